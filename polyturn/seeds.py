"""Derived randomness: every random number comes from a seed hashed from the run's seed and what it is for."""

from __future__ import annotations

import hashlib

SEED_RANGE = 2**63  # seeds are below it


def derive(seed: int, *path: str | int) -> int:
    """A 63-bit seed for `path`, e.g. derive(run_seed, "sample", step, problem_id, sibling, turn).

    Equal arguments give equal seeds on every machine; different ones are independent (SHA-256).
    """
    text = "/".join([str(seed), *(f"{type(part).__name__}:{part}" for part in path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
