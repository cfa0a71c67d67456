"""The embedded sampler: Hugging Face modules, one batch of live trajectories, keys and values kept over turns.

It is meant for lockstep rollouts: one call per turn with all live trajectories. A group's shared prompt is
prefilled once, each distinct picture is encoded once per version of the vision tower, and a later turn feeds
only the tokens that the cache does not hold yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyturn.policy import vision
from polyturn.policy.forward import hidden_states, token_distribution
from polyturn.policy.model import Policy
from polyturn.policy.positions import mrope_positions
from polyturn.render import Renderer
from polyturn.sampler.base import Reply, SampleRequest
from polyturn.sampler.drafts import Drafts
from polyturn.sampler.drawing import draw_tokens
from polyturn.sampler.kv_cache import ColumnCache
from polyturn.types import ImageRecord


@dataclass(frozen=True)
class _Prompt:
    """A request's prompt as the decoder sees it: expanded ids [T], positions [3, T], pictures."""

    token_ids: np.ndarray
    positions: np.ndarray
    images: tuple[ImageRecord, ...]


@dataclass(frozen=True)
class _Part:
    """The end of a prompt that a row's cache lacks: from `num_cached` on, `num_sampled` of it sampled tokens."""

    prompt: _Prompt
    num_cached: int = 0
    num_sampled: int = 0
    num_images: int = 0  # whose features are in the cache

    @property
    def length(self) -> int:
        """Tokens to feed."""
        return len(self.prompt.token_ids) - self.num_cached


@dataclass
class _Live:
    """The rows of the cache: which session each is and how many of its tokens are cached."""

    cache: ColumnCache
    row_of: dict[str, int]
    cached: dict[str, tuple[int, ...]]  # engine ids in the cache, by session
    num_cached: dict[str, int]  # expanded tokens in the cache, by session
    images: dict[str, tuple[ImageRecord, ...]]  # whose features are in the cache, by session


@dataclass
class SamplerCounts:
    """What was computed since the last reset: decoder tokens (fillers not counted) and encoded pictures.

    `prefill_tokens` are those of prompts and observations, `decode_tokens` the sampled ones. A reply's last token
    is fed only if the trajectory goes on, with the observation that follows it.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    pictures: int = 0


class HfSampler:
    """Samples with a Hugging Face module; see the module docstring."""

    is_lockstep = True

    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        *,
        is_vision_frozen: bool = False,
        vision_cache_mb: int = vision.CACHE_MB,
    ) -> None:
        self._policy = policy
        self._renderer = renderer
        self._is_vision_frozen = is_vision_frozen
        cache = vision_cache_mb * 10**6
        self._features = vision.FeatureStore(policy, vision.PatchReader(policy, cache), cache)
        self._live: _Live | None = None
        self._version = 0
        self.counts = SamplerCounts()

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        """Sample one reply per request, in order; all rows are computed together.

        Continues from the cache when every request extends a session of the call before, else starts anew.
        """
        return self._generate(requests) if requests else []

    @torch.no_grad()  # on a plain function: around a coroutine it would end before the body runs
    def _generate(self, requests: Sequence[SampleRequest]) -> list[Reply]:
        prompts = [self._prompt(request) for request in requests]
        room = max(request.max_new_tokens for request in requests)
        if self._extends(requests):
            hidden = self._continue(requests, prompts, room)
        else:
            hidden = self._prefill(requests, prompts, room)
        return self._decode(requests, prompts, hidden)

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in, unless they are the very storage that this module already has.

        Raises:
            ValueError: a tensor is unknown, of another shape, or has not come (a frozen tower's need not).
        """
        own = dict(self._policy.model.named_parameters(remove_duplicate=False))
        arrived: set[int] = set()  # by identity: a tied head comes with its embedding
        for name, tensor in tensors:
            if name not in own:
                raise ValueError(f"the sampler's model has no parameter {name!r}")
            if own[name].shape != tensor.shape:
                raise ValueError(
                    f"the sampler's {name} has shape {tuple(own[name].shape)}, the new one {tuple(tensor.shape)}"
                )
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].data.copy_(tensor)
            arrived.add(id(own[name]))
        missing = [name for name, parameter in own.items() if id(parameter) not in arrived
                   and not (self._is_vision_frozen and name.startswith("model.visual."))]  # fmt: skip
        if missing:
            raise ValueError(
                f"{len(missing)} weights of the sampler were not updated: {', '.join(missing[:8])}"
            )
        self._live = None
        self._version = version
        if not self._is_vision_frozen:
            self._features.clear()

    def rest(self) -> None:
        """Nothing is given back: keys and values are freed with the next weights."""

    def take_metrics(self) -> Mapping[str, float]:
        """Nothing that the loop does not time itself."""
        return {}

    def close(self) -> None:
        """Forget cached keys, values and features."""
        self._live = None
        self._features.clear()

    @property
    def _device(self) -> torch.device:
        return next(self._policy.model.parameters()).device

    # -- prompts ----------------------------------------------------------------------------------------------

    def _prompt(self, request: SampleRequest) -> _Prompt:
        pad = self._policy.family.image_token_id
        grids = [self._renderer.grid(image) for image in request.images]
        cells = iter([rows * columns for rows, columns in grids])
        ids = [
            token
            for engine_id in request.engine_ids
            for token in ([pad] * next(cells) if engine_id == pad else [engine_id])
        ]
        token_ids = np.array(ids, dtype=np.int64)
        return _Prompt(token_ids, mrope_positions(token_ids, pad, grids), request.images)

    def _encode(self, images: Sequence[ImageRecord]) -> list[vision.Features]:
        before = self._features.num_encoded
        features = self._features.encode(images)
        self.counts.pictures += self._features.num_encoded - before
        return [features[image.sha256] for image in images]

    # -- feeding ----------------------------------------------------------------------------------------------

    def _extends(self, requests: Sequence[SampleRequest]) -> bool:
        live = self._live
        if live is None or len({request.session for request in requests}) != len(requests):
            return False
        for request in requests:
            cached, images = live.cached.get(request.session), live.images.get(request.session, ())
            if cached is None or len(request.engine_ids) <= len(cached):
                return False
            if (
                request.engine_ids[: len(cached)] != cached
                or request.images[: len(images)] != images
            ):
                return False
        return True

    def _prefill(
        self, requests: Sequence[SampleRequest], prompts: Sequence[_Prompt], room: int
    ) -> Tensor:
        """Feed each distinct prompt once, then give every request its own row; returns hidden [B, H]."""
        keys = [
            (request.engine_ids, tuple(i.sha256 for i in request.images)) for request in requests
        ]
        first_of = {key: index for index, key in reversed(list(enumerate(keys)))}
        distinct = sorted(first_of.values())
        row_of = {keys[index]: row for row, index in enumerate(distinct)}
        num_layers = self._policy.model.config.text_config.num_hidden_layers
        cache = ColumnCache(num_layers, len(distinct), self._device)
        self._live = _Live(cache, {}, {}, {}, {})
        hidden = self._feed([_Part(prompts[index]) for index in distinct])
        rows = torch.tensor([row_of[key] for key in keys])
        cache.select(rows, room)
        return hidden.index_select(0, rows.to(hidden.device))

    def _continue(
        self, requests: Sequence[SampleRequest], prompts: Sequence[_Prompt], room: int
    ) -> Tensor:
        """Feed what each session's cache lacks: the reply's last token and the observation; returns hidden [B, H]."""
        live = self._live
        assert live is not None
        parts = [
            _Part(
                prompt,
                live.num_cached[request.session],
                1,
                len(live.images[request.session]),
            )
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        rows = torch.tensor([live.row_of[request.session] for request in requests])
        live.cache.select(rows, max(part.length for part in parts) + room)
        return self._feed(parts)

    def _feed(self, parts: Sequence[_Part]) -> Tensor:
        """Feed each row's part, right aligned; returns the last hidden state [B, H]."""
        live = self._live
        assert live is not None
        width, rows = max(part.length for part in parts), len(parts)
        token_ids = torch.full((rows, width), self._policy.family.padding_id)
        positions = torch.zeros(3, rows, width, dtype=torch.int64)
        is_real = torch.zeros(rows, width, dtype=torch.bool)
        images: list[ImageRecord] = []
        for row, part in enumerate(parts):
            first, start = width - part.length, part.num_cached
            token_ids[row, first:] = torch.from_numpy(part.prompt.token_ids[start:])
            positions[:, row, first:] = torch.from_numpy(part.prompt.positions[:, start:])
            is_real[row, first:] = True
            images += part.prompt.images[part.num_images :]
            self.counts.prefill_tokens += part.length - part.num_sampled
            self.counts.decode_tokens += part.num_sampled
        return self._run(token_ids, positions, self._encode(images), is_real)

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        features: Sequence[vision.Features],
        is_real: Tensor,
    ) -> Tensor:
        """Feed columns [A, T] of the active rows; returns the hidden state [A, H] of the last column."""
        live = self._live
        assert live is not None
        hidden = hidden_states(
            self._policy,
            token_ids.to(self._device),
            positions.to(self._device),
            features,
            mask=live.cache.feed_mask(is_real.to(self._device)),
            cache=live.cache,
        )
        live.cache.advance(token_ids.shape[1])
        return hidden[:, -1]

    # -- decoding ---------------------------------------------------------------------------------------------

    def _decode(
        self, requests: Sequence[SampleRequest], prompts: Sequence[_Prompt], hidden: Tensor
    ) -> list[Reply]:
        """Sample until every row has ended its turn or used up its tokens; a row that has ended is not computed."""
        live = self._live
        assert live is not None
        drafts = Drafts(requests, self._policy.family.end_ids)
        next_position = torch.tensor([int(prompt.positions[:, -1].max()) + 1 for prompt in prompts])
        while True:
            tokens, swaps = drafts.take(*self._sample(hidden, drafts))
            live.cache.num_active = drafts.num_active
            if drafts.num_active == 0:
                break
            live.cache.swap(swaps.one, swaps.other)
            self.counts.decode_tokens += drafts.num_active
            position = next_position[drafts.active] + drafts.num_steps - 1
            is_real = torch.ones(drafts.num_active, 1, dtype=torch.bool)
            hidden = self._run(tokens[:, None], position.expand(3, -1)[:, :, None], (), is_real)
        replies = [
            self._reply(drafts, index, len(prompt.token_ids))
            for index, prompt in enumerate(prompts)
        ]
        self._remember(requests, prompts, replies)
        rows = drafts.place.tolist()
        live.row_of = {requests[index].session: row for row, index in enumerate(rows)}
        return replies

    def _sample(self, hidden: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """One token and its logprob per active row, both [A]; greedy where the temperature is 0."""
        is_greedy = drafts.temperatures == 0
        scale = torch.where(is_greedy, 1.0, drafts.temperatures)[:, None].to(hidden.device)
        distribution = token_distribution(self._policy, hidden, scale)
        tokens = draw_tokens(distribution, drafts.uniform)
        if bool(is_greedy.any()):
            tokens = torch.where(is_greedy, distribution.argmax(-1).cpu(), tokens)
        chosen = tokens[:, None].to(distribution.device)
        return tokens, distribution.gather(-1, chosen)[:, 0].cpu()

    def _reply(self, drafts: Drafts, index: int, prompt_length: int) -> Reply:
        token_ids, logprobs = drafts.said(index)
        has_ended = token_ids[-1] in self._policy.family.end_ids
        return Reply(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="stop" if has_ended else "length",
            prompt_length=prompt_length,
            weight_version=self._version,
        )

    def _remember(
        self,
        requests: Sequence[SampleRequest],
        prompts: Sequence[_Prompt],
        replies: Sequence[Reply],
    ) -> None:
        live = self._live
        assert live is not None
        live.cached, live.num_cached, live.images = {}, {}, {}
        for request, prompt, reply in zip(requests, prompts, replies, strict=True):
            live.cached[request.session] = request.engine_ids + reply.token_ids[:-1]
            live.num_cached[request.session] = len(prompt.token_ids) + len(reply.token_ids) - 1
            live.images[request.session] = prompt.images
