"""A headless Chromium: what a page is after its scripts ran, and what it looks like."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in _NAMES if (found := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="NO BROWSER: apt-get install chromium, or the pages are not looked at"
)


def _run(directory: Path, *arguments: str) -> str:
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--no-first-run", "--virtual-time-budget=5000",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={directory / 'profile'}", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def dom(page: Path, fragment: str, directory: Path) -> str:
    """The page's markup after its scripts, opened from a file with no network."""
    return _run(directory, "--dump-dom", f"{page.resolve().as_uri()}#{fragment}")


def screenshot(
    page: Path,
    fragment: str,
    directory: Path,
    *,
    size: tuple[int, int] = (1400, 1000),
    dark: bool = False,
) -> Image.Image:
    """What a person sees."""
    path = directory / "screenshot.png"
    path.unlink(missing_ok=True)
    options = [f"--screenshot={path}", f"--window-size={size[0]},{size[1]}"]
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    _run(directory, *options, f"{page.resolve().as_uri()}#{fragment}")
    with Image.open(path) as picture:
        return picture.convert("RGB")
