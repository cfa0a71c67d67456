"""What params can say and this version cannot do."""

from __future__ import annotations

from polyturn.params import Params, ParamsError


def check_supported(chosen: Params) -> None:
    """Refuse what params can say and this version cannot do, before any stage does work.

    Raises:
        ParamsError: the message names the key, its value and what to use.
    """
    for key, value, known in (("learner.backend", chosen.learner.backend, "fsdp"),):
        if value != known:
            raise ParamsError(f"{key}: {value} is not in this version of polyturn; use {known}")
    uri = chosen.train.work_uri
    if "://" in uri and not uri.startswith("s3://"):
        raise ParamsError(f"train.work_uri must be a path or s3://BUCKET/PREFIX, got {uri}")
    learner = chosen.learner
    # What FsdpLearner.shares_weights comes to.
    is_shared = (
        learner.num_processes == 1 and learner.precision == "float32" and learner.lora is None
    )
    if learner.offload and chosen.sampler.backend == "hf" and is_shared and learner.device != "cpu":
        raise ParamsError(
            "learner.offload: true moves away the very weights that sampler.backend: hf samples with, as both share "
            "them in one process in float32 without lora; set it to false"
        )
