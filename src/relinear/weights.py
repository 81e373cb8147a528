"""The tensors of a file of weights, by its header, and whether all numbers are finite. Imports neither torch
nor transformers."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relinear.errors import UserError

# the files of weights that a step of a run may leave
TRAINED = ("model.safetensors", "method.safetensors", "adapter/adapter_model.safetensors")
INDEX = "model.safetensors.index.json"  # the index of a model that is cut into several files
# bytes of a number, by safetensors' names of the dtypes that a model has
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00}  # all of these bits set: infinite, or no number
CHUNK = 1 << 24  # numbers that are looked at in one go
SHOWN = 3  # names in a message
ADAPTER_CONFIG = "adapter_config.json"
WIDEST = 65536  # the highest rank and the largest alpha of an adapter; no projection is wider
# the name of a module; peft reads most other strings as patterns, which can be of any cost
PLAIN = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# What an adapter's configuration may say freely. In all else peft's default is asked for: other entries
# import modules, change the weights below, or are patterns.
ADAPTER_FIELDS = (
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",
    "inference_mode",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "peft_version",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
)


class Tensor(NamedTuple):
    """A tensor in a file: where its bytes begin, and how many numbers of which dtype they are."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. Raises UserError for a file that is missing, cut short or
    anything else."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= size - 8:
                raise ValueError(f"its header would have {length} of {size} bytes")
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            tensors = {
                n: Tensor(x["dtype"], tuple(x["shape"]), *(8 + length + at for at in x["data_offsets"]))
                for n, x in entries.items()
            }
        end = max((t.end for t in tensors.values()), default=8 + length)
        if end != size:
            raise ValueError(f"its tensors end at byte {end} of {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no whole safetensors file: {error}") from None
    for name, tensor in tensors.items():
        numbers = 1
        for size in tensor.shape:
            numbers *= size
        if tensor.dtype in WIDTHS and tensor.end - tensor.begin != numbers * WIDTHS[tensor.dtype]:
            raise UserError(
                f"{path}: {name} of {tensor.dtype} {list(tensor.shape)} has {tensor.end - tensor.begin} bytes"
            )
    return tensors


def require_finite(path: Path) -> None:
    """Raise UserError where a file of weights holds a number that is infinite or none; it names the
    tensor."""
    import numpy as np  # not at the top, since planning loads no numpy

    kinds = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<u2"), "BF16": np.dtype("<u2")}
    for name, tensor in header(path).items():
        if tensor.dtype not in kinds or tensor.begin == tensor.end:
            continue  # whole numbers are finite
        kind = kinds[tensor.dtype]
        numbers = np.memmap(path, kind, "r", tensor.begin, ((tensor.end - tensor.begin) // kind.itemsize,))
        for begin in range(0, len(numbers), CHUNK):
            part = numbers[begin : begin + CHUNK]
            bits = EXPONENT.get(tensor.dtype)
            wrong = int((~np.isfinite(part) if bits is None else (part & bits) == bits).sum())
            if wrong:
                raise UserError(
                    f"{path}: {name} holds {wrong} numbers that are infinite or none (NaN); a model has"
                    " finite weights"
                )


def files_of(folder: Path) -> list[Path]:
    """The files of weights of a transformers folder, one or as its index names them. Raises UserError where
    there is none."""
    if (one := folder / "model.safetensors").is_file():
        return [one]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} has no weights: neither model.safetensors nor {INDEX}")
    try:
        return sorted(
            {
                folder / Path(name).name
                for name in json.loads((folder / INDEX).read_bytes())["weight_map"].values()
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is no index of weights: {error!r}") from None


def require_plain_adapter(folder: Path) -> None:
    """Raise UserError unless the adapter_config.json of a folder is a plain LoRA: finite, on modules that it
    names."""
    from peft import LoraConfig  # takes seconds to import

    file = folder / ADAPTER_CONFIG
    try:
        told = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is no configuration of an adapter: {error}") from None
    if not isinstance(told, dict) or told.get("peft_type") != "LORA":
        raise UserError(
            f"{file} is no LoRA's; got peft_type"
            f" {told.get('peft_type') if isinstance(told, dict) else told!r}, possible: LORA"
        )
    defaults, targets = LoraConfig().to_dict(), told.get("target_modules")
    checks = [
        ("r", isinstance(told.get("r"), int) and 0 < told["r"] <= WIDEST, f"1 to {WIDEST}"),
        ("lora_alpha", _within(told.get("lora_alpha"), WIDEST), f"a number above 0, at most {WIDEST}"),
        ("lora_dropout", told.get("lora_dropout", 0) == 0 or _within(told["lora_dropout"], 1), "0 to 1"),
        (
            "target_modules",
            isinstance(targets, list)
            and bool(targets)
            and all(isinstance(t, str) and PLAIN.fullmatch(t) for t in targets),
            "a list of modules' names, no pattern",
        ),
    ]
    empty = (None, False, [], {}, "")
    checks += [
        (name, value in empty or value == defaults.get(name), repr(defaults.get(name)))
        for name, value in told.items()
        if name not in ADAPTER_FIELDS
    ]
    for name, fits, possible in checks:
        if not fits:
            raise UserError(f"{file}: {name} is {str(told.get(name))[:80]!r}; possible: {possible}")


def _within(value: Any, most: float) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 < value <= most
    )


Names = Sequence[str]  # the names of one tensor; a tied one has several


def require_whole(
    files: Sequence[Path], expected: Mapping[str, tuple[int, ...]], tied: Sequence[Names] = ()
) -> None:
    """Raise UserError unless the files hold each expected tensor in its shape, and no other; of those that
    are `tied` one is enough."""
    found = {name: tensor for file in files for name, tensor in header(file).items()}
    spare = {name for names in tied if any(n in found for n in names) for name in names}
    require_none(
        files[0] if len(files) == 1 else files[0].parent,
        {
            "missing": expected.keys() - found.keys() - spare,
            "unexpected": found.keys() - expected.keys(),
            "misshapen": {
                f"{n} {list(t.shape)} instead of {list(expected[n])}"
                for n, t in found.items()
                if n in expected and t.shape != expected[n]
            },
        },
    )


def require_none(where: Path | str, problems: Mapping[str, Iterable[str]]) -> None:
    """Raise UserError where there are problems: by what is wrong, the names of the tensors."""
    if said := "; ".join(f"{what} tensors: {some(names)}" for what, names in problems.items() if names):
        raise UserError(f"{where} is not what its model needs: {said}")


def some(names: Iterable[str]) -> str:
    """A few of the names, sorted, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def trained(folder: Path) -> Iterator[Path]:
    """The files of weights that a step left in its folder."""
    yield from (folder / name for name in TRAINED if (folder / name).is_file())
