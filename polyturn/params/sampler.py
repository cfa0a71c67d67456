"""Who turns token ids into replies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polyturn.params.fields import PositiveInt, Section


class SglangParams(Section):
    """SGLang servers of one host."""

    urls: tuple[str, ...] = ()  # empty: started and supervised by polyturn
    deterministic: bool = True  # --enable-deterministic-inference; per-request seeds are honoured
    tensor_parallel: PositiveInt = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    extra_flags: tuple[str, ...] = ()


class SamplerParams(Section):
    """Who turns token ids into replies."""

    backend: Literal["hf", "sglang"] = "hf"
    sglang: SglangParams = SglangParams()
