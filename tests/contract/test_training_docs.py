"""docs/training.md names keys, metrics, commands and objects that exist, and leaves out none of the loop's switches."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from polyturn.cli import commands as cli
from polyturn.envs.base import load_object
from polyturn.params import parse
from polyturn.params.train import DebugParams, DynamicSamplingParams, StopParams, TrainParams

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
SWITCHES = {
    *DynamicSamplingParams.model_fields,
    *StopParams.model_fields,
    *DebugParams.model_fields,
    "deterministic",
    "eval_every",
    "updates_per_rollout",
    "warn_logprob_gap",
    "max_logprob_gap",
}


def code(page: str) -> set[str]:
    """Everything between backticks, without the value that may follow a key."""
    return {text.partition(": ")[0] for text in re.findall(r"`([^`\n]+)`", page)}


def test_every_switch_of_the_loop_is_explained() -> None:
    assert sorted(SWITCHES - code(PAGE)) == []


def test_the_example_is_valid() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    rules = parse(yaml.safe_load(example)).train.dynamic_sampling
    assert rules != DynamicSamplingParams()
    for path in rules.filters:
        load_object(path, "train.dynamic_sampling.filters")
    for name in re.findall(r"`(?:polyturn\.group_filters)?:(\w+)`", PAGE):
        load_object(f"polyturn.group_filters:{name}", "train.dynamic_sampling.filters")


def test_defaults_that_the_page_states_are_those_of_the_code() -> None:
    params = TrainParams()
    assert f"`warn_logprob_gap` ({params.warn_logprob_gap:g} nats a token)" in PAGE
    assert f"`max_logprob_gap` ({params.max_logprob_gap:g})" in PAGE
    assert (
        f"| `max_rounds`: rounds of sampling in a step | {params.dynamic_sampling.max_rounds} |"
        in PAGE
    )


def test_the_metrics_exist() -> None:
    source = "".join(
        (ROOT / "polyturn/training" / name).read_text() for name in ("collect.py", "checks.py")
    )
    for name in ("train/logprob_gap_alarm", "rollout/dynamic_filter"):
        assert name in PAGE
        assert name in source
    for name in ("rounds", "groups_sampled", "groups_kept", "is_exhausted"):
        assert f"`{name}`" in PAGE or f"/{name}`" in PAGE
        assert f'"{name}"' in source


def test_the_command_exists() -> None:
    assert "`polyturn stop RUN`" in PAGE
    assert cli.build_parser().parse_args(["stop", "abc"]).target == "abc"
