"""M-RoPE positions (Qwen2-VL, arXiv:2409.12191): text advances all three axes, a picture spans a grid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def mrope_positions(
    token_ids: npt.NDArray[np.int64], image_token_id: int, grids: Sequence[tuple[int, int]]
) -> npt.NDArray[np.int64]:
    """Positions (temporal, height, width) of one sequence, shape [3, T].

    `grids` are the (rows, columns) of visual tokens of each picture, in order. After a picture the text goes on
    at its start plus max(rows, columns). Two text tokens, a picture of 1 x 2 tokens, one text token:

        >>> mrope_positions(np.array([5, 6, 9, 9, 7]), 9, [(1, 2)]).tolist()
        [[0, 1, 2, 2, 4], [0, 1, 2, 2, 4], [0, 1, 2, 3, 4]]

    Raises:
        ValueError: the number of image tokens is not the sum of the grids' cells.
    """
    is_image = token_ids == image_token_id
    cells = sum(rows * columns for rows, columns in grids)
    if int(is_image.sum()) != cells:
        raise ValueError(f"{int(is_image.sum())} image tokens, but the pictures have {cells} cells")
    positions = np.empty((3, len(token_ids)), dtype=np.int64)
    starts = np.flatnonzero(is_image)
    at, position, used = 0, 0, 0
    for rows, columns in grids:
        start = int(starts[used])
        text = start - at
        positions[:, at:start] = position + np.arange(text)
        position += text
        end = start + rows * columns
        positions[0, start:end] = position
        positions[1, start:end] = position + np.repeat(np.arange(rows), columns)
        positions[2, start:end] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        at, used = end, used + rows * columns
    positions[:, at:] = position + np.arange(len(token_ids) - at)
    return positions
