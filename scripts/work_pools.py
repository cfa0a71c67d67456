"""The work pools of prefect.yaml and their queues, made or brought up to date on the server of PREFECT_API_URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker

CPU = "polyturn-cpu"
GPU = "polyturn-gpu"


@dataclass(frozen=True)
class Queue:
    """A queue of a pool; of what waits, lower `priority` goes first."""

    name: str
    priority: int


@dataclass(frozen=True)
class Pool:
    """A pool of workers that start processes; at most `limit` runs at once (None: no limit)."""

    name: str
    limit: int | None
    queues: Sequence[Queue] = ()


# One run at a time on the GPU host: with more hosts, raise the limit to their number (`prefect work-pool update`).
POOLS = (
    Pool(CPU, limit=None),
    Pool(GPU, limit=1, queues=(Queue("urgent", 1), Queue("default", 10))),
)


def make(pools: Sequence[Pool] = POOLS) -> None:
    """Make the pools that are not there; limits and priorities of those that are become these."""
    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        for pool in pools:
            client.create_work_pool(
                WorkPoolCreate(
                    name=pool.name,
                    type="process",
                    base_job_template=template,
                    concurrency_limit=pool.limit,
                ),
                overwrite=True,
            )
            for queue in sorted(pool.queues, key=lambda queue: queue.priority):
                _make_queue(client, pool, queue)


def _make_queue(client: SyncPrefectClient, pool: Pool, queue: Queue) -> None:
    limits = {"concurrency_limit": pool.limit, "priority": queue.priority}
    try:
        client.create_work_queue(queue.name, work_pool_name=pool.name, **limits)
    except ObjectAlreadyExists:
        found = client.read_work_queue_by_name(queue.name, work_pool_name=pool.name)
        client.update_work_queue(found.id, **limits)
