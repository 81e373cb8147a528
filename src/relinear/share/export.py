"""A run as one transformers folder: weights, adapter or none, tokenizer, generation settings, and where it all came from.

With an adapter beside the weights, `AutoModelForCausalLM.from_pretrained(folder)` loads both, by transformers' own adapter loading: nobody
gets half a model. `merge` adds the adapter to the weights instead.
"""

import json
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel

from relinear import records
from relinear.errors import UserError
from relinear.files import MANIFEST, folder_aside, sha256, write_json
from relinear.linearize.assemble import assemble
from relinear.linearize.model import Linearized
from relinear.share.runs import Chain, again, chain_of
from relinear.share.selfcontained import write_code

DTYPES = ("float32", "bfloat16", "float16")
RECORD = "relinear.json"  # what this module wrote and from what; a folder without it is not ours to replace
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def export(run: Path | str, out: Path | str, *, merge: bool = False, dtype: str = "float32", self_contained: bool = False) -> Path:
    """Write the run folder `run` (`results/<scale>/runs/<run>`) as the transformers folder `out`, whole or not at all; returns `out`.

    Args:
        merge: add the LoRA to the weights, computed in float32 before they are rounded to `dtype`.
        dtype: of the weights; a method's own parameters stay float32.
        self_contained: also write the modeling code, so that the folder loads without relinear (`trust_remote_code=True`).

    Raises UserError for a folder that is no run, is not as its records say or is of committed results, an `out` that holds what export did
    not write, an unknown dtype, and an adapter in a self-contained folder.
    """
    run, out = Path(run).resolve(), Path(out).resolve()
    if dtype not in DTYPES:
        raise UserError(f"no dtype {dtype!r}; have {', '.join(DTYPES)}")
    if (run.parents[1] / MANIFEST).is_file():
        raise UserError(f"{run} is of committed results, whose files are not all that its records name; possible: a run of results/<scale>")
    _require_ours(out)
    chain = chain_of(run)
    model, record = assemble(*chain), provenance(run, chain)
    if isinstance(model, PeftModel):
        if self_contained and not merge:
            raise UserError("a self-contained folder has no adapter, since transformers ignores one silently where peft is missing; add --merge")
        model = model.merge_and_unload() if merge else model.unload()
    own = () if merge else chain.steps[-1:]  # the adapter of any other step is in the weights
    adapter = [path for step in own for name in ADAPTER if (path := step / "adapter" / name).is_file()]
    _round(model, getattr(torch, dtype))

    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(out) as scratch:
        if self_contained and isinstance(model, Linearized):
            write_code(model, scratch)
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(chain.model).save_pretrained(scratch)
        for path in adapter:
            shutil.copy(path, scratch)
        if adapter:
            _forget_base(scratch / ADAPTER[0])
        files = {str(p.relative_to(scratch)): sha256(p) for p in sorted(scratch.rglob("*")) if p.is_file()}
        write_json(scratch / RECORD, {**record, "merged": merge, "dtype": dtype, "files": files})
    return out


def provenance(run: Path, chain: Chain) -> dict:
    """Key, commit and artefact hashes of the run's model, of each step that trained it, of whichever run, and of the run's measurements.

    They are named by their folders below the scale's. Raises UserError where one is not what its or a later record says.
    """
    root = run.parents[1]
    folders = [chain.model, *chain.steps, *(path.parent for path in sorted(run.glob("*/run.json")))]
    read = {folder.relative_to(root).as_posix(): record for folder in folders if (record := records.read(folder))}
    for own, record in read.items():
        for role, parent in record["parents"].items():
            made = next((name for name in read if parent["path"].endswith(f"/{name}")), None)  # the scale's folder may have been moved
            if made is not None and parent["key"] != read[made]["key"]:
                raise UserError(f"{root / own} was made from another {role} than {root / made}; {again(record)}")
        for name in record["artefacts"]:
            if wrong := records.difference(root / own, record, name):
                raise UserError(f"{wrong}; {again(record)}")
    stages = {
        name: {"key": r["key"], "commit": r["git"]["commit"], "artefacts": {n: a["sha256"] for n, a in r["artefacts"].items()}}
        for name, r in read.items()
    }
    return {"run": run.name, "stages": stages}


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
