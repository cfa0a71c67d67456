"""What happened between sampler and servers since the last look, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyturn.sampler.base import Reply, SampleRequest


@dataclass
class SglangCounts:
    """Prompt tokens, and those of them whose keys and values a server still had, by turn (from 1), and the rest."""

    prompt_tokens: Counter[int] = field(default_factory=Counter[int])
    cached_tokens: Counter[int] = field(default_factory=Counter[int])
    replies: int = 0
    latency_s: float = 0.0  # of all replies together, from a server's receipt to its answer
    longest_s: float = 0.0
    recomputed_turns: int = 0
    retries: int = 0
    failures: int = 0
    weight_sync_s: float = 0.0
    tensors_compared: int = 0
    waits: int = 0  # for a server that was busy

    def metrics(self) -> dict[str, float]:
        """The counts as metrics; hit rates are those of prompt tokens."""
        turns = sorted(self.prompt_tokens)
        return {
            "perf/prefix_cache_hit_rate": self.cached_tokens.total()
            / max(1, self.prompt_tokens.total()),
            **{
                f"perf/prefix_cache_hit_rate/turn_{turn}": self.cached_tokens[turn]
                / max(1, self.prompt_tokens[turn])
                for turn in turns
            },
            "perf/sampler_latency/mean": self.latency_s / max(1, self.replies),
            "perf/sampler_latency/max": self.longest_s,
            "perf/recomputed_turns": float(self.recomputed_turns),
            "perf/sampler_retries": float(self.retries),
            "perf/sampler_waits": float(self.waits),
            "perf/sampler_failures": float(self.failures),
            "perf/update_weights_time": self.weight_sync_s,
            "perf/weights_compared": float(self.tensors_compared),
        }


def added(counts: Sequence[SglangCounts]) -> SglangCounts:
    """The counts of all ranks together; they push weights at the same time."""
    return SglangCounts(
        prompt_tokens=sum((one.prompt_tokens for one in counts), Counter[int]()),
        cached_tokens=sum((one.cached_tokens for one in counts), Counter[int]()),
        replies=sum(one.replies for one in counts),
        latency_s=sum(one.latency_s for one in counts),
        longest_s=max(one.longest_s for one in counts),
        recomputed_turns=sum(one.recomputed_turns for one in counts),
        retries=sum(one.retries for one in counts),
        waits=sum(one.waits for one in counts),
        failures=sum(one.failures for one in counts),
        weight_sync_s=max(one.weight_sync_s for one in counts),
        tensors_compared=sum(one.tensors_compared for one in counts),
    )


@dataclass(frozen=True)
class _Known:
    """How far a trajectory has come: its ids up to the last reply, and how many turns these are."""

    ids: tuple[int, ...]
    expanded: int  # the same with each picture's pads
    turns: int


class Trails:
    """Which turn of its trajectory a request is, and how much of it the server computed before."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def turn(self, request: SampleRequest) -> int:
        """The number of the turn, from 1."""
        known = self._before(request)
        return 1 if known is None else known.turns + 1

    def reusable(self, request: SampleRequest) -> int:
        """Tokens whose keys and values come from earlier turns: all but the last sampled, which was never put in."""
        known = self._before(request)
        return 0 if known is None else known.expanded - 1

    def add(self, request: SampleRequest, reply: Reply) -> None:
        """The reply to a request has come."""
        self._known[request.session] = _Known(
            (*request.engine_ids, *reply.token_ids),
            reply.prompt_length + len(reply.token_ids),
            self.turn(request),
        )

    def clear(self) -> None:
        """New weights: nothing that was computed is of use."""
        self._known.clear()

    def _before(self, request: SampleRequest) -> _Known | None:
        known = self._known.get(request.session)
        if known is None or request.engine_ids[: len(known.ids)] != known.ids:
            return None
        return known
