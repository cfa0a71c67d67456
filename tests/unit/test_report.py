"""The report: self-contained, honest about what is absent, and its numbers are those of the files."""

import doctest
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from flows import summary
from polyturn import layout
from polyturn.params import parse
from polyturn.report import charts, details, trajectories
from polyturn.report.card import TrainingRun, write_card
from polyturn.report.charts import Bar, Line, bar_chart, line_chart, ticks
from polyturn.report.data import read_run
from polyturn.report.page import choose
from polyturn.report.trajectories import TokenReader, show, verdict
from polyturn.report.write import write_report
from tasks.evaluate import plans_of
from tests.unit.fake_run import NUM_TEST, make_run


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(run_directory: Path) -> str:
    return write_report(run_directory).read_text()


class Tags(HTMLParser):
    """Collects what a browser would load, and checks that tags close in order."""

    VOID = ("meta", "img", "br", "link", "input", "hr", "rect", "line", "circle", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "srcset")]
        self.loaded += [value or "" for name, value in attrs if tag == "link" and name == "href"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("module", [charts, details, trajectories])
def test_docstring_examples_hold(module: object):
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_the_page_is_well_formed_and_loads_nothing_from_elsewhere(page: str):
    tags = Tags()
    tags.feed(page)
    assert [tag for tag in tags.open if tag not in ("li", "p")] == []
    assert len(tags.loaded) >= 10
    assert all(address.startswith("data:image/png;base64,") for address in tags.loaded)
    assert "<script" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_the_headline_says_both_accuracies_with_intervals(run_directory: Path, page: str):
    blocks = json.loads((run_directory / layout.METRICS).read_text())["test"]
    assert f"{NUM_TEST} held-out problems" in page
    for policy in ("warmstart", "policy"):
        scores = blocks[policy]["sampled"]
        low, high = (f"{100 * scores[key]:.1f}%" for key in ("accuracy_low", "accuracy_high"))
        assert f"{100 * scores['accuracy']:.1f}% ({low} to {high})" in page
    assert re.search(r"On the same problems that is <b>\+\d+\.\d points", page)


def test_everything_of_the_run_is_on_the_page(page: str):
    for text in (
        "polyturn-geo3k version 3",
        "models:/polyturn-geo3k/3",
        "a gain above registry.min_gain 0",
        "http 404 3, too small 1",
        "shared with train 1",
        "2 min 32 s",
        "6 min 13 s",
        f"{4:032x}",
        "artifacts/images",
        "mlflow ui --backend-store-uri sqlite:///mlflow.db",
        "seed 7",
        "pass@2",
        "0.52, 0.7",
    ):
        assert text in page


def test_one_problem_is_shown_before_and_after(run_directory: Path):
    chosen = choose(read_run(run_directory))
    (before, before_label), (after, after_label) = chosen[:2]
    assert before["problem_id"] == after["problem_id"]
    assert (verdict(before), before_label) == ("wrong", "warm start")
    assert (verdict(after), after_label) == ("correct", "after training")
    assert {verdict(entry) for entry, _ in chosen[2:]} == {"correct", "wrong"}
    assert len({id(entry) for entry, _ in chosen}) == len(chosen)


def test_tokens_line_up_with_turns_and_keep_their_probability(run_directory: Path):
    reader = TokenReader(run_directory / layout.POLICY / "tokenizer.json")
    entry = next(e for e in read_run(run_directory).exhibits.after if len(e["turns"]) > 2)
    shown = show(entry, reader)
    for turn, step in zip(entry["turns"], shown.steps, strict=True):
        assert "".join(token.text for token in step.tokens) == turn["text"] + "<|im_end|>"
        assert all(token.is_sampled and token.probability for token in step.tokens)
        assert len(step.tokens) == turn["num_tokens"]
    assert all(token.probability is None for token in shown.prompt_tokens)
    assert "[picture: 9]" in [token.text for token in shown.prompt_tokens]
    assert shown.pictures == [entry["images"][0]["sha256"]]


def test_without_a_tokenizer_ids_are_shown(run_directory: Path):
    entry = read_run(run_directory).exhibits.after[0]
    shown = show(entry, TokenReader(None))
    assert shown.steps[0].tokens[0].text.strip().isdigit()


def test_repeated_looks_share_one_box(run_directory: Path):
    run = read_run(run_directory)
    for entry in (*run.exhibits.before, *run.exhibits.after):
        boxes = show(entry, TokenReader(None)).boxes
        assert len({(box.left, box.top) for box in boxes}) == len(boxes)
        looks = [turn for turn in entry["turns"] if "box" in turn["info"]]
        assert sum(len(box.turns.split()) for box in boxes) == len(looks)


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        (layout.REGISTERED, "not registered yet"),
        (layout.METRICS, "No evaluation yet"),
        (layout.CURVE, "No training curve"),
        (layout.STATE, "No times were recorded"),
        (layout.PROBLEMS, "Accuracy on"),
        (layout.DVC_LOCK, "Accuracy on"),
        (layout.PARAMS, "Accuracy on"),
        (layout.POLICY, "Accuracy on"),
    ],
)
def test_an_absent_part_is_said_to_be_absent(
    run_directory: Path, tmp_path: Path, absent: Path, said: str
):
    root = tmp_path / "copy"
    shutil.copytree(run_directory, root)
    target = root / absent
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    assert said in write_report(root).read_text()


def test_without_an_evaluation_training_trajectories_are_shown(run_directory: Path, tmp_path: Path):
    root = tmp_path / "copy"
    shutil.copytree(run_directory, root)
    shutil.rmtree(root / layout.EVALUATION)
    assert "training problems of steps 0 and 39" in write_report(root).read_text()


def test_scores_without_feedback_stand_beside_those_of_trainings_environment(
    run_directory: Path, tmp_path: Path
):
    root = tmp_path / "copy"
    shutil.copytree(run_directory, root)
    tree = yaml.safe_load((root / layout.PARAMS).read_text())
    tree["env"] = {**tree.get("env", {}), "eval_params": {"oracle": False}}
    (root / layout.PARAMS).write_text(yaml.safe_dump(tree))
    metrics = json.loads((root / layout.METRICS).read_text())
    for name, accuracy in (("warmstart", 0.311), ("policy", 0.877)):
        block = {**metrics["test"][name]["sampled"], "accuracy": accuracy}
        metrics["test"][name]["training_env"] = block
    (root / layout.METRICS).write_text(json.dumps(metrics))
    page = write_report(root).read_text()
    assert "Validation changes the environment of the rewards: oracle: false." in page
    assert page.count("after training, training&#39;s environment") >= 2, "bar and row"
    assert "87.7%" in page
    rows = {row.what: row.value for row in summary.read(root)}
    assert rows["accuracy, training's environment"].startswith("0.311 [")


def test_runs_with_one_environment_say_nothing_of_another(page: str):
    assert "training&#39;s environment" not in page
    assert "Validation changes" not in page


def test_a_second_score_is_taken_only_where_evaluation_changes_the_environment():
    assert list(plans_of(parse({}))) == ["sampled", "greedy"]
    plans = plans_of(parse({"env": {"eval_params": {"oracle": False}}}))
    assert list(plans) == ["sampled", "greedy", "training_env"]
    assert plans["training_env"] == plans["sampled"], "the same seeds"


def test_an_empty_directory_gives_a_page_that_says_so(tmp_path: Path):
    page = write_report(tmp_path).read_text()
    for text in ("No evaluation yet", "No training curve", "No trajectories", "not registered"):
        assert text in page


def test_damaged_files_leave_their_part_out_with_a_warning(
    run_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    root = tmp_path / "copy"
    shutil.copytree(run_directory, root)
    for path in (layout.METRICS, layout.DVC_LOCK, layout.EVALUATION / "trajectories.jsonl.gz"):
        (root / path).write_text("{[")
    write_report(root)
    for name in ("metrics.json", "dvc.lock", "trajectories.jsonl.gz"):
        assert name in caplog.text


SCORED = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "turns_mean": None}


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        (layout.METRICS, {"test": {"policy": {"sampled": {"accuracy": 0.5}}}}, "test.policy.sampled"),
        (layout.METRICS, {"test": {"policy": {"sampled": {**SCORED, "accuracy": None}}}}, "accuracy_low"),
        (layout.METRICS, {"test": {"policy": {"sampled": {**SCORED, "accuracy_low": float("nan")}}}}, "test.policy"),
        (layout.METRICS, {"test": {"policy": {"sampled": SCORED}}}, ""),
        (layout.METRICS, [], "metrics.json is left out"),
        (layout.REGISTERED, {"name": "m"}, "it has no version"),
        (layout.REGISTERED, {"name": "m", "version": 3}, ""),
        (layout.REGISTERED, [1], "registered.json is left out"),
        (layout.TRAIN_RUN, [], "train_run.json is left out"),
        (layout.TRAIN_RUN, {"run_id": 5, "stop_reason": "a signal"}, ""),
        (layout.STATE / "timings.jsonl", 5, "timings.jsonl is left out"),
        (layout.STATE / "timings.jsonl", {"stage": "train", "seconds": None}, ""),
        (layout.CURVE, "step,reward_mean\n0,high\n", "train_curve.csv is left out"),
        (layout.CURVE, "", ""),
        (layout.CURVE, "step,reward_mean,eval_accuracy\n0,nan,0.5\n1,inf,\n", ""),
        (layout.CURVE, "step,reward_mean\n0,0.5\n1\n2,0.5,3,4\n", ""),
        (layout.POLICY / "config.json", [], ""),
    ],
)  # fmt: skip
def test_json_that_is_not_what_polyturn_writes_leaves_its_part_out(
    run_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: Path, content: object, said: str
):  # fmt: skip
    # A checkout of another version, a merge by hand, a stage that was killed: `polyturn report`, `card` and `view`
    # ended with a KeyError (treeverse/dvc#4068: a metrics file of another shape).
    root = tmp_path / "copy"
    shutil.copytree(run_directory, root)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content if isinstance(content, str) else json.dumps(content))
    write_report(root)
    run = read_run(root)
    write_card(root, run, TrainingRun(str(run.train_run.get("run_id", "")), {}, {}))
    assert said in caplog.text


def test_text_of_a_trajectory_cannot_become_markup(run_directory: Path, tmp_path: Path):
    root = tmp_path / "copy"
    shutil.copytree(run_directory, root)
    registered = {"name": "<b>x</b>", "version": 1, "alias": "<i>", "reason": "<script>"}
    (root / layout.REGISTERED).write_text(json.dumps(registered))
    page = write_report(root).read_text()
    assert "<script>" not in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page


def test_a_curve_passes_through_its_points_and_leaves_gaps():
    chart = line_chart([Line("y", [0.0, 1.0, None, 1.0])], size=(344, 142), unit=(0, 1), title="t")
    # 44 px left, 14 right: steps lie at 44 + 286 / 3 * step; 12 px top, 30 bottom: 0 at y 112, 1 at 12.
    assert 'd="M44.0 112.0L139.3 12.0M330.0 12.0"' in chart


def test_sparse_values_become_dots_with_whiskers():
    line = Line("y", [0.5, None, None, 0.7], "b", [0.4, None, None, 0.6], [0.6, None, None, 0.8])
    chart = line_chart([line], size=(344, 300), unit=(0, 1), title="t")
    assert chart.count("<circle") == 2
    assert chart.count('class="stem b"') == 2
    assert 'class="line b"' not in chart


def test_bars_end_at_their_value():
    chart = bar_chart([Bar("policy", 0.5, 0.4, 0.6, "a")], width=454, title="t")
    assert 'width="100.0"' in chart  # 454 less margins 190 and 64 is 200
    assert "policy: 50.0% (40.0% to 60.0%)" in chart


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 84, 8, [0, 20, 40, 60, 80]),
        (-1, 1, 4, [-1, -0.5, 0, 0.5, 1]),
        (0, 2e-5, 4, [0, 5e-6, 1e-5, 1.5e-5, 2e-5]),
        (3, 3, 5, [3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, count: int, expected: list[float]):
    assert ticks(low, high, count) == pytest.approx(expected)


def test_contact_sheets_show_kept_pictures_and_every_reason(run_directory: Path, page: str):
    """48 problems in 24 places: every second one; three reasons before any comes twice."""
    sheets = re.findall(r'<div class="sheet">.*?</figure></div>', page, re.DOTALL)
    assert len(sheets) == 2
    titles = re.findall(r"<b>(.*?)</b>", sheets[0])
    assert len(titles) == 24
    assert [title.split(" = ")[0] for title in titles[:3]] == [f"test/{i:06d}" for i in (0, 2, 4)]
    assert sheets[0].count('src="data:image/png;base64,') == 24
    reasons = [title.split(": ")[1] for title in re.findall(r"<b>(.*?)</b>", sheets[1])]
    assert reasons == ["http_404", "shared_with_train", "too_small", "http_404", "http_404"]
    assert sheets[1].count("no picture") == 5


def test_a_run_without_images_has_no_sheets(run_directory: Path, tmp_path: Path):
    root = tmp_path / "bare"
    shutil.copytree(run_directory, root)
    shutil.rmtree(root / layout.IMAGES)
    assert "the images stage has not run here" in write_report(root).read_text()
    (root / layout.IMAGES).mkdir()
    (root / layout.IMAGES / "problems.jsonl").write_text("damaged")
    assert "the images stage has not run here" in write_report(root).read_text()
