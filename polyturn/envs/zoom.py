r"""The zoom environment: the model asks for a part of a picture and gets the crop as a new picture.

A call names a `region` (northwest, northeast, southwest, southeast: a square around the centre of that quadrant) or
a `box` [left, top, right, bottom], in thousandths of the picture's sides or in pixels (env.params.box_unit), of any
picture of the problem or, with `image`, of an earlier crop. The answer lists the regions that were not looked at yet:
without that list a small policy searches with replacement, and its argmax loops on one region.
env.params.tool: image_zoom_in_tool shows the tool as DeepEyes (arXiv:2505.14362) and Qwen3-VL name it (bbox_2d,
img_idx), without regions. A reply without a call ends the trajectory.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import cast, get_args

from PIL import Image

from polyturn.envs.base import Observation, ToolSchema, image_record
from polyturn.envs.boxes import MIN_CROP_SIDE, Box, BoxError, Unit, pixel_box, read_box
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.envs.tools import ToolCall, ToolCallError, parse_tool_calls
from polyturn.types import ImageRecord, Json, Message, Problem

__all__ = [
    "MIN_CROP_SIDE",
    "REGIONS",
    "TOOLS",
    "Box",
    "ZoomEnv",
    "build_env",
    "cut",
    "demonstrations",
    "region_box",
]

REGIONS: Mapping[str, tuple[float, float]] = {
    "northwest": (0.25, 0.25),
    "northeast": (0.75, 0.25),
    "southwest": (0.25, 0.75),
    "southeast": (0.75, 0.75),
}
CROP_FRACTION = 0.25  # side of a region's crop / side of the picture
TOOL_NAMES = ("zoom", "image_zoom_in_tool")
_BOX_KEYS = ("box", "bbox_2d")
_IMAGE_KEYS = ("image", "img_idx")
_UNITS = {"thousandths": "thousandths", "pixels": "pixels of the picture"}


def tool_schema(name: str, unit: Unit) -> ToolSchema:
    """The function schema of the tool under one of its names."""
    box_key, image_key = (keys[TOOL_NAMES.index(name)] for keys in (_BOX_KEYS, _IMAGE_KEYS))
    number: dict[str, Json] = {"type": "integer", "minimum": 0}
    box: dict[str, Json] = {
        "type": "array",
        "items": number | ({"maximum": 1000} if unit == "thousandths" else {}),
        "description": f"left, top, right, bottom in {_UNITS[unit]}",
    }
    image: dict[str, Json] = {
        "type": "integer",
        "description": "0: the first picture, 1: the next picture or crop, ...",
    }
    properties: dict[str, Json] = {box_key: box, image_key: image}
    if name == "zoom":
        properties = {"region": {"type": "string", "enum": list(REGIONS)}, **properties}
    parameters: dict[str, Json] = {"type": "object", "properties": properties}
    if name != "zoom":
        parameters["required"] = [box_key]
    description = "Show a part of a picture larger."
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS: Sequence[ToolSchema] = (tool_schema("zoom", "thousandths"),)


@dataclass(frozen=True)
class ZoomParams:
    """env.params: side of a region's crop / side of the picture; unit of boxes; name under which the tool is shown."""

    crop_fraction: float = CROP_FRACTION
    box_unit: Unit = "thousandths"
    tool: str = "zoom"

    @classmethod
    def of(cls, params: Mapping[str, object]) -> ZoomParams:
        """Check env.params.

        Raises:
            ValueError: a param is unknown or wrong; the message names it.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(params) - set(known)):
            raise ValueError(
                f"env.params: {unknown} are unknown to zoom; it takes {', '.join(known)}"
            )
        fraction = params.get("crop_fraction", CROP_FRACTION)
        if not isinstance(fraction, int | float) or not 0 < fraction <= 0.5:
            raise ValueError(
                f"env.params.crop_fraction must be above 0 and at most 0.5, got {fraction!r}"
            )
        unit = _one_of(get_args(Unit), params, "box_unit")
        return cls(float(fraction), cast("Unit", unit), _one_of(TOOL_NAMES, params, "tool"))


def _one_of(known: Sequence[str], params: Mapping[str, object], key: str) -> str:
    value = params.get(key, known[0])
    if value not in known:
        raise ValueError(f"env.params.{key} must be one of {', '.join(known)}, got {value!r}")
    return str(value)


class ZoomError(ValueError):
    """A call that asks for no part of a picture; its text is shown to the model."""


@dataclass(frozen=True)
class ZoomRequest:
    """A call understood: which picture, which part, and the region's name if it was named."""

    image: int
    box: Box
    region: str | None


class ZoomEnv:
    """One trajectory's pictures and what was looked at."""

    def __init__(self, problem: Problem, params: ZoomParams) -> None:
        self.tools = (tool_schema(params.tool, params.box_unit),)
        self._pictures = list(problem.images)
        self._params = params
        self._seen: list[str] = []

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, Json]]:
        """Answer the last tool call of a reply with a crop; a reply without one is the final answer.

        Returns:
            Crop and text, or text that says what is wrong with the call; whether the reply was final; info: tool,
            image, box (fractions of the picture's sides, as asked for) and region, or error.
        """
        calls = parse_tool_calls(response_text)
        if not calls:
            return Observation(), True, {}
        call = calls[-1]
        if isinstance(call, ToolCallError):
            return Observation(call.message), False, {"error": call.reason}
        try:
            request = self._read(call)
        except ZoomError as error:
            return Observation(str(error)), False, {"tool": call.name, "error": str(error)}
        crop = cut(self._pictures[request.image], request.box)
        self._pictures.append(crop)
        if request.region is not None and request.region not in self._seen:
            self._seen.append(request.region)
        info: dict[str, Json] = {"tool": "zoom", "image": request.image, "box": list(request.box)}
        if request.region is not None:
            info["region"] = request.region
        return Observation(self._text(crop), (crop,)), False, info

    def _text(self, crop: ImageRecord) -> str:
        if self._params.tool == "zoom":
            return not_seen(self._seen)
        return f"Picture {len(self._pictures) - 1}: {crop.width} x {crop.height} pixels."

    def _read(self, call: ToolCall) -> ZoomRequest:
        if call.name not in TOOL_NAMES:
            raise ZoomError(f"There is no such tool; call {self._params.tool}.")
        arguments = call.arguments
        index = _first(arguments, _IMAGE_KEYS, 0)
        if isinstance(index, str) and index.isdecimal():
            index = int(index)
        if (
            isinstance(index, bool)
            or not isinstance(index, int)
            or not 0 <= index < len(self._pictures)
        ):
            raise ZoomError(f"image must be a number from 0 to {len(self._pictures) - 1}.")
        region = arguments.get("region")
        if region is None:
            return ZoomRequest(index, self._box(_first(arguments, _BOX_KEYS, None), index), None)
        if not isinstance(region, str) or region not in REGIONS:
            raise ZoomError(f"region must be one of {', '.join(REGIONS)}.")
        box = region_box(region, self._params.crop_fraction)
        return ZoomRequest(index, box, region if index == 0 else None)

    def _box(self, value: Json, index: int) -> Box:
        try:
            return read_box(value, self._params.box_unit, self._pictures[index])
        except BoxError as error:
            asked = "Give a region, or a box" if self._params.tool == "zoom" else "Give bbox_2d as"
            form = (
                f"{asked} [left, top, right, bottom] in {_UNITS[self._params.box_unit]} with left < right "
                "and top < bottom."
            )
            raise ZoomError(form if value is None else f"{form} {error}") from None


def _first(arguments: Mapping[str, Json], keys: Sequence[str], default: Json) -> Json:
    """The argument under the first of its names that the call uses."""
    return next((arguments[key] for key in keys if key in arguments), default)


def build_env(problem: Problem, params: Mapping[str, object]) -> ZoomEnv:
    """Make the environment; for `params` see ZoomParams.

    Raises:
        ValueError: the problem has no picture, or a param is unknown or wrong; the message names it.
    """
    if not problem.images:
        raise ValueError(f"problem {problem.id} has no picture to zoom into")
    return ZoomEnv(problem, ZoomParams.of(params))


def region_box(region: str, fraction: float) -> Box:
    """The square of side `fraction` around the centre of a quadrant."""
    x, y = REGIONS[region]
    half = fraction / 2
    return x - half, y - half, x + half, y + half


def not_seen(seen: Sequence[str]) -> str:
    """What an answer says besides the picture: the regions that are left, each in its own place.

    >>> not_seen(["northeast", "southeast"])
    'Not seen: northwest - southwest -'
    """
    return "Not seen: " + " ".join("-" if region in seen else region for region in REGIONS)


@lru_cache(maxsize=20_000)
def cut(picture: ImageRecord, box: Box) -> ImageRecord:
    """Crop a picture (see `pixel_box`). Equal arguments, equal bytes."""
    with Image.open(io.BytesIO(picture.read())) as image:
        return image_record(image.crop(pixel_box(box, picture.width, picture.height)))


def tool_call(region: str) -> str:
    """The call that looks at a region, as the demonstrations write it."""
    return f'<tool_call>{{"name": "zoom", "arguments": {{"region": "{region}"}}}}</tool_call>'


# ---- demonstrations for the warm start ---------------------------------------------------------------------------

READ_QUESTION = "Find x."


def demonstrations(
    kind: str, problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    """Examples from synthetic problems (metadata: label, region, shape, quantity).

    `read`: one crop, "Find x.", its label. `search`: a search that ends at the right crop; only the regions and
    the answer are trained, never whether to zoom. `recall`: three regions were looked at, only the word of the
    fourth, which the list of regions not seen gives away, is trained. `guess`: a deliberately weak demonstrator that zooms with
    probability params["zoom"], goes on after a wrong crop with params["persist"], else guesses an answer from
    params["guess_min"]..params["guess_max"]. params["crop_fraction"] must be what env.params sets.

    Raises:
        ValueError: an unknown kind, or a problem without the metadata.
    """
    makers = {
        "read": _read_example,
        "search": _search_example,
        "recall": _recall_example,
        "guess": _guess_example,
    }
    if kind not in makers:
        raise ValueError(
            f"warmstart.phases: polyturn.envs.zoom knows the kinds {sorted(makers)}, got {kind!r}"
        )
    if "label" not in problem.metadata:
        raise ValueError(
            "warmstart.examples: polyturn.envs.zoom:demonstrations needs data.source: synthetic, "
            f"but problem {problem.id} has no label in its metadata; of other data "
            "polyturn.envs.geo3k:demonstrations imitates the answers (mix: {answer: 1.0}), and warmstart.phases: [] leaves "
            "the warm start out"
        )
    return makers[kind](problem, rng, params)


def answer(value: str) -> str:
    """A final reply."""
    return f"Answer: \\boxed{{{value}}}"


def _region(problem: Problem) -> str:
    return str(problem.metadata["region"])


def _crop(problem: Problem, region: str, params: Mapping[str, float]) -> ImageRecord:
    fraction = params.get("crop_fraction", CROP_FRACTION)
    return cut(problem.images[0], region_box(region, fraction))


def _read_example(
    problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    del rng
    prompt = Message("user", (_crop(problem, _region(problem), params), READ_QUESTION))
    return Demonstration((prompt,), (Say(answer(str(problem.metadata["label"]))),), "read")


def _search_example(
    problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    others = [region for region in REGIONS if region != _region(problem)]
    num_wrong = rng.choices((0, 1, 2, 3), (0.4, 0.3, 0.2, 0.1))[0]
    path = [*rng.sample(others, num_wrong), _region(problem)]
    turns: list[Say | Message] = []
    for index, region in enumerate(path):
        turns += [_say_region(region), _shown(problem, path[: index + 1], params)]
    return Demonstration(problem.messages, (*turns, Say(answer(problem.answer))), "search")


def _recall_example(
    problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    *seen, left = rng.sample(list(REGIONS), len(REGIONS))
    turns: list[Say | Message] = []
    for index, region in enumerate(seen):
        turns += [Say(tool_call(region), ()), _shown(problem, seen[: index + 1], params)]
    return Demonstration(problem.messages, (*turns, _say_region(left)), "recall")


def _say_region(region: str) -> Say:
    """A call of which only the region's word is trained."""
    call = tool_call(region)
    start = call.index(region)
    return Say(call, ((start, start + len(region)),))


def _guess_example(
    problem: Problem, rng: random.Random, params: Mapping[str, float]
) -> Demonstration:
    turns: list[Say | Message] = []
    final = str(_value(problem, rng.randint(int(params["guess_min"]), int(params["guess_max"]))))
    if rng.random() < params["zoom"]:
        path: list[str] = []
        for region in rng.sample(list(REGIONS), len(REGIONS)):
            path.append(region)
            turns += [Say(tool_call(region)), _shown(problem, path, params)]
            if region == _region(problem):
                final = problem.answer
                break
            if rng.random() > params["persist"]:
                break
    return Demonstration(problem.messages, (*turns, Say(answer(final))), "guess")


def _shown(problem: Problem, path: Sequence[str], params: Mapping[str, float]) -> Message:
    return Message("tool", (_crop(problem, path[-1], params), not_seen(path)))


def _value(problem: Problem, length: int) -> int:
    """The quantity asked for, were the labelled length `length`."""
    formulas = {
        ("square", "perimeter"): 4 * length,
        ("square", "area"): length * length,
        ("triangle", "perimeter"): 3 * length,
        ("circle", "diameter"): 2 * length,
    }
    return formulas[(str(problem.metadata["shape"]), str(problem.metadata["quantity"]))]
