"""Contact sheets of kept and set-aside rows."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from polyturn.data.contact_sheet import draw_sheet, kept_tiles, set_aside_tiles
from tests.unit.data.stage import Stage
from tests.unit.data.web import Web, png, reply


def test_sheets_show_kept_pictures_and_name_every_reason(web: Web, stage: Stage) -> None:
    red, blue = (web.add(f"/{c}.png", reply(png(color=c))) for c in ("red", "blue"))
    gone = [{"id": f"g{i}", "split": "train", "images": [f"{web.url}/no.png"]} for i in range(9)]
    shared = {"id": "v", "split": "test", "images": [red]}
    kept = [
        {"id": "r", "split": "train", "images": [red]},
        {"id": "b", "split": "test", "images": [blue]},
    ]
    stage.raw([{"problem": "<image>Find $x$.", **row} for row in [*kept, *gone, shared]])
    out = stage.finish(stage.job()).out
    tiles = kept_tiles(out, 10)
    assert [tile.caption for tile in tiles] == ["r = 1\nFind $x$.", "b = 1\nFind $x$."]
    aside = set_aside_tiles(out, 3)
    assert {tile.caption.split(": ")[1].split("\n")[0] for tile in aside} == {
        "http_404",
        "shared_with_train",
    }
    assert [tile.picture is not None for tile in aside] == [False, True, False]
    sheet = np.asarray(Image.open(io.BytesIO(draw_sheet(tiles))))
    assert tuple(sheet[80, 80]) == (255, 0, 0)
    assert tuple(sheet[80, 248]) == (0, 0, 255)
    assert draw_sheet(aside) != draw_sheet([])
