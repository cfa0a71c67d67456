"""Pipeline stages, one thin module each: params -> polyturn -> files (`python -m tasks.<stage>`)."""

from polyturn import environment

environment.apply()  # before a stage imports torch, which reads OMP_NUM_THREADS once
