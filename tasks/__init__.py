"""Pipeline stages, one thin module each: params -> polyturn -> files (`python -m tasks.<stage>`)."""

import gc
import sys

from polyturn import environment

environment.apply()  # before a stage imports torch, which reads OMP_NUM_THREADS once
if sys.argv[0] == "-m":  # as long as `python -m tasks.NAME` looks for its module
    # Imports make hundreds of thousands of objects, none of them garbage: to look for some among them takes a third of
    # the time. tasks.context.imports_are_done ends it.
    gc.disable()
