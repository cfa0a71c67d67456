"""The environment API: arguments by name, slime's modules as they are, observations of every documented shape."""

from __future__ import annotations

import base64
import copy
import io
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from PIL import ExifTags, Image

from polyturn.envs.base import (
    EnvContext,
    Observation,
    SlimeSample,
    build,
    image_record,
    load_object,
    observation_message,
    prompt_tools,
)
from polyturn.params import EnvParams
from polyturn.types import ImageRecord, Message, Problem

SLIME_MODULE = '''
class BaseInteractionEnv:
    """As in slime: formats an observation into one chat message."""

    def reset(self):
        raise NotImplementedError

    def step(self, response_text):
        raise NotImplementedError

    def close(self):
        pass

    def format_observation(self, observation):
        content = []
        for _, images in (observation.get("multi_modal_data") or {}).items():
            for image in images:
                content.append({"type": "image", "image": image})
        content.append({"type": "text", "text": observation.get("obs_str", "")})
        return {"role": "user", "content": content}


class CountingEnv(BaseInteractionEnv):
    def __init__(self, ground_truth, max_turns):
        self.ground_truth, self.max_turns, self.turn = ground_truth, max_turns, 0

    def reset(self):
        self.turn = 0
        return {}, {}

    def step(self, response_text):
        self.turn += 1
        done = self.turn >= self.max_turns
        return {"obs_str": f"{self.ground_truth} after {response_text}", "role": "tool"}, done, {"turn": self.turn}


def build_env(sample=None, args=None, **_):
    return CountingEnv(sample.metadata.get("truth") or sample.label, args.max_turns)
'''


@pytest.fixture
def problem() -> Problem:
    return Problem("p1", "train", (Message("user", ("Find x.",)),), "7", {"truth": "seven"})


@pytest.fixture
def slime_env_path(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("slime_style_env")
    exec(SLIME_MODULE, module.__dict__)  # a user's module, as if it lay in plugins/
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:build_env"


def test_a_slime_env_module_runs_unchanged(slime_env_path: str, problem: Problem) -> None:
    builder = load_object(slime_env_path, "env.build")
    env = build(builder, EnvContext(problem, {"extra": 1}, max_turns=2))
    observation, done, info = env.step("hello")  # type: ignore[misc]
    assert (done, info) == (False, {"turn": 1})
    assert observation_message(env, observation) == Message("user", ("seven after hello",))
    assert env.step("again")[1] is True  # type: ignore[index]


def test_slime_args_show_env_params_and_the_turn_limit(problem: Problem) -> None:
    seen: dict[str, object] = {}

    def build_env(args: object, sample: object) -> object:
        seen.update(vars(args))
        seen["prompt"] = sample.prompt  # type: ignore[attr-defined]
        return types.SimpleNamespace(step=lambda text: ("", True, {}))

    build(build_env, EnvContext(problem, {"oracle": False, "max_turns": 99}, max_turns=4))
    assert seen["oracle"] is False
    assert seen["max_turns"] == 4, "the loop's limit, not a param of that name"
    assert seen["prompt"] == [{"role": "user", "content": "Find x."}]


def test_arguments_are_bound_by_name_and_others_are_refused(problem: Problem) -> None:
    def in_any_order(seed: int, problem: Problem, *, max_turns: int, label: str = "x") -> object:
        assert (seed, problem.id, max_turns, label) == (3, "p1", 5, "x")
        return types.SimpleNamespace(step=lambda text: ("", True, {}))

    build(in_any_order, EnvContext(problem, max_turns=5, seed=3))
    with pytest.raises(
        ValueError, match=r"env\.build: arguments \['wrong'\].*use \['args', 'max_turns'"
    ):
        build(lambda problem, wrong: None, EnvContext(problem))
    with pytest.raises(ValueError, match="returned NoneType, which has no step"):
        build(lambda problem: None, EnvContext(problem))


def test_an_environment_cannot_change_what_its_siblings_are_built_from(problem: Problem) -> None:
    """State that one trajectory leaves for the next is of the kind of PrimeIntellect-ai/verifiers#1727, lerobot#4327."""
    params: dict[str, object] = {"size": 3, "words": ["a"]}
    row = replace(problem, metadata={"level": ["#"], "metadata": {"tries": 0}})
    seen: list[object] = []

    def build_env(problem: Problem, params: dict[str, object], sample: SlimeSample) -> object:
        seen.append(copy.deepcopy((params, problem.metadata, sample.metadata)))
        params.pop("size")
        params["words"].append("b")  # type: ignore[attr-defined]
        problem.metadata["level"].append("@")  # type: ignore[index,union-attr,call-overload]
        sample.metadata["tries"] = 1
        return types.SimpleNamespace(step=lambda text: ("", True, {}))

    for _ in range(2):
        build(build_env, EnvContext(row, params))
    assert seen[0] == seen[1]
    assert params == {"size": 3, "words": ["a"]}
    assert row.metadata == {"level": ["#"], "metadata": {"tries": 0}}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("polyturn_no_such_module:build_env", "env.build: module 'polyturn_no_such_module'"),
        (
            "polyturn.envs.single_turn:nothing",
            "env.build: polyturn.envs.single_turn has no callable 'nothing'",
        ),
        ("polyturn.reward:__all__", "env.build: polyturn.reward has no callable '__all__'"),
    ],
)
def test_a_wrong_path_names_the_key(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_object(path, "env.build")


def picture(mode: str = "RGB", colour: object = (10, 20, 30)) -> Image.Image:
    return Image.new(mode, (4, 2), colour)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("observation", "expected_role", "num_images", "text"),
    [
        ("seen", "tool", 0, "seen"),
        (Message("user", ("seen",)), "user", 0, "seen"),
        (Observation("seen", role="user"), "user", 0, "seen"),
        (Observation("", (image_record(picture()),)), "tool", 1, ""),
        ({"obs_str": "seen"}, "user", 0, "seen"),
        ({"obs_str": None, "image": picture()}, "user", 1, ""),  # and not the word None
        (
            {
                "obs_str": "seen",
                "role": "tool",
                "multi_modal_data": {"image": [picture(), picture()]},
            },
            "tool",
            2,
            "seen",
        ),
        ({"role": "tool", "content": "seen"}, "tool", 0, "seen"),
        (
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": picture()},
                    {"type": "text", "text": "seen"},
                ],
            },
            "user",
            1,
            "seen",
        ),
    ],
)
def test_every_documented_observation_becomes_a_message(
    observation: object, expected_role: str, num_images: int, text: str
) -> None:
    message = observation_message(types.SimpleNamespace(), observation)  # type: ignore[arg-type]
    assert (message.role, len(message.images), message.text) == (expected_role, num_images, text)
    if num_images:
        assert isinstance(message.content[0], ImageRecord), "pictures come first"


def test_an_environment_that_only_tells_its_tools_is_closed(problem: Problem) -> None:
    """One was built for the prompt of every problem (PrimeIntellect-ai/verifiers#983 is of the same kind)."""
    closed: list[str] = []

    class Env:
        def __init__(self, how: str) -> None:
            self.tools = [{"type": "function", "function": {"name": how}}]
            self._how = how

        def step(self, response_text: str) -> object:
            raise AssertionError

        def close(self) -> None:
            closed.append(self._how)
            if self._how == "fails":
                raise OSError

    for how in ("closes", "fails"):
        (tool,) = prompt_tools(lambda how=how: Env(how), EnvParams(), problem)
        assert tool == {"type": "function", "function": {"name": how}}
    assert closed == ["closes", "fails"]


def _file() -> bytes:
    buffer = io.BytesIO()
    picture().save(buffer, "PNG")
    return buffer.getvalue()


_URI = f"data:image/png;base64,{base64.b64encode(_file()).decode()}"


@pytest.mark.parametrize(
    "shown",
    [
        {"multi_modal_data": {"images": [picture()]}},
        {"multi_modal_data": {"image": picture(), "video": []}},
        {"multi_modal_data": {"image": _file()}},
        {"multi_modal_data": {"image": np.asarray(picture())}},
        {"image": picture()},
        {"images": [picture()], "multi_modal_data": None},
        {"content": "seen", "images": [picture()]},
        {"content": [{"type": "image_url", "image_url": {"url": _URI}}, "seen"]},
        {"content": [{"type": "image_url", "image_url": _URI.rstrip("=")}, "seen"]},
        {"content": [{"type": "image", "image": np.asarray(picture())}, "seen"]},
    ],
)
def test_a_picture_is_shown_wherever_an_environment_puts_it(shown: dict[str, object]) -> None:
    """Gym environments give arrays and lists of `images` (mll-lab-nu/VAGEN#70); some were left out without a word."""
    message = observation_message(types.SimpleNamespace(), {"obs_str": "seen", **shown})  # type: ignore[arg-type]
    (image,) = message.images
    assert image.sha256 == image_record(picture()).sha256
    assert message.text == "seen"


@pytest.mark.parametrize(
    "shown", [picture(), np.asarray(picture()), _file()], ids=["PIL", "array", "file"]
)
def test_a_picture_of_an_observation_may_be_of_any_type(shown: object) -> None:
    """Also where a record is declared: another type was left out without a word (mll-lab-nu/VAGEN#70)."""
    record = image_record(picture())
    for given, expected in (
        (Observation("seen", (shown,)), (record, "seen")),  # type: ignore[arg-type]
        (Message("tool", ("see", shown, "seen")), ("see", record, "seen")),  # type: ignore[arg-type]
    ):
        message = observation_message(types.SimpleNamespace(), given)  # type: ignore[arg-type]
        assert message == Message("tool", expected)


@pytest.mark.parametrize(
    "observation",
    [
        None,
        5,
        {"role": "assistant", "obs_str": "x"},
        Message("assistant", ("x",)),
        Observation("x", role="assistant"),
        Observation("x", (5,)),  # type: ignore[arg-type]
        {"content": [{"type": "video"}]},
        {"content": [None]},
        {"obs_str": "x", "multi_modal_data": {"image": ["http://figures.example/a.png"]}},
        {"obs_str": "x", "multi_modal_data": {"<image>": [picture()]}},  # mll-lab-nu/VAGEN#70
        {"obs_str": "x", "multi_modal_data": {"video": np.zeros((2, 4, 4, 3))}},
        {"text": "a board", "reward": 0.5},  # it was shown as an empty message
        {"role": "tool"},
    ],
)
def test_other_observations_are_refused_with_a_reason(observation: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        observation_message(types.SimpleNamespace(), observation)  # type: ignore[arg-type]


def test_a_picture_is_recorded_on_white_and_equal_pictures_have_one_hash() -> None:
    transparent = picture("RGBA", (255, 0, 0, 0))
    record = image_record(transparent)
    shown = Image.open(io.BytesIO(record.read()))
    assert (shown.mode, shown.getpixel((0, 0)), shown.size) == (
        "RGB",
        (255, 255, 255),
        (record.width, record.height),
    )
    assert image_record(picture()) == image_record(picture("RGBA", (10, 20, 30, 255)))
    assert image_record(record) is record


def ramp(kind: str) -> Image.Image:
    """A picture that gets brighter from left to right, in pixels of more than 8 bits."""
    steps = np.tile(np.linspace(0, 1, 64), (8, 1))
    if kind == "F":
        return Image.fromarray(steps.astype(np.float32))
    return Image.fromarray((steps * 65535).astype(np.uint16 if kind == "I;16" else np.int32))


@pytest.mark.parametrize("kind", ["I;16", "I", "F"])
@pytest.mark.parametrize("as_file", [False, True])
def test_deep_pixels_are_scaled_and_not_clipped(kind: str, *, as_file: bool) -> None:
    picture = ramp(kind)
    assert picture.mode == kind
    packed = io.BytesIO()
    picture.save(packed, format="TIFF")
    shown = Image.open(io.BytesIO(image_record(packed.getvalue() if as_file else picture).read()))
    row = np.asarray(shown)[0, :, 0]
    assert (row[0], row[-1]) == (0, 255)
    assert abs(int(row[32]) - 130) <= 2


def test_a_file_is_upright_whether_it_was_opened_or_not() -> None:
    """IMG-07 (sgl-project/sglang#33449) where an environment opens the photo itself."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    packed = io.BytesIO()
    picture().save(packed, "PNG", exif=exif)
    given = (packed.getvalue(), Image.open(io.BytesIO(packed.getvalue())))
    sizes = [(record.width, record.height) for record in map(image_record, given)]
    assert sizes == [(2, 4), (2, 4)]
    part = Image.open(io.BytesIO(packed.getvalue())).crop((0, 0, 3, 1))
    assert (image_record(part).width, image_record(part).height) == (3, 1), "the environment's own"


@pytest.mark.parametrize("frame", [np.full((4, 4, 3), 128), np.tile([10, 20, 100], (4, 4, 1))])
def test_frames_of_bytes_that_became_floats_are_the_same_frames(frame: np.ndarray) -> None:
    """pytorch/vision#8782, #1175: each was stretched by its own range, and one of one grey became black."""
    records = [image_record(frame.astype(kind)) for kind in (np.uint8, np.float32, np.float64)]
    assert records[0] == records[1] == records[2]


def test_pixels_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not_finite"):
        image_record(Image.fromarray(np.full((4, 4), np.nan, np.float32)))
