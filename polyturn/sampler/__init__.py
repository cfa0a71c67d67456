"""Samplers turn token ids into replies; base.py holds the protocol."""
