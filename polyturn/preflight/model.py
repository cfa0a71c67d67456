"""What the data and the newest model of a checkout are like: template, positions, labels, whether pictures are seen."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polyturn import layout
from polyturn.data.files import read_jsonl
from polyturn.pipeline.checkout import from_checkout
from polyturn.preflight.finding import Finding, Site
from polyturn.reward import is_gradable

_MODELS = (layout.POLICY, layout.WARMSTART, layout.BASE_MODEL)
_MAX_LABELS = 500  # evenly spaced
_SHOWN = 3
# Two turns with a tool's answer between them, as roles and texts.
_PLAIN = (("user", "question"), ("assistant", "first"), ("user", "observation"), ("assistant", "second"))  # fmt: skip
_THINKING = (
    ("user", "question"), ("assistant", "<think>\nthought\n</think>\n\nfirst"), ("user", "observation"),
    ("assistant", "<think>\nthought\n</think>\n\nsecond"),
)  # fmt: skip
_END = "<|im_end|>"


def chat_template(site: Site) -> Finding:
    """What the template writes for a conversation stays the beginning of what it writes for a longer one.

    Else the tokens that an engine sampled after are not those that are trained on.
    """
    name = "chat template"
    found = next((text for place in _places(site) if (text := _template_in(place))), None)
    if found is None:
        return Finding(name, "skipped", "no model yet: `dvc repro model` makes one")
    try:
        problem = _growth_problem(found, _PLAIN)
        rewrites = _growth_problem(found, _THINKING)
    except TemplateError as error:
        return Finding(name, "failed", f"it cannot be rendered: {error}", "use the checkpoint's own chat_template.jinja")  # fmt: skip
    if problem:
        return Finding(name, "failed", problem, "use the checkpoint's own chat_template.jinja")
    told = "; it strips earlier thoughts, which are trained on as sampled" if rewrites else ""
    return Finding(name, "ok", f"keeps its beginning over turns{told}")


def _growth_problem(template: str, turns: Sequence[tuple[str, str]]) -> str:
    """Where a longer conversation does not begin as the shorter one does; "" if it always does."""
    # What transformers gives templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": str}
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(template)

    def text(count: int) -> str:
        messages = [{"role": role, "content": said} for role, said in turns[:count]]
        return compiled.render(messages=messages, add_generation_prompt=False).rstrip("\n")

    for count in range(2, len(turns)):
        shorter, longer = text(count), text(count + 1)
        if not longer.startswith(shorter):
            place = next(
                i for i, (a, b) in enumerate(zip(shorter, longer + "\0", strict=False)) if a != b
            )
            return (
                f"with message {count + 1} what was {shorter[place : place + 30]!r} becomes "
                f"{longer[place : place + 30]!r}"
            )
    if turns is _PLAIN and f"second{_END}" not in text(len(turns)):
        return f"it does not end a reply with {_END}"
    return ""


class _Generation(Extension):
    """`{% generation %}` marks for training what the assistant says (transformers, TRL); it is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 wants a set)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _template_in(directory: Path) -> str | None:
    if (path := directory / "chat_template.jinja").is_file():
        return path.read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (path := directory / name).is_file():
            found = json.loads(path.read_text()).get("chat_template")
            if isinstance(found, list):  # named ones
                found = {item["name"]: item["template"] for item in found}.get("default")
            if isinstance(found, str):
                return found
    return None


def _places(site: Site) -> list[Path]:
    places = [site.root / name for name in _MODELS]
    return [*places, given] if (given := _given(site)) else places


def _given(site: Site) -> Path | None:
    """Where model.path lies, if it may be a directory here."""
    path = site.params.model.path
    return from_checkout(path, site.root) if path and "://" not in path else None


def context(site: Site) -> Finding:
    """A trajectory fits the positions that the model was trained on; beyond them it degrades without a word."""
    name, asked = "context", site.params.rollout.max_context_tokens
    given = site.params.model.path
    if given is None:
        known = site.params.model.max_positions
    else:
        files = (
            place / "config.json"
            for place in (_given(site), site.root / layout.BASE_MODEL)
            if place
        )
        config = next((json.loads(file.read_text()) for file in files if file.is_file()), None)
        if config is None:
            return Finding(name, "skipped", "no model yet: `dvc repro model` makes one")
        text = config.get("text_config", config)
        if "max_position_embeddings" not in text:
            return Finding(name, "skipped", "config.json says no max_position_embeddings")
        known = _num_positions(text)
    told = f"rollout.max_context_tokens is {asked}, the model knows {known} positions"
    if asked > known:
        return Finding(name, "failed", told, "lower rollout.max_context_tokens, or raise model.max_positions of the small model")  # fmt: skip
    return Finding(name, "ok", told)


def _num_positions(config: Mapping[str, Any]) -> int:
    """Of a text model's config; scaled frequencies know more of them."""
    known = int(config["max_position_embeddings"])
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = scaling.get("original_max_position_embeddings", known)
    return max(known, int(original * scaling.get("factor", 1)))


def labels(site: Site) -> Finding:
    """Every reference answer can be parsed, so that a reply can be right."""
    path = next(
        (
            p
            for d in (layout.PROBLEMS, layout.RAW)
            if (p := site.root / d / "problems.jsonl").is_file()
        ),
        None,
    )
    if path is None:
        return Finding("labels", "skipped", "no problems yet: `dvc repro fetch` makes them")
    rows = [cast("Mapping[str, str]", row) for row in read_jsonl(path)]
    chosen = rows[:: max(1, math.ceil(len(rows) / _MAX_LABELS))]
    wrong = [f"{row['id']}: {row['answer']!r}" for row in chosen if not is_gradable(row["answer"])]
    if wrong:
        return Finding("labels", "failed", f"{len(wrong)} of {len(chosen)} cannot be parsed: {', '.join(wrong[:_SHOWN])}", "`polyturn grade` shows how an answer is read; mend the rows and run `dvc repro fetch`")  # fmt: skip
    return Finding("labels", "ok", f"{len(chosen)} of {len(rows)} looked at, all can be parsed")


def blind_model(site: Site) -> Finding:
    """The newest policy says something else when its picture is blank; see polyturn.blind."""
    # Torch is loaded by this check alone: the others answer at once.
    import torch  # noqa: PLC0415

    from polyturn import blind, data  # noqa: PLC0415
    from polyturn.policy import model  # noqa: PLC0415
    from polyturn.render import Renderer  # noqa: PLC0415
    from polyturn.rollout import RolloutSettings  # noqa: PLC0415
    from polyturn.runtime import training_device  # noqa: PLC0415
    from polyturn.sampler.hf import HfSampler  # noqa: PLC0415

    name = "blind model"
    found = [
        directory for directory in _MODELS if (site.root / directory / "config.json").is_file()
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
    except FileNotFoundError as error:  # images ran again, with other data
        return Finding(name, "failed", f"{layout.PROBLEMS} names a picture that is not there any more: {error.filename}", "`dvc repro model` makes it anew")  # fmt: skip
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
