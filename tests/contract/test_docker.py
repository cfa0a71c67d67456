"""docker/ and docs/ci as far as they can be checked without a Docker daemon: syntax, addresses, secrets, what is copied."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.templating import find_placeholders

from polyturn.cli.commands import build_parser

BIN = Path(sys.executable).parent
Compose = Mapping[str, Any]


@pytest.fixture(scope="module")
def compose(root: Path) -> Compose:
    return yaml.safe_load((root / "docker/compose.yaml").read_text())


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_dockerfiles_pass_the_linter(root: Path, name: str) -> None:
    done = subprocess.run([BIN / "hadolint", root / f"docker/{name}.Dockerfile"], capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("vendor.compose-spec", "docker/compose.yaml"),
        ("vendor.github-workflows", "docs/ci/params.yaml"),
    ],
)
def test_files_follow_their_schema_and_a_wrong_key_would_be_seen(
    root: Path, tmp_path: Path, schema: str, file: str
) -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", schema]
    assert subprocess.run([*command, root / file], capture_output=True, check=False).returncode == 0
    broken = tmp_path / "broken.yaml"
    broken.write_text((root / file).read_text() + "\nimagee: 1\n")
    assert subprocess.run([*command, broken], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_what_an_image_copies_is_let_through_by_dockerignore(root: Path, name: str) -> None:
    allowed = {
        line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    text = (root / f"docker/{name}.Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]  # fmt: skip
    assert copied
    for path in copied:
        assert path in allowed
        assert (root / path).is_file()


def test_the_gpu_image_keeps_the_torch_of_a_tested_engine_for_cuda_13(root: Path) -> None:
    text = (root / "docker/gpu.Dockerfile").read_text()
    tag = re.search(r"^ARG SGLANG_IMAGE_TAG=(\S+)$", text, re.MULTILINE)
    assert tag
    assert tag[1].endswith("-cu130")
    assert tag[1].removeprefix("v").removesuffix("-cu130") in (root / "docs/gpu.md").read_text()
    assert "--constraint constraints-engine.txt" in text
    assert "assert torch.__version__ ==" in text


def texts(node: object) -> Iterator[str]:
    """Every string below a node of YAML."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield str(key)
            yield from texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)
    elif node is not None:
        yield str(node)


def test_secrets_come_from_files_or_the_environment(root: Path, compose: Compose) -> None:
    named = {
        key: value
        for service in compose["services"].values()
        for key, value in (service.get("environment") or {}).items()
    }
    for key, value in named.items():
        if re.search("PASSWORD|SECRET|ACCESS_KEY", key):
            assert re.fullmatch(r"\$\{\w+:[?-][^}]*\}|/run/secrets/\w+", str(value)), key
    ignored = (root / ".gitignore").read_text().splitlines()
    assert {"/docker/.env", "/docker/secrets/"} <= set(ignored)
    assert compose["secrets"]["postgres_password"]["file"].startswith("./secrets/")


def test_every_variable_of_compose_is_explained_in_the_example(
    root: Path, compose: Compose
) -> None:
    used = {name for text in texts(compose) for name in re.findall(r"(?<!\$)\$\{(\w+)", text)}
    example = (root / "docker/env.example").read_text()
    explained = set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    assert used == explained - {"COMPOSE_PROFILES"}


@pytest.mark.parametrize("name", ["mlflow", "mlflow-auth"])
def test_mlflow_knows_its_hosts_and_its_health_check_calls_it_by_the_workers_name(
    compose: Compose, name: str
) -> None:
    service = compose["services"][name]
    command = " ".join(service["command"])
    assert ("--app-name basic-auth" in command) == (name == "mlflow-auth")
    for option in ("--workers 1", "--allowed-hosts", "--no-serve-artifacts", "--default-artifact-root s3://"):  # fmt: skip
        assert option in command
    worker = compose["services"]["cpu-worker"]["environment"]
    host = worker["POLYTURN_TRACKING_URI"].removeprefix("http://")
    assert host in service["environment"]["MLFLOW_HOSTS"]
    assert host in service["healthcheck"]["test"]
    assert not any("health" in part and "healthy.py" not in part for part in service["healthcheck"]["test"])  # fmt: skip


def test_services_wait_for_the_health_of_what_they_need(compose: Compose) -> None:
    services = compose["services"]
    for name, service in services.items():
        for needed, how in (service.get("depends_on") or {}).items():
            wanted = "service_healthy" if "healthcheck" in services[needed] else "service_completed_successfully"  # fmt: skip
            assert how["condition"] == wanted, f"{name} -> {needed}"
            if "profiles" in services[needed]:
                assert how["required"] is False


def test_the_gpu_worker_is_under_a_profile_and_reserves_gpus(compose: Compose) -> None:
    worker = compose["services"]["gpu-worker"]
    assert worker["profiles"] == ["gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", ["docker", "kubernetes"])
def test_templates_of_work_pools_fill_all_their_places(root: Path, name: str) -> None:
    template = json.loads((root / f"docker/work_pools/{name}.json").read_text())
    used = {place.name for place in find_placeholders(template["job_configuration"])}
    known = template["variables"]["properties"]
    assert used == set(known)
    assert known["env"]["default"]["POLYTURN_ROOT"] == "/srv/polyturn"


def test_a_container_brings_the_code_and_becomes_its_command(root: Path, tmp_path: Path) -> None:
    """enter.sh: first start, second start after a push, without the address of the project."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    source, place = tmp_path / "source", tmp_path / "work" / "polyturn"
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "prefect").write_text('#!/bin/sh\necho "$(cat word) $*"\n')
    (programs / "prefect").chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "POLYTURN_ROOT": str(place)}

    def enter(**more: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(root / "docker/enter.sh"), "prefect", "flow-run", "execute"]
        return subprocess.run(command, env={**env, **more}, cwd=tmp_path, capture_output=True, text=True, check=False)  # fmt: skip

    subprocess.run(["git", "init", "-q", "-b", "main", str(source)], check=True)
    for word in ("first", "second"):
        (source / "word").write_text(word)
        subprocess.run([*git, "add", "."], cwd=source, check=True)
        subprocess.run([*git, "commit", "-q", "-m", word], cwd=source, check=True)
        done = enter(POLYTURN_REPOSITORY=str(source))
        assert done.stdout == f"{word} flow-run execute\n", done.stderr
    refused = enter(POLYTURN_REPOSITORY="")
    assert refused.returncode != 0
    assert "POLYTURN_REPOSITORY: the git address of the project" in refused.stderr


def test_the_sample_workflow_calls_commands_that_there_are(root: Path) -> None:
    workflow = yaml.safe_load((root / "docs/ci/params.yaml").read_text())
    scripts = [step["run"] for step in workflow["jobs"]["tiny"]["steps"] if "run" in step]
    calls = [
        line.split("|")[0].split()[1:]
        for script in scripts
        for line in script.splitlines()
        if line.startswith("polyturn ")
    ]
    assert {call[0] for call in calls} == {"plan", "doctor", "compare"}
    for call in calls:
        build_parser().parse_args(call)
