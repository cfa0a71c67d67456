"""Who turns token ids into replies."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from polyturn.params.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section

_HERE = {"127.0.0.1", "localhost"}


class SglangParams(Section):
    """SGLang servers: started and supervised on this host, or given by URL."""

    urls: tuple[str, ...] = ()  # empty: started and supervised by polyturn
    num_servers: PositiveInt = 1  # started here; each takes tensor_parallel GPUs
    tensor_parallel: PositiveInt = 1
    gpu_offset: NonNegativeInt = 0  # first GPU of the servers (1: GPU 0 is the trainer's alone)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the servers' weights and activations
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5  # --mem-fraction-static
    # --enable-deterministic-inference: replies depend on their seeds alone, at about 30% of the throughput;
    # false is faster, and labels the run as not replayable
    deterministic: bool = True
    attention_backend: str = "triton"
    vision_attention_backend: str = "triton_attn"
    # How the server's tokenizer hands pictures' features to its engine: through host memory, or as handles of GPU
    # memory, which admits a request with a picture in 11 ms instead of 17 and takes 1 GiB of the GPU. The engine does
    # not wait for the tokenizer's copy, so that on a crowded GPU it may read a picture before all of it is there
    picture_transport: Literal["host", "cuda_ipc"] = "host"
    extra_flags: tuple[str, ...] = ()  # of sglang.launch_server, after polyturn's own
    # How new weights reach the servers. tensor: CUDA IPC, trainer and server on the same GPUs;
    # distributed: NCCL, on other GPUs; disk: a directory that both see
    weight_update: Literal["tensor", "distributed", "disk"] = "tensor"
    bucket_mb: PositiveInt = 512  # of weights sent at a time
    release_memory: bool = False  # give the GPU back while training (--enable-memory-saver)
    check_weights: bool = True  # compare per-tensor checksums after every weight update
    # About how many: after the first update all, then the ends of the tower, embedding, head and a part of the others
    # that changes from version to version; null: always all
    check_tensors: PositiveInt | None = None
    start_timeout_s: PositiveFloat = 600.0
    request_timeout_s: PositiveFloat = 600.0  # of one reply
    retries: NonNegativeInt = 2  # of one reply, on another server where there is one
    max_concurrency: PositiveInt = 512  # requests in flight over all servers, of all ranks together
    control_timeout_s: PositiveFloat = (
        120.0  # of one call other than a reply: weights, cache, memory, version
    )

    @model_validator(mode="after")
    def _addresses(self) -> SglangParams:
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"urls must be addresses such as http://HOST:30000, got {url!r}; write its scheme and host"
                )
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(
                f"urls must name each server once, since each is given the weights, got {list(self.urls)}"
            )
        return self

    @model_validator(mode="after")
    def _transport(self) -> SglangParams:
        if self.deterministic and self.picture_transport == "cuda_ipc":
            raise ValueError(
                "picture_transport: cuda_ipc does not give the same replies again, as SGLang's engine does not wait for "
                "the copy of a picture; set it to host, or deterministic to false"
            )
        return self

    @model_validator(mode="after")
    def _placement(self) -> SglangParams:
        if self.urls and self.release_memory:
            raise ValueError(
                "release_memory is for servers that polyturn starts (they need --enable-memory-saver); "
                "set it to false or leave urls empty"
            )
        if self.weight_update == "distributed" and not self.urls and self.gpu_offset == 0:
            raise ValueError(
                "weight_update: distributed sends from GPU 0, which NCCL lets no server of the same group use, got "
                "gpu_offset 0; set it to the number of the trainer's GPUs, or weight_update to tensor"
            )
        hosts = {urlsplit(url).hostname for url in self.urls}
        if self.weight_update == "distributed" and not hosts <= _HERE:
            raise ValueError(
                "weight_update: distributed meets its servers at 127.0.0.1, so their urls must name this host as "
                f"that, got {list(self.urls)}; use 127.0.0.1, or weight_update: disk for servers on other hosts"
            )
        return self


class SamplerParams(Section):
    """Who turns token ids into replies."""

    backend: Literal["hf", "sglang"] = "hf"
    sglang: SglangParams = SglangParams()
