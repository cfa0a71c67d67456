"""Where each stage's files lie, relative to the checkout; dvc.yaml names the same paths (a test compares them)."""

from pathlib import Path

PARAMS = Path("params.yaml")
DVC_YAML = Path("dvc.yaml")
DVC_LOCK = Path("dvc.lock")

RAW = Path(
    "artifacts/raw"
)  # fetch: problems.jsonl (image sources as written) and pictures/ of local sources
IMAGES = Path(
    "artifacts/images"
)  # images: manifest.parquet, quarantine.jsonl, problems.jsonl, png/<sha256>.png
BASE_MODEL = Path("artifacts/base")  # model: a Hugging Face directory
PROBLEMS = Path("artifacts/problems")  # model: problems.jsonl after data.fit(), quarantine.jsonl
WARMSTART = Path("artifacts/warmstart")  # warmstart: a Hugging Face directory
POLICY = Path("artifacts/policy")  # train: a Hugging Face directory, the published policy
TRAJECTORIES = Path("artifacts/trajectories")  # train: step_%06d.jsonl.gz, no times
CURVE = Path("artifacts/train_curve.csv")  # train: metrics per step, no times
TRAIN_RUN = Path("artifacts/train_run.json")  # train: the MLflow run id
EVALUATION = Path(
    "artifacts/evaluation"
)  # evaluate: results.jsonl, trajectories.jsonl.gz, png/<sha256>.png
METRICS = Path("metrics.json")  # evaluate: no time, run id or path
REGISTERED = Path("registered.json")  # register: name, version, alias

ACCEPTED = Path("accepted.jsonl")  # committed: outputs kept after an edit of their code
STATE = Path(".polyturn")  # untracked: work/, cache/, logs/, worktrees/, timings.jsonl
REPORT = Path("runs/report.html")  # untracked
