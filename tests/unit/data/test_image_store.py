"""The images stage as a whole: accounting, replay, kills, dedup (cases IMG-16, IMG-17 and their kinds)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from polyturn.data import read_problems
from polyturn.data.images import TooManyBadRowsError
from polyturn.data.quarantine import SetAside
from tests.unit.data.stage import Stage
from tests.unit.data.web import Web, png, reply


def _mixed(web: Web) -> dict[str, str | list[str]]:
    """Good, truncated, 404, text named .png, good."""
    return {
        "a": web.add("/a.png", reply(png(color="red"))),
        "b": web.add("/b.png", reply(png(color="green")[:-20])),
        "c": f"{web.url}/missing.png",
        "d": web.add("/d.png", reply(b"plain words")),
        "e": web.add("/e.png", reply(png(color="blue"))),
    }


def test_bad_rows_are_set_aside_each_with_its_own_reason(web: Web, stage: Stage) -> None:
    """IMG-16."""
    done = stage.run(_mixed(web), max_bad_fraction=0.7)
    assert done.kept == ["a", "e"]
    reasons = {name: row.reason for name, row in done.set_aside.items()}
    assert reasons == {"b": "truncated", "c": "http_404", "d": "not_an_image"}
    assert (done.report.num_rows, done.report.num_kept) == (5, 2)


def test_too_many_bad_rows_stop_the_run_with_a_table(web: Web, stage: Stage) -> None:
    with pytest.raises(TooManyBadRowsError) as error:
        stage.run(_mixed(web), max_bad_fraction=0.5)
    for word in ("3 of 5 rows", "images.max_bad_fraction is 0.5", "http_404", "truncated", "20.0%"):
        assert word in str(error.value)
    assert not (stage.root / "images").exists()
    assert len((stage.root / "logs" / "quarantine.jsonl").read_text().splitlines()) == 3
    # The server is mended: good bodies come from the cache, failures are asked for again.
    web.add("/missing.png", reply(png(color="gray")))
    web.add("/d.png", reply(png(color="black")))
    done = stage.run(_mixed_urls(web), max_bad_fraction=0.5)
    assert done.kept == ["a", "c", "d", "e"]
    assert (web.hits["/a.png"], web.hits["/missing.png"]) == (1, 2)


def _mixed_urls(web: Web) -> dict[str, str | list[str]]:
    return {
        name: f"{web.url}/{file}.png"
        for name, file in zip("abcde", ("a", "b", "missing", "d", "e"), strict=True)
    }


def test_a_run_that_keeps_nothing_fails(web: Web, stage: Stage) -> None:
    with pytest.raises(TooManyBadRowsError, match="1 of 1 rows"):
        stage.run({"a": f"{web.url}/no.png"}, max_bad_fraction=1.0)


def test_a_run_that_is_stopped_shows_a_row_of_the_most_frequent_reason(
    web: Web, stage: Stage
) -> None:
    """Its detail is what to do: of a private address, the key that allows it."""
    own = {name: f"http://127.0.0.2:1/{name}.png" for name in "bc"}
    with pytest.raises(
        TooManyBadRowsError,
        match=r"for example b: blocked_address: .*images\.allow_hosts can name it",
    ):
        stage.run({"a": f"{web.url}/missing.png", **own})


def test_rows_that_fetch_set_aside_count_and_are_listed(web: Web, stage: Stage) -> None:
    before = SetAside("x", "train", "fetch", "missing_answer", "no answer")
    good = web.add("/a.png", reply(png()))
    stage.raw([{"id": "a", "images": [good]}], before=[before])
    done = stage.finish(stage.job(max_bad_fraction=0.5))
    assert done.set_aside == {"x": before}
    assert done.report.num_rows == 2
    with pytest.raises(TooManyBadRowsError, match="missing_answer"):
        stage.finish(stage.job(max_bad_fraction=0.4))


def test_the_second_run_needs_no_network_and_gives_the_same_bytes(web: Web, stage: Stage) -> None:
    sources = _mixed(web)
    first = stage.run(sources)
    bytes_of = {p: p.read_bytes() for p in first.out.rglob("*") if p.is_file()}
    hits = dict(web.hits)
    web.routes.clear()
    second = stage.run(sources)
    assert {p: p.read_bytes() for p in second.out.rglob("*") if p.is_file()} == bytes_of
    assert dict(web.hits) == hits
    assert (first.report.num_fetched, second.report.num_fetched) == (3, 0)
    assert second.report.num_cache_hits == 5


@pytest.mark.usefixtures("nfs")
def test_a_picture_that_is_held_open_does_not_keep_the_next_store_from_its_place(
    web: Web, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """On NFS; the old store stays aside under another name, with a warning."""
    (stage.run({"a": web.add("/a.png", reply(png(color="red")))}).out / "held").touch()
    done = stage.run({"b": web.add("/b.png", reply(png(color="blue")))})
    assert done.kept == ["b"]
    assert not (done.out / "held").exists()
    assert "could not be removed: [Errno 39] Directory not empty" in caplog.text


def test_one_address_is_fetched_once_and_one_content_stored_once(web: Web, stage: Stage) -> None:
    web.add("/same.png", reply(png()))
    web.add("/copy.png", reply(png()))
    rows: dict[str, str | list[str]] = {
        f"r{i}": f"{web.url}/same.png?token=t{i}" for i in range(50)
    }
    done = stage.run({**rows, "copy": f"{web.url}/copy.png"})
    assert web.hits == {"/same.png": 1, "/copy.png": 1}
    assert len(done.rows) == 51
    assert len(list((done.out / "png").iterdir())) == 1


def test_secrets_reach_neither_manifest_nor_logs_nor_cache(web: Web, stage: Stage) -> None:
    web.add("/a.png", reply(png()))
    done = stage.run(
        {"a": f"{web.url}/a.png?X-Amz-Signature=S3CR3T", "b": f"{web.url}/no.png?sig=S3CR3T"}
    )
    for directory in (done.out, stage.root / "logs", stage.root / "cache"):
        for path in directory.rglob("*"):
            assert not path.is_file() or b"S3CR3T" not in path.read_bytes()


def test_the_manifest_accounts_for_every_image_in_row_order(web: Web, stage: Stage) -> None:
    good, other = (web.add(f"/{n}.png", reply(png((w, 48)))) for n, w in (("g", 64), ("o", 80)))
    done = stage.run({"z": good, "m": [other, f"{web.url}/no.png"], "a": [good, other]})
    table = pq.read_table(done.out / "manifest.parquet").to_pylist()
    assert [(row["row_id"], row["position"], row["status"]) for row in table] == [
        ("a", 0, "kept"),
        ("a", 1, "kept"),
        ("m", 0, "set_aside"),
        ("m", 1, "set_aside"),
        ("z", 0, "kept"),
    ]
    assert table[0]["url"] == good
    assert table[0]["source_sha256"] == hashlib.sha256(png((64, 48))).hexdigest()
    stored = (done.out / "png" / f"{table[0]['png_sha256']}.png").read_bytes()
    assert hashlib.sha256(stored).hexdigest() == table[0]["png_sha256"]
    assert (table[1]["source_mode"], table[1]["width"], table[1]["height"]) == ("RGB", 80, 48)
    assert table[3]["reason"] == "http_404"
    assert done.set_aside["m"].detail.startswith("image 1, http://")


def test_pictures_that_only_set_aside_rows_show_are_not_stored(web: Web, stage: Stage) -> None:
    lone = web.add("/lone.png", reply(png(color="blue")))
    good = web.add("/good.png", reply(png()))
    done = stage.run({"bad": [lone, f"{web.url}/no.png"], "good": good})
    assert [path.stem for path in (done.out / "png").iterdir()] == [
        row["sha256"] for row in done.rows[0]["images"]
    ]


def _rows_of_splits(web: Web) -> list[dict[str, object]]:
    urls = {c: web.add(f"/{c}.png", reply(png(color=c))) for c in ("red", "green", "blue")}
    urls["red_again"] = web.add("/red_again.png", reply(png(color="red", compress_level=0)))
    return [
        {"id": "t0", "split": "train", "images": [urls["red"]]},
        {"id": "t1", "split": "train", "images": [urls["red"]]},
        {"id": "v0", "split": "validation", "images": [urls["red_again"]]},
        {"id": "v1", "split": "validation", "images": [urls["green"]]},
        {"id": "e0", "split": "test", "images": [urls["blue"], urls["red"]]},
        {"id": "e1", "split": "test", "images": [urls["green"]]},
        {"id": "e2", "split": "test", "images": []},
    ]


def test_evaluation_rows_that_show_a_train_picture_are_set_aside(web: Web, stage: Stage) -> None:
    stage.raw(_rows_of_splits(web))
    done = stage.finish(stage.job(max_bad_fraction=0.0))
    assert done.kept == ["t0", "t1", "v1", "e1", "e2"]
    assert {row.reason for row in done.set_aside.values()} == {"shared_with_train"}
    assert "train row t0" in done.set_aside["v0"].detail
    assert done.report.num_shared == 2
    # blue is in no kept row
    assert len(list((done.out / "png").iterdir())) == 2
    done = stage.finish(stage.job(dedup_splits=False))
    assert len(done.kept) == 7


def test_rows_without_pictures_pass_through(stage: Stage) -> None:
    stage.raw([{"id": "a", "problem": "What is 1+1?", "answer": "2", "images": []}])
    done = stage.finish(stage.job())
    [problem] = read_problems(done.out / "problems.jsonl", done.out)
    assert (problem.images, problem.messages[0].text) == ((), "What is 1+1?")


def test_served_urls_are_fetched_from_the_dataset_without_a_port_in_any_file(stage: Stage) -> None:
    raw = stage.raw([{"id": "a", "images": ["http://figures.polyturn.test/train/1.png"]}])
    (raw / "pictures" / "train").mkdir()
    (raw / "pictures" / "train" / "1.png").write_bytes(png())
    done = stage.finish(stage.job(allow_hosts=()))
    assert done.kept == ["a"]
    for path in done.out.rglob("*"):
        assert not path.is_file() or b"127.0.0.1" not in path.read_bytes()


@pytest.mark.parametrize("path", ["../../secret.png", "/etc/hostname", "a/../../secret.png"])
def test_paths_out_of_the_dataset_are_refused(stage: Stage, path: str) -> None:
    (stage.root / "secret.png").write_bytes(png())
    raw = stage.raw([{"id": "a", "images": [path]}, {"id": "b", "images": ["x.png"]}])
    (raw / "pictures" / "x.png").write_bytes(png())
    assert stage.finish(stage.job()).set_aside["a"].reason == "blocked_path"


@pytest.mark.parametrize("side", [32, 300])
def test_small_and_large_bodies_come_back_from_the_cache(web: Web, stage: Stage, side: int) -> None:
    url = web.add("/a.png", reply(png((side, side), compress_level=0)))
    first = stage.run({"a": url})
    assert stage.run({"a": url}).rows == first.rows
    assert web.hits["/a.png"] == 1
    files = [path for path in (stage.root / "cache").rglob("*") if len(path.name) == 64]
    assert len(files) == (side > 32)


def test_a_damaged_cache_file_is_fetched_again(web: Web, stage: Stage) -> None:
    url = web.add("/a.png", reply(png((300, 300), compress_level=0)))
    first = stage.run({"a": url})
    [body] = [path for path in (stage.root / "cache" / "bodies").rglob("*") if path.is_file()]
    for damage in (lambda: body.write_bytes(b"damaged"), body.unlink):
        damage()
        assert stage.run({"a": url}).rows == first.rows
    assert web.hits["/a.png"] == 3


def test_counts_reach_the_progress_callback(web: Web, stage: Stage) -> None:
    from polyturn.data.images import build_image_store  # noqa: PLC0415

    stage.raw([{"id": name, "images": [url]} for name, url in _mixed(web).items()])
    seen: list[dict[str, int]] = []
    build_image_store(stage.job(), lambda counts: seen.append(dict(counts)))
    assert len(seen) == 5
    assert (seen[-1]["images"], seen[-1]["fetched"], seen[-1]["set_aside"]) == (5, 3, 3)


_RUN = """
import sys
from pathlib import Path
from tests.unit.data.stage import Stage
stage = Stage(Path(sys.argv[1]))
stage.finish(stage.job(concurrency=8, num_processes=1))
"""


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_with_the_same_manifest(
    web: Web, tmp_path: Path
) -> None:
    rows: list[dict[str, object]] = []
    for i in range(300):
        colour = (i % 256, i // 256, 0)
        large = {"size": (150, 150), "compress_level": 0} if i % 3 == 0 else {"size": (32, 32)}
        url = web.add(f"/{i}.png", reply(png(color=colour, **large)))
        rows.append({"id": f"r{i:04d}", "images": [url if i % 10 else f"{web.url}/no{i}.png"]})
    calm, stormy = Stage(tmp_path / "calm"), Stage(tmp_path / "stormy")
    calm.raw(rows)
    expected = calm.finish(calm.job()).out
    web.hits.clear()
    stormy.raw(rows)
    command = [sys.executable, "-c", _RUN, str(stormy.root)]
    rng = random.Random(0)
    for _ in range(10):
        process = subprocess.Popen(command, cwd=Path.cwd(), start_new_session=True)
        time.sleep(rng.uniform(0.4, 1.2))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True)
    for name in ("manifest.parquet", "problems.jsonl", "quarantine.jsonl"):
        assert (stormy.root / "images" / name).read_bytes() == (expected / name).read_bytes()
    # A request that was under way when the process died is asked again, a finished one is not.
    assert sum(web.hits.values()) <= 300 + 10 * 8


def test_the_fetch_log_tells_hits_from_fetches(web: Web, stage: Stage) -> None:
    url = web.add("/a.png", reply(png()))
    log = stage.root / "logs" / "fetch_log.jsonl"
    stage.run({"a": url})
    [line] = [json.loads(text) for text in log.read_text().splitlines()]
    assert (line["url"], line["attempts"], line["bytes"]) == (url, 1, len(png()))
    stage.run({"a": url})
    [line] = [json.loads(text) for text in log.read_text().splitlines()]
    assert line["cache"] == "hit"


def test_an_unreachable_server_is_a_reason_not_a_crash(web: Web, stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/a.png"
        good = web.add("/good.png", reply(png()))
        done = stage.run({"dead": dead, "nowhere": "http://nowhere.invalid/a.png", "good": good})
    assert done.set_aside["dead"].reason == "connection"
    assert done.set_aside["nowhere"].reason == "dns"
