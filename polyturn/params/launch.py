"""Where training's processes are started: here, or as one gang of several hosts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polyturn.params.fields import PositiveInt, Section

RENDEZVOUS = (
    "POLYTURN_RENDEZVOUS"  # variable with HOST:PORT of the first node, set by a rendered job
)
NODE = "POLYTURN_NODE"  # variable with this node's number in the gang
Launcher = Literal["local", "slurm", "kubernetes"]


class LaunchParams(Section):
    """A gang of hosts for train.launcher slurm and kubernetes; `polyturn launch --dry-run` shows what they make of it."""

    num_nodes: PositiveInt = 1  # learner.num_processes are spread evenly over them
    cpus_per_node: PositiveInt = 16
    memory_gb: PositiveInt = 128  # of each node
    hours: PositiveInt = 24  # the job is ended after them
    port: Annotated[int, Field(ge=1024, le=65535)] = 29400  # of the rendezvous, on the first node
    # Slurm's; null: the cluster's default.
    partition: str | None = None
    account: str | None = None
    # Kubernetes': image and namespace, and the claim of a volume that all pods share, in which the checkout lies.
    image: str = "polyturn:gpu"
    namespace: str = "default"
    claim: str = "polyturn"
    secret: str = "polyturn"  # with AWS_ACCESS_KEY_ID and the like
