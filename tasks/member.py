"""One host of a training gang other than the first: torchrun's agent of its ranks, which join those of the stage."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from polyturn import layout, params
from polyturn.params.launch import NODE
from polyturn.supported import check_supported
from tasks import failure, place, ranks
from tasks.context import imports_are_done, log_to, signals_end_it

logger = logging.getLogger(__name__)


def main() -> int:
    """Train as the ranks of this host until the stage on the first one ends; exit codes as a stage's."""
    imports_are_done()
    log_to(layout.STATE / "logs" / "train_member.log")
    outcome = failure.Outcome(0, "")
    try:
        with signals_end_it():
            chosen = params.load(layout.PARAMS)
            check_supported(chosen)
            ranks.run_ranks(
                chosen, place.shared_directory(chosen), run_id="", node=int(os.environ[NODE])
            )
    except (
        BaseException
    ) as error:  # the boundary: whatever happened becomes a line and an exit code
        outcome = failure.explain(error)
        logger.debug("member", exc_info=True)
        for line in outcome.message.splitlines():
            logger.error("error: member of train: %s", line)
    return outcome.exit_code


if __name__ == "__main__":
    Path.cwd().joinpath(layout.STATE).mkdir(exist_ok=True)
    sys.exit(main())
