"""What is wrong with an engine's reply, before any of it enters a trajectory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyturn.render import Renderer
from polyturn.sampler.base import Reply
from polyturn.types import StopReason


@dataclass(frozen=True)
class Expected:
    """What the loop knows of the reply it asked for; `policy_version` None: any."""

    prompt_length: int
    max_new_tokens: int
    policy_version: int | None


@dataclass(frozen=True)
class Objection:
    """Why a reply is not taken, and the trajectory's end that follows."""

    reason: StopReason
    message: str


def objection(reply: Reply, expected: Expected, renderer: Renderer) -> Objection | None:
    """The first thing that makes a reply unfit for training, or None.

    Lengths, prompt and ids that are not ours are a TOKEN_MISMATCH; an engine that ignores the limit, mixes weights
    or reports no real logprobs is a SAMPLER_ERROR. Image special tokens would count as pads without features.
    """
    mismatch = _mismatch(reply, expected, renderer)
    if mismatch:
        return Objection(StopReason.TOKEN_MISMATCH, mismatch)
    fault = _fault(reply, expected)
    return Objection(StopReason.SAMPLER_ERROR, fault) if fault else None


def _mismatch(reply: Reply, expected: Expected, renderer: Renderer) -> str | None:
    num_ids, num_logprobs = len(reply.token_ids), len(reply.logprobs)
    if num_logprobs != num_ids:
        return (
            f"the reply has {num_ids} token ids, but {num_logprobs} logprobs (prompt {reply.prompt_length}, "
            f"total {reply.prompt_length + num_ids} tokens)"
        )
    if reply.prompt_length != expected.prompt_length:
        return (
            f"the engine's prompt has {reply.prompt_length} tokens, ours {expected.prompt_length}"
        )
    banned = [token for token in reply.token_ids if token in renderer.family.banned_ids]
    if banned:
        return f"the reply has image special tokens {banned[:5]}, which are banned from sampling"
    ends = [at for at, token in enumerate(reply.token_ids[:-1]) if token in renderer.family.end_ids]
    if ends:
        return f"the reply goes on after the end token at {ends[0]} of {num_ids}"
    unknown = [token for token in reply.token_ids if not 0 <= token < renderer.vocab_size]
    if unknown:
        return f"the reply has ids {unknown[:5]}, the model's vocabulary {renderer.vocab_size}"
    return None


def _fault(reply: Reply, expected: Expected) -> str | None:
    if not all(map(math.isfinite, reply.logprobs)):
        return "the reply has logprobs that are not finite; the weights are not, or learner.lr is too high"
    if len(reply.token_ids) > expected.max_new_tokens:
        return (
            f"the reply has {len(reply.token_ids)} tokens, {expected.max_new_tokens} were asked for"
        )
    version = expected.policy_version
    if version is not None and reply.weight_version != version:
        return (
            f"the reply is of policy version {reply.weight_version}, the trajectory's is {version}"
        )
    return None
