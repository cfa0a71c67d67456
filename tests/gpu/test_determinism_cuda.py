"""A whole run on a GPU with train.deterministic: `python -m pytest -m gpu tests/gpu/test_determinism_cuda.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from polyturn.determinism import choose_kernels
from polyturn.policy import model
from polyturn.replayable import is_replayable
from tests.unit.loop import Run, changed, loop_params, taught_policy

precision, directory = sys.argv[1:]
params = changed(loop_params(), deterministic=True)
learner = params.learner.model_copy(update={"precision": precision, "freeze_vision": False})
params = params.model_copy(update={"learner": learner})
policy = taught_policy()
choose_kernels(params)
run = Run(Path(directory), params, policy, device=torch.device("cuda"))
run.train()
print(json.dumps({
    "weights": model.weights_digest(run.own.model),
    "before": model.weights_digest(policy.model),
    "history": run.recorder.history,
    "replayable": is_replayable(params),
}))
"""


def run(precision: str, directory: Path) -> dict[str, object]:
    """In a process of its own: kernels and cuBLAS workspaces are chosen once in a process."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, precision, str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_deterministic_run_gives_the_same_bytes_and_metrics_again(
    tmp_path: Path, precision: str
) -> None:
    first, again = (run(precision, tmp_path / name) for name in ("first", "again"))
    assert first == again
    assert first["weights"] != first["before"]
    assert first["replayable"] is True
