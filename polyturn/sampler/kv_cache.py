"""Keys and values of a batch of rows that grow together, column by column; invalid columns are masked."""

from __future__ import annotations

import torch
from torch import Tensor


class ColumnCache:
    """Keys and values [B, kv_heads, S, head_dim] per decoder layer, with one validity mask [B, S].

    All rows write to the same columns; a row that has nothing to write there leaves an invalid column. It is
    what transformers' attention calls `update` on; masks are given to the decoder ready-made.
    """

    def __init__(self, num_layers: int) -> None:
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._valid = torch.zeros(0, 0, dtype=torch.bool)
        self.length = 0

    def reserve(self, num_columns: int) -> None:
        """Make room for `num_columns` more, so that single tokens are written in place."""
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                if old is not None:
                    grown = old.new_zeros(*old.shape[:2], self.length + num_columns, old.shape[3])
                    grown[:, :, : self.length] = old[:, :, : self.length]
                    store[layer] = grown

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows [B'] in their order."""
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                if old is not None:
                    store[layer] = old[:, :, : self.length].index_select(0, rows)
        self._valid = self._valid.index_select(0, rows)

    def feed_mask(self, is_real: Tensor) -> Tensor:
        """Mask [B, 1, T, length + T] for feeding T new columns of which `is_real` [B, T] hold tokens.

        A real token sees the real tokens before it and itself; a filler sees itself only, so that no row of the
        softmax is empty. The new columns become part of the validity mask.
        """
        rows, width = is_real.shape
        if self.length == 0:
            self._valid = torch.zeros(rows, 0, dtype=torch.bool, device=is_real.device)
        self._valid = torch.cat([self._valid[:, : self.length], is_real], dim=1)
        causal = torch.ones(width, width, dtype=torch.bool, device=is_real.device).tril()
        mask = self._valid[:, None, :].repeat(1, width, 1)
        mask[:, :, self.length :] &= causal
        mask[:, :, self.length :] |= torch.eye(width, dtype=torch.bool, device=is_real.device)
        return mask[:, None]

    def advance(self, width: int) -> None:
        """Count the `width` columns as written, after the decoder has run over all layers."""
        self.length += width

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new columns; returns all columns so far (called by transformers' attention)."""
        end = self.length + keys.shape[2]
        return self._write(self._keys, layer, keys, end), self._write(
            self._values, layer, values, end
        )

    def _write(self, store: list[Tensor | None], layer: int, new: Tensor, end: int) -> Tensor:
        old = store[layer]
        if old is None:
            store[layer] = new
            return new
        if old.shape[2] < end:
            old = torch.cat([old[:, :, : self.length], new], dim=2)
            store[layer] = old
            return old
        old[:, :, self.length : end] = new
        return old[:, :, :end]

    def get_seq_length(self, *_: object) -> int:
        """Number of columns written so far (transformers asks)."""
        return self.length
