"""The process environment under which every command of the project runs; the one place where it is set."""

from __future__ import annotations

import os
from pathlib import Path

from polyturn import login

# Telemetry off, no bars beside our own, one thread per process (two are slower on the demo's small matrices;
# torch follows learner.num_threads).
SETTINGS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "OMP_NUM_THREADS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# A server that a run has reached once and that is away when it says what became of a stage is waited for: 2 + 4 + ... +
# 256 s, where a restart takes less and Prefect's own 62 s would end the run. What the caller has set goes before.
PREFECT_CLIENT = {"PREFECT_CLIENT_MAX_RETRIES": "8"}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def apply(root: Path | None = None) -> None:
    """Set the environment of this process and its children; `root`, a checkout, also gets Prefect's home and client.

    PREFECT_HOME of the caller is kept: it is an address, which a team may share.
    """
    os.environ.update(SETTINGS)
    login.give_name()
    spare_loopback()
    if root is not None:
        os.environ.setdefault("PREFECT_HOME", str(root.resolve() / ".prefect"))
        for name, value in PREFECT_CLIENT.items():
            os.environ.setdefault(name, value)


def spare_loopback() -> None:
    """Where the caller's environment names a proxy, let this process and its children reach this machine without it.

    Servers that runs start or use here (Prefect's temporary one, SGLang's, MLflow's) are behind no proxy.
    """
    if not any(os.environ.get(name) or os.environ.get(name.lower()) for name in _PROXIES):
        return
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    value = ",".join(dict.fromkeys([*hosts, *_LOOPBACK])) if "*" not in hosts else "*"
    for name in ("NO_PROXY", "no_proxy"):  # each library reads one of them first
        os.environ[name] = value
