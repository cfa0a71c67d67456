"""Which megatron-core works: the one place that knows its version."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

OLDEST, TOO_NEW = Version("0.16.1"), Version("0.20")


class MegatronError(ValueError):
    """Params, model and megatron-core do not fit each other; the message names the key, the value and the fix."""


def check(installed: str | None = None) -> None:
    """Refuse a megatron-core outside the range that was tried (`installed`: None looks it up).

    0.16.1 is the newest for Python 3.11, 0.19.2 needs Python 3.12; with 0.14 training ran and learned nothing.

    Raises:
        MegatronError: it is missing, too old or too new.
    """
    if installed is None:
        try:
            installed = importlib.metadata.version("megatron-core")
        except importlib.metadata.PackageNotFoundError:
            raise MegatronError(
                "learner.backend: megatron needs megatron-core, which is not installed; "
                f"pip install 'megatron-core>={OLDEST},<{TOO_NEW}', or use fsdp"
            ) from None
    if OLDEST <= Version(installed) < TOO_NEW:
        return
    known = " (with 0.14 training runs, but nothing is learned)"
    raise MegatronError(
        f"learner.backend: megatron works with megatron-core >={OLDEST},<{TOO_NEW}, got {installed}"
        f"{known if Version(installed) < OLDEST else ''}; install one of these, or use fsdp"
    )
