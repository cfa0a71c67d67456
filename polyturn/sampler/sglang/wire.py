"""SGLang's /generate in both directions: a sample request to its JSON body, its answer to a reply.

Token ids travel both ways, so that nothing is ever tokenized again; an answer whose parts disagree is refused.
Written against SGLang 0.5.15 (srt/managers/io_struct.py, GenerateReqInput).
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from polyturn.sampler.base import FinishReason, Reply, SampleRequest
from polyturn.types import ImageRecord

BAN = -1e9  # logit bias of a token that must not be sampled; the reported logprobs include it
URI_BYTES = 256_000_000  # of encoded pictures that are kept, since every turn sends them again


class WireError(ValueError):
    """A server's answer does not fit its request; the trajectory cannot go on."""


class PictureUris:
    """Pictures as PNG data URIs (lossless), the latest kept."""

    def __init__(self, max_bytes: int = URI_BYTES) -> None:
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def of(self, image: ImageRecord) -> str:
        """The picture's `data:image/png;base64,...`."""
        uri = self._kept.get(image.sha256)
        if uri is None:
            uri = f"data:image/png;base64,{base64.b64encode(image.read()).decode()}"
            self._kept[image.sha256] = uri
            self._num_bytes += len(uri)
            while self._num_bytes > self._max_bytes and len(self._kept) > 1:
                self._num_bytes -= len(self._kept.popitem(last=False)[1])
        else:
            self._kept.move_to_end(image.sha256)
        return uri


@dataclass(frozen=True)
class WireSettings:
    """What is the same in every request of a run.

    Attributes:
        stop_ids: tokens that end a reply, the end-of-turn token first; a server's model directory may name fewer.
        banned_ids: tokens that are never sampled (image tokens).
        is_seeded: whether to send the request's seed; a server without deterministic inference ignores it.
    """

    stop_ids: tuple[int, ...]
    banned_ids: Collection[int]
    is_seeded: bool


def body(
    request: SampleRequest, settings: WireSettings, uris: PictureUris, *, rid: str, tower: str
) -> dict[str, object]:
    """The JSON body of /generate for one reply.

    `rid` names the request for /abort_request, which takes any rid that starts with the one given: all must be of
    one length. `tower` names the vision tower's weights: it goes into the keys of the server's cache
    of picture embeddings, which neither a flush nor a weight update clears.
    """
    sampling: dict[str, object] = {
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        # said all the same: --preferred-sampling-params of a server fill in what a request leaves out
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_new_tokens": 0,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": list(settings.stop_ids),
        "skip_special_tokens": False,
        "logit_bias": {str(token): BAN for token in sorted(settings.banned_ids)},
    }
    if settings.is_seeded:
        sampling["sampling_seed"] = request.seed  # below 2**63: the server keeps int64
    content: dict[str, object] = {
        "rid": rid,
        "input_ids": list(request.engine_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }
    if request.images:
        content["image_data"] = [uris.of(image) for image in request.images]
        content["mm_hashes"] = [_embedding_key(image, tower) for image in request.images]
    return content


def _embedding_key(image: ImageRecord, tower: str) -> str:
    return hashlib.sha256(f"{image.sha256}/{tower}".encode()).hexdigest()


def reply(answer: Mapping[str, object], *, version: int) -> Reply:
    """Read the answer of /generate.

    Raises:
        WireError: ids and logprobs disagree, weights of another version answered, or a field is missing.
    """
    try:
        meta = cast("Mapping[str, object]", answer["meta_info"])
        ids = tuple(int(token) for token in cast("Sequence[int]", answer["output_ids"]))
        scored = cast("Sequence[tuple[float, int, object]]", meta["output_token_logprobs"])
        finish = cast("Mapping[str, object]", meta["finish_reason"])
        kind, told = str(finish["type"]), finish.get("message")
        prompt_length = int(cast("int", meta["prompt_tokens"]))
        scored_ids = tuple(int(item[1]) for item in scored)
        logprobs = tuple(float(item[0]) for item in scored)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"the answer cannot be read ({type(error).__name__}: {error}); it has {sorted(answer)}"
        ) from None
    if scored_ids != ids:
        raise WireError(
            f"{len(ids)} output ids and {len(scored_ids)} ids with logprobs differ (first at "
            f"{_first_difference(ids, scored_ids)}); the server has tokenized again or cut the reply"
        )
    answered = str(meta.get("weight_version"))
    if answered != str(version):
        raise WireError(f"weights of version {answered} answered, version {version} was pushed")
    return Reply(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=_finish_reason(kind),
        prompt_length=prompt_length,
        weight_version=version,
        error=str(told or "aborted by the server") if kind == "abort" else None,
    )


def num_cached(answer: Mapping[str, object]) -> int:
    """Prompt tokens whose keys and values the server still had."""
    meta = cast("Mapping[str, object]", answer["meta_info"])
    return int(_number(meta.get("cached_tokens")))


def latency_s(answer: Mapping[str, object]) -> float:
    """Seconds from the server's receipt of the request to its answer."""
    meta = cast("Mapping[str, object]", answer["meta_info"])
    return _number(meta.get("e2e_latency"))


def _number(value: object) -> float:
    """0 for what is none: only metrics read it."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _finish_reason(kind: str) -> FinishReason:
    if kind in ("stop", "length", "abort"):
        return cast("FinishReason", kind)
    raise WireError(f"finish_reason {kind!r} is none of stop, length, abort")


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a != b),
        min(len(left), len(right)),
    )
