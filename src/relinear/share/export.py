"""A run as one transformers folder: weights, tokenizer, generation settings, the model's code, a card, licences, and where it all came from.

Such a folder loads where there is only transformers, by `trust_remote_code=True`; with relinear its code is never run. An adapter is added to
the weights. Left beside them, `AutoModelForCausalLM.from_pretrained(folder)` loads both, by transformers' own adapter loading, and `import
relinear` must come before: transformers ignores an adapter silently where peft is missing, so such a folder has no code of its own.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from relinear import records
from relinear.draw.render import write_text
from relinear.errors import UserError
from relinear.files import MANIFEST, folder_aside, sha256, write_json
from relinear.folders import tokenizer_of
from relinear.linearize.assemble import assemble
from relinear.linearize.model import Linearized
from relinear.plan.job import DTYPES
from relinear.share.card import card, licences
from relinear.share.runs import ADAPTER, Chain, again, chain_of
from relinear.share.selfcontained import write_code
from relinear.share.tensors import EXPORTED as RECORD

CARD = "README.md"


def export(run: Path | str, out: Path | str, *, merge: bool = True, dtype: str = "float32") -> Path:
    """Write the run folder `run` (`results/<scale>/runs/<run>`) as the transformers folder `out`, whole or not at all; returns `out`.

    Args:
        merge: add the LoRA to the weights, computed in float32 before they are rounded to `dtype`; else it lies beside them, and the folder
            has no code of its own.
        dtype: of the weights; a method's own parameters stay float32.

    Raises UserError for a folder that is no run or is not as its records say, an `out` that holds what export did not write, an unknown dtype,
    and an adapter to be left beside the weights where there is none.
    """
    run, out = Path(run).resolve(), Path(out).resolve()
    if dtype not in DTYPES:
        raise UserError(f"no dtype {dtype!r}; have {', '.join(DTYPES)}")
    _require_ours(out)
    chain = chain_of(run)
    model, read = assemble(*chain), verify_records(run, chain)
    last = chain.steps[-1:]  # the adapter of any other step is in the weights
    adapter = [] if merge else [path for step in last for name in ADAPTER if (path := step / name).is_file()]
    if not (merge or adapter):
        raise UserError(f"{run} ends without a LoRA, so there is none to leave beside the weights; leave --adapter out")
    if isinstance(model, PeftModel):
        model = model.merge_and_unload() if merge else model.unload()
    _round(model, getattr(torch, dtype))

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
        own = {folder: read[folder] for folder in (chain.model, *chain.steps)}
        write_text(scratch / CARD, card(run, chain, own))
        for name, (_, text) in licences(chain, own).items():
            shutil.copyfile(text, scratch / name)
        files = {str(p.relative_to(scratch)): sha256(p) for p in sorted(scratch.rglob("*")) if p.is_file()}
        write_json(scratch / RECORD, {"run": run.name, "stages": _stages(run, chain, read), "merged": merge, "dtype": dtype, "files": files})
    return out


def verify_records(run: Path, chain: Chain) -> dict[Path, dict[str, Any]]:
    """The records of the run's model, of each step that trained it, of whichever run, and of the run's measurements, by their folders.

    Raises UserError where one is not what its or a later record says. Of committed results, some files were left out or made smaller; those that
    the model is loaded from were checked with the chain.
    """
    folders = [chain.model, *chain.steps, *(path.parent for path in sorted(run.glob("*/run.json")))]
    read = {folder: record for folder in folders if (record := records.read(folder))}
    places = {records.place(folder): folder for folder in read}
    committed = (run.parents[1] / MANIFEST).is_file()
    for own, record in read.items():
        for role, parent in record["parents"].items():
            made = places.get(records.place(parent["path"]))
            if made is not None and parent["key"] != read[made]["key"]:
                raise UserError(f"{own} was made from another {role} than {made}; {again(record)}")
        for name in () if committed else record["artefacts"]:
            if wrong := records.difference(own, record, name):
                raise UserError(f"{wrong}; {again(record)}")
    return read


def _stages(run: Path, chain: Chain, read: Mapping[Path, dict[str, Any]]) -> dict[str, Any]:
    """Key, commit and hashes of what each stage made, by its folder below the scale's."""
    roots = (run.parents[1], chain.model.parents[1])  # a committed run's model lies with the results
    named = {next(folder.relative_to(root) for root in roots if root in folder.parents).as_posix(): record for folder, record in read.items()}
    return {
        name: {"key": r["key"], "commit": r["git"]["commit"], "artefacts": {n: a["sha256"] for n, a in r["artefacts"].items()}}
        for name, r in named.items()
    }


def _require_ours(out: Path) -> None:
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
    """Parameters in `dtype`, those of a method excepted. Not `model.to`, which would round the rotary frequencies too."""
    own = set(model.method_parameters()) if isinstance(model, Linearized) else set()
    for name, parameter in model.named_parameters():
        if name not in own:
            parameter.data = parameter.data.to(dtype)


def _forget_base(path: Path) -> None:
    """The adapter's base is the folder it lies in, not the path on the machine that trained it."""
    write_json(path, json.loads(path.read_text()) | {"base_model_name_or_path": None})
