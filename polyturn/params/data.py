"""Where problems and pictures come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyturn.params.fields import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class SyntheticParams(Section):
    """Drawn figures: one shape, one small label near the centre of one quadrant."""

    image_size: Annotated[int, Field(ge=64, le=2048)] = 256  # side of the square picture, pixels
    label_size: Annotated[int, Field(ge=8, le=256)] = 40  # font size of the label, pixels
    min_value: Annotated[int, Field(ge=1)] = 2  # smallest labelled length
    max_value: Annotated[int, Field(ge=1, le=999)] = 6  # largest labelled length

    @model_validator(mode="after")
    def _ordered(self) -> SyntheticParams:
        if self.max_value < self.min_value:
            raise ValueError(f"max_value {self.max_value} is below min_value {self.min_value}")
        return self


class DataParams(Section):
    """Where problems come from."""

    source: str = "synthetic"  # synthetic | geo3k | "module:attr" of a load(split) source
    # handed to a "module:attr" source that takes them, load(split, params=...)
    params: dict[str, object] = Field(default_factory=dict)
    path: str | None = (
        None  # geo3k: directory, .jsonl, .json, .parquet, s3:// URI or Hugging Face dataset id (docs/data.md)
    )
    revision: str | None = None  # pinned revision of a Hugging Face dataset id
    base_url: str | None = None  # prefix that turns relative image paths into URLs
    num_train: PositiveInt | None = 1024  # None: all rows of the split (synthetic needs a number)
    num_validation: PositiveInt | None = 256  # scored by train.eval_every
    num_test: PositiveInt | None = 512  # scored by the evaluate stage only
    dedup_splits: bool = True  # set evaluation rows aside whose picture is also in train
    problem_key: str = (
        "problem"  # column of the prompt: text with <image> tags, typed parts or messages
    )
    answer_key: str = "answer"  # column of the reference answer; a.b is the field b of a struct
    images_key: str = "images"  # column of the pictures: one or a list
    on_bad_line: Literal["set_aside", "stop"] = "set_aside"  # a line of a .jsonl that is no JSON
    add_image_tag: bool = (
        True  # a row with pictures and no <image> tag gets them in front; else set aside
    )
    synthetic: SyntheticParams = SyntheticParams()


class ImagesParams(Section):
    """How image URLs become checked, hashed PNGs."""

    serve_host: str | None = (
        "figures.polyturn.test"  # URLs of this host are served by the stage on loopback
    )
    allow_hosts: tuple[str, ...] = ()  # hosts (or host:port) that may resolve to private addresses
    size_multiple: PositiveInt = (
        16  # final sides are multiples of it: patch size x merge size of the model
    )
    min_side: PositiveInt = 16  # smaller pictures are set aside
    max_aspect_ratio: PositiveFloat = 100.0  # longer side / shorter side
    max_pixels: PositiveInt = 1_048_576  # larger pictures are scaled down to it
    max_input_pixels: Annotated[int, Field(ge=1, le=178_956_970)] = (
        89_478_485  # refused from the header, before decoding
    )
    max_bytes: PositiveInt = 20_000_000  # of one fetched body, enforced while streaming
    max_bad_fraction: Fraction = 0.02  # more rows than this set aside stop the run
    concurrency: PositiveInt = 32  # requests in flight, over all hosts
    per_host: PositiveInt = 16  # requests in flight to one host
    connect_timeout_s: PositiveFloat = 5.0
    read_timeout_s: PositiveFloat = 15.0
    total_timeout_s: PositiveFloat = (
        60.0  # one image: all redirects, attempts and waits between them
    )
    num_processes: NonNegativeInt = 2  # that decode and encode; 0: a thread of the stage does
    retries: NonNegativeInt = 4  # on 429, 5xx, timeouts and resets
    backoff_s: NonNegativeFloat = 0.5  # first wait; doubles, with jitter
    max_redirects: NonNegativeInt = 5
    user_agent: str = "polyturn/0.1 (+image fetcher)"
    s3_endpoint_url: str | None = None  # None: AWS
    engine: Literal["local", "ray"] = "local"

    @model_validator(mode="after")
    def _one_patch_fits(self) -> ImagesParams:
        if self.max_pixels < self.size_multiple**2:
            raise ValueError(
                f"max_pixels {self.max_pixels} holds no picture of size_multiple {self.size_multiple}; "
                f"set max_pixels to {self.size_multiple**2} or more"
            )
        return self
