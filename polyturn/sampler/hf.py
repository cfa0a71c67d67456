"""The embedded sampler: Hugging Face modules, one batch of live trajectories, keys and values kept over turns.

It is meant for lockstep rollouts: one call per turn with all live trajectories. A group's shared prompt is
prefilled once, each distinct picture is encoded once per version of the vision tower, and a later turn feeds
only the tokens that the cache does not hold yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyturn import vision
from polyturn.forward import hidden_states, token_distribution
from polyturn.model import Policy
from polyturn.positions import mrope_positions
from polyturn.render import Renderer
from polyturn.sampler.base import Reply, SampleRequest
from polyturn.sampler.kv_cache import ColumnCache
from polyturn.types import ImageRecord


@dataclass(frozen=True)
class _Prompt:
    """A request's prompt as the decoder sees it: expanded ids [T], positions [3, T], pictures."""

    token_ids: np.ndarray
    positions: np.ndarray
    images: tuple[ImageRecord, ...]


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
    """What was computed since the last reset: decoder tokens (fillers not counted) and encoded pictures."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    pictures: int = 0


class HfSampler:
    """Samples with a Hugging Face module; see the module docstring."""

    is_lockstep = True

    def __init__(
        self, policy: Policy, renderer: Renderer, *, is_vision_frozen: bool = False
    ) -> None:
        self._policy = policy
        self._renderer = renderer
        self._is_vision_frozen = is_vision_frozen
        self._features = vision.FeatureStore(policy, vision.PatchReader(policy))
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
        if not self._extends(requests):
            hidden = self._prefill(requests, prompts)
        else:
            hidden = self._continue(requests, prompts)
        return self._decode(requests, prompts, hidden)

    def update_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in, unless they are the very storage that this module already has."""
        own = dict(self._policy.model.named_parameters(remove_duplicate=False))
        for name, tensor in tensors:
            if name not in own:
                raise ValueError(f"the sampler's model has no parameter {name!r}")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].data.copy_(tensor)
        self._live = None
        self._version = version
        if not self._is_vision_frozen:
            self._features.clear()

    def close(self) -> None:
        """Forget cached keys, values and features."""
        self._live = None
        self._features.clear()

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

    def _prefill(self, requests: Sequence[SampleRequest], prompts: Sequence[_Prompt]) -> Tensor:
        """Feed each distinct prompt once, then give every request its own row; returns hidden [B, H]."""
        keys = [
            (request.engine_ids, tuple(i.sha256 for i in request.images)) for request in requests
        ]
        first_of = {key: index for index, key in reversed(list(enumerate(keys)))}
        distinct = sorted(first_of.values())
        row_of = {keys[index]: row for row, index in enumerate(distinct)}
        self._live = _Live(
            ColumnCache(self._policy.model.config.text_config.num_hidden_layers), {}, {}, {}, {}
        )
        hidden = self._feed([(prompts[i], 0, 0) for i in distinct])
        rows = torch.tensor([row_of[key] for key in keys])
        self._live.cache.select(rows)
        return hidden.index_select(0, rows)

    def _continue(self, requests: Sequence[SampleRequest], prompts: Sequence[_Prompt]) -> Tensor:
        """Feed what each session's cache lacks; returns hidden [B, H]."""
        live = self._live
        assert live is not None
        live.cache.select(torch.tensor([live.row_of[request.session] for request in requests]))
        return self._feed(
            [
                (prompt, live.num_cached[request.session], len(live.images[request.session]))
                for request, prompt in zip(requests, prompts, strict=True)
            ]
        )

    def _feed(self, parts: Sequence[tuple[_Prompt, int, int]]) -> Tensor:
        """Feed the tokens of each row from `start` on, right aligned; returns the last hidden state [B, H]."""
        live = self._live
        assert live is not None
        lengths = [len(prompt.token_ids) - start for prompt, start, _ in parts]
        width, rows = max(lengths), len(parts)
        token_ids = torch.full((rows, width), self._policy.family.padding_id)
        positions = torch.zeros(3, rows, width, dtype=torch.int64)
        is_real = torch.zeros(rows, width, dtype=torch.bool)
        images: list[ImageRecord] = []
        for row, (prompt, start, first_image) in enumerate(parts):
            token_ids[row, width - lengths[row] :] = torch.from_numpy(prompt.token_ids[start:])
            positions[:, row, width - lengths[row] :] = torch.from_numpy(
                prompt.positions[:, start:]
            )
            is_real[row, width - lengths[row] :] = True
            images += prompt.images[first_image:]
        self.counts.prefill_tokens += sum(lengths)
        hidden = self._run(
            token_ids, positions, self._encode(images), live.cache.feed_mask(is_real)
        )
        return hidden[:, -1]

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        features: Sequence[vision.Features],
        mask: Tensor,
    ) -> Tensor:
        live = self._live
        assert live is not None
        device = next(self._policy.model.parameters()).device
        hidden = hidden_states(
            self._policy,
            token_ids.to(device),
            positions.to(device),
            features,
            mask=mask.to(device),
            cache=live.cache,
        )
        live.cache.advance(token_ids.shape[1])
        return hidden

    # -- decoding ---------------------------------------------------------------------------------------------

    def _decode(
        self, requests: Sequence[SampleRequest], prompts: Sequence[_Prompt], hidden: Tensor
    ) -> list[Reply]:
        """Sample until every row has ended its turn or used up its tokens.

        The last sampled token of a row is not fed: a later turn feeds it with its observation.
        """
        live = self._live
        assert live is not None
        limits = torch.tensor([request.max_new_tokens for request in requests])
        longest = int(limits.max())
        live.cache.reserve(longest)
        draws = torch.from_numpy(
            np.stack([np.random.default_rng(request.seed).random(longest) for request in requests])
        )
        temperatures = torch.tensor([request.temperature for request in requests])
        next_position = torch.tensor([int(prompt.positions[:, -1].max()) + 1 for prompt in prompts])
        lengths = torch.zeros(len(requests), dtype=torch.int64)
        alive = torch.ones(len(requests), dtype=torch.bool)
        tokens, logprobs = [], []
        for step in range(longest):
            token, logprob = self._sample(hidden, draws[:, step], temperatures)
            tokens.append(token)
            logprobs.append(logprob)
            lengths += alive
            alive = alive & (token != self._policy.family.end_of_turn_id) & (lengths < limits)
            if not bool(alive.any()):
                break
            self.counts.decode_tokens += int(alive.sum())
            position = (next_position + step).expand(3, -1)[:, :, None]
            mask = live.cache.feed_mask(alive[:, None])
            hidden = self._run(token[:, None], position, (), mask)[:, -1]
        replies = self._replies(torch.stack(tokens, 1), torch.stack(logprobs, 1), lengths, prompts)
        self._remember(requests, prompts, replies)
        return replies

    def _sample(self, hidden: Tensor, draws: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """One token per row by inverse transform sampling of the row's own uniform draw."""
        is_greedy = temperatures == 0
        scale = torch.where(is_greedy, 1.0, temperatures)[:, None].to(hidden.device)
        distribution = token_distribution(self._policy, hidden, scale).cpu()
        cumulative = distribution.double().exp().cumsum(-1)
        drawn = (cumulative <= (draws * cumulative[:, -1])[:, None]).sum(-1)
        token = torch.where(is_greedy, distribution.argmax(-1), drawn)
        return token, distribution.gather(-1, token[:, None])[:, 0]

    def _replies(
        self, tokens: Tensor, logprobs: Tensor, lengths: Tensor, prompts: Sequence[_Prompt]
    ) -> list[Reply]:
        replies = []
        for row, length in enumerate(lengths.tolist()):
            ids = tuple(tokens[row, :length].tolist())
            ended = ids[-1] == self._policy.family.end_of_turn_id
            replies.append(
                Reply(
                    token_ids=ids,
                    logprobs=tuple(logprobs[row, :length].tolist()),
                    finish_reason="stop" if ended else "length",
                    prompt_length=len(prompts[row].token_ids),
                    weight_version=self._version,
                )
            )
        return replies

    def _remember(
        self,
        requests: Sequence[SampleRequest],
        prompts: Sequence[_Prompt],
        replies: Sequence[Reply],
    ) -> None:
        live = self._live
        assert live is not None
        live.row_of = {request.session: row for row, request in enumerate(requests)}
        live.cached, live.num_cached, live.images = {}, {}, {}
        for request, prompt, reply in zip(requests, prompts, replies, strict=True):
            live.cached[request.session] = request.engine_ids + reply.token_ids[:-1]
            live.num_cached[request.session] = len(prompt.token_ids) + len(reply.token_ids) - 1
            live.images[request.session] = prompt.images
