"""Learners turn batches into new weights; base.py holds the protocol."""
