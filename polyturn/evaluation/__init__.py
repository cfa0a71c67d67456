"""Scoring a policy on a split, and comparing two that were scored on the same problems."""
