"""Several processes train one policy: torchrun's agent starts them here, and the first error of one ends all.

`python -m tasks.ranks WORK RUN_ID LAUNCHER` is one of them, in the environment that the agent gives it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.multiprocessing import api as processes_api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from polyturn import layout, params, processes, world
from polyturn.params import Params, TrainParams
from polyturn.params.launch import RENDEZVOUS
from polyturn.pipeline import lease
from polyturn.processes import Process
from polyturn.tracking.run import attach_run
from polyturn.training.recorder import MetricsSink
from polyturn.world import LostPeerError, RankError, RankInputError
from tasks import failure, training
from tasks.context import imports_are_done, log_to, signals_end_it, write_json

logger = logging.getLogger(__name__)

_MODULE = "tasks.ranks"
_MONITOR_S = 0.1  # between looks at the ranks
_JOIN_S = 3600  # for the hosts of a gang to meet: the stage on the first one brings its inputs up to date before


def run_ranks(chosen: Params, work: Path, run_id: str, *, node: int = 0) -> None:
    """Train on learner.num_processes ranks; they log to the MLflow run `run_id`, and die with this process.

    Those of this host, the `node`th, are started here. In a gang (train.launcher) the agents of its hosts meet at the address that
    `polyturn.pipeline.launch` has put into the environment.

    Raises:
        ValueError: there are fewer GPUs than ranks, or train.launcher asks for a gang and this is none.
        RankInputError, RankError: a rank failed; the message is that of the one that failed first.
    """
    num_processes = chosen.ranks_per_node
    num_gpus = torch.cuda.device_count()
    if chosen.learner.device != "cpu" and 0 < num_gpus < num_processes:
        raise ValueError(
            f"learner.num_processes asks for {num_processes} here, but there are {num_gpus} GPUs here, and each process needs "
            f"its own; set it to {num_gpus}, or learner.device to cpu"
        )
    endpoint = _rendezvous(chosen.train)
    for rank in range(chosen.learner.num_processes):
        _outcome_path(work, rank).unlink(missing_ok=True)
    config = LaunchConfig(
        min_nodes=chosen.train.launch.num_nodes,
        max_nodes=chosen.train.launch.num_nodes,
        nproc_per_node=num_processes,
        run_id=work.name,
        # static: the stage's node, which has the lease and the MLflow run, also has rank 0
        rdzv_backend="static" if endpoint else "c10d",
        rdzv_endpoint=endpoint or "127.0.0.1:0",
        rdzv_configs={"rank": node, "timeout": _JOIN_S} if endpoint else {},
        local_addr=None if endpoint else "127.0.0.1",
        max_restarts=0,
        monitor_interval=_MONITOR_S,
    )
    for module in (agent_api, processes_api):
        logging.getLogger(module.__name__).setLevel(logging.CRITICAL)  # told below, once
    launcher = str(processes.current())
    try:
        elastic_launch(config, sys.executable)("-m", _MODULE, str(work), run_id, launcher)
    except ChildFailedError as error:
        codes = {rank: found.exitcode for rank, found in error.failures.items()}
        raise _first_failure(work, codes) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise failure.Terminated from None


def _rendezvous(train: TrainParams) -> str | None:
    """HOST:PORT at which the agents of a gang meet; None for processes of this host alone."""
    if train.launcher == "local":
        return None
    if endpoint := os.environ.get(RENDEZVOUS):
        return endpoint
    raise ValueError(
        f"train.launcher: {train.launcher} is rendered only: `polyturn launch --dry-run` prints the job, which is yours "
        "to submit; set it to local to train on this host"
    )


def _first_failure(work: Path, codes: dict[int, int]) -> Exception:
    """The error to tell: of a rank that was killed, else the earliest that is not the loss of another rank."""
    for rank, code in sorted(codes.items()):
        if code < 0 and code != -signal.SIGTERM and not _outcome_path(work, rank).exists():
            return RankError(f"rank {rank} was ended by {signal.Signals(-code).name}")
    left = [
        (told["is_lost_peer"], told["at"], rank, told)
        for rank in codes
        if (path := _outcome_path(work, rank)).exists() and (told := json.loads(path.read_text()))
    ]
    if not left:
        rank, code = min(codes.items())
        return RankError(f"rank {rank} ended with exit code {code}; see {_log_path(rank)}")
    _, _, rank, told = min(left, key=lambda item: item[:3])
    message = told["message"]
    text = message if message.startswith("rank ") else f"rank {rank}: {message}"
    return (RankInputError if told["exit_code"] == failure.USER_ERROR else RankError)(text)


# -- one rank -------------------------------------------------------------------------------------------------


class _Nowhere:
    """The metrics sink of ranks that write nothing."""

    def log_metrics(self, *_: object, **__: object) -> None:
        """Take nothing."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Train as one rank and exit as a stage does; an error is left in the work directory for the launcher."""
    work, run_id, launcher = Path(arguments[0]), arguments[1], processes.parse(arguments[2])
    rank = int(os.environ["RANK"])
    log_to(_log_path(rank), console=logging.INFO if rank == 0 else logging.CRITICAL)
    processes.die_with(launcher, name="the launcher")
    outcome = failure.Outcome(0, "")
    try:
        with signals_end_it():
            _train(work, run_id, launcher)
    except (
        BaseException
    ) as error:  # the boundary: whatever happened becomes a file and an exit code
        outcome = failure.explain(error)
        logger.debug("rank %d", rank, exc_info=True)
        write_json(
            _outcome_path(work, rank),
            {
                "exit_code": outcome.exit_code,
                "message": outcome.message,
                "is_lost_peer": _is_lost_peer(error),
                "at": time.time(),
            },
        )
    sys.stdout.flush()
    logging.shutdown()
    os._exit(
        outcome.exit_code
    )  # a thread in a collective with a rank that has gone would hold the exit up


def _train(work: Path, run_id: str, launcher: Process) -> None:
    loaded: Params = params.load(layout.PARAMS)
    with ExitStack() as stack:
        here = stack.enter_context(world.joined(with_gpu=loaded.learner.device != "cpu"))
        sink: MetricsSink = _Nowhere()
        if here.is_main:
            # The launcher's lease ends with it; this one does when its ranks have stopped to write.
            lock = work.with_suffix(".ranks.lock")
            what = f"training run {work.name}"
            stack.enter_context(lease.hold(lock, what=what, parent=launcher))
            sink = attach_run(loaded.tracking, root=Path.cwd(), run_id=run_id)
        imports_are_done()
        here.barrier()
        training.train(loaded, work, sink, here)
        here.barrier()


def _is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank has gone; torch's collectives have no class for that."""
    text = str(error)
    marks = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "Broken pipe")
    is_torch = type(error) is RuntimeError or type(error).__name__ == "DistBackendError"
    return isinstance(error, LostPeerError) or (is_torch and any(mark in text for mark in marks))


def _outcome_path(work: Path, rank: int) -> Path:
    return work / f"rank_{rank}.json"


def _log_path(rank: int) -> Path:
    return layout.STATE / "logs" / f"train_rank{rank}.log"


if __name__ == "__main__":
    main(sys.argv[1:])
