"""What params can say and this version cannot do."""

from __future__ import annotations

from polyturn.learner.megatron import versions
from polyturn.params import LearnerParams, Params, ParamsError


def check_supported(chosen: Params) -> None:
    """Refuse what params can say and this version cannot do, before any stage does work.

    Raises:
        ParamsError: the message names the key, its value and what to use.
        MegatronError: learner.backend is megatron, and no megatron-core is installed that works.
    """
    uri = chosen.train.work_uri
    if "://" in uri and not uri.startswith("s3://"):
        raise ParamsError(f"train.work_uri must be a path or s3://BUCKET/PREFIX, got {uri}")
    learner = chosen.learner
    _check_layout(learner)
    if learner.backend == "megatron":
        versions.check()
        if learner.lora is not None:
            raise ParamsError(
                "learner.lora is built for learner.backend: fsdp alone; set it to null, or the backend to fsdp"
            )
    # What FsdpLearner.shares_weights comes to.
    is_shared = (
        learner.backend == "fsdp"
        and learner.num_processes == 1
        and learner.precision == "float32"
        and learner.lora is None
    )
    if learner.offload and chosen.sampler.backend == "hf" and is_shared and learner.device != "cpu":
        raise ParamsError(
            "learner.offload: true moves away the very weights that sampler.backend: hf samples with, as both share "
            "them in one process in float32 without lora; set it to false"
        )


def _check_layout(learner: LearnerParams) -> None:
    reasons = {
        "tensor_parallel": "FSDP shards every weight over all learner.num_processes already",
        "pipeline_parallel": "a micro-batch is scored and differentiated in one piece; raise learner.tensor_parallel",
        "context_parallel": "samples that share a prompt would be cut apart; use learner.sequence_parallel, or a smaller "
        "learner.micro_batch_tokens",
    }
    for key, reason in reasons.items():
        value = int(getattr(learner, key))
        if value > 1 and not (key == "tensor_parallel" and learner.backend == "megatron"):
            raise ParamsError(
                f"learner.{key}: {value} is not built for learner.backend: {learner.backend} ({reason}); set it to 1"
            )
    if learner.compile and learner.tensor_parallel > 1:
        raise ParamsError(
            f"learner.compile: true does not go with learner.tensor_parallel: {learner.tensor_parallel} (compiled layers "
            "hang in the collectives that they share); set compile to false, or tensor_parallel to 1"
        )
