"""Stage `model`: the policy before training -> artifacts/base; problems whose prompt fits -> artifacts/problems."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import cast

from polyturn import data, layout
from polyturn.corpus import corpus
from polyturn.data.files import write_jsonl
from polyturn.envs.base import load_object, prompt_tools
from polyturn.params import Params
from polyturn.policy import model, model_source, small_model
from polyturn.render import Renderer, TemplateError
from polyturn.runtime import set_up_torch
from polyturn.seeds import derive
from polyturn.types import Problem
from tasks.context import StageContext, run_stage, write_json

_log = logging.getLogger(__name__)


def body(ctx: StageContext) -> None:
    """Build or load the policy, then set aside what its context cannot hold."""
    set_up_torch(ctx.params)
    problems = data.read_problems(layout.IMAGES / "problems.jsonl", layout.IMAGES)
    policy, source = starting_policy(ctx.params, problems, ctx.work_dir)
    _check_size_multiple(ctx.params, policy)
    kept, set_aside = data.fit(
        problems, _token_counter(ctx.params, policy), ctx.params.model.max_prompt_tokens
    )
    if not any(problem.split == "train" for problem in kept):
        first = f" (the first set aside: {set_aside[0]})" if set_aside else ""
        raise ValueError(
            f"model.max_prompt_tokens {ctx.params.model.max_prompt_tokens} leaves no training problem; "
            f"raise it or lower images.max_pixels{first}"
        )
    model.save(policy, layout.BASE_MODEL)
    write_json(layout.BASE_MODEL / "source.json", source)
    _write_problems(kept, set_aside)
    num_parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    ctx.run.log_metrics(
        {
            "model/num_parameters": num_parameters,
            "model/problems_kept": len(kept),
            "model/problems_set_aside": len(set_aside),
        }
    )
    ctx.run.set_tags({"model.source": source["path"], "model.revision": source["revision"] or ""})
    _log.info(
        "model: %s %s with %d parameters; %d problems, %d set aside",
        source["path"],
        policy.family.model_type,
        num_parameters,
        len(kept),
        len(set_aside),
    )


def starting_policy(
    params: Params, problems: list[Problem], work_dir: Path
) -> tuple[model.Policy, dict[str, str | None]]:
    """The policy and where it came from; the hub's resolved commit is recorded."""
    if params.model.path is None:
        small = params.model.small
        texts = chain(corpus(problems), _own_texts(params))
        tokenizer = small_model.train_tokenizer(texts, small.vocab_size)
        network = small_model.build_model(
            small,
            tokenizer,
            seed=derive(params.seed, "model"),
            max_positions=params.model.max_positions,
        )
        processor = small_model.build_processor(small, tokenizer)
        return model.wrap(network, processor), {"path": "built here", "revision": None}
    directory, revision = model_source.resolve(
        params.model, work_dir, endpoint_url=params.storage.endpoint_url
    )
    return model.load(params.model, directory), {"path": params.model.path, "revision": revision}


def _own_texts(params: Params) -> Iterable[str]:
    path = params.model.small.texts
    return cast("Iterable[str]", load_object(path, "model.small.texts")()) if path else ()


def _check_size_multiple(params: Params, policy: model.Policy) -> None:
    wanted = policy.family.size_multiple
    if params.images.size_multiple % wanted:
        raise ValueError(
            f"images.size_multiple must be a multiple of {wanted} (patch size x merge size) for this "
            f"{policy.family.model_type}, got {params.images.size_multiple}"
        )


def _token_counter(params: Params, policy: model.Policy) -> Callable[[Problem], int]:
    renderer = Renderer(policy)
    builder = load_object(params.env.build, "env.build")

    def count(problem: Problem) -> int:
        tools = prompt_tools(builder, params.env, problem)
        try:
            return len(renderer.prompt(problem.messages, tools).token_ids)
        except TemplateError as error:  # such as a text that spells an image token
            raise data.RowError("unrenderable", str(error)) from None

    return count


def _write_problems(kept: list[Problem], set_aside: list[data.SetAside]) -> None:
    shutil.rmtree(layout.PROBLEMS, ignore_errors=True)
    write_jsonl(layout.PROBLEMS / "problems.jsonl", (data.problem_row(problem) for problem in kept))
    data.write_quarantine(layout.PROBLEMS / "quarantine.jsonl", set_aside)


if __name__ == "__main__":
    run_stage("model", body)
