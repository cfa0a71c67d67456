"""Preflight: checks of what a run needs, as one table; what is red stops a run unless doctor.allow names it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyturn import layout, params
from polyturn.preflight import machine, model, services, versions
from polyturn.preflight.finding import Check, Finding, Site

logger = logging.getLogger(__name__)

# At the start of training too: a second or two together. By then its MLflow run is open, and the loop itself probes the
# policy that it trains.
AT_START: Mapping[str, Check] = {
    "packages": versions.packages,
    "cudnn": versions.cudnn,
    "gpu": machine.gpus,
    "disk": machine.disk,
    "s3": services.buckets,
    "prefect": services.prefect,
    "chat template": model.chat_template,
    "context": model.context,
    "labels": model.labels,
}
CHECKS: Mapping[str, Check] = {
    **AT_START,
    "mlflow": services.mlflow,
    "champion": services.champion,
    "blind model": model.blind_model,
}
_GREEN, _RED, _YELLOW, _PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
_COLOURS = {"ok": _GREEN, "failed": _RED, "allowed": _YELLOW, "skipped": ""}


@dataclass(frozen=True)
class StartReport:
    """What is not green at the start of training, as a table; allowed lines are healthy.

    `may_pass`: all that is red may end by itself.
    """

    text: str
    is_healthy: bool
    may_pass: bool


def at_start(root: Path) -> StartReport:
    """The checks that training begins with, on a checkout.

    Raises:
        ParamsError: see `site_of`.
    """
    site = site_of(root)
    allowed = site.params.doctor.allow
    findings = [found for found in examine(site, AT_START) if found.outcome == "failed"]
    may_pass = all(found.may_pass for found in findings if found.check not in allowed)
    return StartReport(told(findings, allowed), is_healthy(findings, allowed), may_pass)


def site_of(root: Path) -> Site:
    """A checkout with its params.

    Raises:
        ParamsError: params.yaml cannot be read, or doctor.allow names no check.
    """
    site = Site(root, params.load(root / layout.PARAMS))
    if unknown := set(site.params.doctor.allow) - set(CHECKS):
        raise params.ParamsError(
            f"doctor.allow: {', '.join(sorted(unknown))} is no check; known: {', '.join(CHECKS)}"
        )
    return site


def examine(site: Site, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Run checks on a checkout; one that raises has failed with what it raised."""
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings.append(check(site))
        except (
            Exception
        ) as error:  # whatever is wrong with this machine is what the doctor is asked for
            logger.debug("%s", name, exc_info=True)
            findings.append(Finding(name, "failed", f"{type(error).__name__}: {error}"))
    return findings


def told(
    findings: Sequence[Finding], allowed: Collection[str] = (), *, with_colour: bool = False
) -> str:
    """The findings as a table for a terminal; a failed one is followed by its fix."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        outcome = _outcome(finding, allowed)
        shown = f"{outcome:<8}"
        if with_colour and _COLOURS[outcome]:
            shown = f"{_COLOURS[outcome]}{shown}{_PLAIN}"
        lines.append(f"{shown}{finding.check:<{width}}  {finding.detail}")
        if finding.fix and finding.outcome == "failed":
            lines.append(f"{'':<8}{'':<{width}}  fix: {finding.fix}")
    return "\n".join(lines)


def is_healthy(findings: Sequence[Finding], allowed: Collection[str] = ()) -> bool:
    """Whether nothing failed that is not allowed to."""
    return all(_outcome(finding, allowed) != "failed" for finding in findings)


def _outcome(finding: Finding, allowed: Collection[str]) -> str:
    is_allowed = finding.outcome == "failed" and finding.check in allowed
    return "allowed" if is_allowed else finding.outcome
