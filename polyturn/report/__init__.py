"""The report of a run, from its files to one self-contained HTML page."""
