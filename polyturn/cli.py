"""The `polyturn` command; each subcommand imports what it needs, so that --help is fast."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """All subcommands and their arguments."""
    parser = argparse.ArgumentParser(
        prog="polyturn", description="Multi-turn reinforcement learning of vision-language models."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    use = commands.add_parser("use", help="write a recipe and overrides into params.yaml")
    use.add_argument("recipe", nargs="?", help="an overlay of recipes/, by name; none: list them")
    use.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="pairs")
    commands.add_parser(
        "plan", help="say which stages would run again, why, and how long they took"
    )
    commands.add_parser("report", help="write runs/report.html from the files of this checkout")
    view = commands.add_parser(
        "view", help="write a page with trajectories: tokens, pictures, calls"
    )
    view.add_argument(
        "source", type=Path, help="a run directory, a directory of steps, or one file"
    )
    view.add_argument("--out", type=Path, default=Path("runs/view.html"))
    view.add_argument("--steps", type=int, nargs="+", help="default: evenly spaced ones")
    commands.add_parser("grade", help="grade answers (`polyturn grade --help`)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand in the current directory; 2 for what the user has to mend."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["grade"]:
        return _grade(given[1:])  # it has options of its own
    chosen = build_parser().parse_args(given)
    try:
        if chosen.command == "use":
            return _use(chosen.recipe, chosen.pairs)
        if chosen.command == "view":
            return _view(chosen.source, chosen.out, chosen.steps)
        return _plan() if chosen.command == "plan" else _report()
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2


def _use(recipe: str | None, pairs: Sequence[str]) -> int:
    from polyturn import workspace

    root = Path.cwd()
    if recipe is None and not pairs:
        print("\n".join(workspace.recipe_names(root)))
        return 0
    plan = workspace.compose(root, recipe=recipe, overrides=workspace.parse_pairs(pairs))
    workspace.write_params(root, plan.changes)
    print("params.yaml written; `git diff params.yaml` shows what changed")
    return 0


def _plan() -> int:
    from polyturn import layout, params

    params.load(layout.PARAMS)
    code = subprocess.run([sys.executable, "-m", "dvc", "status"], check=False).returncode
    times = _last_times(layout.STATE / "timings.jsonl")
    if times:
        print("\nseconds that each stage took when it last ran:")
        for stage, seconds in times.items():
            print(f"  {stage:<10} {seconds:8.1f}")
    return code


def _last_times(path: Path) -> dict[str, float]:
    if not path.is_file():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["stage"]: record["seconds"] for record in records}


def _report() -> int:
    from polyturn.report.write import write_report

    print(write_report(Path.cwd()))
    return 0


def _view(source: Path, out: Path, steps: Sequence[int] | None) -> int:
    from polyturn import view

    print(view.view(source, out, steps=steps))
    return 0


def _grade(arguments: Sequence[str]) -> int:
    from polyturn import grading_cli

    return grading_cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
