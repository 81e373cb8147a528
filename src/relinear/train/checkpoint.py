"""Checkpoints of a training: safetensors and JSON, so that reading one runs nothing; the last two, so that a
broken one costs an interval.

A checkpoint is a folder named after its step. `rank-<n>.safetensors` has what a process holds of the
parameters and of AdamW's moments: of a replica rank 0 has all, of shards each has its own. `state.json` has
the step, the losses and the random numbers of Python. Beside them lie copies of the files that the training
itself goes on with, such as its history. `files.json` has the sha256 of each, and is written last.
"""

import json
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from relinear import weights
from relinear.errors import UserError
from relinear.files import sha256, write_json
from relinear.machine.disk import sync
from relinear.machine.distributed import agreed, gathered, rank, sharded

KEPT = 2  # checkpoints: the last, and the one before it
MANIFEST, STATE, TENSORS = "files.json", "state.json", "rank-{}.safetensors"


def save(
    folder: Path,
    step: int,
    losses: list[float],
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    beside: Sequence[Path] = (),
) -> None:
    """Write the checkpoint of a training that has done `step` steps, whole or not at all. A call of all
    processes where the model is sharded.

    `beside` are files to go on with; one that is not there is none.
    """
    shards = sharded(parameters)
    if rank() > 0 and not shards:
        return
    scratch = folder / ".new"
    if rank() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    if shards:
        agreed(None)  # wait until the folder is there
    own = scratch / TENSORS.format(rank())
    save_file(dict(_tensors(parameters, optimiser)), own)
    written = [(own.name, sha256(own))]
    hashes = dict(gathered(written) if shards else written)
    if rank() > 0:
        return
    version, inner, gauss = random.getstate()
    write_json(scratch / STATE, {"step": step, "losses": losses, "python": [version, list(inner), gauss]})
    for path in beside:
        if path.is_file():
            shutil.copyfile(path, scratch / path.name)
    hashes |= {path.name: sha256(path) for path in scratch.iterdir() if path.name not in hashes}
    write_json(scratch / MANIFEST, hashes)
    sync(scratch)
    place = folder / f"{step:08}"
    shutil.rmtree(place, ignore_errors=True)
    scratch.replace(place)
    sync(folder, deep=False)
    for old in _newest_first(folder)[KEPT:]:
        shutil.rmtree(old)


def restore(
    folder: Path,
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    beside: Sequence[Path] = (),
    name: str = "",
) -> tuple[int, list[float]]:
    """Go on from the newest whole checkpoint, also with another number of processes: the steps that are done,
    and their losses; (0, []) without one.

    A broken checkpoint is named on stderr and removed. The files `beside` are then as they were at that step;
    without a checkpoint they are gone.

    Raises UserError for a checkpoint of other parameters.
    """
    found = agreed(_whole(folder, name) if rank() == 0 else None)
    if rank() == 0:
        for path in beside:
            path.unlink(missing_ok=True)
            if found and (found / path.name).is_file():
                shutil.copyfile(found / path.name, path)
    if found is None:
        return 0, []
    state = json.loads((found / STATE).read_bytes())
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, "pt"))
            for path in sorted(found.glob(TENSORS.format("*")), key=_number)
        ]
        holders: dict[str, list] = {}
        for file in files:
            for tensor in file.keys():  # noqa: SIM118, no mapping
                holders.setdefault(tensor, []).append(file)
        _load(holders, parameters, optimiser, found)
        torch.set_rng_state(files[0].get_tensor("rng.cpu"))
        if "rng.cuda" in holders:
            torch.cuda.set_rng_state(files[0].get_tensor("rng.cuda"))
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    return state["step"], state["losses"]


def _tensors(
    parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that this process writes: its pieces of sharded ones, and on the first process also the
    whole ones."""
    if rank() == 0:
        yield "rng.cpu", torch.get_rng_state()
        if torch.cuda.is_available():
            yield "rng.cuda", torch.cuda.get_rng_state()
    for number, parameter in enumerate(parameters):
        for name, x in {"parameter": parameter, **optimiser.state.get(parameter, {})}.items():
            if isinstance(x, DTensor) or rank() == 0:
                yield (
                    f"{name}.{number}",
                    (x.to_local() if isinstance(x, DTensor) else x).detach().contiguous(),
                )


@torch.no_grad()
def _load(
    holders: Mapping[str, list],
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    where: Path,
) -> None:
    """Give parameters and optimiser the tensors of a checkpoint's files, `holders` of each; pieces are
    joined, and cut anew for these processes."""
    names = {name for name in holders if name.startswith("parameter.")}
    if names != {f"parameter.{number}" for number in range(len(parameters))}:
        raise UserError(
            f"{where} has {len(names)} parameters, and this training {len(parameters)}; remove {where.parent}"
            " to begin anew"
        )
    for number, parameter in enumerate(parameters):
        found = {}
        for name in [name for name in holders if name.endswith(f".{number}")]:
            pieces = [file.get_tensor(name) for file in holders[name]]
            x = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).to(parameter.device)
            if isinstance(parameter, DTensor) and x.shape == parameter.shape:
                x = distribute_tensor(x, parameter.device_mesh, parameter.placements, src_data_rank=None)
            found[name.rpartition(".")[0]] = x
        value = found.pop("parameter")
        if value.shape != parameter.shape:
            raise UserError(
                f"{where}: parameter {number} is {list(value.shape)}, and this training's"
                f" {list(parameter.shape)}; remove {where.parent}"
            )
        parameter.copy_(value)
        if found:  # a parameter without a gradient has no moments
            optimiser.state[parameter] = found


def _whole(folder: Path, name: str) -> Path | None:
    """The newest checkpoint whose files are as they were written."""
    checkpoints = _newest_first(folder)
    for place, path in enumerate(checkpoints):
        if not (why := _broken(path)):
            return path
        shutil.rmtree(path)
        rest = (
            "training goes on from the one before" if place + 1 < len(checkpoints) else "training begins anew"
        )
        print(f"{name}: checkpoint {path} is broken ({why}); {rest}", file=sys.stderr, flush=True)
    return None


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _broken(path: Path) -> str | None:
    """The way in which a checkpoint differs from what was written; None where it does not."""
    try:
        hashes = json.loads((path / MANIFEST).read_bytes())
        if not {STATE, TENSORS.format(0)} <= set(hashes):
            return f"{MANIFEST} lacks {STATE} or {TENSORS.format(0)}"
        wrong = [
            name
            for name, expected in hashes.items()
            if not (path / name).is_file() or sha256(path / name) != expected
        ]
        if wrong:
            return f"{wrong[0]} is not the file that was written"
        for tensors in path.glob(TENSORS.format("*")):
            weights.header(tensors)
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return None
