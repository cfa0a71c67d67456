"""The zoom environment: crops by region and box, calls that ask for nothing, and its demonstrations."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from polyturn.envs.base import EnvContext, Observation, build, image_record
from polyturn.envs.boxes import BoxError, read_box
from polyturn.envs.demonstration import Demonstration, Say
from polyturn.envs.zoom import (
    MIN_CROP_SIDE,
    REGIONS,
    ZoomEnv,
    build_env,
    cut,
    demonstrations,
    not_seen,
    region_box,
    tool_call,
)
from polyturn.params import EnvParams, RolloutParams
from polyturn.render import Renderer
from polyturn.rollout import Draw, RolloutSettings, rollout
from polyturn.types import ImageRecord, Json, Message, Problem, StopReason
from tests.unit import tiny

PARAMS = {"zoom": 0.5, "persist": 0.3, "guess_min": 2, "guess_max": 6}


def coordinates(width: int = 200, height: int = 100) -> ImageRecord:
    """A picture whose red and green tell the column and the row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width)[None]
    pixels[..., 1] = np.arange(height)[:, None]
    return image_record(Image.fromarray(pixels))


def shown(record: ImageRecord) -> tuple[int, int, int, int]:
    """Which part of `coordinates` a crop is: left, top, right, bottom (exclusive)."""
    pixels = np.asarray(Image.open(io.BytesIO(record.read())))
    left, top, right, bottom = (
        pixels[0, 0, 0],
        pixels[0, 0, 1],
        pixels[-1, -1, 0],
        pixels[-1, -1, 1],
    )
    return int(left), int(top), int(right) + 1, int(bottom) + 1


def env(picture: ImageRecord | None = None, **params: object) -> ZoomEnv:
    message = Message("user", (picture or coordinates(), "Find x."))
    return build_env(Problem("p", "train", (message,), "12"), params)


def call(arguments: str, name: str = "zoom") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def seen(zoom: ZoomEnv, reply: str) -> tuple[str, tuple[ImageRecord, ...], Mapping[str, Json]]:
    observation, is_done, info = zoom.step(reply)
    assert isinstance(observation, Observation)
    assert not is_done
    return observation.text, observation.images, info


@pytest.mark.parametrize(
    ("region", "part"),
    [
        ("northwest", (25, 12, 75, 38)),
        ("northeast", (125, 12, 175, 38)),
        ("southwest", (25, 62, 75, 88)),
        ("southeast", (125, 62, 175, 88)),
    ],
)
def test_a_region_is_the_square_around_the_centre_of_its_quadrant(
    region: str, part: tuple[int, int, int, int]
) -> None:
    _, (crop,), info = seen(env(), tool_call(region))
    assert shown(crop) == part
    assert (crop.width, crop.height) == (part[2] - part[0], part[3] - part[1])
    assert info["region"] == region
    assert info["box"] == list(region_box(region, 0.25))


def test_the_answer_lists_the_regions_that_are_left() -> None:
    zoom = env()
    path = ["southeast", "northwest", "southeast", "southwest", "northeast"]
    texts = [seen(zoom, tool_call(region))[0] for region in path]
    assert texts == [not_seen(path[: index + 1]) for index in range(len(path))]
    assert all(region in not_seen([]) for region in REGIONS)
    for index, text in enumerate(texts):
        assert [r for r in REGIONS if r in text] == [
            r for r in REGIONS if r not in path[: index + 1]
        ]


def test_a_box_is_in_thousandths_of_the_picture() -> None:
    text, (crop,), info = seen(env(), call('{"box": [100, 200, 500, 1000]}'))
    assert shown(crop) == (20, 20, 100, 100)
    assert text == not_seen([])
    assert "region" not in info
    assert info["box"] == [0.1, 0.2, 0.5, 1.0]


def test_a_later_call_may_look_into_a_crop() -> None:
    zoom = env()
    seen(zoom, call('{"box": [0, 0, 500, 1000]}'))
    _, (crop,), info = seen(zoom, call('{"box": [500, 0, 1000, 500], "image": 1}'))
    assert shown(crop) == (50, 0, 100, 50)
    assert info["image"] == 1
    text, (part,), info = seen(zoom, call('{"region": "northwest", "image": 1}'))
    assert shown(part) == (12, 12, 38, 38)
    assert "region" not in info
    assert text == not_seen([])


@pytest.mark.parametrize(
    ("box", "part"),
    [
        ("[0, 0, 1, 1]", (0, 0, 16, 16)),
        ("[999, 990, 1000, 1000]", (184, 84, 200, 100)),
        ("[500, 500, 510, 510]", (93, 42, 109, 58)),
    ],
)
def test_a_small_box_grows_to_the_smallest_crop_inside_the_picture(
    box: str, part: tuple[int, int, int, int]
) -> None:
    _, (crop,), _ = seen(env(), call(f'{{"box": {box}}}'))
    assert shown(crop) == part
    assert min(crop.width, crop.height) >= MIN_CROP_SIDE


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (call('{"region": "middle"}'), "region must be one of northwest, northeast"),
        (call('{"region": ["northwest"]}'), "region must be one of"),
        (call('{"region": 3}'), "region must be one of"),
        (call("{}"), "Give a region, or a box"),
        (call('{"box": [1, 2, 3]}'), "Give a region, or a box"),
        (call('{"box": [500, 0, 100, 10]}'), "left < right"),
        (call('{"box": [0, 0, 1001, 10]}'), "Give a region, or a box"),
        (call('{"box": "0 0 10 10"}'), "Give a region, or a box"),
        (call('{"box": [0, 0, true, 10]}'), "Give a region, or a box"),
        (call('{"region": "northwest", "image": 1}'), "image must be a number from 0 to 0"),
        (call('{"region": "northwest", "image": -1}'), "image must be a number"),
        (call('{"region": "northwest", "image": true}'), "image must be a number"),
        (call('{"region": "northwest"}', "look"), "There is no such tool; call zoom."),
        ("<tool_call>{broken</tool_call>", "could not be read"),
    ],
)
def test_a_call_that_asks_for_nothing_is_told_so_and_goes_on(reply: str, words: str) -> None:
    text, images, info = seen(env(), reply)
    assert words in text
    assert images == ()
    assert "error" in info


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ("[150, 0, 100, 10]", "left must be less than right"),
        ("[0, 90, 10, 90]", "top less than bottom"),
        ("[0, 0, 201, 100]", "from 0 to 200 across and from 0 to 100 down"),
        ("[0, -1, 200, 100]", "from 0 to 200 across"),
        ("[0, 0, NaN, 100]", "could not be read"),
        (f"[0, 0, 1{'0' * 400}, 100]", "from 0 to 200 across"),
        ("[0, 0, 1e400, 100]", "could not be read"),
        ('["0", "0", "10", "10"]', "list of four numbers"),
        ('{"left": 0}', "list of four numbers"),
        ("[[0, 0], [10, 10]]", "list of four numbers"),
        ("7", "list of four numbers"),
        ("null", "in pixels of the picture with left < right"),
    ],
)
def test_a_bad_box_is_told_what_is_wrong_with_it(box: str, words: str) -> None:
    text, images, info = seen(env(box_unit="pixels"), call(f'{{"box": {box}}}'))
    assert words in text
    assert images == ()
    assert json.loads(json.dumps(info))["error"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 10**400, -(10**400)])
@pytest.mark.parametrize("place", range(4))
def test_no_number_breaks_the_reading_of_a_box(bad: float, place: int) -> None:
    box: list[Json] = [0, 0, 10, 10]
    box[place] = bad
    for unit in ("pixels", "thousandths"):
        with pytest.raises(BoxError, match="The picture goes from 0"):
            read_box(box, unit, coordinates())


@pytest.mark.parametrize("unit", ["pixels", "thousandths"])
@pytest.mark.parametrize("box", [[0.1, 0.2, 0.5, 1.0], [0, 0, 1, 0.5], [0.25, 0.25, 0.75, 0.75]])
def test_a_box_in_fractions_is_told_what_the_picture_goes_to(unit: str, box: list[float]) -> None:
    """It was shown the top left corner for it, as if it had looked (TIGER-AI-Lab/Pixel-Reasoner#23).

    It is not guessed to mean the part either: a small box of whole numbers is none in fractions (kdr/overcast#23).
    """
    for tool, key in (("zoom", "box"), ("image_zoom_in_tool", "bbox_2d")):
        zoom = env(box_unit=unit, tool=tool)
        text, images, info = seen(zoom, call(json.dumps({key: box, "label": "it"}), tool))
        assert images == ()
        assert info["error"]
        assert "The picture goes from 0 to" in text


def test_a_box_in_pixels_is_of_the_picture_that_the_call_names() -> None:
    zoom = env(box_unit="pixels")
    _, (crop,), info = seen(zoom, call('{"box": [20, 30, 120, 70]}'))
    assert shown(crop) == (20, 30, 120, 70)
    assert info["box"] == [0.1, 0.3, 0.6, 0.7], "in fractions, whatever the unit"
    _, (part,), _ = seen(zoom, call('{"box": [10.0, 0, 60, 40], "image": 1}'))
    assert shown(part) == (30, 30, 80, 70)
    text, images, _ = seen(zoom, call('{"box": [0, 0, 101, 40], "image": 1}'))
    assert images == ()
    assert "from 0 to 100 across and from 0 to 40 down" in text, "the crop's own size"


def test_a_call_in_tags_of_its_own_zooms_too() -> None:
    """The form of Qwen3.5 writes every argument as text (panbanda/higgs#177)."""
    in_tags = "<tool_call><function=zoom><parameter=box>[0, 0, 500, 500]</parameter>{}</function></tool_call>"
    _, (expected,), _ = seen(env(), call('{"box": [0, 0, 500, 500], "image": 0}'))
    for image in ("", "<parameter=image>0</parameter>"):
        assert seen(env(), in_tags.format(image))[1] == (expected,)
    assert (
        "image must be a number" in seen(env(), in_tags.format("<parameter=image>x</parameter>"))[0]
    )


@pytest.mark.parametrize("unit", ["pixels", "thousandths"])
def test_the_tool_as_deepeyes_and_qwen3_vl_name_it(unit: str) -> None:
    zoom = env(box_unit=unit, tool="image_zoom_in_tool")
    box = [20, 20, 100, 100] if unit == "pixels" else [100, 200, 500, 1000]
    first = call(f'{{"bbox_2d": {box}, "label": "the label"}}', "image_zoom_in_tool")
    text, (crop,), _ = seen(zoom, first)
    assert shown(crop) == (20, 20, 100, 100)
    assert text == "Picture 1: 80 x 80 pixels."
    again = [0, 0, 40, 40] if unit == "pixels" else [0, 0, 500, 500]
    inside = call(f'{{"bbox_2d": {again}, "img_idx": 1}}', "image_zoom_in_tool")
    assert shown(seen(zoom, inside)[1][0]) == (20, 20, 60, 60)
    (schema,) = zoom.tools
    told = json.dumps(schema)
    assert '"image_zoom_in_tool"' in told
    assert "bbox_2d" in told
    assert "region" not in told
    assert ("thousandths" in told) == (unit == "thousandths")
    assert "Give bbox_2d as [left" in seen(zoom, call("{}", "image_zoom_in_tool"))[0]


def test_all_pictures_of_a_problem_can_be_looked_at() -> None:
    """A row of any dataset may have several pictures; crops are numbered after them."""
    message = Message("user", (coordinates(), "and", coordinates(64, 32), "differ how?"))
    zoom = build_env(Problem("p", "train", (message,), "2"), {"box_unit": "pixels"})
    _, (crop,), _ = seen(zoom, call('{"box": [0, 0, 64, 32], "image": 1}'))
    assert (crop.width, crop.height) == (64, 32)
    _, (part,), _ = seen(zoom, call('{"box": [0, 0, 20, 32], "image": 2}'))
    assert (part.width, part.height) == (20, 32)
    assert "image must be a number from 0 to 3" in seen(zoom, call('{"image": 4}'))[0]


def test_a_narrow_box_is_grown_to_what_the_models_processor_takes() -> None:
    tall = image_record(Image.new("RGB", (4000, 3000)))
    zoom = env(tall, box_unit="pixels")
    _, (crop,), _ = seen(zoom, call('{"box": [0, 10, 4000, 12]}'))
    assert (crop.width, crop.height) == (4000, 40)
    _, (crop,), _ = seen(zoom, call('{"box": [3999, 0, 4000, 3000]}'))
    assert (crop.width, crop.height) == (30, 3000)


def test_boxes_on_a_picture_of_any_shape_play_through_the_rollout(renderer: Renderer) -> None:
    """Every crop, however narrow, is rendered and counted as the sampler counts it."""
    picture = coordinates(250, 120)
    said = [
        call('{"bbox_2d": [0, 0, 250, 1]}', "image_zoom_in_tool"),
        call('{"bbox_2d": [240, 0, 250, 16], "img_idx": 1}', "image_zoom_in_tool"),
        call('{"bbox_2d": [240, 0, 900, 16]}', "image_zoom_in_tool"),
        "Answer: \\boxed{12}",
    ]
    how = RolloutSettings(
        EnvParams(
            build="polyturn.envs.zoom:build_env",
            params={"tool": "image_zoom_in_tool", "box_unit": "pixels"},
        ),
        RolloutParams(
            max_turns=4, max_turn_tokens=None, max_new_tokens=600, max_context_tokens=4096
        ),
        tiny.params().reward,
    )
    problem = Problem("p", "train", (Message("user", (picture, "Find x.")),), "12")
    sampler = tiny.ScriptedSampler(renderer, tiny.saying(*said))
    (group,) = asyncio.run(rollout([problem], sampler, renderer, how, Draw(1, 1, 1.0)))
    (trajectory,) = group.trajectories
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ENV_DONE, 1.0)
    assert [(i.width, i.height) for i in trajectory.images] == [(250, 120), (250, 16), (16, 16)]
    assert ["error" in turn.info for turn in trajectory.turns] == [False, False, True, False]


@given(
    st.lists(
        st.floats() | st.integers() | st.none() | st.booleans() | st.text(max_size=3), max_size=5
    )
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2)
    | st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    st.sampled_from(["pixels", "thousandths"]),
    st.integers(-1, 3) | st.none() | st.floats() | st.text(max_size=2),
)
@settings(max_examples=200, deadline=None)
def test_any_box_gives_a_crop_or_words_never_an_error(box: Json, unit: str, image: Json) -> None:
    zoom = env(box_unit=unit)
    for arguments in ({"box": box, "image": image}, {"bbox_2d": box}):
        observation, is_done, info = zoom.step(call(json.dumps(arguments)))
        assert not is_done
        assert bool(observation.images) != ("error" in info)
        for crop in observation.images:
            assert min(crop.width, crop.height) >= MIN_CROP_SIDE


def test_a_reply_without_a_call_ends_it_and_the_last_of_several_counts() -> None:
    zoom = env()
    _, _, info = seen(zoom, tool_call("northwest") + tool_call("southeast"))
    assert info["region"] == "southeast"
    observation, is_done, info = zoom.step("Answer: \\boxed{12}")
    assert is_done
    assert info == {}
    assert observation == Observation()


def test_equal_crops_have_equal_bytes() -> None:
    first, second = coordinates(), coordinates()
    box = region_box("northwest", 0.25)
    crop = cut(first, box)
    cut.cache_clear()
    assert cut(second, box).read() == crop.read()
    assert cut(second, box) == crop


def test_crop_fraction_is_a_parameter_within_bounds() -> None:
    _, (crop,), _ = seen(env(crop_fraction=0.5), tool_call("northwest"))
    assert shown(crop) == (0, 0, 100, 50)
    for wrong in (0, 0.6, "half", None):
        with pytest.raises(ValueError, match=r"env.params.crop_fraction must be above 0"):
            env(crop_fraction=wrong)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"box_unit": "cm"}, r"env\.params\.box_unit must be one of thousandths, pixels, got 'cm'"),
        (
            {"tool": "crop"},
            r"env\.params\.tool must be one of zoom, image_zoom_in_tool, got 'crop'",
        ),
        (
            {"crop": 0.2},
            r"env\.params: \['crop'\] are unknown to zoom; it takes crop_fraction, box_unit",
        ),
    ],
)
def test_wrong_params_name_the_key(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        env(**params)


def test_a_problem_without_a_picture_is_refused() -> None:
    problem = Problem("p-1", "train", (Message("user", ("Find x.",)),), "12")
    with pytest.raises(ValueError, match="problem p-1 has no picture"):
        build(build_env, EnvContext(problem))


# ---- demonstrations ----------------------------------------------------------------------------------------------


def demonstrate(kind: str, seed: int, params: Mapping[str, float] = PARAMS) -> Demonstration:
    return demonstrations(kind, tiny.problems()[seed % 6], random.Random(seed), params)


def words(demonstration: Demonstration) -> list[str]:
    return [turn.text for turn in demonstration.turns if isinstance(turn, Say)]


@pytest.mark.parametrize("kind", ["search", "guess"])
def test_demonstrations_say_what_the_environment_answers(kind: str) -> None:
    """Every observation of a demonstration is what the environment shows to the same replies."""
    for seed in range(40):
        problem = tiny.problems()[seed % 6]
        demonstration = demonstrate(kind, seed)
        zoom = build_env(problem, {})
        turns = demonstration.turns
        for said, answered in zip(turns[::2], turns[1::2], strict=False):
            assert isinstance(said, Say)
            observation, is_done, _ = zoom.step(said.text)
            assert not is_done
            assert answered == Message("tool", (*observation.images, observation.text))
        last = turns[-1]
        assert isinstance(last, Say)
        assert zoom.step(last.text)[1]


def test_a_search_ends_at_the_right_crop_and_trains_regions_and_answer() -> None:
    for seed in range(20):
        problem = tiny.problems()[seed % 6]
        demonstration = demonstrate("search", seed)
        *calls, final = words(demonstration)
        assert tool_call(str(problem.metadata["region"])) == calls[-1]
        assert len(set(calls)) == len(calls)
        assert final == f"Answer: \\boxed{{{problem.answer}}}"
        for turn in demonstration.turns[:-1:2]:
            assert isinstance(turn, Say)
            assert turn.trained is not None
            ((start, end),) = turn.trained
            assert turn.text[start:end] in REGIONS
        assert demonstration.turns[-1] == Say(final)


def test_recall_trains_the_one_region_that_the_list_leaves() -> None:
    for seed in range(20):
        demonstration = demonstrate("recall", seed)
        *before, last = demonstration.turns[::2]
        assert all(isinstance(turn, Say) and turn.trained == () for turn in before)
        shown = demonstration.turns[-2]
        assert isinstance(shown, Message)
        (left,) = [word for word in shown.text.split() if word in REGIONS]
        assert isinstance(last, Say)
        assert last.text == tool_call(left)
        assert last.trained == ((last.text.index(left), last.text.index(left) + len(left)),)


def test_a_guess_zooms_as_often_as_asked_and_answers_right_after_the_right_crop() -> None:
    never = [words(demonstrate("guess", seed, {**PARAMS, "zoom": 0.0})) for seed in range(20)]
    assert {len(said) for said in never} == {1}
    always = {**PARAMS, "zoom": 1.0, "persist": 1.0}
    for seed in range(20):
        problem = tiny.problems()[seed % 6]
        *calls, final = words(demonstrate("guess", seed, always))
        assert calls[-1] == tool_call(str(problem.metadata["region"]))
        assert final == f"Answer: \\boxed{{{problem.answer}}}"


def test_reading_shows_the_right_crop_and_asks_for_its_label() -> None:
    problem = tiny.problems()[0]
    demonstration = demonstrate("read", 0)
    crop = cut(problem.images[0], region_box(str(problem.metadata["region"]), 0.25))
    assert demonstration.prompt == (Message("user", (crop, "Find x.")),)
    assert words(demonstration) == [f"Answer: \\boxed{{{problem.metadata['label']}}}"]


def test_unknown_kinds_and_foreign_problems_are_refused_with_their_key() -> None:
    with pytest.raises(ValueError, match=r"warmstart.phases: .*got 'dance'"):
        demonstrate("dance", 0)
    foreign = Problem("p-1", "train", (Message("user", (coordinates(), "Find x.")),), "12")
    with pytest.raises(
        ValueError, match=r"needs data.source: synthetic, but problem p-1.*phases: \[\] leaves"
    ):
        demonstrations("read", foreign, random.Random(0), PARAMS)
