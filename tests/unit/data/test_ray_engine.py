"""images.engine: ray gives the same files as the local engine (needs the extra: polyturn[ray])."""

from __future__ import annotations

import importlib.util

import pytest

from polyturn.params import ParamsError
from tests.unit.data.stage import Stage
from tests.unit.data.web import Web, png, reply

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install polyturn[ray]")
def test_ray_writes_the_same_files(web: Web, stage: Stage) -> None:
    sources: dict[str, str | list[str]] = {
        f"r{i:03d}": web.add(f"/{i}.png", reply(png((40, 40), (i, 0, 0)))) for i in range(40)
    }
    raw_picture = stage.root / "raw" / "pictures" / "train" / "1.png"
    raw_picture.parent.mkdir(parents=True)
    raw_picture.write_bytes(png(color="gray"))
    sources |= {
        "served": "http://figures.polyturn.test/train/1.png",
        "gone": f"{web.url}/gone.png",
        "cut": web.add("/cut.png", reply(png()[:-20])),
    }
    expected = stage.run(sources)
    files = {p.relative_to(expected.out): p.read_bytes() for p in expected.out.rglob("*.*")}
    done = Stage(stage.root).run(sources, engine="ray")
    assert {p.relative_to(done.out): p.read_bytes() for p in done.out.rglob("*.*")} == files
    assert (done.report.num_fetched, done.report.num_images) == (0, 43)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_engine_says_what_to_install(web: Web, stage: Stage) -> None:
    good = web.add("/a.png", reply(png()))
    with pytest.raises(
        ParamsError, match=r"images.engine: ray needs module 'ray'.*polyturn\[ray\]"
    ):
        stage.run({"a": good}, engine="ray")
