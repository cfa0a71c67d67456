"""The child process of symbolic.py: reads one JSON request per line, answers one JSON line; run as a script.

It leaves by itself when its parent is gone (end of input), when a comparison outlasts its limit, or when it needs
too much memory.
"""

import faulthandler
import json
import logging
import os
import resource
import sys

MAX_MEMORY = 4 * 1024**3  # bytes of address space
GRACE_S = 1.0  # the parent kills at the limit; a child without parent ends itself this much later


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    logging.disable(logging.CRITICAL)
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # noqa: PLC0415  takes a second

    targets = (LatexExtractionConfig(), ExprExtractionConfig())
    print("ready", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["limit_s"] + GRACE_S, exit=True)
        try:
            reference = parse(request["reference"], targets, parsing_timeout=0)
            prediction = parse(request["prediction"], targets, parsing_timeout=0)
            answer = {
                "match": bool(
                    reference and prediction and verify(reference, prediction, timeout_seconds=0)
                )
            }
        except (
            Exception
        ) as error:  # sympy raises almost anything on odd input; that is an answer too
            answer = {"match": False, "error": f"{type(error).__name__}"}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
