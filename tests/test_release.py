"""A dry run of publishing: a wheel and a source distribution are built, pass an index's checks, and are
installed by name from a folder."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import releases
from conftest import ROOT

import relinear

TWINE = ("twine==6.2.0",)
PARTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "src", "kernels")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, sources: Path, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)], cwd=sources, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with a source distribution, and with the wheel that is built from it and not from the
    clone."""
    sources, out, unpacked = (tmp_path_factory.mktemp(name) for name in ("sources", "dist", "unpacked"))
    for part in PARTS:
        (sources / part).symlink_to(ROOT / part)
    source = build("build_sdist", sources, out)
    with tarfile.open(source) as archive:
        archive.extractall(unpacked, **releases.SAFELY)
    build("build_wheel", unpacked / source.name.removesuffix(".tar.gz"), out)
    return out


def test_names_have_the_version_and_the_wheel_of_the_source_has_the_code_and_the_licences(built):
    version = relinear.__version__
    assert {path.name for path in built.iterdir()} == {
        f"relinear-{version}.tar.gz",
        f"relinear-{version}-py3-none-any.whl",
    }
    with zipfile.ZipFile(built / f"relinear-{version}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    ours = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/relinear").rglob("*.py")}
    assert ours <= names, "a module is in the clone and not in the wheel"
    assert {f"relinear-{version}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= names


def test_what_is_built_passes_an_index_s_checks(built):
    folder = releases.or_skip(releases.installed, TWINE, True)
    done = releases.python(folder, "-m", "twine", "check", "--strict", *map(str, built.iterdir()))
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_it_is_installed_by_name(built, tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--find-links",
        str(built),
        "--pre",
    ]
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")} | {
        "PIP_CONFIG_FILE": os.devnull
    }
    done = subprocess.run(
        [*command, "--target", str(tmp_path / "there"), "relinear"],
        cwd=tmp_path,
        env=plain,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = releases.python(tmp_path / "there", "-m", "relinear.cli", "--version", PYTHONSAFEPATH="1")
    assert said.stdout == f"relinear {relinear.__version__}\n", said.stderr
    assert (tmp_path / "there/bin/relinear").is_file()
    said = releases.python(tmp_path / "there", "-m", "relinear.cli", "check", PYTHONSAFEPATH="1")
    assert said.returncode == 1 and re.search(
        r"error: this verb reads workflow/.*Run it in a clone", said.stderr
    ), said.stderr
