"""Checkpoints of a training: safetensors and JSON, so that reading one runs nothing; the last two, so that a
broken one costs an interval.

A checkpoint is a folder named after its step. `rank-<n>.safetensors` has what a process holds of the
parameters and of AdamW's moments: of a replica rank 0 has all, of shards each has its own. `state.json` has
the step, the losses and the random numbers of Python. Beside them lie copies of the files that the training
itself goes on with, such as its history. `files.json` has the sha256 of each, and is written last.

A file's header says where each of its tensors begins in the whole one, as torch.distributed.checkpoint writes
it for safetensors: its `HuggingFaceStorageReader` reads these folders. With another number of processes each
reads the rows of its own shards and no others. That library is not used itself: its own storage pickles, its
safetensors writer makes each file in memory a second time, and it wants the optimiser's state made before it
reads one.
"""

import json
import math
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from relinear import weights
from relinear.errors import UserError
from relinear.files import sha256, write_json
from relinear.machine.disk import sync
from relinear.machine.distributed import agreed, gathered, rank, sharded

KEPT = 2  # checkpoints: the last, and the one before it
MANIFEST, STATE, TENSORS = "files.json", "state.json", "rank-{}.safetensors"
OFFSETS, SAVED = "DCP_SHARDING_INFO", "saved_offsets"  # torch.distributed.checkpoint's words


class Piece(NamedTuple):
    """A part of a tensor of a checkpoint: its file, and where it begins and how large it is, by dimension."""

    file: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


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
    held = {name: (x, offsets) for name, x, offsets in _tensors(parameters, optimiser)}
    begins = json.dumps({name: {SAVED: offsets} for name, (_, offsets) in held.items()})
    save_file({name: x for name, (x, _) in held.items()}, own, {"format": "pt", OFFSETS: begins})
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
        pieces = _pieces(found)
        paths = {piece.file for some in pieces.values() for piece in some}
        files = {path: stack.enter_context(safe_open(path, "pt")) for path in paths}
        _load(pieces, files, parameters, optimiser, found)
        first = files[found / TENSORS.format(0)]
        torch.set_rng_state(first.get_tensor("rng.cpu"))
        if "rng.cuda" in pieces:
            torch.cuda.set_rng_state(first.get_tensor("rng.cuda"))
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    return state["step"], state["losses"]


def _tensors(
    parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor, list[int]]]:
    """The tensors that this process writes, and where each begins in the whole one: its pieces of sharded
    ones, and on the first process also the whole ones."""
    if rank() == 0:
        yield "rng.cpu", torch.get_rng_state(), [0]
        if torch.cuda.is_available():
            yield "rng.cuda", torch.cuda.get_rng_state(), [0]
    for number, parameter in enumerate(parameters):
        for name, x in {"parameter": parameter, **optimiser.state.get(parameter, {})}.items():
            if isinstance(x, DTensor):
                if (piece := x.to_local().detach()).numel():  # a short tensor leaves some processes without
                    yield f"{name}.{number}", piece.contiguous(), _begin(x)
            elif rank() == 0:
                yield f"{name}.{number}", x.detach().contiguous(), [0] * x.ndim


def _begin(x: DTensor) -> list[int]:
    """Where this process's shard of a tensor begins, by dimension."""
    [chunk] = x.__create_chunk_list__()
    return list(chunk.offsets)


def _pieces(folder: Path) -> dict[str, list[Piece]]:
    """The pieces of each tensor of a checkpoint. Raises ValueError where they are not a whole tensor."""
    found: dict[str, list[Piece]] = {}
    for path in sorted(folder.glob(TENSORS.format("*"))):
        tensors = weights.header(path)
        with safe_open(path, "pt") as file:
            begins = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
        for name, tensor in tensors.items():
            if name not in begins:
                raise ValueError(f"{path.name} does not say where its {name} begins")
            found.setdefault(name, []).append(Piece(path, tuple(begins[name][SAVED]), tensor.shape))
    for name, pieces in found.items():
        got, size = sum(math.prod(piece.sizes) for piece in pieces), math.prod(_shape(pieces))
        if got != size:
            raise ValueError(f"its files have {got} of the {size} numbers of {name}")
    return found


def _shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The shape of the tensor that pieces are of."""
    ends = [tuple(map(sum, zip(piece.offsets, piece.sizes, strict=True))) for piece in pieces]
    return tuple(map(max, zip(*ends, strict=True)))


def _read(files: Mapping[Path, Any], name: str, pieces: Sequence[Piece], begin: Sequence[int], to: Tensor):
    """Fill a tensor, which begins at `begin` of the whole one, from the pieces that lie in it."""
    for piece in pieces:
        first = [max(*pair) for pair in zip(begin, piece.offsets, strict=True)]
        ends = zip(begin, to.shape, piece.offsets, piece.sizes, strict=True)
        last = [min(at + size, start + length) for at, size, start, length in ends]
        if any(a >= b for a, b in zip(first, last, strict=True)):
            continue
        of_piece, of_own = (
            tuple(slice(a - at, b - at) for a, b, at in zip(first, last, place, strict=True))
            for place in (piece.offsets, begin)
        )
        file = files[piece.file]
        to[of_own].copy_(file.get_slice(name)[of_piece] if to.ndim else file.get_tensor(name))


@torch.no_grad()
def _load(
    pieces: Mapping[str, Sequence[Piece]],
    files: Mapping[Path, Any],
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    where: Path,
) -> None:
    """Give parameters and optimiser the tensors of a checkpoint; of sharded ones this process reads its
    part, however many processes wrote them."""
    names = {name for name in pieces if name.startswith("parameter.")}
    if names != {f"parameter.{number}" for number in range(len(parameters))}:
        raise UserError(
            f"{where} has {len(names)} parameters, and this training {len(parameters)}; remove {where.parent}"
            " to begin anew"
        )
    for number, parameter in enumerate(parameters):
        if (shape := _shape(pieces[f"parameter.{number}"])) != parameter.shape:
            raise UserError(
                f"{where}: parameter {number} is {list(shape)}, and this training's {list(parameter.shape)};"
                f" remove {where.parent}"
            )
        state = {}
        for name in [name for name in pieces if name.endswith(f".{number}")]:
            field, shape = name.rpartition(".")[0], _shape(pieces[name])
            if isinstance(parameter, DTensor) and shape == parameter.shape:
                x = parameter if field == "parameter" else torch.zeros_like(parameter)
                _read(files, name, pieces[name], _begin(parameter), x.to_local())
            elif len(pieces[name]) == 1:
                x = files[pieces[name][0].file].get_tensor(name).to(parameter.device)
            else:
                x = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                _read(files, name, pieces[name], [0] * len(shape), x)
            if field != "parameter":
                state[field] = x
            elif x is not parameter:
                parameter.copy_(x)
        if state:  # a parameter without a gradient has no moments
            optimiser.state[parameter] = state


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
        _pieces(path)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        return str(error)
    return None
