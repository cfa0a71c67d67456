"""Keys and values of a batch of rows that grow together, column by column; invalid columns are masked."""

from __future__ import annotations

import torch
from torch import Tensor


class ColumnCache:
    """Keys and values [R, K, S, D] per decoder layer (R rows, K heads, S columns, D head size), validity [R, S].

    The first `num_active` rows write to the same columns; a row that has nothing to write there leaves an invalid
    column, and so do all rows behind them. It is what transformers' attention calls `update` on; masks are given to
    the decoder ready-made.
    """

    def __init__(self, num_layers: int, num_rows: int, device: torch.device) -> None:
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._valid = torch.zeros(num_rows, 0, dtype=torch.bool, device=device)
        self.length = 0
        self.num_active = num_rows

    def select(self, rows: Tensor, room: int) -> None:
        """Keep (or repeat) the given rows [R'], in their order and all active, with room for as many columns more.

        Each row's valid columns move to the right end, so that only as many stay as the longest row needs.
        """
        rows = rows.to(self._valid.device)
        valid = self._valid[:, : self.length].index_select(0, rows)
        length = int(valid.sum(1).max())
        columns = valid.byte().argsort(dim=1, stable=True)[:, self.length - length :]
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                if old is not None:
                    kept = old.new_zeros(len(rows), old.shape[1], length + room, old.shape[3])
                    kept[:, :, :length] = old[rows[:, None], :, columns].transpose(1, 2)
                    store[layer] = kept
        self._valid = valid.new_zeros(len(rows), length + room)
        self._valid[:, :length] = valid.gather(1, columns)
        self.length = length
        self.num_active = len(rows)

    def swap(self, one: Tensor, other: Tensor) -> None:
        """Exchange the rows `one` [N] with the rows `other` [N]; no row stands in both."""
        source = torch.cat([one, other]).to(self._valid.device)
        target = torch.cat([other, one]).to(self._valid.device)
        for tensor in (*self._keys, *self._values, self._valid):
            if tensor is not None:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def feed_mask(self, is_real: Tensor) -> Tensor:
        """Mask [R, 1, T, length + T] for feeding the R active rows T columns of which `is_real` [R, T] hold tokens.

        A real token sees the real tokens before it and itself; a filler sees itself only, so that no row of the
        softmax is empty. The new columns become part of the validity.
        """
        rows, width = is_real.shape
        start, end = self.length, self.length + width
        if self._valid.shape[1] < end:
            more = self._valid.new_zeros(len(self._valid), end - self._valid.shape[1])
            self._valid = torch.cat([self._valid, more], dim=1)
        self._valid[:rows, start:end] = is_real
        mask = self._valid[:rows, None, :end].repeat(1, width, 1)
        mask[:, :, start:] &= torch.ones_like(mask[0, :, start:]).tril()
        mask[:, :, start:] |= torch.eye(width, dtype=torch.bool, device=mask.device)
        return mask[:, None]

    def advance(self, width: int) -> None:
        """Count the `width` columns as written, after the decoder has run over all layers."""
        self.length += width

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new columns of the active rows; returns all their columns so far.

        Called by transformers' attention.
        """
        return self._write(self._keys, layer, keys), self._write(self._values, layer, values)

    def _write(self, store: list[Tensor | None], layer: int, new: Tensor) -> Tensor:
        old = store[layer]
        if old is None:
            store[layer] = new
            return new
        rows, end = len(new), self.length + new.shape[2]
        if old.shape[2] < end:
            grown = old.new_zeros(*old.shape[:2], end, old.shape[3])
            grown[:, :, : self.length] = old[:, :, : self.length]
            store[layer] = old = grown
        old[:rows, :, self.length : end] = new
        return old[:rows, :, :end]

    def get_seq_length(self, *_: object) -> int:
        """Number of columns written so far (transformers asks)."""
        return self.length
