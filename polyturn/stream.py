"""The two id streams of a trajectory under construction: what the engine is sent, and what is trained on."""

from __future__ import annotations

from dataclasses import dataclass, field

from polyturn.render import Rendered
from polyturn.sampler.base import Reply
from polyturn.types import ImageRecord, TokenCounts


@dataclass
class TokenStream:
    """Grows by rendered pieces (mask 0) and sampled replies, verbatim (mask 1); the first piece is the prompt.

    `engine_ids` hold one image pad per picture; `token_ids`, `loss_mask` and `logprobs` one entry per visual token.
    """

    engine_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    images: list[ImageRecord] = field(default_factory=list)
    num_prompt: int = 0
    num_sampled: int = 0

    def append(self, rendered: Rendered) -> None:
        """Add the prompt or an observation."""
        self.engine_ids += rendered.engine_ids
        self.token_ids += rendered.token_ids
        self.loss_mask += [0] * len(rendered.token_ids)
        self.logprobs += [0.0] * len(rendered.token_ids)
        self.images += rendered.images
        self.num_prompt = self.num_prompt or len(self.token_ids)

    def take(self, reply: Reply) -> None:
        """Add what was sampled."""
        self.engine_ids += reply.token_ids
        self.token_ids += reply.token_ids
        self.loss_mask += [1] * len(reply.token_ids)
        self.logprobs += reply.logprobs
        self.num_sampled += len(reply.token_ids)

    def counts(self, image_token_id: int) -> TokenCounts:
        """Tokens by role."""
        is_pad = [token == image_token_id for token in self.token_ids]
        prompt_pads = sum(is_pad[: self.num_prompt])
        observed = len(is_pad) - self.num_prompt - self.num_sampled
        return TokenCounts(
            prompt=self.num_prompt - prompt_pads,
            assistant=self.num_sampled,
            observation=observed - (sum(is_pad) - prompt_pads),
            image_pads=sum(is_pad),
        )
