"""A rank of two_gpu_scaling.py: runs train_2b.py's work for each layout of a file, so that ranks start once."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import torch

from benchmarks import train_2b
from polyturn.world import joined


def main() -> None:
    """The file holds a list of command lines of train_2b.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    commands: list[list[str]] = json.loads(parser.parse_args().file.read_text())
    with joined() as world:
        for words in commands:
            train_2b.run(train_2b.parse(words), world)
            gc.collect()  # a learner that is done holds itself in cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
