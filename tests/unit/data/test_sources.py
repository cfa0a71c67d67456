"""Sources and the fetch stage's out: synthetic figures, Geometry3K-shaped files, own functions."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi
from PIL import Image

from polyturn.data import read_problems, read_quarantine
from polyturn.data.files import read_jsonl
from polyturn.data.geo3k import HubSource, hub_commit, split_of_name
from polyturn.data.raw import RawReport, RawWriter
from polyturn.data.sources import load_source
from polyturn.data.synthetic import KINDS, REGIONS, draw_figure, figure_rng
from polyturn.params import DataParams, ImagesParams, ParamsError, SyntheticParams
from tests.unit.data.stage import Stage
from tests.unit.data.web import Web, png, reply

GEO3K = Path(__file__).parents[4] / "shared" / "data" / "geo3k"
ALL = {"num_train": None, "num_validation": None, "num_test": None}


def _write(out: Path, seed: int = 0, **data: object) -> RawReport:
    params, images = DataParams.model_validate(data), ImagesParams()
    source = load_source(params, images, seed=seed, work_dir=out.parent / "work")
    writer = RawWriter(
        out, source, params, images.serve_host, parse_answer=str.strip, on_row=lambda: None
    )
    return writer.write()


def _lines(out: Path) -> list[dict[str, object]]:
    return list(read_jsonl(out / "problems.jsonl"))


def _files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


SYNTHETIC = {"num_train": 30, "num_validation": 8, "num_test": 9}


def test_synthetic_rows_are_as_described(tmp_path: Path) -> None:
    report = _write(tmp_path / "raw", **SYNTHETIC)
    assert report.kept == {"train": 30, "validation": 8, "test": 9}
    rows = _lines(tmp_path / "raw")
    assert rows[0]["id"] == "train/000000"
    assert rows[0]["images"] == ["http://figures.polyturn.test/train/000000.png"]
    answers = {"perimeter": {"square": 4, "triangle": 3}, "diameter": {"circle": 2}}
    for row in rows:
        figure = row["metadata"]
        label = figure["label"]
        assert 2 <= label <= 6
        assert row["problem"] == f"<image>Find the {figure['quantity']}."
        factor = (
            label if figure["quantity"] == "area" else answers[figure["quantity"]][figure["shape"]]
        )
        assert row["answer"] == str(label * factor)
        assert set(figure) == {"shape", "quantity", "label", "region"}
        assert figure["region"] in REGIONS
        path = tmp_path / "raw" / "pictures" / f"{row['id']}.png"
        with Image.open(path) as image:
            assert image.size == (256, 256)


def test_synthetic_files_depend_on_seed_split_and_index_alone(tmp_path: Path) -> None:
    _write(tmp_path / "a", **SYNTHETIC)
    _write(tmp_path / "b", **SYNTHETIC)
    assert _files(tmp_path / "a") == _files(tmp_path / "b")
    _write(tmp_path / "more", **{**SYNTHETIC, "num_train": 40})
    more = _files(tmp_path / "more")
    assert {
        k: v for k, v in more.items() if k in _files(tmp_path / "a") and k.startswith("pic")
    } == {k: v for k, v in _files(tmp_path / "a").items() if k.startswith("pic")}
    _write(tmp_path / "other", seed=1, **SYNTHETIC)
    assert _files(tmp_path / "other") != _files(tmp_path / "a")
    pictures = _files(tmp_path / "a" / "pictures")
    assert pictures["train/000000.png"] != pictures["test/000000.png"]


def test_shapes_labels_and_regions_are_evenly_drawn() -> None:
    params = SyntheticParams()
    figures = [draw_figure(figure_rng(0, "train", i), params)[0] for i in range(600)]
    assert set(Counter((f.shape, f.quantity) for f in figures)) == set(KINDS)
    assert all(100 < count < 200 for count in Counter(f.region for f in figures).values())
    assert all(80 < count < 160 for count in Counter(f.label for f in figures).values())


@pytest.mark.parametrize("region", REGIONS)
def test_the_label_lies_near_the_centre_of_its_quadrant(region: str) -> None:
    params = SyntheticParams()
    figure, image = next(
        drawn
        for i in range(100)
        if (drawn := draw_figure(figure_rng(0, "test", i), params))[0].region == region
        and drawn[0].shape == "square"
    )
    row, column = divmod(REGIONS.index(figure.region), 2)
    for r in range(2):
        for c in range(2):
            inner = np.asarray(image)[r * 128 + 34 : r * 128 + 94, c * 128 + 34 : c * 128 + 94]
            assert ((inner < 128).sum() > 30) == ((r, c) == (row, column))


def _dataset(root: Path) -> list[dict[str, object]]:
    """Five rows of three splits with relative pictures."""
    (root / "images").mkdir(parents=True)
    rows: list[dict[str, object]] = []
    for i, split in enumerate(("train", "train", "val", "test", "test")):
        (root / "images" / f"{i} ü.png").write_bytes(png((32, 32), (i, 0, 0)))
        rows.append(
            {
                "id": f"r{i}",
                "split": split,
                "problem": "<image>Find $x$.",
                "answer": i,
                "images": [f"images/{i} ü.png"],
            }
        )
    return rows


def _jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _bytes_of(rows: list[dict[str, object]], root: Path) -> list[dict[str, object]]:
    return [
        {**row, "images": [{"bytes": (root / str(row["images"][0])).read_bytes(), "path": None}]}
        for row in rows
    ]


def test_rows_of_a_split_of_another_name_are_set_aside_not_trained_on(tmp_path: Path) -> None:
    """lupantech/MathVista#10: its rows are of test sets, under splits such as testmini."""
    root = tmp_path / "set"
    rows = _dataset(_made(root).parent)
    for row, split in zip(rows, ("testmini", "hidden", "train", "", None), strict=True):
        row["split"] = split
    _jsonl(root / "problems.jsonl", rows)
    report = _write(tmp_path / "raw", source="geo3k", path=str(root), **ALL)
    assert report.kept == {"train": 3, "validation": 0, "test": 1}
    (aside,) = report.set_aside
    assert (aside.id, aside.reason) == ("r1", "bad_split")
    assert "split 'hidden' is none of train, training, validation, val" in aside.detail


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n  "])
def test_a_file_that_is_one_json_list_gives_its_rows(
    tmp_path: Path, indent: int | None, start: str
) -> None:
    """open-mmlab/StyleShot#18: every line of such a file was set aside."""
    root = tmp_path / "set"
    rows: list[object] = [*_dataset(_made(root).parent), "no row"]
    (root / "rows.json").write_text(start + json.dumps(rows, indent=indent))
    report = _write(tmp_path / "raw", source="geo3k", path=str(root / "rows.json"), **ALL)
    assert report.kept == {"train": 2, "validation": 1, "test": 2}
    assert [(row.id, row.reason) for row in report.set_aside] == [("rows.json:6", "bad_json")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"problem,answer\n", r"is a \.csv file; \.jsonl, \.json"),
        ("rows.jsonl.gz", b"\x1f\x8b", r"is a \.gz file"),
        ("rows.json", b'[{"problem": ', "begins as a list and is not valid JSON"),
        ("rows.json", b"[" * 100_000, "begins as a list and is not valid JSON"),
    ],
)
def test_a_file_of_another_format_is_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ParamsError, match=message):
        _write(tmp_path / "raw", source="geo3k", path=str(tmp_path / name), **ALL)


def test_a_directory_gives_relative_paths_that_lie_in_pictures(tmp_path: Path) -> None:
    root = tmp_path / "set"
    _jsonl(root.joinpath("problems.jsonl") if root.exists() else _made(root), _dataset(root))
    report = _write(tmp_path / "raw", source="geo3k", path=str(root), **ALL)
    assert report.kept == {"train": 2, "validation": 1, "test": 2}
    rows = _lines(tmp_path / "raw")
    assert [row["split"] for row in rows] == ["train", "train", "validation", "test", "test"]
    assert rows[0]["images"] == ["images/0 ü.png"]
    assert rows[0]["answer"] == "0"
    assert (tmp_path / "raw" / "pictures" / "images" / "0 ü.png").is_file()


def _made(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    return root / "problems.jsonl"


def _stored(tmp_path: Path, name: str, **data: object) -> list[str]:
    """Picture hashes after fetch and images, in row order."""
    stage = Stage(tmp_path / name)
    _write(stage.root / "raw", source="geo3k", **{**ALL, **data})
    done = stage.finish(stage.job(dedup_splits=False))
    return [p.images[0].sha256 for p in read_problems(done.out / "problems.jsonl", done.out)]


def test_all_forms_of_a_dataset_give_the_same_pictures(tmp_path: Path) -> None:
    """ROW-07: paths, URLs, bytes in Parquet, data URIs."""
    root = tmp_path / "set"
    rows = _dataset(root)
    _jsonl(root / "problems.jsonl", rows)
    expected = _stored(tmp_path, "paths", path=str(root))
    assert len(set(expected)) == 5
    base = "http://figures.polyturn.test"
    assert _stored(tmp_path, "urls", path=str(root), base_url=f"{base}/geo") == expected
    assert _stored(tmp_path, "root_url", path=str(root), base_url=base) == expected
    assert _stored(tmp_path, "file", path=str(root / "problems.jsonl")) == expected
    pq.write_table(pa.Table.from_pylist(_bytes_of(rows, root)), tmp_path / "all.parquet")
    assert _stored(tmp_path, "parquet", path=str(tmp_path / "all.parquet")) == expected
    assert (
        _stored(tmp_path, "parquet_url", path=str(tmp_path / "all.parquet"), base_url=base)
        == expected
    )
    by_split = tmp_path / "by_split" / "data"
    by_split.mkdir(parents=True)
    for split in ("train", "val", "test"):
        own = [dict(row) for row in _bytes_of(rows, root) if row["split"] == split]
        for row in own:
            del row["split"]
        pq.write_table(pa.Table.from_pylist(own), by_split / f"{split}-00000-of-00001.parquet")
    assert _stored(tmp_path, "splits", path=str(by_split.parent)) == expected


def test_a_directory_of_save_to_disk_gives_the_same_pictures(tmp_path: Path) -> None:
    """With one folder a split, with a split column, and beside the cache of a `map`, which holds no rows of its own."""
    import datasets  # noqa: PLC0415

    root = tmp_path / "set"
    rows = _dataset(root)
    _jsonl(root / "problems.jsonl", rows)
    expected = _stored(tmp_path, "paths", path=str(root))
    with_bytes = _bytes_of(rows, root)
    datasets.Dataset.from_list(with_bytes).save_to_disk(str(tmp_path / "column"))
    (tmp_path / "column" / "cache-0123456789abcdef.arrow").write_bytes(b"no rows")
    assert _stored(tmp_path, "column_out", path=str(tmp_path / "column")) == expected
    decoded = datasets.Sequence(datasets.Image())
    splits = {
        split: datasets.Dataset.from_list(
            [
                {k: v for k, v in row.items() if k != "split"}
                for row in with_bytes
                if row["split"] == split
            ]
        ).cast_column("images", decoded)
        for split in ("train", "val", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "folders"))
    assert _stored(tmp_path, "folders_out", path=str(tmp_path / "folders")) == expected


@pytest.mark.parametrize(
    ("state", "arrow", "message"),
    [
        ("{}", b"", r"state\.json is none that datasets\.save_to_disk wrote \(KeyError"),
        (
            '{"_data_files": [{"filename": "a.arrow"}]}',
            b"no rows",
            "a.arrow is not a readable Arrow",
        ),
        (
            '{"_data_files": [{"filename": "gone.arrow"}]}',
            b"",
            "gone.arrow is not a readable Arrow",
        ),
    ],
)
def test_a_damaged_directory_of_save_to_disk_is_one_line(
    tmp_path: Path, state: str, arrow: bytes, message: str
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "state.json").write_text(state)
    (tmp_path / "set" / "a.arrow").write_bytes(arrow)
    with pytest.raises(ParamsError, match=message):
        _write(tmp_path / "raw", source="geo3k", path=str(tmp_path / "set"), **ALL)


def test_a_directory_without_rows_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "rows.csv").write_text("problem,answer\n")
    with pytest.raises(ParamsError, match=r"but rows\.csv; convert it"):
        _write(tmp_path / "raw", source="geo3k", path=str(tmp_path / "set"), **ALL)


def test_a_hub_dataset_is_streamed_with_its_pictures_still_encoded(tmp_path: Path) -> None:
    import datasets  # noqa: PLC0415

    data = png((32, 32), (1, 2, 3))
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        rows = [
            {"images": [{"bytes": data, "path": None}], "problem": f"<image>{split}", "answer": "1"}
        ]
        features = datasets.Features(
            {
                "images": datasets.Sequence(datasets.Image()),
                "problem": datasets.Value("string"),
                "answer": datasets.Value("string"),
            }
        )
        table = datasets.Dataset.from_list(rows, features=features)
        table.to_parquet(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    source = HubSource(str(tmp_path / "set"), None)
    [row] = source.load("validation")
    assert row["problem"] == "<image>validation"
    assert row["images"] == [{"bytes": data, "path": None}]
    assert list(source.load("test")) == []


def test_a_hub_dataset_is_pinned_to_a_commit(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"id": "someone/geo", "sha": "0" * 40}).encode()
    web.add("/api/datasets/someone/geo/revision/v1", reply(answer, kind="application/json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("polyturn.data.geo3k.HfApi", lambda: HfApi(endpoint=web.url))
    assert hub_commit("someone/geo", "v1") == "0" * 40
    with pytest.raises(ParamsError, match=r"data.path: Hugging Face dataset 'someone/none'"):
        hub_commit("someone/none", "v1")
    monkeypatch.setattr("polyturn.data.geo3k.HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9"))
    with pytest.raises(ParamsError, match=r"\(Connect.*data\.revision and the network"):
        hub_commit("someone/geo", "v1")


def test_urls_under_a_foreign_base_copy_nothing(tmp_path: Path) -> None:
    root = tmp_path / "set"
    _jsonl(_made(root), _dataset(root))
    _write(tmp_path / "raw", source="geo3k", path=str(root), base_url="https://a.test/geo/", **ALL)
    assert _lines(tmp_path / "raw")[0]["images"] == ["https://a.test/geo/images/0%20%C3%BC.png"]
    assert not any(path.is_file() for path in (tmp_path / "raw" / "pictures").rglob("*"))


def test_no_file_of_fetch_names_this_machine(tmp_path: Path) -> None:
    root = tmp_path / "set"
    _jsonl(_made(root), _dataset(root))
    for base_url in (None, "http://figures.polyturn.test"):
        out = tmp_path / f"raw{base_url is None}"
        _write(out, source="geo3k", path=str(root), base_url=base_url, **ALL)
        assert not any(str(tmp_path).encode() in data for data in _files(out).values())


def test_a_bad_line_stops_or_is_set_aside_with_file_and_line(tmp_path: Path) -> None:
    """ROW-15."""
    good = '{"problem": "Find $a \\\\cdot b$.", "answer": "1"}\n'
    bad = '{"problem": "Find $a \\cdot b$.", "answer": "1"}\n'
    (tmp_path / "train.jsonl").write_text(good + bad + good + "[1]\n")
    where = {"source": "geo3k", "path": str(tmp_path / "train.jsonl"), **ALL}
    report = _write(tmp_path / "raw", **where)
    assert report.kept["train"] == 2
    assert [row["problem"] for row in _lines(tmp_path / "raw")] == ["Find $a \\cdot b$."] * 2
    assert [(row.id, row.reason) for row in report.set_aside] == [
        ("train.jsonl:2", "bad_json"),
        ("train.jsonl:4", "bad_json"),
    ]
    with pytest.raises(ValueError, match=r"train.jsonl, line 2.*data.on_bad_line"):
        _write(tmp_path / "strict", on_bad_line="stop", **where)


def test_splits_in_the_names_of_folders_are_read(tmp_path: Path) -> None:
    """The layout of the Hub's own Parquet files; a file's own name comes before its folder's."""
    for name in ("default/train/0000", "default/validation/0000", "default/test/0000"):
        path = tmp_path / "set" / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        row = {"id": name.split("/")[1], "problem": "x", "answer": 1}
        pq.write_table(pa.Table.from_pylist([row]), path)
    report = _write(tmp_path / "raw", source="geo3k", path=str(tmp_path / "set"), **ALL)
    assert report.kept == {"train": 1, "validation": 1, "test": 1}
    assert [row["id"] for row in _lines(tmp_path / "raw")] == ["train", "validation", "test"]
    assert split_of_name("test_sets/train.parquet") == "train"
    assert split_of_name("hub__default__test__0000.parquet") == "test"


def test_ids_that_count_anew_in_each_split_lose_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """bigscience-workshop/biomedical#165: an id is unique within its split."""
    root = tmp_path / "set"
    root.mkdir()
    rows = [
        {"id": number, "split": split, "problem": f"{split} {number}", "answer": 1}
        for split in ("train", "val", "test")
        for number in (0, 1, 1)
    ]
    _jsonl(root / "problems.jsonl", rows)
    report = _write(tmp_path / "raw", source="geo3k", path=str(root), **ALL)
    assert report.kept == {"train": 2, "validation": 2, "test": 2}
    assert [row.reason for row in report.set_aside] == ["duplicate_id"] * 3
    ids = [row["id"] for row in read_jsonl(tmp_path / "raw" / "problems.jsonl")]
    assert ids == ["0", "1", "validation/0", "validation/1", "test/0", "test/1"]
    assert "named SPLIT/ID" in caplog.text


def test_rows_that_cannot_be_placed_are_set_aside_by_id(tmp_path: Path) -> None:
    root = tmp_path / "set"
    (tmp_path / "secret.png").write_bytes(png())
    bad = {
        "../secret.png": "blocked_path",
        str(tmp_path / "secret.png"): "blocked_path",
        "images/none.png": "missing_file",
        "images": "missing_file",
        "file:///etc/hostname": "blocked_scheme",
        "ftp://a.test/x.png": "blocked_scheme",
        "link.png": "blocked_path",
        str(png((8, 8))): "missing_file",
        "A" * 5000: "missing_file",  # longer than a path may be (sgl-project/sglang#7199)
        "images/" + "a" * 300 + ".png": "missing_file",
        "images/a\0.png": "missing_file",
    }
    rows = _dataset(root)[:1]
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    rows += [{**rows[0], "id": f"b{i}", "images": [path]} for i, path in enumerate(bad)]
    rows += [rows[0]]
    _jsonl(root / "problems.jsonl", rows)
    report = _write(tmp_path / "raw", source="geo3k", path=str(root), **ALL)
    assert report.kept["train"] == 1
    assert [row.reason for row in report.set_aside] == [*bad.values(), "duplicate_id"]
    assert {row.stage for row in report.set_aside} == {"fetch"}


@pytest.mark.parametrize("column", ["problem", "answer", "note", "id", "images"])
def test_half_a_character_costs_its_own_row(tmp_path: Path, column: str) -> None:
    """strands-rl/strands-env#211: JSON has an escape for half a pair of surrogates, and UTF-8 has no bytes for it."""
    rows = _dataset(tmp_path / "set")[:2]
    value = "<image>Find x \ud83d." if column == "problem" else "\ud83d"
    rows[0] = {**rows[0], "id": "half", column: [value] if column == "images" else value}
    _jsonl(tmp_path / "set" / "problems.jsonl", rows)
    report = _write(tmp_path / "raw", source="geo3k", path=str(tmp_path / "set"), **ALL)
    assert report.kept["train"] == 1
    (found,) = report.set_aside
    assert found.reason == "bad_text", found
    assert read_quarantine(tmp_path / "raw" / "quarantine.jsonl") == [found]


def test_json_that_is_too_deep_is_a_bad_line(tmp_path: Path) -> None:
    deep = '{"problem": "x", "answer": "1", "note": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    (tmp_path / "train.jsonl").write_text(deep + '{"problem": "x", "answer": "1"}\n')
    report = _write(tmp_path / "raw", source="geo3k", path=str(tmp_path / "train.jsonl"), **ALL)
    assert (report.kept["train"], [row.reason for row in report.set_aside]) == (1, ["bad_json"])


def test_a_dataset_without_a_usable_row_stops_the_run(tmp_path: Path) -> None:
    _jsonl(
        tmp_path / "a.jsonl", [{"problem": "<image>x", "answer": "1", "images": [str(b"\x89PNG")]}]
    )
    with pytest.raises(ValueError, match=r"no usable row \(1 set aside"):
        _write(tmp_path / "raw", source="geo3k", path=str(tmp_path / "a.jsonl"), **ALL)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"source": "geo3k"}, "data.path"),
        ({"source": "geo3k", "path": "no/such/dir/x"}, "data.path"),
        ({"source": "geo3k", "path": "gone.jsonl"}, "data.path"),
        ({"source": "geo3k", "path": "../gone"}, "data.path: '../gone' is neither a file nor"),
        ({"source": "geo3k", "path": "./gone"}, "data.path: './gone' is neither a file nor"),
        ({"source": "imagenet"}, "data.source"),
        ({"source": "no_such_module:load"}, "data.source"),
        ({"source": "polyturn.data.synthetic:nothing"}, "data.source"),
        ({"source": "builtins:len"}, ""),
        ({"num_train": None}, "data.num_train"),
    ],
)
def test_a_wrong_source_names_its_key(tmp_path: Path, data: dict[str, object], key: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        _write(tmp_path / "raw", **data)
    assert key in str(error.value)


def own_rows(split: str) -> list[dict[str, object]]:
    """A user's source."""
    return [
        {"problem": "<image>x", "answer": i, "images": [png((32, 32), (i, 0, 0))]}
        for i in range(len(split))
    ]


def test_a_function_of_ones_own_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import polyturn.data.synthetic as host  # noqa: PLC0415

    monkeypatch.setattr(host, "own_rows", own_rows, raising=False)
    report = _write(tmp_path / "raw", source="polyturn.data.synthetic:own_rows", num_train=3)
    assert report.kept == {"train": 3, "validation": 10, "test": 4}
    assert _lines(tmp_path / "raw")[0]["images"] == ["embedded/train/000000_0.png"]
    data = (tmp_path / "raw" / "pictures" / "embedded" / "train" / "000001_0.png").read_bytes()
    assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (1, 0, 0)


def seeded_rows(split: str, *, seed: int, params: dict[str, int]) -> list[dict[str, object]]:
    """A user's source that draws."""
    return [{"problem": f"{split} {seed}", "answer": params["answer"]}]


def test_a_source_of_ones_own_may_take_the_seed_and_data_params(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import polyturn.data.synthetic as host  # noqa: PLC0415

    monkeypatch.setattr(host, "own_rows", own_rows, raising=False)
    monkeypatch.setattr(host, "seeded_rows", seeded_rows, raising=False)
    _write(tmp_path / "raw", source="polyturn.data.synthetic:seeded_rows", params={"answer": 8})
    line = _lines(tmp_path / "raw")[0]
    assert (line["problem"], line["answer"]) == ("train 0", "8")
    for source in ("polyturn.data.synthetic:own_rows", "synthetic"):
        with pytest.raises(ParamsError, match=r"data\.params: .* to take|takes none"):
            _write(tmp_path / "other", source=source, params={"answer": 8})


def test_real_geometry3k_passes_whole_with_its_answers(tmp_path: Path) -> None:
    if not GEO3K.is_dir():
        pytest.skip(f"{GEO3K} is absent: real problems are not part of the project")
    base = "http://figures.polyturn.test/geo3k"
    count = {"num_train": 60, "num_validation": 30, "num_test": 30}
    stage = Stage(tmp_path)
    _write(stage.root / "raw", source="geo3k", path=str(GEO3K), base_url=base, **count)
    done = stage.finish(stage.job(dedup_splits=False, max_bad_fraction=0.0, size_multiple=32))
    problems = read_problems(done.out / "problems.jsonl", done.out)
    assert len(problems) == 120
    truth = {row["id"]: row for row in read_jsonl(GEO3K / "problems.jsonl")}
    for problem in problems:
        assert problem.answer == truth[problem.id]["answer"]
        assert "<image>" + problem.messages[0].text == truth[problem.id]["problem"]
    again = stage.finish(stage.job(dedup_splits=False, max_bad_fraction=0.0, size_multiple=32))
    assert (again.report.num_fetched, again.report.num_cache_hits) == (0, 120)


@pytest.mark.full
def test_all_of_geometry3k_is_kept_and_its_shared_pictures_are_found(tmp_path: Path) -> None:
    """1,959 problems, of which 143 pictures lie in more than one split."""
    if not GEO3K.is_dir():
        pytest.skip(f"{GEO3K} is absent: real problems are not part of the project")
    base = "http://figures.polyturn.test/geo3k"
    stage = Stage(tmp_path)
    _write(stage.root / "raw", source="geo3k", path=str(GEO3K), base_url=base, **ALL)
    done = stage.finish(stage.job(dedup_splits=False, max_bad_fraction=0.0, size_multiple=32))
    assert (done.report.num_kept, done.report.num_fetched) == (1959, 1959)
    splits: dict[str, set[str]] = {}
    for problem in read_problems(done.out / "problems.jsonl", done.out):
        splits.setdefault(problem.images[0].sha256, set()).add(problem.split)
    assert sum(len(names) > 1 for names in splits.values()) == 143
    done = stage.finish(stage.job(max_bad_fraction=0.0, size_multiple=32))
    assert (done.report.num_cache_hits, done.report.num_fetched) == (1959, 0)
    with_train = {sha for sha, names in splits.items() if len(names) > 1 and "train" in names}
    assert done.report.num_shared == len(done.set_aside) == 165
    assert len(with_train) == 132
