"""A training in shards goes on with another number of processes: the same data in the same order, the same
curve to rounding, and a checkpoint that torch.distributed.checkpoint reads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import resharding
import torch
import torch.distributed.checkpoint as dcp
from conftest import environment
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from relinear.files import sha256
from relinear.machine.torchrun import torchrun
from relinear.train import checkpoint

ROOT = Path(__file__).parents[1]
# processes, and the step before which they die: four to two to one to two
CHAIN = [(4, 3), (2, 6), (1, 9), (2, resharding.STEPS)]


def run(folder: Path, processes: int, stop: int) -> None:
    if processes == 1:
        resharding.run(folder, stop)
        return
    env = environment() | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = torchrun(processes, resharding.__file__, str(folder), str(stop))
    done = subprocess.run([sys.executable, *command[1:]], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict]:
    """The training of one process, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, 1, resharding.STEPS)
    return lines(folder)


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    """The training as it changes processes; the checkpoints that each number of them left are kept."""
    folder = tmp_path_factory.mktemp("chain")
    for processes, stop in CHAIN:
        run(folder, processes, stop)
        shutil.copytree(folder / "checkpoints", folder / f"{processes}.{stop}")
    return folder


def test_the_data_goes_on_exactly_and_the_curve_to_rounding(whole, chain):
    got = lines(chain)
    assert [line["processes"] for line in got] == [4] * 3 + [2] * 3 + [1] * 3 + [2] * 3
    assert [line["engine"] for line in got] == ["fsdp"] * 6 + ["ddp"] * 3 + ["fsdp"] * 3
    for field in ("step", "sequences"):
        assert [line[field] for line in got] == [line[field] for line in whole], field
    for field in ("loss", "grad_norm"):
        assert [x[field] for x in got] == pytest.approx([x[field] for x in whole], rel=1e-5), field
    assert got[-1]["loss"] < 0.9 * got[0]["loss"], "and it learns"


def joined(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint, put together by another reader: torch's own."""
    with_shapes = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    found = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in with_shapes.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return found


def test_torch_reads_the_shards_that_we_write_and_the_other_way_round(chain, tmp_path):
    folder = chain / "4.3/00000003"
    files = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(4)]
    assert [file["parameter.2"].shape[0] for file in files if "parameter.2" in file] == [1, 1, 1], (
        "three rows of four processes"
    )
    theirs, pieces = joined(folder), checkpoint._pieces(folder)
    assert theirs.keys() == pieces.keys()
    with_moments = {name.rpartition(".")[0] for name in theirs}
    assert {"parameter", "exp_avg", "exp_avg_sq", "step", "rng"} == with_moments
    for name, x in theirs.items():
        ours = torch.empty_like(x)
        opened = {piece.file: safe_open(piece.file, "pt") for piece in pieces[name]}
        checkpoint._read(opened, name, pieces[name], [0] * x.ndim, ours)
        assert torch.equal(ours, x), name
    alone = chain / "1.9/00000009"
    assert all(
        torch.equal(x, joined(alone)[name]) for name, x in load_file(alone / "rank-0.safetensors").items()
    )


def test_shards_that_are_not_whole_are_a_broken_checkpoint(chain, tmp_path, capsys):
    """One of four files is gone, from the list of files too: nothing is left as it lay in memory."""
    shutil.copytree(chain / "4.3", tmp_path / "checkpoints")
    last = tmp_path / "checkpoints/00000003"
    (last / "rank-1.safetensors").unlink()
    names = json.loads((last / "files.json").read_text())
    del names["rank-1.safetensors"]
    (last / "files.json").write_text(json.dumps(names))
    run(tmp_path, 1, resharding.STEPS)
    assert "00000003 is broken (its files have" in capsys.readouterr().err
    assert lines(tmp_path)[0]["step"] == 2


def test_a_file_that_does_not_say_where_its_tensors_begin_is_broken(chain, tmp_path):
    folder = tmp_path / "00000003"
    shutil.copytree(chain / "2.6/00000006", folder)
    path = folder / "rank-1.safetensors"
    save_file(load_file(path), path)
    names = json.loads((folder / "files.json").read_text()) | {path.name: sha256(path)}
    (folder / "files.json").write_text(json.dumps(names))
    assert "does not say where" in checkpoint._broken(folder)
