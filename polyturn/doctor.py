"""Preflight: checks of what a run needs, each with a finding in words; a check that breaks is a finding too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyturn import layout, params
from polyturn.params import Params

logger = logging.getLogger(__name__)

Outcome = Literal["ok", "skipped", "failed"]


@dataclass(frozen=True)
class Finding:
    """What a check found, in one line; `fix` says what to do where it failed."""

    check: str
    outcome: Outcome
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Site:
    """What checks look at: the checkout and its params."""

    root: Path
    params: Params


Check = Callable[[Site], Finding]


def blind_model(site: Site) -> Finding:
    """The newest policy says something else when its picture is blank; see polyturn.blind."""
    # Torch is loaded by this check alone: the others answer at once.
    import torch  # noqa: PLC0415

    from polyturn import blind, data, model  # noqa: PLC0415
    from polyturn.render import Renderer  # noqa: PLC0415
    from polyturn.rollout import RolloutSettings  # noqa: PLC0415
    from polyturn.runtime import training_device  # noqa: PLC0415
    from polyturn.sampler.hf import HfSampler  # noqa: PLC0415

    name = "blind model"
    found = [
        directory
        for directory in (layout.POLICY, layout.WARMSTART, layout.BASE_MODEL)
        if (site.root / directory / "config.json").is_file()
    ]
    problems = site.root / layout.PROBLEMS / "problems.jsonl"
    if not found or not problems.is_file():
        return Finding(name, "skipped", "no policy and problems yet: `dvc repro model` makes them")
    policy = model.load(site.params.model, site.root / found[0])
    torch.nn.Module.to(policy.model, training_device(site.params.learner))
    renderer = Renderer(policy)
    sampler = HfSampler(policy, renderer)
    settings = RolloutSettings.of(site.params)
    rows = data.read_problems(problems, site.root / layout.IMAGES)
    try:
        report = asyncio.run(blind.check(rows, sampler, renderer, settings, seed=site.params.seed))
    except blind.BlindModelError as error:
        return Finding(name, "failed", f"{found[0]}: {error}", "see rollout.blind_min_change")
    finally:
        sampler.close()
    if report is None:
        return Finding(name, "skipped", "no problem has a picture, or rollout.blind_problems is 0")
    return Finding(
        name,
        "ok",
        f"{found[0]}: logprobs move by {report.mean_change:.3g} nats when pictures are blank; "
        f"{len(report.pads)} turns with all their features",
    )


CHECKS: Mapping[str, Check] = {"blind model": blind_model}


def examine(root: Path, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Run all checks on a checkout; one that raises has failed with what it raised.

    Raises:
        ParamsError: params.yaml cannot be read.
    """
    site = Site(root, params.load(root / layout.PARAMS))
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


def told(findings: Sequence[Finding]) -> str:
    """The findings as lines for a terminal."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.outcome:<8}{finding.check:<{width}}  {finding.detail}")
        if finding.fix and finding.outcome == "failed":
            lines.append(f"{'':<8}{'':<{width}}  fix: {finding.fix}")
    return "\n".join(lines)


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.outcome != "failed" for finding in findings)
