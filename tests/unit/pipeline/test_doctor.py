"""The preflight: each check green, skipped and red, each red line with its fix; and how a run is stopped by it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from polyturn import layout
from polyturn.cli import commands as cli
from polyturn.data.files import write_jsonl
from polyturn.data.problems import problem_row
from polyturn.objects import Objects
from polyturn.params import ParamsError, TrackingParams, parse
from polyturn.pipeline import doctor
from polyturn.policy import model as policy_model
from polyturn.policy.small_model import CHAT_TEMPLATE
from polyturn.preflight import machine, model, services, versions
from polyturn.preflight.finding import Finding, Site
from polyturn.preflight.machine import Gpu
from polyturn.preflight.versions import CPU, GPU, KnownGood
from polyturn.report import data
from polyturn.tracking import store
from tasks import failure, preflight
from tests import s3
from tests.unit import tiny


def site(root: Path, **changes: object) -> Site:
    return Site(root, parse(changes))


# -- the frame ------------------------------------------------------------------------------------------------


def red(_: Site) -> Finding:
    return Finding("labels", "failed", "too small", fix="buy more")


def test_a_check_that_raises_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\n")

    def broken(site: Site) -> Finding:
        raise OSError(f"no disk at seed {site.params.seed}")

    findings = doctor.examine(doctor.site_of(tmp_path), {"broken": broken, "labels": red})
    assert not doctor.is_healthy(findings)
    assert doctor.told(findings).splitlines() == [
        "failed  broken  OSError: no disk at seed 1",
        "failed  labels  too small",
        "                fix: buy more",
    ]


def test_what_is_allowed_is_told_and_stops_nothing() -> None:
    findings = [red(site(Path()))]
    assert doctor.is_healthy(findings, ["labels"])
    assert not doctor.is_healthy(findings, ["disk"])
    assert doctor.told(findings, ["labels"]).startswith("allowed labels  too small")
    coloured = doctor.told(findings, with_colour=True)
    assert coloured.startswith("\x1b[31mfailed  \x1b[0mlabels")


@pytest.mark.parametrize("name", ["lables", "Disk", ""])
def test_a_name_that_is_no_check_cannot_be_allowed(tmp_path: Path, name: str) -> None:
    (tmp_path / "params.yaml").write_text(f"doctor: {{allow: ['{name}']}}\n")
    with pytest.raises(ParamsError, match=r"doctor.allow: .* is no check; known: packages, "):
        doctor.site_of(tmp_path)


def test_checks_call_themselves_what_the_table_calls_them(tmp_path: Path) -> None:
    """Or doctor.allow would not find them."""
    (tmp_path / "params.yaml").write_text("learner: {device: cpu}\n")
    names = [finding.check for finding in doctor.examine(doctor.site_of(tmp_path))]
    assert names == list(doctor.CHECKS)


# -- versions -------------------------------------------------------------------------------------------------


def having(row: KnownGood, build: str = "", **changes: str | None) -> Callable[[str], str | None]:
    found: dict[str, str | None] = {**row.packages}
    found["torch"] = f"{found['torch']}{build}"
    found |= {name.replace("_", "-"): version for name, version in changes.items()}
    return found.get


@pytest.mark.parametrize("row", [CPU, GPU])
def test_the_table_is_what_the_lock_files_pin(root: Path, row: KnownGood) -> None:
    names = ["constraints-cpu.txt"] if row is CPU else ["gpu-engine.lock", "gpu-pipeline.lock"]
    text = "\n".join((root / "docker" / name).read_text() for name in names)
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;+]+)", text, re.MULTILINE))
    locked = {name: pins[name] for name in row.packages if name in pins}
    assert locked == {name: row.packages[name] for name in locked}
    assert row.packages.keys() - locked.keys() <= {"torch"}  # the GPU host's engine brings its own


def test_both_rows_are_green(tmp_path: Path) -> None:
    for row, build in ((CPU, "+cpu"), (GPU, "+cu130")):
        found = versions.packages(site(tmp_path), having(row, build), f"{row.python}.1")
        assert (found.outcome, f"{row.name} row" in found.detail) == ("ok", True), found


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"transformers": "5.24.3"}, "ok"),  # a patch release
        ({"transformers": "5.18.0"}, "ok"),  # between the rows
        ({"transformers": "5.11.9"}, "failed"),
        ({"transformers": "5.25.0"}, "failed"),
        ({"torch": "2.10.0+cpu"}, "failed"),
        ({"mlflow": None}, "failed"),
        ({"peft": None, "megatron_core": None}, "ok"),  # not asked for
    ],
)
def test_versions_beside_the_table_are_named_with_the_pin(
    tmp_path: Path, changes: dict[str, str | None], outcome: str
) -> None:
    found = versions.packages(site(tmp_path), having(CPU, "+cpu", **changes), "3.11.7")
    assert found.outcome == outcome, found
    if outcome == "failed":
        (name,) = changes
        assert name in found.detail
        assert found.fix == f"pip install '{name}=={CPU.packages[name]}'"


@pytest.mark.parametrize(
    ("params", "package"),
    [
        ({"sampler": {"backend": "sglang"}}, "sglang"),
        ({"learner": {"backend": "megatron"}}, "megatron-core"),
    ],
)
def test_what_params_ask_for_must_be_installed(
    tmp_path: Path, params: dict[str, object], package: str
) -> None:
    absent = {package.replace("-", "_"): None}
    found = versions.packages(site(tmp_path, **params), having(GPU, "+cu130", **absent), "3.12.0")
    assert found.outcome == "failed"
    assert f"{package} is not installed" in found.detail
    assert (
        versions.packages(site(tmp_path), having(GPU, "+cu130", **absent), "3.12.0").outcome == "ok"
    )


@pytest.mark.parametrize("python", ["3.10.14", "3.13.0", "3.1.1"])
def test_another_python_is_red(tmp_path: Path, python: str) -> None:
    found = versions.packages(site(tmp_path), having(CPU, "+cpu"), python)
    assert found.detail == f"Python {python} (known good: 3.11, 3.12)"
    assert found.fix == "make .venv with Python 3.11"


@pytest.mark.parametrize(
    ("torch", "package", "cudnn", "outcome"),
    [
        ("2.9.0+cu129", "nvidia-cudnn-cu12", "9.10.2.21", "failed"),
        ("2.9.1+cu130", "nvidia-cudnn-cu13", "9.15.1.9", "failed"),
        ("2.9.1", "nvidia-cudnn-cu12", "9.1.0.70", "failed"),
        ("2.9.1+cu130", "nvidia-cudnn-cu13", None, "failed"),
        ("2.9.1+cu130", "nvidia-cudnn-cu13", "9.16.0.29", "ok"),
        ("2.9.1+cu130", "nvidia-cudnn-cu13", "10.0.0.1", "ok"),
        ("2.11.0+cu130", "nvidia-cudnn-cu13", "9.10.2.21", "ok"),
        ("2.90.0+cu130", "nvidia-cudnn-cu13", "9.10.2.21", "ok"),
        ("2.9.0+cpu", "nvidia-cudnn-cu13", None, "skipped"),
        (None, "nvidia-cudnn-cu13", None, "skipped"),
    ],
)
def test_the_slow_conv3d_of_torch_2_9_is_told_with_its_fix(
    tmp_path: Path, torch: str | None, package: str, cudnn: str | None, outcome: str
) -> None:
    """pytorch#168167."""
    found = versions.cudnn(site(tmp_path), {"torch": torch, package: cudnn}.get)
    assert found.outcome == outcome, found
    if outcome == "failed":
        assert "conv3d" in found.detail
        assert ">=9.16.0.29" in found.fix


# -- the machine ----------------------------------------------------------------------------------------------

H200 = Gpu("NVIDIA H200", 143_000, 142_000)
GANG = {
    "learner": {"num_processes": 16},
    "train": {"launcher": "slurm", "work_uri": "/shared/work", "launch": {"num_nodes": 2}},
}


@pytest.mark.parametrize(
    ("params", "found", "outcome", "text"),
    [
        ({"learner": {"device": "cpu"}}, [], "skipped", "learner.device is cpu"),
        ({}, [], "skipped", "there is none"),
        ({"learner": {"device": "cuda"}}, [], "failed", "nvidia-smi shows no GPU"),
        ({}, [H200], "ok", "1 x NVIDIA H200, 139 of 140 GiB free"),
        ({"learner": {"num_processes": 2}}, [H200], "failed", "params ask for 2 GPUs, 1 are here"),
        (
            {"sampler": {"backend": "sglang", "sglang": {"gpu_offset": 1, "num_servers": 2}}},
            [H200] * 2, "failed", "ask for 3 GPUs",
        ),
        ({}, [Gpu("X", 100_000, 49_000)], "failed", "GPU 0 has 48 of 98 GiB free"),
        ({}, [H200, Gpu("X", 100_000, 49_000)], "ok", "2 x NVIDIA H200"),  # the other is not used
        ({}, [Gpu("NVIDIA GB10", None, None)], "ok", "1 x NVIDIA GB10, memory shared with the host"),
        (GANG, [H200] * 8, "ok", "8 x NVIDIA H200"),  # those of one of its two hosts
        (GANG, [H200] * 4, "failed", "params ask for 8 GPUs, 4 are here"),
    ],
)  # fmt: skip
def test_gpus_are_counted_and_free(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, object],
    found: list[Gpu],
    outcome: str,
    text: str,
) -> None:
    monkeypatch.setattr(machine, "has_cuda_build", lambda: True)
    finding = machine.gpus(site(tmp_path, **params), lambda: found)
    assert finding.outcome == outcome, finding
    assert text in finding.detail
    assert bool(finding.fix) == (outcome == "failed")


def test_what_nvidia_smi_cannot_say_is_no_missing_gpu() -> None:
    """llamastash/llamastash#60: GPUs with the host's memory (GB10, Jetson) have [N/A] where others have MiB."""
    table = "GPU-1, [N/A], [N/A], NVIDIA GB10\nGPU-2, 143000, 142000, NVIDIA H200, SXM\nNo devices were found\n"
    assert machine.read_gpus(table) == [
        Gpu("NVIDIA GB10", None, None, "GPU-1"),
        Gpu("NVIDIA H200, SXM", 143_000, 142_000, "GPU-2"),
    ]
    assert machine.read_gpus("") == []


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, "abc"),
        ("", ""),
        ("2,0", "ca"),
        ("1, 7, 0", "b"),  # as CUDA: nothing behind one that there is not
        ("-1", ""),
        ("GPU-b,GPU-a", "ba"),
        ("MIG-0a1b", ["a MIG device"]),
    ],
)
def test_the_gpus_of_a_process_are_those_that_its_environment_names(
    chosen: str | None, names: str | list[str]
) -> None:
    found = [Gpu(name, 1, 1, f"GPU-{name}{name}") for name in "abc"]
    assert [gpu.name for gpu in machine.visible(found, chosen)] == list(names)


def test_gpus_under_a_cpu_build_of_torch_are_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_cuda_build", lambda: False)
    finding = machine.gpus(site(tmp_path), lambda: [H200])
    assert (finding.outcome, "CPU build" in finding.detail) == ("failed", True)


def weights(root: Path, num_bytes: int) -> None:
    (root / layout.WARMSTART).mkdir(parents=True)
    with (root / layout.WARMSTART / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)  # sparse


def test_what_will_be_written_is_counted_from_the_weights(tmp_path: Path) -> None:
    """1 GB of float32 weights: checkpoints of 3 GB and candidates of 1 GB, three of each, and two published copies."""
    weights(tmp_path, 10**9)
    found = machine.disk(site(tmp_path, doctor={"min_free_gb": 0}, train={"keep_checkpoints": 2}))
    assert "about 14.0 GB will be written" in found.detail


def test_a_disk_that_is_too_small_is_red_before_it_is_full(tmp_path: Path) -> None:
    assert machine.disk(site(tmp_path)).outcome == "ok"
    assert "no model yet" in machine.disk(site(tmp_path)).detail
    weights(tmp_path, 10**13)
    found = machine.disk(site(tmp_path))
    assert found.outcome == "failed"
    assert "GB will be written and doctor.min_free_gb is 1" in found.detail
    assert "train.work_uri" in found.fix


# -- services -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server with the bucket `team`."""
    with s3.serving("team") as url:
        yield url


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment."""
    for name, value in s3.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("params", "outcome", "text"),
    [
        ({}, "skipped", "no s3:// address"),
        ({"train": {"work_uri": "s3://team/work"}}, "ok", "put, get and delete in s3://team/work"),
        ({"storage": {"url": "s3://team/dvc"}}, "ok", "s3://team/dvc"),
        ({"storage": {"url": "s3://nowhere/dvc"}}, "failed", "storage.url s3://nowhere/dvc: "),
        ({"train": {"work_uri": "s3://nowhere"}}, "failed", "train.work_uri s3://nowhere: "),
        ({"tracking": {"artifact_location": "s3://nowhere"}}, "failed", "tracking.artifact_location s3:"),
    ],
)  # fmt: skip
def test_buckets_are_tried(  # noqa: PLR0917
    tmp_path: Path,
    server: str,
    credentials: None,
    monkeypatch: pytest.MonkeyPatch,
    params: Mapping[str, Mapping[str, object]],
    outcome: str,
    text: str,
) -> None:
    """PIPE-10: put, get, delete; nothing is left behind."""
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", server)
    storage = {**params.get("storage", {}), "endpoint_url": server}
    finding = services.buckets(site(tmp_path, **{**params, "storage": storage}))
    assert finding.outcome == outcome, finding
    assert text in finding.detail
    assert Objects("s3://team", endpoint_url=server).names() == []


def test_a_dead_endpoint_and_missing_keys_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PIPE-10, PIPE-12."""
    storage = {"url": "s3://team/x", "endpoint_url": "http://127.0.0.1:9"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    assert (
        "AWS_SECRET_ACCESS_KEY is not set"
        in services.buckets(site(tmp_path, storage=storage)).detail
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    finding = services.buckets(site(tmp_path, storage=storage, tracking={"timeout_s": 2}))
    assert (finding.outcome, "127.0.0.1:9 cannot be reached" in finding.detail) == ("failed", True)


def test_a_store_without_conditional_writes_cannot_hold_leases(
    tmp_path: Path, server: str, credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Objects, "put_new", Objects.put)
    storage = {"url": "s3://team/x", "endpoint_url": server}
    finding = services.buckets(site(tmp_path, storage=storage))
    assert (finding.outcome, "ignores If-None-Match" in finding.detail) == ("failed", True)


@contextmanager
def answering(code: int, body: bytes = b'"3.9.1"') -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code if self.path == "/api/admin/version" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/api"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [(200, "ok", "version 3.9.1"), (401, "failed", "answers 401"), (404, "failed", "answers 404")],
)
def test_prefect_is_asked_where_the_environment_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, outcome: str, text: str
) -> None:
    with answering(code) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        finding = services.prefect(site(tmp_path))
    assert (finding.outcome, text in finding.detail) == (outcome, True), finding
    finding = services.prefect(site(tmp_path, tracking={"timeout_s": 2}))
    assert (finding.outcome, "does not answer" in finding.detail) == ("failed", True)
    monkeypatch.delenv("PREFECT_API_URL")
    assert services.prefect(site(tmp_path)).outcome == "skipped"


def test_a_tracking_store_that_cannot_be_used_is_red(tmp_path: Path) -> None:
    assert services.mlflow(site(tmp_path)).outcome == "ok"
    assert list(tmp_path.iterdir()) == [], "looking makes no database"
    dead = {"uri": "http://127.0.0.1:9", "timeout_s": 2}
    finding = services.mlflow(site(tmp_path, tracking=dead))
    assert (finding.outcome, "http://127.0.0.1:9" in finding.detail) == ("failed", True)
    (tmp_path / "file").write_text("")
    finding = services.mlflow(site(tmp_path, tracking={"uri": f"sqlite:///{tmp_path}/file/x.db"}))
    assert finding.outcome == "failed"


def test_nothing_registered_is_nothing_lost(tmp_path: Path) -> None:
    assert services.champion(site(tmp_path)).outcome == "skipped"
    tracking = TrackingParams()
    store.connect(tracking, tmp_path).client.create_registered_model("another")
    finding = services.champion(site(tmp_path))
    assert (finding.outcome, "no model polyturn-geo3k" in finding.detail) == ("skipped", True)


# -- data and model -------------------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_ONLY = PLAIN.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}"
)
NUMBERED = "{{ messages|length }}" + PLAIN
STRIPS = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n') }}",
)
NO_END = PLAIN.replace("<|im_end|>", "")
# What transformers gives a template beside jinja's own: marks for training masks (TRL, llama-cpp-python#2082), `break`
# and `continue`, and today's date.
MARKED = PLAIN.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
LOOPED = PLAIN.replace("{% endfor %}", "{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}")
DATED = "{{ strftime_now('%Y') }}" + PLAIN


@pytest.mark.parametrize(
    ("template", "outcome", "text"),
    [
        (PLAIN, "ok", "keeps its beginning"),
        (STRIPS, "ok", "strips earlier thoughts"),
        (LAST_ONLY, "failed", "with message 3 what was 'first"),
        (NUMBERED, "failed", "with message 3 what was '2<|im_start|>user"),
        (MARKED, "ok", "keeps its beginning"),
        (LOOPED, "ok", "keeps its beginning"),
        (DATED, "ok", "keeps its beginning"),
        (NO_END, "failed", "does not end a reply with <|im_end|>"),
        ("{{ raise_exception('no tools') }}", "failed", "cannot be rendered: no tools"),
        ("{% if %}", "failed", "cannot be rendered"),
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_red(
    tmp_path: Path, template: str, outcome: str, text: str
) -> None:
    (tmp_path / layout.BASE_MODEL).mkdir(parents=True)
    (tmp_path / layout.BASE_MODEL / "chat_template.jinja").write_text(template)
    finding = model.chat_template(site(tmp_path))
    assert (finding.outcome, text in finding.detail) == (outcome, True), finding
    assert bool(finding.fix) == (outcome == "failed")


def test_the_template_of_the_small_model_and_of_older_files_is_read(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    assert model.chat_template(site(tmp_path, model={"path": "given"})).outcome == "skipped"
    (given / "tokenizer_config.json").write_text(json.dumps({"chat_template": NUMBERED}))
    assert model.chat_template(site(tmp_path, model={"path": str(given)})).outcome == "failed"
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": NUMBERED}]
    (given / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert model.chat_template(site(tmp_path, model={"path": str(given)})).outcome == "ok"
    (given / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert model.chat_template(site(tmp_path, model={"path": str(given)})).outcome == "ok"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}


@pytest.mark.parametrize(
    ("config", "asked", "outcome"),
    [
        ({"text_config": {"max_position_embeddings": 1000}}, 1000, "ok"),
        ({"text_config": {"max_position_embeddings": 1000}}, 1001, "failed"),
        ({"max_position_embeddings": 1000}, 1001, "failed"),
        ({"max_position_embeddings": 1000, "rope_scaling": YARN}, 4000, "ok"),
        ({"max_position_embeddings": 4000, "rope_scaling": YARN}, 4001, "failed"),
        ({"max_position_embeddings": 1000, "rope_parameters": {"factor": 2}}, 2000, "ok"),
        ({"text_config": {}}, 2000, "skipped"),
        (
            {"max_position_embeddings": 1000, "rope_scaling": {"mrope_section": [1, 2]}},
            1001,
            "failed",
        ),
    ],
)
def test_trajectories_longer_than_the_model_knows_are_red(
    tmp_path: Path, config: object, asked: int, outcome: str
) -> None:
    """verl-project/verl#1873: prompt and reply together beyond max_position_embeddings."""
    rollout = {"max_context_tokens": asked}
    given = site(tmp_path, model={"path": str(tmp_path / "given")}, rollout=rollout)
    assert model.context(given).outcome == "skipped"
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    assert model.context(given).outcome == outcome
    small = site(tmp_path, model={"max_positions": 1000}, rollout=rollout)
    assert model.context(small).outcome == ("ok" if asked <= 1000 else "failed")


def problems(root: Path, *answers: str) -> None:
    (root / layout.PROBLEMS).mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"id": f"r{i}", "answer": answer}) for i, answer in enumerate(answers)]
    (root / layout.PROBLEMS / "problems.jsonl").write_text("\n".join(rows) + "\n")


def test_a_line_separator_in_a_row_is_no_end_of_it(tmp_path: Path) -> None:
    (tmp_path / layout.PROBLEMS).mkdir(parents=True)
    row = {"id": "r\u2028\x85", "answer": "5", "problem": "a\u2029b"}
    path = tmp_path / layout.PROBLEMS / "problems.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
    assert model.labels(site(tmp_path)).outcome == "ok"
    assert list(data._read_lines(path)) == [row], "nor in the report"


def test_labels_that_no_reply_can_match_are_red(tmp_path: Path) -> None:
    assert model.labels(site(tmp_path)).outcome == "skipped"
    problems(tmp_path, "3", r"2\sqrt{3}", "B")
    assert model.labels(site(tmp_path)).detail == "3 of 3 looked at, all can be parsed"
    problems(tmp_path, *["3"] * 999)
    assert model.labels(site(tmp_path)).detail == "500 of 999 looked at, all can be parsed"
    problems(tmp_path, "3", "", "2 +")
    finding = model.labels(site(tmp_path))
    assert finding.outcome == "failed"
    assert finding.detail.startswith("2 of 3 cannot be parsed: r1: '', r2: '2 +'")


def test_the_probe_of_sight_needs_the_pictures_that_problems_name(tmp_path: Path) -> None:
    """`dvc repro images` with other data takes away those of the problems that an earlier run has left."""
    assert model.blind_model(site(tmp_path)).outcome == "skipped"
    policy_model.save(tiny.qwen3(), tmp_path / layout.POLICY)
    (problem,) = tiny.problems(1)
    write_jsonl(tmp_path / layout.PROBLEMS / "problems.jsonl", [problem_row(problem)])
    finding = model.blind_model(site(tmp_path))
    assert (finding.outcome, finding.fix) == ("failed", "`dvc repro model` makes it anew")
    assert "names a picture that is not there any more" in finding.detail
    assert problem.images[0].sha256 in finding.detail


# -- the command, and the start of training -------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with params.yaml and one label that cannot be parsed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / "params.yaml").write_text("learner: {device: cpu}\n")
    problems(tmp_path, "3", "")
    return tmp_path


def test_the_exit_code_says_whether_a_run_may_start(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "failed  labels         1 of 2 cannot be parsed: r1: ''" in shown
    assert len([line for line in shown if not line.startswith("   ")]) == len(doctor.CHECKS)
    (checkout / "params.yaml").write_text("learner: {device: cpu}\ndoctor: {allow: [labels]}\n")
    assert cli.main(["doctor"]) == 0
    assert "allowed labels" in capsys.readouterr().out
    (checkout / "params.yaml").write_text("doctor: {allow: [nothing]}\n")
    assert cli.main(["doctor"]) == 2


def test_training_does_not_start_under_a_red_line(
    checkout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(preflight.PreflightError) as raised:
        preflight.check()
    lines = str(raised.value).splitlines()
    assert lines[1] == "failed  labels  1 of 2 cannot be parsed: r1: ''"
    assert lines[2].strip().startswith("fix: `polyturn grade`")
    assert lines[-1] == "mend it, or name the check in doctor.allow"
    assert len(lines) == 4, "only what is red"
    (checkout / "params.yaml").write_text("learner: {device: cpu}\ndoctor: {allow: [labels]}\n")
    preflight.check()
    assert "preflight: allowed labels  1 of 2" in caplog.text
    problems(checkout, "3")
    caplog.clear()
    preflight.check()
    assert caplog.text == ""


def test_a_server_that_does_not_answer_is_worth_a_retry_and_what_is_wrong_here_is_not(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(preflight.PreflightError) as both:
        preflight.check()
    assert failure.explain(both.value).exit_code == failure.USER_ERROR, "the label stays wrong"
    problems(checkout, "3")
    with pytest.raises(preflight.NoAnswerError) as away:
        preflight.check()
    outcome = failure.explain(away.value)
    assert outcome.exit_code == failure.FAILURE
    assert "PREFECT_API_URL http://127.0.0.1:9/api does not answer" in outcome.message


def test_a_preflight_that_cannot_run_is_told(checkout: Path) -> None:
    (checkout / "params.yaml").write_text("sead: 1\n")
    with pytest.raises(ParamsError, match="sead is not a key"):
        preflight.check()
