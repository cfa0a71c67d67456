"""A short training run of two ranks, `torchrun -m tests.gpu.two_ranks DIRECTORY DEVICE KIND`: whole, killed or resumed.

killed: rank 1 kills itself inside a pass of the learner in the third step, while rank 0 waits for it; resumed goes on.
Rank 0 leaves digests of what came out. SIGTERM is an exception to a rank, as in `tasks.ranks`: one that waits inside NCCL
is deaf to it, and torchrun's agent kills it after 30 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from polyturn import world
from polyturn.determinism import choose_kernels
from polyturn.runtime import set_up_torch
from polyturn.training.parts import Parts
from tests.unit import tiny
from tests.unit.loop import Run, loop_params

LAST_WHOLE_STEP = 1  # counted from 0; a checkpoint is written after it


@dataclass
class Dying(Run):
    """A run whose rank 1 dies inside the next step's first pass of the learner."""

    def parts(self) -> Parts:
        made = super().parts()
        record = self.recorder.step

        def step(number: int, metrics: dict[str, float], times: dict[str, float]) -> None:
            record(number, metrics, times)
            if number == LAST_WHOLE_STEP and self.world.rank == 1:
                last = self.learner.policy.model.model.language_model.layers[-1]
                last.register_forward_hook(lambda *_: die(self.directory))

        self.recorder.step = step  # type: ignore[method-assign, assignment]
        return made


def die(directory: Path) -> None:
    (directory / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main(directory: Path, device: str, kind: str) -> None:
    params = loop_params()
    train = params.train.model_copy(update={"deterministic": True})
    learner = params.learner.model_copy(update={"device": device, "num_processes": 2})
    params = params.model_copy(update={"train": train, "learner": learner})
    set_up_torch(params)
    choose_kernels(params)
    with world.joined(with_gpu=device == "cuda") as here:
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
        made = (Dying if kind == "killed" else Run)(
            directory, params, tiny.qwen3(), device=place, world=here
        )
        best = made.train(resume=kind == "resumed")
        if here.is_main:
            files = json.dumps({n: hashlib.sha256(d).hexdigest() for n, d in made.files().items()})
            told = {
                "weights": made.published(best),
                "files": hashlib.sha256(files.encode()).hexdigest(),
                "history": made.recorder.history,
            }
            (directory / "outcome.json").write_text(json.dumps(told))
        here.barrier()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    sys.stdout.flush()
    os._exit(0)
