"""Wall time of a training run: phases of a step, and processes x hours over all resumed parts; never in a result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_SECONDS_PER_HOUR = 3600


@dataclass
class Clock:
    """`spent_hours` were used before this part of the run; `num_processes` count at once from now on."""

    spent_hours: float
    num_processes: int
    times: dict[str, float] = field(default_factory=dict[str, float])
    _started: float = field(default_factory=time.monotonic)
    _lap: float = 0.0

    def begin_step(self) -> None:
        """Forget the phases of the last step."""
        self.times = {}
        self._lap = time.monotonic()

    def lap(self, name: str) -> None:
        """Note the seconds since the step began or since the last lap as `name` (perf/...)."""
        now = time.monotonic()
        self.times[name] = now - self._lap
        self._lap = now

    def note(self, name: str, seconds: float) -> None:
        """Note seconds that somebody else measured; 0 means that there was nothing to do."""
        if seconds:
            self.times[name] = seconds

    @property
    def hours(self) -> float:
        """Process hours (GPU hours, with a GPU per process) so far."""
        elapsed = time.monotonic() - self._started
        return self.spent_hours + self.num_processes * elapsed / _SECONDS_PER_HOUR
