"""The environment API: what an env may define, how its build function is called, how its answers become messages.

An environment is a plain object with `step(response_text) -> (observation, done, info)`; optional are
`tools` (function schemas shown in the prompt), `reset(seed=...) -> (observation, info)`,
`format_observation(observation) -> Message | dict` and `close()`. Methods may be async. The loop owns the limits.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from PIL import Image, ImageFile

from polyturn.data.embedded import embed
from polyturn.data.normalise import as_shown, to_rgb
from polyturn.data.urls import decode_data_uri
from polyturn.envs.call import awaited, discard
from polyturn.types import ImageRecord, Json, Message, Problem, Role

if TYPE_CHECKING:
    from polyturn.params import EnvParams

ToolSchema = Mapping[str, Json]
_IMAGE_KEYS = ("image", "images")
_TEXT_KEYS = ("obs_str", "content")
_DATA_URI = re.compile(r"data:image(?:/[\w.+-]+)?;base64,")


@dataclass(frozen=True)
class Observation:
    """What polyturn's own environments answer with: text and pictures, shown in this order: pictures, text."""

    text: str = ""
    images: tuple[ImageRecord, ...] = ()
    role: Role = "tool"


class Env(Protocol):
    """What the rollout loop calls; see the module docstring for the optional methods."""

    def step(self, response_text: str) -> object:
        """Take one reply; return (observation, done, info) or an awaitable of it."""
        ...


@dataclass(frozen=True)
class EnvContext:
    """What a build function can ask for by argument name."""

    problem: Problem
    params: Mapping[str, object] = field(default_factory=dict[str, object])
    max_turns: int = 1
    seed: int = 0


class SlimeSample:
    """slime's view of a problem for `build_env(sample=, args=)`.

    label: the reference answer. prompt: chat messages, text only. metadata: the row's other columns, and what a column
    of the name metadata holds, laid over them. multimodal_inputs: {"images": PIL pictures}. index: the problem's id.
    """

    def __init__(self, problem: Problem) -> None:
        self.label = problem.answer
        self.prompt = [{"role": m.role, "content": m.text} for m in problem.messages]
        self.metadata = {**problem.metadata, **_as_mapping(problem.metadata.get("metadata"))}
        self.index = problem.id
        self._problem = problem

    @property
    def multimodal_inputs(self) -> dict[str, list[Image.Image]]:
        """The prompt's pictures, decoded when asked for."""
        return {"images": [_opened(image.read()) for image in self._problem.images]}


class SlimeArgs:
    """slime's view of the run's arguments: max_turns (rollout.max_turns) and every key of env.params."""

    def __init__(self, context: EnvContext) -> None:
        self.__dict__.update(context.params)
        self.max_turns = context.max_turns

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"args has no {name}; set env.params.{name}")


def load_object(path: str, key: str) -> Callable[..., object]:
    """Import "module:attr" named by params key `key`.

    Raises:
        ValueError: the module or the attribute does not exist or is not callable; the message names the key.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key}: module {error.name!r} of {path!r} cannot be imported; is it in plugins/ "
            "or installed?"
        ) from None
    target = getattr(module, attribute, None)
    if not callable(target):
        raise ValueError(f"{key}: {module_name} has no callable {attribute!r}, got {path!r}")
    return target


def build(builder: Callable[..., object], context: EnvContext) -> Env:
    """Call a build function with the arguments it names: problem, params, max_turns, seed, or slime's sample, args.

    What it changes in params or in the problem's metadata is its own: they are copies.

    Raises:
        ValueError: it has a required argument of another name, or returns no env.
    """
    problem = replace(context.problem, metadata=copy.deepcopy(context.problem.metadata))
    own = replace(context, problem=problem, params=copy.deepcopy(context.params))
    available: dict[str, object] = {
        "problem": problem,
        "params": own.params,
        "max_turns": own.max_turns,
        "seed": own.seed,
        "sample": SlimeSample(problem),
        "args": SlimeArgs(own),
    }
    wanted = inspect.signature(builder).parameters.values()
    named = [p for p in wanted if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = [p.name for p in named if p.name not in available and p.default is p.empty]
    if unknown:
        raise ValueError(
            f"env.build: arguments {unknown} of {builder!r} are unknown; use {sorted(available)}"
        )
    env = awaited(builder(**{p.name: available[p.name] for p in named if p.name in available}))
    if not callable(getattr(env, "step", None)):
        raise ValueError(
            f"env.build: {builder!r} returned {type(env).__name__}, which has no step()"
        )
    return cast("Env", env)


def prompt_tools(
    builder: Callable[..., object], env: EnvParams, problem: Problem
) -> Sequence[ToolSchema]:
    """The function schemas that a problem's prompt shows: those of its environment, or none."""
    if not env.tools_in_prompt:
        return ()
    built = build(builder, EnvContext(problem, env.params))
    try:
        return cast("Sequence[ToolSchema]", getattr(built, "tools", ()) or ())
    finally:
        discard(built)


def observation_message(env: Env, observation: object) -> Message:
    """The chat message of an observation: by the env's format_observation if it has one, else by its type.

    Understood are Observation, Message, str, slime's {"obs_str", "role", "multi_modal_data": {"image": [...]}}
    and a chat message {"role", "content"} whose content is text or typed parts.

    Raises:
        ValueError: nothing of these.
    """
    formatter = getattr(env, "format_observation", None)
    shown = awaited(formatter(observation)) if callable(formatter) else observation
    if isinstance(shown, Observation):
        shown = Message(shown.role, (*shown.images, *((shown.text,) if shown.text else ())))
    if isinstance(shown, Message):
        # An environment may have put a picture of another type there than the annotation says.
        content = tuple(
            part if isinstance(part, str) else image_record(part) for part in shown.content
        )
        return Message(_role(shown.role), content)
    if isinstance(shown, str):
        return Message("tool", (shown,))
    if isinstance(shown, Mapping):
        return _from_mapping(cast("Mapping[str, object]", shown))
    raise ValueError(
        f"an observation must be text, a Message or a mapping, got {type(shown).__name__}"
    )


def reset_of(env: Env, seed: int) -> Callable[[], object] | None:
    """The env's reset with the seed bound to it if it accepts one; None if it has no reset."""
    reset = getattr(env, "reset", None)
    if not callable(reset):
        return None
    accepts_seed = "seed" in inspect.signature(reset).parameters
    return partial(reset, seed=seed) if accepts_seed else reset


def first_message(env: Env, answered: object) -> Message | None:
    """The chat message of what reset answered, (observation, info) or the observation; None if it shows nothing."""
    shown = cast("tuple[object, ...]", answered)[0] if isinstance(answered, tuple) else answered
    is_empty = shown is None or (type(shown) in (str, dict) and not shown)
    return None if is_empty else observation_message(env, shown)


def plain_info(info: object) -> dict[str, Json]:
    """A copy of what step returned as info, as JSON keeps it; None is empty.

    Raises:
        TypeError, ValueError: it is no mapping, or holds what JSON cannot say.
    """
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise TypeError(f"the info of step() must be a mapping, got {type(info).__name__}")
    held = cast("Mapping[str, object]", info)
    try:
        text = json.dumps(dict(held), allow_nan=False, ensure_ascii=False)
        return cast("dict[str, Json]", json.loads(text.encode()))
    except (TypeError, ValueError) as error:
        raise TypeError(f"the info of step() must be JSON: {error}") from None


def _from_mapping(shown: Mapping[str, object]) -> Message:
    role = _role(str(shown.get("role") or "user"))
    media = _as_mapping(shown.get("multi_modal_data"))
    if unknown := [key for key in media if key not in _IMAGE_KEYS and _is_given(media[key])]:
        raise ValueError(
            f"the keys of an observation's multi_modal_data must be of {_IMAGE_KEYS}, got {unknown}"
        )
    given = [
        held[key] for held in (media, shown) for key in _IMAGE_KEYS if _is_given(held.get(key))
    ]
    pictures = tuple(image_record(picture) for images in given for picture in _as_list(images))
    if shown and not any(key in shown for key in (*_TEXT_KEYS, *_IMAGE_KEYS, "multi_modal_data")):
        raise ValueError(
            "an observation must be text, a Message or a mapping that holds "
            f"{' or '.join(_TEXT_KEYS)}, got {sorted(map(str, shown))}"
        )
    if "content" in shown:
        return Message(role, (*pictures, *(_part(part) for part in _as_list(shown["content"]))))
    text = shown.get("obs_str")
    return Message(role, (*pictures, "" if text is None else str(text)))


def _role(name: str) -> Role:
    if name not in ("user", "tool"):
        raise ValueError(f"an observation's role must be 'user' or 'tool', got {name!r}")
    return name


def _is_given(value: object) -> bool:
    return value is not None and not (isinstance(value, list | tuple) and not value)


def _as_mapping(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value if isinstance(value, Mapping) else {})


def _as_list(content: object) -> Sequence[object]:
    if isinstance(content, Sequence) and not isinstance(content, str | bytes | bytearray):
        return cast("Sequence[object]", content)
    return [content]


def _part(part: object) -> str | ImageRecord:
    if isinstance(part, str | ImageRecord):
        return part
    typed = _as_mapping(part)
    if typed.get("type") == "image":
        return image_record(typed.get("image"))
    if typed.get("type") == "image_url":
        url = typed.get("image_url")
        return image_record(_as_mapping(url).get("url", url))
    if isinstance(typed.get("text"), str):
        return str(typed["text"])
    raise ValueError(f"a part of a message must be text or an image, got {str(part)[:80]}")


def image_record(picture: object) -> ImageRecord:
    """A record of a picture that an environment made; on white, RGB, lossless PNG.

    Understood are ImageRecord, PIL image, array, the bytes of an image file and a data URI in base64. 16-bit and
    float pixels are scaled by their range, and files (also those that PIL has only opened) are turned upright and to
    sRGB, as those of the data set are.

    Raises:
        ValueError: it is none of these, or its pixels are not finite.
    """
    if isinstance(picture, ImageRecord):
        return picture
    if isinstance(picture, str) and _DATA_URI.match(picture):
        picture = decode_data_uri(picture)
    if isinstance(picture, np.ndarray):
        picture = embed(cast("object", picture), "observation").data
    if isinstance(picture, bytes):
        picture = _opened(picture)
    if isinstance(picture, ImageFile.ImageFile):
        picture = as_shown(picture)
    if not isinstance(picture, Image.Image):
        raise ValueError(
            "a picture must be an ImageRecord, a PIL image, an array, bytes or a data URI, got "
            f"{type(picture).__name__}"
        )
    buffer = io.BytesIO()
    to_rgb(picture).save(buffer, format="PNG", compress_level=1)
    return ImageRecord.from_png(buffer.getvalue(), picture.width, picture.height)


def _opened(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except OSError as error:
        raise ValueError(
            f"a picture must be an image file, got {len(data)} bytes: {error}"
        ) from None
    return as_shown(image)
