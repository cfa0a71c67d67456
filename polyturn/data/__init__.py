"""Datasets: sources of rows, checked pictures, and the problems made of both."""

from polyturn.data.problems import fit, problem_row, read_problems
from polyturn.data.quarantine import RowError, SetAside, read_quarantine, write_quarantine

__all__ = [
    "RowError",
    "SetAside",
    "fit",
    "problem_row",
    "read_problems",
    "read_quarantine",
    "write_quarantine",
]
