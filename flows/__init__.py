"""When and where stages run (Prefect); no torch."""

from pathlib import Path

from polyturn import environment

environment.apply(Path(__file__).resolve().parent.parent)  # before Prefect reads its settings
