"""A run's rollout batches: each sampled when it is trained on, or beside the update before it (train.async_steps).

With async_steps 1, batch t + 1 comes wholly from version t of the policy: sampling begins once that version is in
the sampler, goes on while the learner trains on batch t, and is over before version t + 1 is pushed. So a batch is
trained on by a policy that is one update ahead of the one that sampled it, and batch 0 by its own:

    sampler | batch 0 from v0 | batch 1 from v0 | batch 2 from v1 | batch 3 from v2
    learner |                 | batch 0 -> v1   | batch 1 -> v2   | batch 2 -> v3
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from polyturn.params import Params
from polyturn.training.checkpoint import CheckpointError
from polyturn.training.checkpoint_writer import Snapshot
from polyturn.training.clock import Clock
from polyturn.training.collect import Collected, collect
from polyturn.training.metrics import Metrics
from polyturn.training.parts import Parts

BATCH_FILE = "next_batch.pickle"  # of a checkpoint: what its next step trains on


@dataclass(frozen=True)
class _Sampled:
    """The batch that a step trains on, and the version of the policy that sampled it."""

    step: int
    version: int
    groups: Collected
    seconds: float


class Rollouts:
    """Hands out batches by step; `load` and `snapshot` are the learner's, with a batch that was sampled ahead.

    An embedded sampler shares the device, and mostly the weights, with the learner: it samples ahead before the
    update instead of beside it. The batches are the same.
    """

    def __init__(self, parts: Parts, params: Params) -> None:
        self._params = params
        self._is_ahead = params.train.async_steps > 0
        self._parts = parts
        if (
            self._is_ahead
        ):  # what ranks exchange beside an update must not meet what the update exchanges
            self._parts = replace(parts, world=parts.world.twin())
        self._next: _Sampled | None = None

    async def take(self, step: int, clock: Clock) -> Collected:
        """The groups that a step trains on; sampled now, from the present policy, if they are not there yet."""
        found, self._next = self._next, None
        if found is None or found.step != step:
            clock.note("perf/offload_time", self._parts.learner.offload())
            found = await self._sample(step, step)
            clock.note("perf/onload_time", self._hand_over())
        clock.lap("perf/rollout_time")
        if not self._is_ahead:
            return found.groups
        staleness = {"train/staleness": float(step - found.version)}
        return replace(found.groups, metrics={**found.groups.metrics, **staleness})

    async def beside(self, step: int, update: Callable[[], Metrics], clock: Clock) -> Metrics:
        """Run a step's update and, with async_steps, sample the next step's batch from the policy before it.

        The batch after the run's last step is sampled only if a checkpoint is due, so that a run which is given
        more steps later goes on as if it had had them from the start.
        """
        train = self._params.train
        is_wanted = step + 1 < train.steps or (step + 1) % train.checkpoint_every == 0
        sampling: Future[_Sampled] | None = None
        if self._is_ahead and is_wanted:
            if self._parts.sampler.is_lockstep:
                self._next = await self._sample(step + 1, step)
                clock.lap("perf/rollout_time")
            else:
                work = self._sample(step + 1, step)
                sampling = asyncio.run_coroutine_threadsafe(work, _sampling_loop())
        try:
            metrics = update()
            clock.lap("perf/train_time")
            if sampling is not None:
                self._next = await asyncio.wrap_future(sampling)
                clock.note("perf/rollout_time", self._next.seconds)
                clock.lap("perf/train_wait_time")
        except BaseException:
            if sampling is not None:
                sampling.cancel()
            raise
        return metrics

    async def _sample(self, step: int, version: int) -> _Sampled:
        started = time.monotonic()
        self._parts.recorder.enters("rollout", step)
        groups = await collect(self._parts, self._params, step, policy_version=version)
        return _Sampled(step, version, groups, time.monotonic() - started)

    def _hand_over(self) -> float:
        """The GPU goes from the sampler to the learner; seconds of learner.onload."""
        if self._params.train.debug.mode != "rollout_only":  # no new weights come: these sample on
            self._parts.sampler.rest()
        return self._parts.learner.onload()

    # -- checkpoints ------------------------------------------------------------------------------------------

    def load(self, directory: Path) -> None:
        """The learner's state and, where the checkpoint has it, the batch that was sampled ahead (collective).

        Raises:
            CheckpointError: the batch was written by code whose trajectories are other ones.
        """
        self._parts.learner.load(directory)
        path = directory / BATCH_FILE
        if self._is_ahead and path.exists():
            self._next = _read(path)

    def snapshot(self) -> Snapshot:
        """The learner's snapshot; rank 0 adds the batch that was sampled ahead (collective)."""
        write_state = self._parts.learner.snapshot()
        if self._next is None or not self._parts.world.is_main:
            return write_state
        batch = pickle.dumps(self._next)

        def write(directory: Path) -> None:
            write_state(directory)
            (directory / BATCH_FILE).write_bytes(batch)

        return write


def _read(path: Path) -> _Sampled:
    try:
        found = pickle.loads(path.read_bytes())
    except (pickle.UnpicklingError, AttributeError, ImportError, TypeError, EOFError) as error:
        found = error
    if isinstance(found, _Sampled):
        return found
    raise CheckpointError(
        f"{path}, the batch that was sampled ahead, cannot be read by this version of the code ({found!r}); go on "
        "with the code that wrote it, or set train.resume to never"
    )


@functools.cache
def _sampling_loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, since an update keeps the caller's busy."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sampling ahead", daemon=True).start()
    return loop
