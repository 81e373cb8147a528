"""A run as one transformers folder: weights, tokenizer, generation settings, the model's code, a card,
licences, and where it all came from.

Such a folder loads where there is only transformers, by `trust_remote_code=True`; with relinear its code is
never run. An adapter is added to the weights. Left beside them,
`AutoModelForCausalLM.from_pretrained(folder)` loads both, by transformers' own adapter loading, and `import
relinear` must come before: transformers ignores an adapter silently where peft is missing, so such a folder
has no code of its own.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relinear import records
from relinear.core import store
from relinear.draw.render import write_text
from relinear.errors import UserError
from relinear.files import MANIFEST, folder_aside, sha256, write_json
from relinear.folders import config_of, tokenizer_of
from relinear.linearize.assemble import assemble
from relinear.linearize.model import Linearized
from relinear.machine.mode import as_umask
from relinear.opening import configuring
from relinear.plan.job import DTYPES
from relinear.share.card import card, card_of_model, licence, licences
from relinear.share.plain import plain_form
from relinear.share.runs import ADAPTER, Chain, again, chain_of
from relinear.share.selfcontained import write_code
from relinear.share.tensors import EXPORTED as RECORD
from relinear.share.tensors import load_folder
from relinear.weights import files_of, require_finite

CARD = "README.md"


def export(
    run: Path | str, out: Path | str, *, merge: bool = True, dtype: str = "float32", plain: bool = False
) -> Path:
    """Write the run folder `run` (`results/<scale>/runs/<run>`) as the transformers folder `out`, whole or
    not at all; returns `out`.

    Args:
        merge: add the LoRA to the weights, computed in float32 before they are rounded to `dtype`; else it
        lies beside them, and the folder
            has no code of its own.
        dtype: of the weights; a method's own parameters stay float32.
        plain: as an architecture of transformers, with no code of ours (`relinear.share.plain`).

    Raises UserError for a folder that is no run or is not as its records say, an `out` that holds what export
    did not write, an unknown dtype, an adapter to be left beside the weights where there is none, and a model
    that no architecture of transformers computes, where one is asked for.
    """
    run, out = Path(run).resolve(), Path(out).resolve()
    if dtype not in DTYPES:
        raise UserError(f"no dtype {dtype!r}; have {', '.join(DTYPES)}")
    if plain and not merge:
        raise UserError("--plain adds the adapter to the weights; leave --adapter or --plain out")
    require_ours(out)
    chain = chain_of(run)
    model, steps = assemble(*chain), verify_records(run, chain)
    measured = measurements(run, steps)
    last = chain.steps[-1:]  # the adapter of any other step is in the weights
    adapter = [] if merge else [path for step in last for name in ADAPTER if (path := step / name).is_file()]
    if not (merge or adapter):
        raise UserError(
            f"{run} ends without a LoRA, so there is none to leave beside the weights; leave --adapter out"
        )
    if isinstance(model, PeftModel):
        model = model.merge_and_unload() if merge else model.unload()
    _round(model, getattr(torch, dtype))
    if plain:
        model = plain_form(model)

    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(out) as scratch:
        if isinstance(model, Linearized) and not adapter:
            write_code(model, scratch)
        model.save_pretrained(scratch)
        tokenizer_of(chain.model).save_pretrained(scratch)
        for path in adapter:
            shutil.copy(path, scratch)
        if adapter:
            _forget_base(scratch / Path(ADAPTER[0]).name)
        write_text(scratch / CARD, card(run.name, chain, steps, measured, plain=plain))
        for name, (_, text) in licences(chain, steps).items():
            shutil.copyfile(text, scratch / name)
        files = {str(p.relative_to(scratch)): sha256(p) for p in sorted(scratch.rglob("*")) if p.is_file()}
        as_umask(scratch)
        write_json(
            scratch / RECORD,
            {
                "run": run.name,
                "stages": _stages(run, chain, {**steps, **measured}),
                "merged": merge,
                "dtype": dtype,
                "files": files,
            },
        )
    return out


def export_model(
    model: PreTrainedModel,
    out: Path | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    plain: bool = False,
) -> Path:
    """Write a linearized model, as it is now, as the transformers folder `out`, whole or not at all; returns
    `out`.

    The folder has the model's code, so it loads where there is only transformers, by
    `trust_remote_code=True`; with `plain` it is an architecture of transformers and has none
    (`relinear.share.plain`). Weights keep their dtypes.

    Raises UserError for a model that is not linearized, one with an adapter that is not merged, one in a
    wrapper, weights that are not finite, an `out` that holds what export did not write, and, with `plain`, a
    model that no architecture of transformers computes.
    """
    out = Path(out).resolve()
    require_ours(out)
    if isinstance(model, PeftModel):
        raise UserError(
            "the model has an adapter beside its weights; possible: merge it first, model ="
            " model.merge_and_unload()"
        )
    if getattr(model, "_hf_peft_config_loaded", False):  # by transformers' own add_adapter, which merges none
        raise UserError(
            "the model has an adapter beside its weights; possible: merge it first, model ="
            " peft.PeftModel.from_pretrained(the model without it, the folder that model.save_pretrained"
            " wrote).merge_and_unload()"
        )
    for inner in ("_orig_mod", "module"):  # of torch.compile, and of DataParallel and the like
        if isinstance(getattr(model, inner, None), Linearized):
            raise UserError(
                f"{type(model).__name__} is a wrapper of a linearized model; possible: the model itself,"
                f" model.{inner}"
            )
    if not isinstance(model, Linearized):
        raise UserError(
            f"a {type(model).__name__} is not linearized, so it needs no code of ours; possible: its own"
            " save_pretrained"
        )
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise UserError(
            f"got a {type(tokenizer).__name__} as tokenizer; possible: what AutoTokenizer.from_pretrained"
            " returns, or none"
        )
    saved = plain_form(model) if plain else model
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(out) as scratch:
        if not plain:
            write_code(model, scratch)
        try:
            saved.save_pretrained(scratch)
        finally:
            vars(model.config).pop("auto_map", None)  # the model in memory is as it was
        for path in files_of(scratch):
            require_finite(path)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        write_text(scratch / CARD, card_of_model(model, plain=plain))
        if (text := licence()) is not None:
            shutil.copyfile(text, scratch / "LICENSE")
        as_umask(scratch)
        files = {str(p.relative_to(scratch)): sha256(p) for p in sorted(scratch.rglob("*")) if p.is_file()}
        write_json(scratch / RECORD, {"run": None, "method": model.config.relinear, "files": files})
    return out


def export_folder(folder: Path, out: Path | str, dtype: str | None = None, *, plain: bool = False) -> Path:
    """As `export_model`, of a linearized model that save_pretrained wrote, with the tokenizer that lies
    beside it. `dtype` None: as saved."""
    with configuring(folder):
        config = config_of(folder)
    torch_dtype = getattr(torch, dtype) if dtype else config.dtype or torch.float32
    tokens = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer = tokenizer_of(folder) if tokens else None
    return export_model(load_folder(folder, torch_dtype), out, tokenizer, plain=plain)


def is_saved_model(folder: Path) -> bool:
    """Whether a folder is a model's, as save_pretrained writes one, and no run's."""
    return (folder / "config.json").is_file() and not store.parts(folder)


def verify_records(run: Path, chain: Chain) -> dict[Path, dict[str, Any]]:
    """The records of the run's model and of each step that trained it, of whichever run, by their folders.

    Raises UserError where one is not what its or a later record says. Of committed results, some files were
    left out or made smaller; those that the model is loaded from were checked with the chain.
    """
    read = {folder: record for folder in (chain.model, *chain.steps) if (record := records.read(folder))}
    for own, record in read.items():
        if wrong := _wrong(own, record, _keys(run, read), () if _committed(run) else record["artefacts"]):
            raise UserError(f"{wrong}; {again(record)}")
    return read


def measurements(run: Path, steps: Mapping[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """The records of the run's measurements that were taken of this model, by their folders.

    One line on stderr names those that were not, or whose files are others by now: the model is whole without
    them.
    """
    read = {own: record for own in store.parts(run) if (record := records.read(own))["measure"]}
    keys, found = _keys(run, {**steps, **read}), {}
    for own, record in read.items():
        names = record["artefacts"].keys() & {"metrics.json"} if _committed(run) else record["artefacts"]
        if wrong := _wrong(own, record, keys, names):
            print(f"left out: {wrong}", file=sys.stderr)
        else:
            found[own] = record
    return found


def _committed(run: Path) -> bool:
    """Whether a run lies in committed results."""
    return (run.parents[1] / MANIFEST).is_file()


def _keys(run: Path, read: Mapping[Path, dict[str, Any]]) -> dict[Path, tuple[Path, str]]:
    """The folder and the key of each record, by its place in the results.

    A committed run's model lies elsewhere, and was compared by its weights (`chain_of`): its key is that of
    the committed record.
    """
    keys = {records.place(folder): (folder, record["key"]) for folder, record in read.items()}
    for place in keys:
        if place.parts[0] == "models" and (committed := records.read(run.parents[1] / place)):
            keys[place] = (run.parents[1] / place, committed["key"])
    return keys


def _wrong(
    own: Path, record: Mapping[str, Any], keys: Mapping[Path, tuple[Path, str]], files: Iterable[str]
) -> str | None:
    """The way in which a folder is not what its record says: made from another parent, or a file that
    differs. None where it is."""
    for role, parent in record["parents"].items():
        made, key = keys.get(records.place(parent["path"]), (None, None))
        if made is not None and parent["key"] != key:
            return f"{own} was made from another {role} than {made}"
    return next((wrong for name in files if (wrong := records.difference(own, record, name))), None)


def _stages(run: Path, chain: Chain, read: Mapping[Path, dict[str, Any]]) -> dict[str, Any]:
    """Key, commit and hashes of what each stage made, by its folder below the scale's."""
    roots = (run.parents[1], chain.model.parents[1])  # a committed run's model lies with the results
    named = {
        next(folder.relative_to(root) for root in roots if root in folder.parents).as_posix(): record
        for folder, record in read.items()
    }
    return {
        name: {
            "key": r["key"],
            "commit": r["git"]["commit"],
            "artefacts": {n: a["sha256"] for n, a in r["artefacts"].items()},
        }
        for name, r in named.items()
    }


def require_ours(out: Path) -> None:
    """Raises UserError unless `out` is free, empty, or an export with nothing added to it."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file; give a folder")
    found = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    ours = {RECORD, *json.loads((out / RECORD).read_text())["files"]} if RECORD in found else set()
    if other := sorted(found - ours):
        raise UserError(f"{out} holds what `relinear export` did not write ({other[0]}); give another folder")


def _round(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters in `dtype`, those of a method excepted. Not `model.to`, which would round the rotary
    frequencies too."""
    own = set(model.method_parameters()) if isinstance(model, Linearized) else set()
    for name, parameter in model.named_parameters():
        if name not in own:
            parameter.data = parameter.data.to(dtype)


def _forget_base(path: Path) -> None:
    """The adapter's base is the folder it lies in, not the path on the machine that trained it."""
    write_json(path, json.loads(path.read_text()) | {"base_model_name_or_path": None})
