r"""The zoom environment: the model asks for a part of the picture and gets the crop as a new picture.

A call names a `region` (northwest, northeast, southwest, southeast: a square around the centre of that quadrant) or
a `box` [left, top, right, bottom] in thousandths of the picture's width and height, of the problem's picture or,
with `image`, of an earlier crop. The answer lists the regions that were not looked at yet: without that list a small
policy searches with replacement, and its argmax loops on one region. A reply without a call ends the trajectory.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image

from polyturn.envs.base import Observation, image_record
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.envs.tools import ToolCall, ToolCallError, parse_tool_calls
from polyturn.types import ImageRecord, Json, Message, Problem

REGIONS: Mapping[str, tuple[float, float]] = {
    "northwest": (0.25, 0.25),
    "northeast": (0.75, 0.25),
    "southwest": (0.25, 0.75),
    "southeast": (0.75, 0.75),
}
CROP_FRACTION = 0.25  # side of a region's crop / side of the picture
MIN_CROP_SIDE = 16  # pixels; a smaller box is grown to it
TOOLS: Sequence[Mapping[str, Json]] = (
    {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "Show a part of a picture larger.",
            "parameters": {
                "type": "object",
                "properties": {
                    "region": {"type": "string", "enum": list(REGIONS)},
                    "box": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0, "maximum": 1000},
                        "description": "left, top, right, bottom in thousandths",
                    },
                    "image": {
                        "type": "integer",
                        "description": "0: the first picture, 1: the first crop, ...",
                    },
                },
            },
        },
    },
)

Box = tuple[float, float, float, float]  # left, top, right, bottom as fractions of width and height


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

    tools = TOOLS

    def __init__(self, problem: Problem, crop_fraction: float) -> None:
        self._pictures = list(problem.images)
        self._crop_fraction = crop_fraction
        self._seen: list[str] = []

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, Json]]:
        """Answer the last tool call of a reply with a crop; a reply without one is the final answer."""
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
        return Observation(not_seen(self._seen), (crop,)), False, info

    def _read(self, call: ToolCall) -> ZoomRequest:
        if call.name != "zoom":
            raise ZoomError("There is no such tool; call zoom.")
        arguments = call.arguments
        index = arguments.get("image", 0)
        if (
            isinstance(index, bool)
            or not isinstance(index, int)
            or not 0 <= index < len(self._pictures)
        ):
            raise ZoomError(f"image must be a number from 0 to {len(self._pictures) - 1}.")
        region = arguments.get("region")
        if region is None:
            return ZoomRequest(index, read_box(arguments.get("box")), None)
        if not isinstance(region, str) or region not in REGIONS:
            raise ZoomError(f"region must be one of {', '.join(REGIONS)}.")
        box = region_box(region, self._crop_fraction)
        return ZoomRequest(index, box, region if index == 0 else None)


def build_env(problem: Problem, params: Mapping[str, object]) -> ZoomEnv:
    """Make the environment; `params` may set crop_fraction (0 < f <= 0.5).

    Raises:
        ValueError: the problem has no picture, or crop_fraction is out of range.
    """
    if not problem.images:
        raise ValueError(f"problem {problem.id} has no picture to zoom into")
    fraction = params.get("crop_fraction", CROP_FRACTION)
    if not isinstance(fraction, int | float) or not 0 < fraction <= 0.5:
        raise ValueError(
            f"env.params.crop_fraction must be above 0 and at most 0.5, got {fraction!r}"
        )
    return ZoomEnv(problem, float(fraction))


def region_box(region: str, fraction: float) -> Box:
    """The square of side `fraction` around the centre of a quadrant."""
    x, y = REGIONS[region]
    half = fraction / 2
    return x - half, y - half, x + half, y + half


def read_box(value: Json) -> Box:
    """A box given in thousandths.

    Raises:
        ZoomError: it is no box with left < right and top < bottom inside 0..1000.
    """
    wrong = ZoomError(
        "Give a region, or a box [left, top, right, bottom] in thousandths with left < right "
        "and top < bottom."
    )
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 4:
        raise wrong
    numbers = [float(n) for n in value if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) != 4 or not all(0 <= n <= 1000 for n in numbers):
        raise wrong
    left, top, right, bottom = numbers
    if not (left < right and top < bottom):
        raise wrong
    return left / 1000, top / 1000, right / 1000, bottom / 1000


def not_seen(seen: Sequence[str]) -> str:
    """What an answer says besides the picture: the regions that are left, each in its own place.

    >>> not_seen(["northeast", "southeast"])
    'Not seen: northwest - southwest -'
    """
    return "Not seen: " + " ".join("-" if region in seen else region for region in REGIONS)


@lru_cache(maxsize=20_000)
def cut(picture: ImageRecord, box: Box) -> ImageRecord:
    """Crop a picture; a box smaller than MIN_CROP_SIDE pixels is grown to it. Equal arguments, equal bytes."""
    with Image.open(io.BytesIO(picture.read())) as image:
        left, right = _span(box[0], box[2], picture.width)
        top, bottom = _span(box[1], box[3], picture.height)
        return image_record(image.crop((left, top, right, bottom)))


def _span(low: float, high: float, size: int) -> tuple[int, int]:
    start, end = round(low * size), round(high * size)
    if end - start < MIN_CROP_SIDE:
        start = max(0, min((start + end - MIN_CROP_SIDE) // 2, size - MIN_CROP_SIDE))
        end = min(size, start + MIN_CROP_SIDE)
    return start, end


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
            f"but problem {problem.id} has no label in its metadata"
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
