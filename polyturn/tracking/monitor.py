"""Use of CPU, memory, disk, network and GPUs as metrics of a run (system/...), by MLflow's own collectors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from polyturn.tracking.orphans import heartbeat_tags

if TYPE_CHECKING:
    from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 60.0
_JOIN_S = 5.0  # a server that hangs does not hold the end of a stage up

LogMetrics = Callable[[Mapping[str, float], int], None]
SetTags = Callable[[Mapping[str, object]], None]


@contextmanager
def monitored(log: LogMetrics, set_tags: SetTags, interval_s: float) -> Iterator[None]:
    """Log a sample every `interval_s` and one at the end while the block runs (0: none), and a sign of life as a tag.

    Not MLflow's own thread: that one ends for good at the first answer which does not come.
    """
    stop = threading.Event()
    threads = [threading.Thread(target=_live, args=(set_tags, stop), daemon=True)]
    if interval_s:
        threads.append(threading.Thread(target=_sample, args=(log, interval_s, stop), daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(_JOIN_S)


def _sample(log: LogMetrics, interval_s: float, stop: threading.Event) -> None:
    collectors = _collectors()
    step, is_last = 0, False
    while not is_last:
        is_last = stop.wait(interval_s)
        for collector in collectors:
            collector.clear_metrics()
            collector.collect_metrics()
        found = {f"system/{k}": v for c in collectors for k, v in _means(c).items()}
        try:
            log(found, step)
        except ValueError as error:  # the run goes on without
            logger.warning("no more system metrics: %s", error)
            return
        step += 1


def _collectors() -> Sequence[BaseMetricsMonitor]:
    found: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        found.append(GPUMonitor())
    except (ImportError, RuntimeError):  # no nvidia-ml-py, no GPU
        logger.debug("no GPU to monitor")
    return found


def _means(collector: BaseMetricsMonitor) -> Mapping[str, float]:
    return cast("Mapping[str, float]", collector.aggregate_metrics())  # not annotated there


def _live(set_tags: SetTags, stop: threading.Event) -> None:
    while not stop.wait(_HEARTBEAT_S):
        try:
            set_tags(heartbeat_tags(time.time()))
        except ValueError as error:
            logger.warning("no more signs of life: %s", error)
            return
