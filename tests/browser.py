"""A headless Chromium for tests: pages as they are once their scripts have run."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@functools.cache
def chromium() -> str:
    """The browser's command. Skips the calling test on a machine without a browser."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(
            f"no browser ({', '.join(NAMES)}) here, so NOTHING was checked of what a person sees; `apt-get"
            " install chromium` brings one"
        )
    return found


def open_page(page: Path | str, *, seconds: int = 30, size: tuple[int, int] = (2400, 1400)) -> str:
    """The DOM of a page (a file or an address) after `seconds` of the page's own clock, which runs faster
    than real time."""
    return _run(page, seconds, size, "--dump-dom")


def screenshot(
    page: Path | str, to: Path, *, seconds: int = 30, size: tuple[int, int] = (2400, 1400)
) -> Path:
    """A PNG of a page, as `open_page` opens it."""
    _run(page, seconds, size, f"--screenshot={to}")
    return to


def _run(page: Path | str, seconds: int, size: tuple[int, int], what: str) -> str:
    address = page.resolve().as_uri() if isinstance(page, Path) else page
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        sized = f"--window-size={size[0]},{size[1]}"
        command = [
            chromium(),
            *OPTIONS,
            f"--user-data-dir={profile}",
            sized,
            f"--virtual-time-budget={1000 * seconds}",
            what,
            address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
