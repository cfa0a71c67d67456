"""Dataset rows as they are in the world (cases ROW-01 to ROW-17 and their kinds)."""

from __future__ import annotations

import base64
import io
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from polyturn.data.normalise import normalise
from polyturn.data.quarantine import RowError
from polyturn.data.rows import Embedded, Row, parse_row
from polyturn.params import DataParams, ImagesParams
from polyturn.reward import parse_reference
from tests.unit.data.web import png

URL = "http://a.test/1.png"
OTHER = "http://a.test/2.png"


def _parse(row: object, **params: object) -> Row:
    return parse_row(
        row,
        split="train",
        index=7,
        params=DataParams.model_validate(params),
        parse_answer=str.strip,
    )


def _row(
    problem: object = "<image>Find $x$.", images: object = (URL,), answer: object = "1"
) -> dict[str, object]:
    return {"problem": problem, "images": images, "answer": answer}


def _reason(row: object, **params: object) -> RowError:
    with pytest.raises(RowError) as error:
        _parse(row, **params)
    return error.value


def test_a_plain_row_keeps_everything() -> None:
    row = _parse({**_row(), "level": 2, "goal": None})
    assert row == Row(
        "train/000007", "train", "<image>Find $x$.", "1", (URL,), {"level": 2, "goal": None}
    )
    assert _parse({**_row(), "id": 12}).id == "12"


@pytest.mark.parametrize(
    "value", [URL, {"bytes": png(), "path": None}, [URL], png(), np.zeros((8, 8), np.uint8)]
)
def test_a_picture_in_a_column_of_another_name_is_not_left_out(value: object) -> None:
    """TRL takes `image` as well as `images` (huggingface/trl#6618): such rows were asked without their picture."""
    row = {"problem": "Find $x$.", "answer": "1", "image": value}
    error = _reason(row)
    assert error.reason == "unnamed_image"
    assert "column 'image'" in error.detail
    assert "data.images_key is 'images'" in error.detail
    assert len(_parse(row, images_key="image").images) == 1
    assert _parse({**row, "images": [URL]}).images == (URL,)
    assert _parse({**row, "image": None}).images == ()


def test_tags_in_two_turns_for_one_picture_are_a_named_error() -> None:
    """ROW-01."""
    messages = [
        {"role": "user", "content": "<image>What is it?"},
        {"role": "assistant", "content": "A circle."},
        {"role": "user", "content": "<image>Find $x$."},
    ]
    error = _reason(_row(messages))
    assert (error.reason, error.detail) == ("image_count", "images=1 placeholders=2")
    row = _parse(_row(messages, [URL, OTHER]))
    assert row.problem == tuple((m["role"], m["content"]) for m in messages)
    assert row.images == (URL, OTHER)


@pytest.mark.parametrize(
    ("problem", "images", "detail"),
    [
        ("<image><image>x", [URL], "images=1 placeholders=2"),
        ("<image>x", [URL, OTHER], "images=2 placeholders=1"),
        ("<image>x", [], "images=0 placeholders=1"),
        ("<image>x", None, "images=0 placeholders=1"),
    ],
)
def test_tags_and_pictures_must_agree(problem: str, images: object, detail: str) -> None:
    error = _reason(_row(problem, images))
    assert (error.reason, error.detail) == ("image_count", detail)


@pytest.mark.parametrize(("images", "tags"), [([URL], 1), ([URL, OTHER], 2)])
def test_missing_tags_are_put_in_front_or_set_the_row_aside(images: list[str], tags: int) -> None:
    """ROW-03: the rule is data.add_image_tag."""
    row = _parse(_row("Find $x$.", images))
    assert row.problem == "<image>" * tags + "Find $x$."
    assert row.is_tag_added
    assert _reason(_row("Find $x$.", images), add_image_tag=False).reason == "image_count"


def test_rows_without_pictures_are_problems_too() -> None:
    """ROW-06, the data side; tests/unit/test_mixed_rows.py samples and trains on both kinds."""
    row = _parse({"problem": "What is 1+1?", "answer": "2"})
    assert (row.problem, row.images, row.is_tag_added) == ("What is 1+1?", (), False)


def test_all_forms_of_a_picture_have_the_same_pixels() -> None:
    """ROW-07."""
    data = png((32, 48), (10, 20, 30))
    image = Image.open(io.BytesIO(data))
    pixels = np.asarray(image)
    forms: list[object] = [
        data,
        bytearray(data),
        {"bytes": data, "path": None},
        {"bytes": data, "path": "a.png"},
        pa.scalar({"bytes": data, "path": None}),
        pa.array([{"bytes": data, "path": None}])[0],
        image,
        pixels,
        np.moveaxis(pixels, 2, 0),
        pixels / 255,
        pixels.astype(np.int64),
        base64.b64encode(data).decode(),
        base64.urlsafe_b64encode(data).decode().rstrip("="),
        {"bytes": base64.encodebytes(data).decode()},
    ]
    limits = ImagesParams()
    expected = normalise(data, limits).sha256
    for form in forms:
        for images in (form, [form], (form,)):
            [picture] = _parse(_row(images=images)).images
            assert isinstance(picture, Embedded)
            assert picture.name == "embedded/train/000007_0"
            assert normalise(picture.data, limits).sha256 == expected


@pytest.mark.parametrize(
    "form", [URL, {"path": URL, "bytes": None}, {"url": URL}, pa.scalar(URL), f" {URL}\n"]
)
def test_addresses_stay_as_written(form: object) -> None:
    assert _parse(_row(images=[form])).images == (URL,)


@pytest.mark.parametrize(
    "picture",
    [
        None,
        {},
        {"bytes": None, "path": None},
        7,
        "",
        np.zeros((0, 3)),
        np.zeros(5),
        np.zeros((2, 2, 9)),
        object(),
    ],
)
def test_what_is_no_picture_is_named(picture: object) -> None:
    assert _reason(_row(images=[picture])).reason == "bad_image"


@pytest.mark.parametrize(
    "path",
    [
        "images/train/figure_00001_of_the_first_part_of_the_collection",
        "A" * 5000,
    ],
)
def test_a_path_of_letters_is_no_base64(path: str) -> None:
    assert _parse(_row(images=[path])).images == (path,)


def test_stringified_bytes_are_no_path_that_exists() -> None:
    text = str(png((8, 8)))
    assert _parse(_row(images=[text])).images == (text,)  # fetch sets it aside: no such file


def test_none_keys_that_arrow_adds_are_ignored() -> None:
    """ROW-08."""
    content = [
        {"type": "text", "text": "Find x", "image": None},
        {"type": "image", "image": URL, "text": None},
    ]
    row = _parse(_row(content, None))
    assert (row.problem, row.images) == ("Find x<image>", (URL,))
    table = pa.Table.from_pylist([{"problem": content, "answer": "1"}])
    assert _parse(table.to_pylist()[0]).problem == "Find x<image>"


def _containers(parts: list[object]) -> list[object]:
    array = np.empty(len(parts), dtype=object)
    array[:] = parts
    return [parts, tuple(parts), array, pa.array(parts)[:].to_pylist(), pa.scalar(parts)]


def test_content_is_found_in_every_kind_of_sequence() -> None:
    """ROW-11."""
    parts: list[object] = [{"type": "image", "image": URL}, {"type": "text", "text": "Find x."}]
    for content in _containers(parts):
        for problem in (content, [{"role": "user", "content": content}]):
            row = _parse(_row(problem, None))
            assert (row.problem, row.images) == ("<image>Find x.", (URL,))
    for images in _containers([URL, OTHER]):
        assert _parse(_row("<image><image>x", images)).images == (URL, OTHER)


@pytest.mark.parametrize("content", [7, {"a": 1}, [], [7], [["x"]], np.zeros(3), object()])
def test_other_content_is_an_explicit_error(content: object) -> None:
    assert _reason(_row([{"role": "user", "content": content}], None)).reason == "bad_content"


@pytest.mark.parametrize(
    ("parts", "images"),
    [
        ([{"type": "image", "image": URL}, {"type": "text", "text": "Find x."}], None),
        (
            [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "Find x."}],
            None,
        ),
        ([{"type": "image_url", "image_url": URL}, {"type": "text", "text": "Find x."}], []),
        ([{"type": "image"}, {"type": "text", "text": "Find x."}], [URL]),
        ([{"type": "text", "text": "<image>Find x."}], [URL]),
        ([{"image": URL}, {"text": "Find x."}], None),
        (["<image>", "Find x."], [URL]),
    ],
)
def test_list_form_equals_string_form(parts: list[object], images: object) -> None:
    """ROW-13."""
    assert _parse(_row(parts, images)) == _parse(_row("<image>Find x.", [URL]))


def test_parts_with_and_without_a_source_of_their_own_keep_their_order() -> None:
    parts = [{"type": "image"}, {"type": "image", "image": OTHER}, {"type": "text", "text": "x"}]
    assert _parse(_row(parts, [URL])).images == (URL, OTHER)
    assert _reason(_row(parts, [URL, OTHER])).reason == "image_count"


def test_conversations_of_sharegpt_are_messages() -> None:
    """NVIDIA-NeMo/Automodel#2375, axolotl-ai-cloud/axolotl#752: they were taken for pictures, and the question lost."""
    conversation = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>What is it?"},
        {"from": "assistant", "value": "A circle."},
        {"from": "human", "value": "Find $x$."},
    ]
    row = _parse(_row(conversation))
    assert row.problem == (
        ("system", "Be brief."),
        ("user", "<image>What is it?"),
        ("assistant", "A circle."),
        ("user", "Find $x$."),
    )
    answered = [*conversation, {"from": "gpt", "value": "7"}]
    assert _reason(_row(answered)).reason == "bad_role"
    assert _reason(_row([{"from": "observation", "value": "x"}])).reason == "bad_role"


def test_a_picture_as_qwens_templates_write_it_is_a_tag() -> None:
    """StarsfieldAI/R1-V#98: prompts that went through a chat template before."""
    rendered = "<|vision_start|><|image_pad|><|vision_end|>"
    row = _parse(_row(f"You see {rendered} and {rendered}. Find $x$.", [URL, OTHER]))
    assert row.problem == "You see <image> and <image>. Find $x$."
    assert (row.images, row.is_tag_added) == ((URL, OTHER), False)


def test_a_part_without_text_or_picture_is_no_picture() -> None:
    assert _reason(_row([{"value": "<image>x"}])).reason == "bad_content"
    assert _parse(_row([{"type": "image"}, "x"])).problem == "<image>x"


def test_empty_bytes_beside_a_path_are_no_picture() -> None:
    assert _parse(_row(images=[{"bytes": b"", "path": "a.png"}])).images == ("a.png",)


@pytest.mark.parametrize("kind", ["video", "audio", "input_audio"])
def test_other_media_are_named(kind: str) -> None:
    assert _reason(_row([{"type": kind, kind: "a.mp4"}], None)).reason == "unsupported_media"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": "x"}],
        [{"role": None, "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    ],
)
def test_prompts_end_with_the_user(messages: list[object]) -> None:
    assert _reason(_row(messages, None)).reason == "bad_role"


@pytest.mark.parametrize("problem", [None, "", [], ()])
def test_a_missing_problem_names_the_columns_there_are(problem: object) -> None:
    error = _reason({"problem": problem, "question": "Find x", "answer": "1"})
    assert error.reason == "missing_problem"
    assert "question" in error.detail
    assert (
        _parse(
            {"question": "Find x", "label": 1}, problem_key="question", answer_key="label"
        ).answer
        == "1"
    )


@pytest.mark.parametrize(
    "label", [0, 0.0, "0", np.int64(0), np.float64(0.0), pa.scalar(0), [0], " 0 "]
)
def test_a_label_of_zero_is_a_label(label: object) -> None:
    """ROW-17."""
    assert _parse(_row(answer=label)).answer == "0"


@pytest.mark.parametrize(
    ("label", "answer"),
    [(15, "15"), (15.0, "15"), (2.5, "2.5"), ("2 \\sqrt { 21 }", "2 \\sqrt { 21 }"), (-3, "-3")],
)
def test_labels_become_text(label: object, answer: str) -> None:
    assert _parse(_row(answer=label)).answer == answer


@pytest.mark.parametrize("written", ["0.1", "15.3", "-2.45", "1234.5", "7"])
def test_a_label_is_as_its_column_was_written_whatever_the_type_of_the_column(written: str) -> None:
    """0.1 of 32 bits is 0.10000000149011612 in 64: a label that no answer equals."""
    for label in (
        pa.array([float(written)], pa.float32()).to_pylist()[0],
        np.float32(written),
        float(written),
        pa.array([Decimal(written)], pa.decimal128(9, 2)).to_pylist()[0],
    ):
        answer = _parse(_row(answer=label)).answer
        assert answer.rstrip("0").rstrip(".") == written, label


def test_a_label_may_stand_in_a_struct() -> None:
    """verl-project/verl#2417: rows prepared for verl."""
    row = {
        "prompt": [{"role": "user", "content": "<image>Find $x$."}],
        "images": [{"bytes": png(), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": "72"},
    }
    keys = {"problem_key": "prompt", "answer_key": "reward_model.ground_truth"}
    assert _parse(row, **keys).answer == "72"
    assert _parse({**_row(), "a.b": "3"}, answer_key="a.b").answer == "3"
    assert _reason({**row, "reward_model": None}, **keys).reason == "missing_answer"


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (None, "missing_answer"),
        ("", "missing_answer"),
        ("  ", "missing_answer"),
        ([], "missing_answer"),
        (["1", "2"], "ambiguous_answer"),
        (float("nan"), "bad_answer"),
        (float("inf"), "bad_answer"),
        (True, "bad_answer"),
        ({"a": 1}, "bad_answer"),
    ],
)
def test_labels_that_cannot_be_graded_are_named(label: object, reason: str) -> None:
    assert _reason(_row(answer=label)).reason == reason


def test_labels_are_read_by_the_grader() -> None:
    def parse(label: object) -> Row:
        return parse_row(
            _row(answer=label),
            split="train",
            index=0,
            params=DataParams(),
            parse_answer=parse_reference,
        )

    assert parse("2 \\sqrt { 21 }").answer == "2 \\sqrt { 21 }"
    assert parse(0).answer == "0"
    with pytest.raises(RowError, match=r"bad_answer.*no value that can be graded"):
        parse("see the figure")


@pytest.mark.parametrize("row", [None, "text", 7, ["<image>", "1"]])
def test_what_is_no_row_is_named(row: object) -> None:
    assert _reason(row).reason == "bad_row"


def test_metadata_that_json_cannot_hold_is_shown_not_lost() -> None:
    row = _parse(
        {**_row(), "blob": b"\0\1", "level": np.int64(3), "tags": ("a", "b"), "nan": float("nan")}
    )
    assert row.metadata == {"blob": repr(b"\0\1"), "level": 3, "tags": ["a", "b"], "nan": "nan"}
