"""The run card: its numbers by hand, what it says of what is not known, and both forms."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from polyturn import layout
from polyturn.cli import card as card_cli
from polyturn.cli import commands as cli
from polyturn.params import Params
from polyturn.report.card import TrainingRun, build_card, markdown, write_card
from polyturn.report.data import read_run
from polyturn.report.work import Machine, phases
from tests.unit.fake_run import make_run
from tests.unit.policy.test_flops import CONFIG

HISTORY = {
    "perf/rollout_time": {0: 6.0, 1: 2.0},
    "perf/train_time": {0: 1.0, 1: 1.0},
    "perf/eval_time": {0: 4.0},
    "rollout/response_len/mean": {0: 10.0, 1: 15.0},
    "rollout/total_len/mean": {0: 20.0, 1: 30.0},
    "train/num_tokens": {0: 160.0, 1: 40.0},
    "train/train_rollout_logprob_abs_diff": {0: 0.001, 1: 0.003},
    "train/train_rollout_logprob_abs_diff_max": {0: 0.5, 1: 0.25},
}
TAGS = {
    "gpu.model": "NVIDIA H200, NVIDIA H200", "num_processes": "2", "python": "3.12.1", "version.torch": "2.11",
    "mlflow.source.git.commit": "c0ffee" * 6, "git.dirty": "true", "replayable": "True", "weights.sha256": "ab" * 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_run(tmp_path_factory.mktemp("card"))
    (root / layout.POLICY / "config.json").write_text(json.dumps(CONFIG))
    prices = {"train": 36.0, "default": 3.6}
    (root / layout.PARAMS).write_text(yaml.safe_dump({"doctor": {"prices_per_hour": prices}}))
    return root


def table(root: Path, title: str, training: TrainingRun) -> list[list[str]]:
    (part,) = [p for p in build_card(read_run(root), training).parts if p.title == title]
    return [list(row) for row in part.table] or [[f.name, f.value] for f in part.facts]


def test_phases_have_seconds_tokens_operations_and_utilisation_by_hand():
    params = Params.model_validate(
        {"rollout": {"prompts_per_step": 2, "group_size": 2}, "learner": {"freeze_vision": True}}
    )
    machine = Machine("NVIDIA H200", num_processes=2, peak_tflops=1e-9)
    rollout, update, validation = phases(HISTORY, params, CONFIG, machine)
    assert (rollout.seconds, rollout.tokens, rollout.tokens_per_second) == (8.0, 100.0, 12.5)
    # 200 tokens in 8 trajectories of 25: layers 80 each, causal attention 2 x 12.5 x 4, head 40 per sampled token.
    forward = 200 * (80 + 100) + 100 * 40
    assert rollout.tflop == pytest.approx(forward / 1e12)
    assert rollout.utilisation == pytest.approx(forward / 8 / 2000)
    assert (update.tokens, update.tflop) == (200.0, pytest.approx(2 * 3 * forward / 1e12))
    assert (validation.seconds, validation.tokens, validation.utilisation) == (4.0, None, None)


def test_without_a_gpu_or_a_config_what_follows_from_them_is_left_out():
    params = Params()
    on_cpu = phases(HISTORY, params, CONFIG, Machine("", 1, None))
    assert [phase.utilisation for phase in on_cpu] == [None, None, None]
    assert [p.tflop for p in phases(HISTORY, params, None, Machine("", 1, None))] == [None] * 3
    assert phases({}, params, CONFIG, Machine("", 1, None)) == []


def test_costs_are_prices_times_hours_and_gpu_hours_count_every_process(directory: Path):
    rows = dict(table(directory, "Time and cost", TrainingRun("a" * 32, TAGS, HISTORY)))
    # 181.4 s of training at 36 an hour, 191.6 s of the other stages at 3.6.
    assert rows["cost"] == "2.01"
    assert rows["GPU-hours of training"] == f"{2 * 181.4 / 3600:.2f}"


def test_the_gap_is_of_the_logged_steps_and_the_machine_is_the_one_that_trained(directory: Path):
    training = TrainingRun("a" * 32, TAGS, HISTORY)
    gap = dict(table(directory, "Sampler against learner", training))
    assert gap["mean over steps"] == "0.002 nats"
    assert gap["worst token"] == "0.5 nats"
    environment = dict(table(directory, "Environment", training))
    assert environment["machine"] == "NVIDIA H200"
    assert environment["git commit"] == "c0ffeec0ffee, with uncommitted edits"
    assert environment["torch"] == "2.11"


def test_accuracies_carry_their_intervals(directory: Path):
    scores = json.loads((directory / layout.METRICS).read_text())["test"]["policy"]["sampled"]
    rows = table(directory, "Accuracy", TrainingRun("", {}, {}))
    assert rows[0][:3] == ["", "accuracy", "95% interval"]
    (row,) = [r for r in rows if r[0] == "after training, sampled"]
    assert row[1:3] == [
        f"{100 * scores['accuracy']:.1f}%",
        f"{100 * scores['accuracy_low']:.1f}% to {100 * scores['accuracy_high']:.1f}%",
    ]


def test_what_is_not_known_is_said_to_be_so(tmp_path: Path):
    card = build_card(read_run(tmp_path), TrainingRun("", {}, {}))
    assert card.headline == "Not evaluated yet."
    text = markdown(card)
    assert "no times of this training run are known here" in text
    assert "| logprob gap | unknown |" in text


def test_both_forms_are_written_and_say_the_same_numbers(directory: Path):
    html, text = write_card(directory, read_run(directory), TrainingRun("a" * 32, TAGS, HISTORY))
    page, said = html.read_text(), text.read_text()
    assert page.count("<svg") == 2
    for number in ("2.01", "0.002 nats", "polyturn.envs.zoom:build_env"):
        assert number in page
        assert number in said
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_checkout_where_nothing_ran_has_no_card(tmp_path: Path):
    (tmp_path / layout.PARAMS).write_text("seed: 0\n")
    with pytest.raises(ValueError, match="nothing ran here; `dvc repro` first"):
        card_cli.run(tmp_path)
    assert not (tmp_path / layout.REPORT).parent.exists()


def test_what_came_back_of_a_worktree_holds_the_card_of_its_run(directory: Path, tmp_path: Path):
    """`polyturn card runs/NAME`: what it was made of stayed in the worktree."""
    pages = write_card(directory, read_run(directory), TrainingRun("a" * 32, TAGS, HISTORY))
    kept = tmp_path / "runs" / "lr-1e-5"
    kept.mkdir(parents=True)
    for page in pages:
        shutil.copy(page, kept)
    assert card_cli.run(kept) == (kept / "card.html", kept / "card.md")
    assert cli.main(["card", str(kept)]) == 0
