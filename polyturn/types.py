"""The nouns of polyturn (DESIGN: problem, group, trajectory, turn, sample, batch); imports neither torch nor PIL.

A *problem* is tried by a *group* of N sibling *trajectories*. A *turn* is one assistant reply plus the
environment's observation. A trajectory becomes one *training sample*:

    prompt P (image = 3 pads) | A0 (sampled, ends <|im_end|>) | O1 = "\\n" + message + header | A1 (sampled)
    token_ids  p p i i i p    |  a a a e                      |  n o o o                      |  a a e
    loss_mask  0 0 0 0 0 0    |  1 1 1 1                      |  0 0 0 0                      |  1 1 1
    logprobs   0 0 0 0 0 0    |  l l l l                      |  0 0 0 0                      |  l l l
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Role = Literal["system", "user", "assistant", "tool"]


class StopReason(enum.StrEnum):
    """Why a trajectory ended."""

    ENV_DONE = "env_done"
    MAX_TURNS = "max_turns"
    MAX_NEW_TOKENS = "max_new_tokens"
    MAX_CONTEXT = "max_context"
    ABORT = "abort"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    SAMPLER_ERROR = "sampler_error"
    TOKEN_MISMATCH = "token_mismatch"

    @property
    def status(self) -> Status:
        """The status that this reason leads to."""
        return _STATUS_OF[self]


class Status(enum.StrEnum):
    """What a trajectory is worth: COMPLETED and TRUNCATED carry a reward, ABORTED and FAILED do not."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_rewarded(self) -> bool:
        """Whether a trajectory of this status is graded and counts in its group's baseline."""
        return self in (Status.COMPLETED, Status.TRUNCATED)


_STATUS_OF = {
    StopReason.ENV_DONE: Status.COMPLETED,
    StopReason.MAX_TURNS: Status.COMPLETED,
    StopReason.MAX_NEW_TOKENS: Status.TRUNCATED,
    StopReason.MAX_CONTEXT: Status.TRUNCATED,
    StopReason.ABORT: Status.ABORTED,
    StopReason.ENV_ERROR: Status.FAILED,
    StopReason.ENV_TIMEOUT: Status.FAILED,
    StopReason.SAMPLER_ERROR: Status.FAILED,
    StopReason.TOKEN_MISMATCH: Status.FAILED,
}


@dataclass(frozen=True)
class ImageRecord:
    """One picture as every part of polyturn sees it: upright, on white, RGB, PNG.

    `sha256` is the hash of the PNG bytes; they are held in `data` or read from `path`.
    Two records are equal when their hashes are.
    """

    sha256: str
    width: int
    height: int
    path: Path | None = field(default=None, compare=False, repr=False)
    data: bytes | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_png(cls, png: bytes, width: int, height: int) -> ImageRecord:
        """Make a record that holds its own PNG bytes (an image that an environment drew)."""
        return cls(hashlib.sha256(png).hexdigest(), width, height, data=png)

    def read(self) -> bytes:
        """The PNG bytes.

        Raises:
            ValueError: neither `data` nor `path` is set.
        """
        if self.data is not None:
            return self.data
        if self.path is None:
            raise ValueError(f"image {self.sha256} has neither data nor path")
        return self.path.read_bytes()


@dataclass(frozen=True)
class Message:
    """One chat message; `content` holds text and pictures in the order in which they are shown."""

    role: Role
    content: tuple[str | ImageRecord, ...]

    @property
    def images(self) -> tuple[ImageRecord, ...]:
        """The pictures of the message, in order."""
        return tuple(part for part in self.content if isinstance(part, ImageRecord))

    @property
    def text(self) -> str:
        """The text of the message without its pictures."""
        return "".join(part for part in self.content if isinstance(part, str))


@dataclass(frozen=True)
class Problem:
    """One row of a dataset: prompt messages (with pictures), reference answer, and whatever else the row says."""

    id: str
    split: str
    messages: tuple[Message, ...]
    answer: str
    metadata: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def images(self) -> tuple[ImageRecord, ...]:
        """All pictures of the prompt, in order."""
        return tuple(image for message in self.messages for image in message.images)


@dataclass(frozen=True)
class Turn:
    """One assistant reply plus the environment's observation.

    `reply_ids` are the engine's ids, verbatim; `reply_logprobs` has the same length. `observation` is None
    when the trajectory ended with this reply; `info` is what the environment's step returned (JSON).
    """

    reply_ids: tuple[int, ...]
    reply_logprobs: tuple[float, ...]
    reply_text: str
    observation: Message | None
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True)
class TokenCounts:
    """How many tokens of a trajectory each role has; `image_pads` are those of prompt and observations together.

    `assistant` counts sampled tokens; an end token that the loop adds counts as observation.
    """

    prompt: int = 0
    assistant: int = 0
    observation: int = 0
    image_pads: int = 0


@dataclass(frozen=True)
class EnvFailures:
    """How often a trajectory's environment raised, took too long or could not be closed, over all its attempts.

    `num_retries` counts the attempts after the first.
    """

    num_errors: int = 0
    num_timeouts: int = 0
    num_close_failures: int = 0
    num_retries: int = 0


@dataclass(frozen=True)
class Trajectory:
    """One finished try at a problem, with everything that training and reading it need.

    `token_ids`, `loss_mask` and `logprobs` are the stream that is trained on (image pads expanded), all of
    length T; `images` are all pictures in the order of their pads. `reward` is None unless status is rewarded.
    """

    problem: Problem
    group_index: int
    sibling: int
    turns: tuple[Turn, ...] = field(repr=False)
    token_ids: npt.NDArray[np.int64] = field(repr=False)
    loss_mask: npt.NDArray[np.int8] = field(repr=False)
    logprobs: npt.NDArray[np.float32] = field(repr=False)
    images: tuple[ImageRecord, ...] = field(repr=False)
    stop_reason: StopReason
    policy_version: int
    error: str | None = None
    reward: float | None = None
    reward_terms: Mapping[str, float] = field(default_factory=dict[str, float])
    reward_failures: tuple[
        str, ...
    ] = ()  # reward terms that could not be computed (they count 0), with causes
    tokens: TokenCounts = TokenCounts()
    # Replies that the chat template would show otherwise in the whole conversation (thoughts that it strips);
    # None: this trajectory was not compared with the canonical rendering.
    num_rewritten: int | None = None
    env_time_s: float = field(default=0.0, compare=False)  # in the environment's methods
    env_failures: EnvFailures = EnvFailures()

    @property
    def status(self) -> Status:
        """The status that `stop_reason` leads to."""
        return self.stop_reason.status

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled, over all turns."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Group:
    """The sibling trajectories of one problem; rewards are compared only inside a group."""

    index: int
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class TrainingSample:
    """What the learner sees of one trajectory; torch-free, pictures by record, all arrays of length T.

    `logprobs` are the sampler's at the sampling temperature (0 where loss_mask is 0). `id` names the trajectory.

    Raises:
        ValueError: the arrays differ in length.
    """

    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float32]
    images: tuple[ImageRecord, ...]
    advantage: float = 0.0
    kind: str = ""  # of the demonstration it comes from
    num_answer_tokens: int = 0  # trained tokens of a demonstration's last reply
    id: str = ""

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.loss_mask), len(self.logprobs))
        if len(set(lengths)) != 1:
            trained = np.flatnonzero(self.loss_mask)
            prompt = int(trained[0]) if len(trained) else len(self.loss_mask)
            raise ValueError(
                f"sample {self.id or '(no id)'}: arrays differ in length: token_ids {lengths[0]}, loss_mask "
                f"{lengths[1]}, logprobs {lengths[2]}; prompt {prompt}, response {lengths[0] - prompt}, "
                f"total {lengths[0]}"
            )


@dataclass(frozen=True)
class Span:
    """Where one sample lies in a packed batch: tokens prompt_start..prompt_stop, then start..stop.

    Siblings share the tokens of their prompt; a sample that shares nothing has an empty first part.
    """

    prompt_start: int
    prompt_stop: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens of the sample."""
        return self.prompt_stop - self.prompt_start + self.stop - self.start

    def indices(self) -> npt.NDArray[np.int64]:
        """The sample's tokens in the batch, in its own order."""
        prompt = np.arange(self.prompt_start, self.prompt_stop)
        return np.concatenate([prompt, np.arange(self.start, self.stop)])


@dataclass(frozen=True)
class Batch:
    """One packed micro-batch: T tokens of S samples end to end, no padding; the only noun that holds tensors.

    token_ids, sequence (index of its sample; a shared prompt's: the first that has it) [T] int64; loss_mask [T]
    bool; logprobs (the sampler's), advantages and weights (of each token in the loss) [T] float32; position_ids
    [3, T] int64 (M-RoPE: temporal, height, width); before [N] int64: for each trained token, the token whose
    state predicts it; trained [N] int64 and pads [P] int64: where loss_mask is true and where image pads are (known
    beforehand, so that nothing waits for a GPU to count them); images: the distinct pictures; image_rows: for each picture slot in reading order, its
    index into `images`; spans: where each sample lies.
    """

    token_ids: torch.Tensor
    sequence: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    position_ids: torch.Tensor
    before: torch.Tensor
    trained: torch.Tensor
    pads: torch.Tensor
    images: tuple[ImageRecord, ...]
    image_rows: tuple[int, ...]
    spans: tuple[Span, ...]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`; a GPU takes them when it comes to it (`transfer.to_device`)."""
        names = [f.name for f in fields(self) if f.name not in ("images", "image_rows", "spans")]
        tensors = {name: getattr(self, name) for name in names}
        if device.type == "cuda" and not self.token_ids.is_cuda:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return replace(
            self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        )
