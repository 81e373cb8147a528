"""Hostile or broken folders, names and stores: none of their code runs, nothing is written outside, and
stages go on."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, copy_sources, environment
from servers import silent_server, slow_server

from relinear.core import store as nodes
from relinear.errors import UserError
from relinear.files import MANIFEST, sha256
from relinear.machine import gpus
from relinear.tracking import mirror

SECONDS = 60  # a command that meets a silent store: a dozen of them are imports


def stage(results: Path, **changes) -> Path:
    """The folder of a finished training whose record has these fields instead of its own."""
    folder = results / "mini/runs/lizard/distill"
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text("{}")
    record = {
        "schema": 2,
        "scale": "mini",
        "run": "lizard",
        "stage": "distill",
        "key": "0" * 64,
        "attempt": 1,
        "config": {},
        "parents": {},
        "artefacts": {"metrics.json": {"sha256": sha256(folder / "metrics.json")}},
        "config_hash": "",
        "code_hash": "",
        "datasets": [],
        "git": {},
        "versions": {},
        "hardware": {},
        "started": "2026-01-01T00:00:00+00:00",
        "wall_seconds": 1.0,
        "tags": {},
    }
    (folder / "run.json").write_text(json.dumps(record | changes))
    return folder


def everything(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


@pytest.fixture
def store(tmp_path) -> str:
    return f"sqlite:///{tmp_path / 'own/mlflow.db'}"


ILL = (
    "x/../../../../../ESCAPED",
    "../ESCAPED",
    "/ESCAPED",
    "it's",
    "x' or '1' = '1",
    "",
    ".",
    "a b",
    "x\n",
    "$(touch PWNED)",
)


@pytest.mark.parametrize("field", ["scale", "root", "run", "stage", "key"])
def test_names_of_a_folder_that_is_imported_are_names(tmp_path, store, field):
    theirs = tmp_path / "theirs"
    for name in ILL:
        shutil.rmtree(theirs, ignore_errors=True)
        stage(theirs, **{field: name})
        with pytest.raises(UserError, match=f"{field} must be of letters"):
            mirror.import_folder(store, theirs)
    assert everything(tmp_path) <= {"theirs", *(f"theirs/{name}" for name in everything(theirs))}


def test_an_import_follows_no_link(tmp_path, store):
    (tmp_path / "loot.csv").write_text("secret")
    folder = stage(tmp_path / "theirs")
    (folder / "loot.csv").symlink_to(tmp_path / "loot.csv")
    with pytest.raises(UserError, match="loot.csv is a link"):
        mirror.import_folder(store, tmp_path / "theirs")
    (folder / "loot.csv").unlink()
    (tmp_path / "theirs/elsewhere").symlink_to(tmp_path)  # nor through a folder, in which it would go round
    assert mirror.import_folder(store, tmp_path / "theirs") == 1
    assert "secret" not in "".join(p.read_text(errors="replace") for p in (tmp_path / "own").rglob("*.csv"))
    assert {path.name for path in tmp_path.iterdir()} == {"loot.csv", "theirs", "own"}


def test_an_import_reads_no_node_outside_the_results(tmp_path, store):
    stage(tmp_path / "elsewhere")
    [record] = (tmp_path / "elsewhere").rglob("run.json")
    (tmp_path / "theirs").mkdir()
    node = f"../elsewhere/{record.parent.relative_to(tmp_path / 'elsewhere').as_posix()}"
    nodes.write(tmp_path / "theirs", {node: nodes.Packed(record.read_bytes())})
    with pytest.raises(UserError, match="leads elsewhere"):
        mirror.import_folder(store, tmp_path / "theirs")


# --- a store that fails ---


def init(python: str, tmp_path, uri: str, *verb: str) -> tuple[subprocess.CompletedProcess, float]:
    began = time.monotonic()
    environment_ = {
        **environment(),
        "MLFLOW_TRACKING_URI": uri,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}",
    }
    command = [
        python,
        "-m",
        "relinear.cli",
        *(verb or ("track", "init", "--scale", "smoke")),
        "--results",
        str(tmp_path / "results"),
    ]
    return subprocess.run(
        command, cwd=tmp_path, env=environment_, text=True, capture_output=True, timeout=180
    ), time.monotonic() - began


@pytest.mark.parametrize("kind", ["silent", "slow", "closed", "nonsense"])
def test_a_store_that_cannot_be_had_is_one_warning_without_its_password(interpreter, tmp_path, kind):
    with silent_server() as silent, slow_server() as slow:
        uri = {
            "silent": silent,
            "slow": slow,
            "closed": "http://user:secret@127.0.0.1:1",
            "nonsense": "nonsense://user:secret@x",
        }[kind]
        done, seconds = init(interpreter, tmp_path, uri)
    assert done.returncode == 0, "tables do not need the store"
    assert "secret" not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert (
        done.stderr.count("failed") >= 1 and done.stderr.count("track rebuild") == 1 and "***@" in done.stderr
    )
    assert seconds < SECONDS


def test_a_call_of_a_server_ends_and_says_what_it_returns_or_raises(monkeypatch):
    class Client:
        name = "a store"

        def get_run(self, number, *, wait=0.0):
            time.sleep(wait)
            return 10 // number

    client = mirror.store.Bounded(Client())
    assert client.name == "a store" and client.get_run(5) == 2
    with pytest.raises(ZeroDivisionError):
        client.get_run(0)
    monkeypatch.setattr(mirror.store, "SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"no whole answer within 0\.1 s"):
        client.get_run(1, wait=5)


def test_a_store_that_is_no_database_is_told_and_the_remedy_sets_it_aside(interpreter, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/mlflow.db").write_text("no database at all, whatever its name")
    done, _ = init(interpreter, tmp_path, "")
    assert (
        done.returncode == 0
        and done.stderr.count("\n") == 2
        and "mlflow.db failed: DatabaseError" in done.stderr
    )
    done, _ = init(interpreter, tmp_path, "", "track", "rebuild")
    assert (
        done.returncode == 0
        and done.stdout == "0 runs restored\n"
        and "mlflow.db.broken, and a new one is made" in done.stderr
    )
    done, _ = init(interpreter, tmp_path, "")
    assert done.returncode == 0 and not done.stderr


def test_a_store_that_vanished_is_noticed(tmp_path, capsys):
    mirror.init(f"sqlite:///{tmp_path / 'new/mlflow.db'}")
    assert capsys.readouterr().err == "", "a first store is nothing to tell"
    committed = tmp_path / "clone/results/reference/mini"
    for file in ("teacher/run.json", MANIFEST):
        (committed / file).parent.mkdir(parents=True, exist_ok=True)
        (committed / file).write_text("{}")
    mirror.init(f"sqlite:///{tmp_path / 'clone/results/mlflow.db'}")
    assert capsys.readouterr().err == "", "nor is that of a clone, which has committed results"
    stage(tmp_path / "results")
    uri = f"sqlite:///{tmp_path / 'results/mlflow.db'}"
    mirror.init(uri)
    assert "mlflow.db is gone, and begins anew: `relinear track rebuild`" in capsys.readouterr().err
    assert mirror.rebuild(uri, tmp_path / "results") == 1


# --- GPU locks ---


@pytest.mark.parametrize("kind", ["a link", "for all", "of another"])
def test_gpus_are_locked_in_a_folder_of_this_user_alone(tmp_path, monkeypatch, kind):
    folder = tmp_path / "relinear-gpus"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "for all" else 0o700)
    if kind == "of another":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="this user alone writes to; remove it, or set TMPDIR"):
        gpus._own(folder)
    monkeypatch.undo()
    own = gpus._own(tmp_path / "new")
    assert own.stat().st_mode & 0o777 == 0o700 and gpus._own(own) == own
    (tmp_path / "target").write_text("")
    (own / "turn").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        gpus._lock(own / "turn")


# --- the folder of a clone ---


def test_whatever_a_rule_writes_into_a_shell_line_is_quoted():
    """The fields that a user, a file's name or a wildcard fills. All others are our own text."""
    ours = {"RELINEAR", "PYTHON", "OPTIONS", "TEE", "threads", "resources.gpu", "params.options", "rule"}
    lines = [
        line
        for path in (ROOT / "workflow/rules").glob("*.smk")
        for line in path.read_text().splitlines()
        if "({TEE}" in line
    ]
    fields = {field for line in lines for field in re.findall(r"\{([^}]+)\}", line)}
    assert len(lines) > 8 and fields - ours == {
        "log:q",
        "input:q",
        "output:q",
        "wildcards.name:q",
        "wildcards.measure:q",
    }


def test_a_clone_works_in_a_folder_of_any_name(tmp_path):
    clone = copy_sources(tmp_path / 'my clone\'s "x"; $(touch PWNED) `touch PWNED` {name}')
    try:
        clone.snakemake("results/table2.csv", options=("--dry-run", "--quiet"))
        clone.snakemake("results/smoke/models/tiny/run.json")
        assert json.loads((clone / "results/smoke/models/tiny/run.json").read_text())["stage"] == "model"
        assert not [path for path in tmp_path.rglob("PWNED")]
    finally:
        clone.end()
