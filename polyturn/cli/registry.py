"""The subcommands around the registry (compare, promote, ...): their arguments, and what each calls."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

AddCommand = Callable[[str, str], argparse.ArgumentParser]

_NAMES = "v3, an alias (champion), MODEL@ALIAS, MODEL/3 or an MLflow run id"


def add(command: AddCommand) -> None:
    """Add the subcommands; `command(name, about)` makes a parser for one."""
    _add_compare(command("compare", "compare two versions or runs on the same evaluation set"))
    _add_promote(command("promote", "move the champion alias, by the promotion rule or by hand"))
    card = command("card", "write the run card of a checkout: its runs/card.html and runs/card.md")
    card.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="RUN",
        help="a checkout or worktree, or a runs/NAME, which holds the card of its run (%(default)s)",
    )
    card.set_defaults(run=_card)
    _add_reproduce(command("reproduce", "run a past run again from its record, and compare"))


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help=_NAMES)
    parser.add_argument("second", help="as FIRST; the difference is second minus first")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--out", type=Path, default=Path("runs/compare.html"), help="(%(default)s)")
    parser.add_argument(
        "--problems",
        type=int,
        default=24,
        metavar="N",
        help="shown in each direction of those on which they differ (%(default)s)",
    )
    parser.set_defaults(run=_compare)


def _add_promote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("candidate", nargs="?", help=f"{_NAMES}; default: the challenger")
    parser.add_argument("--to", metavar="VERSION", help="make it champion whatever it scored")
    parser.add_argument("--reason", default="", help="why, with --to")
    parser.add_argument(
        "--sealed",
        action="store_true",
        help="judge by the sealed part of the test split (evaluate.sealed_fraction), which opens it",
    )
    parser.add_argument("--history", action="store_true", help="print every move of an alias")
    parser.set_defaults(run=_promote)


def _add_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_id", metavar="RUN_ID", help="an MLflow run: of a pipeline, or of any of its stages"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the worktree even if all comes out the same"
    )
    parser.set_defaults(run=_reproduce)


def _compare(chosen: argparse.Namespace) -> int:
    from polyturn.cli import compare as compare_cli
    from polyturn.evaluation import compare_text

    request = compare_cli.Request(chosen.first, chosen.second, chosen.out, chosen.problems)
    outcome = compare_cli.run(request, Path.cwd())
    if chosen.markdown:
        print(compare_text.markdown(outcome.found), end="")
    else:
        print("\n".join([*compare_text.lines(outcome.found), "", str(outcome.page)]))
    return 0


def _promote(chosen: argparse.Namespace) -> int:
    from polyturn.cli import promote as promote_cli

    if chosen.history:
        print("\n".join(promote_cli.history(Path.cwd())))
        return 0
    if chosen.to and chosen.candidate:
        raise ValueError("promote takes a candidate for the rule, or --to VERSION --reason TEXT")
    if chosen.to:
        outcome = promote_cli.by_hand(chosen.to, chosen.reason, Path.cwd())
    else:
        outcome = promote_cli.by_rule(chosen.candidate, Path.cwd(), is_sealed=chosen.sealed)
    print("\n".join(outcome.lines))
    return 0 if outcome.is_champion else 1


def _reproduce(chosen: argparse.Namespace) -> int:
    from polyturn import layout, params
    from polyturn.pipeline import reproduce, reproduce_text

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("polyturn").setLevel(logging.INFO)
    root = Path.cwd()
    found = reproduce.run(chosen.run_id, root, keeps_worktree=chosen.keep)
    text = reproduce_text.markdown(found)
    tracking = params.load(root / layout.PARAMS).tracking
    kept = reproduce.publish(found, text, tracking, root)
    print(f"{text}\n{kept}")
    return 0 if found.is_same else 1


def _card(chosen: argparse.Namespace) -> int:
    from polyturn.cli import card as card_cli

    print("\n".join(str(path) for path in card_cli.run(chosen.directory.absolute())))
    return 0
