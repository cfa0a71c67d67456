"""Interactive environments; base.py holds the API that all of them follow."""
