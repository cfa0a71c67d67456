"""Typed params.yaml: every value of a run, bounded and documented; imports without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polyturn.params_tree import ParamsError, read_tree

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ObjectPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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
    path: str | None = (
        None  # geo3k: directory, .jsonl, .parquet, s3:// URI or Hugging Face dataset id
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
    answer_key: str = "answer"  # column of the reference answer
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
    num_threads: PositiveInt = 2  # of decoding and encoding
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


class SmallModelParams(Section):
    """The small Qwen3-VL that is built where no checkpoint is named (about 1 M parameters)."""

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    intermediate_size: PositiveInt = 384
    vision_hidden_size: PositiveInt = 96
    vision_num_layers: PositiveInt = 2
    vision_num_heads: PositiveInt = 4
    vision_intermediate_size: PositiveInt = 192
    patch_size: PositiveInt = 8
    deepstack_layers: tuple[NonNegativeInt, ...] = (0,)
    tie_embeddings: bool = True
    init_std: PositiveFloat = 0.05
    vocab_size: Annotated[int, Field(ge=300, le=150_000)] = 512  # of the trained byte-level BPE
    image_pixels: PositiveInt = 48 * 48  # the processor shrinks what the model sees to it
    image_mean: float = 1.0  # white becomes 0: a reader of black glyphs learns sooner
    image_std: PositiveFloat = 0.25


class ModelParams(Section):
    """The policy before any training."""

    path: str | None = None  # None: build the small one; else directory, s3:// URI or hub id
    revision: str | None = None  # pinned revision of a hub id; the resolved hash is recorded
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "eager"] = "sdpa"
    max_positions: PositiveInt = 4096  # of the small model's rotary embedding
    max_prompt_tokens: PositiveInt = 2048  # longer prompts are set aside by data.fit()
    small: SmallModelParams = SmallModelParams()


class PhaseParams(Section):
    """One phase of the warm start: a mix of examples, trained until its gates or a number of steps."""

    name: str
    # kind of example -> share of the batch
    mix: Annotated[dict[str, PositiveFloat], Field(min_length=1)]
    batch_size: PositiveInt = 64
    lr: PositiveFloat
    warmup_steps: NonNegativeInt = 0  # linear, from the phase's first step on
    max_steps: PositiveInt
    freeze_vision: bool = False
    # kind -> nats: the phase ends when each kind's loss per last reply, a mean over gate_window steps, is below
    gates: dict[str, PositiveFloat] = Field(default_factory=dict)
    gate_window: PositiveInt = 10
    decay_steps: NonNegativeInt = 0  # linear decay to 3% after the gates

    @model_validator(mode="after")
    def _kinds(self) -> PhaseParams:
        unknown = sorted(set(self.gates) - set(self.mix))
        if unknown:
            raise ValueError(f"gates name {unknown}, which mix {sorted(self.mix)} does not have")
        return self


class WarmstartParams(Section):
    """Supervised warm start (also the SFT recipe); no phases: the base model is passed on."""

    examples: ObjectPath = "polyturn.envs.zoom:demonstrations"  # (kind, problem, rng, params)
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    weight_decay: NonNegativeFloat = 0.01
    grad_clip: PositiveFloat = 1.0
    micro_batch_tokens: PositiveInt = 4096  # padded tokens of one micro-batch
    phases: tuple[PhaseParams, ...] = ()
    example_params: dict[str, float] = Field(
        default_factory=dict
    )  # passed to the examples callable


class EnvParams(Section):
    """The interactive environment."""

    build: ObjectPath = "polyturn.envs.zoom:build_env"
    params: dict[str, object] = Field(default_factory=dict)  # handed to build_env as `params`
    # over params while validating and evaluating, e.g. {oracle: false}
    eval_params: dict[str, object] = Field(default_factory=dict)
    tools_in_prompt: bool = True  # show the function schemas in the prompt
    step_timeout_s: PositiveFloat = 30.0
    max_failure_fraction: Fraction = 0.1  # of a step's trajectories; above it the step stops


class RewardTermParams(Section):
    """One weighted reward term, `(trajectory, problem) -> float`."""

    term: ObjectPath
    weight: float = 1.0


class RewardParams(Section):
    """What a finished trajectory is worth."""

    terms: tuple[RewardTermParams, ...] = (RewardTermParams(term="polyturn.reward:correctness"),)
    rounding: Literal["reference", "strict"] = "reference"
    tolerance: NonNegativeFloat = 0.0  # relative
    timeout_s: PositiveFloat = 2.0  # of one symbolic comparison
    needs_box: bool = False  # an answer outside of \boxed{} or <answer> counts as none
    max_failure_fraction: Fraction = 0.05  # of a step's trajectories; above it the step stops


class RolloutParams(Section):
    """Limits and shape of a rollout batch."""

    prompts_per_step: PositiveInt = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    max_turns: PositiveInt = 6
    max_new_tokens: PositiveInt = 192  # sampled tokens over all turns
    max_turn_tokens: PositiveInt | None = (
        24  # sampled tokens of one turn; None: no limit of its own
    )
    max_context_tokens: PositiveInt = 1024  # prompt, pads, replies and observations together
    temperature: PositiveFloat = 1.0


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


class LearnerParams(Section):
    """Who turns batches into new weights."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    num_processes: PositiveInt = 1
    num_threads: PositiveInt = 1  # of torch on CPU; two are slower at the demo's size
    lr: PositiveFloat = 3e-4
    warmup_steps: NonNegativeInt = 5  # rollout batches
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    decay_steps: PositiveInt = 40  # horizon of the schedule, in rollout batches
    min_lr_fraction: Fraction = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0
    freeze_vision: bool = True
    micro_batch_tokens: PositiveInt = 4096  # padded tokens of one micro-batch


class LossParams(Section):
    """The clipped surrogate (GRPO arXiv:2402.03300, DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783)."""

    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # arXiv:1912.09729
    normalize_std: bool = True  # divide advantages by the group's standard deviation
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_divisor: PositiveFloat | None = None  # tokens; for aggregation: constant

    @model_validator(mode="after")
    def _divisor(self) -> LossParams:
        if (self.aggregation == "constant") != (self.constant_divisor is not None):
            raise ValueError(
                "constant_divisor is needed with aggregation: constant and meaningless without, got "
                f"aggregation {self.aggregation!r}, constant_divisor {self.constant_divisor}"
            )
        return self


class TrainParams(Section):
    """The training loop."""

    steps: PositiveInt = 40  # rollout batches
    updates_per_rollout: PositiveInt = 2
    eval_every: PositiveInt = 20  # steps between scores on the validation split
    eval_batch_size: PositiveInt = 128  # trajectories of a score sampled together
    eval_bootstrap_samples: PositiveInt = 2000  # behind a score's interval
    checkpoint_every: PositiveInt = 20
    resume: str = (
        "auto"  # auto: continue an equal key; never: start anew; RUN_ID: continue that run
    )
    work_uri: str = ""  # where checkpoints in progress live; empty: .polyturn/work
    max_logprob_gap: PositiveFloat = (
        0.5  # mean |sampler - learner| logprob above which the run stops
    )


class EvaluateParams(Section):
    """The last word: warm start and published policy on the test split."""

    temperature: PositiveFloat = 1.0
    samples_per_problem: PositiveInt = 1  # pass@k for k up to it
    greedy: bool = True  # score argmax decoding as well
    bootstrap_samples: PositiveInt = 2000
    batch_size: PositiveInt = 128  # trajectories sampled together
    num_saved_trajectories: NonNegativeInt = 24  # kept with pictures for the report


class RegistryParams(Section):
    """The MLflow model registry."""

    name: Annotated[str, Field(pattern=r"^\w[\w. -]*$")] = "polyturn-geo3k"
    min_gain: NonNegativeFloat = (
        0.0  # the champion moves when accuracy exceeds the old one's by more
    )


class TrackingParams(Section):
    """Where metrics go; addresses only, never part of a result."""

    uri: str = "sqlite:///mlflow.db"  # relative SQLite paths are resolved at the main checkout
    experiment: str = "polyturn"
    artifact_location: str | None = None  # None: mlartifacts beside the SQLite file
    timeout_s: PositiveFloat = 10.0  # how long an unreachable server is waited for


class DoctorParams(Section):
    """Preflight."""

    min_free_gb: NonNegativeFloat = 1.0


class Params(Section):
    """All of params.yaml."""

    seed: NonNegativeInt = 0
    data: DataParams = DataParams()
    images: ImagesParams = ImagesParams()
    model: ModelParams = ModelParams()
    warmstart: WarmstartParams = WarmstartParams()
    env: EnvParams = EnvParams()
    reward: RewardParams = RewardParams()
    rollout: RolloutParams = RolloutParams()
    sampler: SamplerParams = SamplerParams()
    learner: LearnerParams = LearnerParams()
    loss: LossParams = LossParams()
    train: TrainParams = TrainParams()
    evaluate: EvaluateParams = EvaluateParams()
    registry: RegistryParams = RegistryParams()
    tracking: TrackingParams = TrackingParams()
    doctor: DoctorParams = DoctorParams()


def parse(tree: Mapping[str, object], *, origin: str = "params.yaml") -> Params:
    """Validate a parsed params tree.

    Raises:
        ParamsError: one line per wrong key, with its dotted name, the value seen and what is wrong.
    """
    try:
        return Params.model_validate(tree)
    except ValidationError as error:
        lines = [_describe(cast("Mapping[str, object]", item)) for item in error.errors()]
        raise ParamsError("\n".join(f"{origin}: {line}" for line in lines)) from None


def _describe(item: Mapping[str, object]) -> str:
    path = cast("tuple[str | int, ...]", item["loc"])
    key = ".".join(str(part) for part in path) or "(top level)"
    if item["type"] == "extra_forbidden":
        return f"{key} is not a key of polyturn; known here: {', '.join(_siblings(path))}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{key}: {message}, got {json.dumps(item.get('input'), default=str)[:200]}"


def _siblings(path: Sequence[str | int]) -> list[str]:
    section: type[BaseModel] = Params
    for part in path[:-1]:
        field = section.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ["see polyturn/params.py"]
        section = annotation
    return sorted(section.model_fields)


def load(path: Path = Path("params.yaml")) -> Params:
    """Read and validate params.yaml.

    Raises:
        ParamsError: see `read_tree` and `parse`.
    """
    return parse(read_tree(path), origin=str(path))
