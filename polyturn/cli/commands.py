"""The `polyturn` command; each subcommand imports what it needs, so that --help is fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from polyturn import __version__, environment, login
from polyturn.cli import pipeline as cli_pipeline
from polyturn.cli import registry as cli_registry

_POLICY = "artifacts/policy"  # what evaluate scores unless it is told otherwise
_SPLITS = ("train", "validation", "test")


def build_parser() -> argparse.ArgumentParser:
    """All subcommands and their arguments; `run` is the function that a subcommand calls."""
    parser = argparse.ArgumentParser(
        prog="polyturn", description="Multi-turn reinforcement learning of vision-language models."
    )
    parser.add_argument("--version", action="version", version=f"polyturn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")

    use = command("use", "write a recipe and overrides into params.yaml")
    use.add_argument("recipe", nargs="?", help="an overlay of recipes/, by name; none: list them")
    _add_pairs(use)
    use.set_defaults(run=_use)
    cli_pipeline.add(command)
    report = command("report", "write runs/report.html from the files of this checkout")
    report.set_defaults(run=_report)
    _add_view(command("view", "write a page with trajectories: tokens, pictures, calls, rewards"))
    _add_play(command("play", "be the policy by hand in an environment; needs no model"))
    _add_evaluate(command("evaluate", "score a policy on held-out problems, also without pictures"))
    _add_gc(command("gc", "remove what neither champion, last nor pinned runs need"))
    pin = command("pin", "keep an MLflow run, and what it needs, from `polyturn gc`")
    pin.add_argument("run_id", metavar="RUN_ID")
    pin.add_argument("--remove", action="store_true", help="take the pin away")
    pin.set_defaults(run=_pin)
    fetch = command("fetch-model", "bring a registered policy as a Hugging Face directory")
    fetch.add_argument("name", help="models:/NAME@champion, champion, v3 or NAME/3")
    fetch.add_argument("--out", type=Path, default=Path("runs/model"), help="(%(default)s)")
    fetch.set_defaults(run=_fetch_model)
    stop = command("stop", "end training after this step, with the best policy so far")
    stop.add_argument(
        "target",
        nargs="?",
        default=".",
        metavar="RUN",
        help="a flow run's name, an MLflow run id, or the directory of the checkout or worktree that trains (%(default)s)",
    )
    stop.set_defaults(run=_stop)
    cli_registry.add(command)
    commands.add_parser("grade", help="grade answers (`polyturn grade --help`)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand in the current directory; 2 for what the user has to mend."""
    if arguments is None:
        _reach_plugins()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["grade"]:
        return _grade(given[1:])  # it has options of its own
    chosen = build_parser().parse_args(given)
    login.give_name()
    environment.spare_loopback()
    try:
        return chosen.run(chosen)
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except OSError as error:  # a path that cannot be read or written
        print(
            f"error: {error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        return 130


def _reach_plugins() -> None:
    """Modules of plugins/ and tasks/ are those of the checkout one stands in, as for the stages (`python -m`): the
    installed command has its own directory on Python's path instead."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="pairs",
        help="override a value of params.yaml, such as train.steps=3",
    )


def _add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="RUN",
        help="a run directory (., runs/NAME), a directory of steps, one file, an MLflow run id, a registry alias of "
        "registry.name (champion), MODEL@ALIAS or MODEL/VERSION",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/view.html"), help="(%(default)s)")
    parser.add_argument("--steps", type=int, nargs="+", help="default: evenly spaced ones")
    parser.set_defaults(run=_view)


def _add_play(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--env", help="zoom, geo3k, sokoban, ... or module:attr (the configured one)"
    )
    parser.add_argument("--problem", default="0", help="an id, a number, or generated[:NUMBER]")
    parser.add_argument("--split", default="train", choices=_SPLITS)
    parser.add_argument("--recipe", help="an overlay of recipes/, by name")
    parser.add_argument(
        "--pictures", type=Path, default=Path("runs/play"), help="where they go (%(default)s)"
    )
    _add_pairs(parser)
    parser.set_defaults(run=_play)


def _add_gc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only list it")
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="the last N runs of every stage and of the pipeline stay (tracking.keep_runs)",
    )
    parser.add_argument("--local", action="store_true", help="leave DVC's remote alone")
    parser.set_defaults(run=_gc)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        default=_POLICY,
        help="a Hugging Face directory, or a version of the registry: champion, v3, MODEL/3 (%(default)s)",
    )
    parser.add_argument("--split", default="test", choices=_SPLITS)
    parser.add_argument("--num", type=int, help="the first NUM problems only")
    parser.add_argument("--greedy", action="store_true", help="argmax instead of samples")
    parser.add_argument(
        "--ablate-images",
        action="store_true",
        help="score again with blank pictures in the environment's answers, and compare",
    )
    parser.add_argument(
        "--sealed",
        action="store_true",
        help="score a version of the registry on the sealed part of the test split; each time is counted",
    )
    parser.set_defaults(run=_evaluate)


def _use(chosen: argparse.Namespace) -> int:
    from polyturn.pipeline import workspace

    root = Path.cwd()
    if chosen.recipe is None and not chosen.pairs:
        print("\n".join(workspace.recipe_names(root)))
        return 0
    overrides = workspace.parse_pairs(chosen.pairs)
    plan = workspace.compose(root, recipe=chosen.recipe, overrides=overrides)
    workspace.write_params(root, plan.changes)
    print("params.yaml written; `git diff params.yaml` shows what changed")
    return 0


def _report(chosen: argparse.Namespace) -> int:
    from polyturn.report.write import write_report

    del chosen
    print(write_report(Path.cwd()))
    return 0


def _view(chosen: argparse.Namespace) -> int:
    from polyturn import layout, params
    from polyturn.cli import view

    source = Path(chosen.source)
    name = _brought_back(source) or chosen.source
    if name != chosen.source or not source.exists():
        from polyturn.tracking.locate import locate

        source = locate(name, params.load(layout.PARAMS), Path.cwd())
    print(view.view(source, chosen.out, steps=chosen.steps))
    return 0


def _brought_back(directory: Path) -> str | None:
    """MODEL/VERSION of a runs/NAME: what came back of a worktree, in which trajectories are not."""
    from polyturn import layout
    from polyturn.report.data import read_registered

    if (directory / layout.TRAJECTORIES).is_dir():
        return None
    registered = read_registered(directory)
    return f"{registered['name']}/{registered['version']}" if registered else None


def _play(chosen: argparse.Namespace) -> int:
    from polyturn.cli import play
    from polyturn.cli.terminal import Terminal
    from polyturn.evaluation.pick import pick
    from polyturn.pipeline import workspace
    from polyturn.types import StopReason

    overrides = workspace.parse_pairs(chosen.pairs)
    composed = workspace.compose(Path.cwd(), recipe=chosen.recipe, overrides=overrides).params
    params = play.with_env(composed, chosen.env)
    problem = pick(chosen.problem, params, split=chosen.split)
    terminal = Terminal(chosen.pictures / problem.id.replace("/", "_"))
    terminal.say("a reply is one line, a \\ at its end asks for another; Ctrl-D gives up")
    trajectory = play.play(play.Game(problem, params.env, params.rollout, params.seed), terminal)
    for line in play.outcome_lines(trajectory, play.grade(trajectory, params)):
        terminal.say(line)
    return 1 if trajectory.stop_reason in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT) else 0


def _evaluate(chosen: argparse.Namespace) -> int:
    from polyturn.cli import evaluate as evaluate_cli

    if chosen.sealed:
        from polyturn.cli import sealed

        name = "champion" if chosen.policy == _POLICY else chosen.policy
        print("\n".join(sealed.lines(name)))
        return 0
    request = evaluate_cli.Request(
        policy=chosen.policy,
        split=chosen.split,
        num_problems=chosen.num,
        is_greedy=chosen.greedy,
        is_ablated=chosen.ablate_images,
    )
    print("\n".join(evaluate_cli.run(request)))
    return 0


def _gc(chosen: argparse.Namespace) -> int:
    from polyturn import layout, params
    from polyturn.pipeline import gc

    loaded = params.load(layout.PARAMS)
    keep = loaded.tracking.keep_runs if chosen.keep is None else chosen.keep
    if keep < 0:
        raise ValueError(f"--keep must be at least 0, got {keep}")
    found = gc.plan(Path.cwd(), loaded, keep_last=keep, with_remote=not chosen.local)
    if not chosen.dry_run:
        for item in found.items:
            item.remove()
    print("\n".join(gc.told(found, is_dry=chosen.dry_run)))
    return 0


def _pin(chosen: argparse.Namespace) -> int:
    from polyturn import layout, params
    from polyturn.tracking import needs, store

    connected = store.connect(params.load(layout.PARAMS).tracking, Path.cwd())
    needs.pin(connected, chosen.run_id, is_pinned=not chosen.remove)
    return 0


def _fetch_model(chosen: argparse.Namespace) -> int:
    from polyturn import layout, params
    from polyturn.tracking.fetch_model import fetch_model

    print(fetch_model(chosen.name, chosen.out, params.load(layout.PARAMS), Path.cwd()))
    return 0


def _stop(chosen: argparse.Namespace) -> int:
    from polyturn import layout, params
    from polyturn.training import stop_request

    try:
        where = f"in {stop_request.ask(chosen.target)}"
    except stop_request.NoRunError:
        if Path(chosen.target).is_dir() or not layout.PARAMS.is_file():
            raise
        from polyturn.tracking import stop_tag

        tracking = params.load(layout.PARAMS).tracking
        where = f"{chosen.target} ({stop_tag.ask(chosen.target, tracking, Path.cwd())}), elsewhere"
    print(f"asked the run {where} to end before its next step; the stage then succeeds")
    return 0


def _grade(arguments: Sequence[str]) -> int:
    from polyturn.cli import grading as grading_cli

    return grading_cli.main(arguments)
