"""When and where stages run (Prefect); no torch."""

import gc
import sys
from pathlib import Path

from polyturn import environment

environment.apply(Path(__file__).resolve().parent.parent)  # before Prefect reads its settings
if sys.argv[0] == "-m":  # as in tasks/__init__.py
    gc.disable()
