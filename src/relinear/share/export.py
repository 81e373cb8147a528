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

from relinear.errors import UserError
from relinear.files import MANIFEST, folder_aside, read_record, sha256, write_json
from relinear.linearize.assemble import assemble, chain_of
from relinear.linearize.model import Linearized
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
    base, links = chain_of(run)
    model = assemble(base, links)
    record = provenance(run)
    if isinstance(model, PeftModel):
        if self_contained and not merge:
            raise UserError("a self-contained folder has no adapter, since transformers ignores one silently where peft is missing; add --merge")
        model = model.merge_and_unload() if merge else model.unload()
    last = [step for link in links for step in link.steps][-1:]  # the adapter of any other is in the weights
    adapter = [] if merge else [path for step in last for name in ADAPTER if (path := step / "adapter" / name).is_file()]
    _round(model, getattr(torch, dtype))

    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(out) as scratch:
        if self_contained and isinstance(model, Linearized):
            write_code(model, scratch)
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(base).save_pretrained(scratch)
        for path in adapter:
            shutil.copy(path, scratch)
        if adapter:
            _forget_base(scratch / ADAPTER[0])
        files = {str(p.relative_to(scratch)): sha256(p) for p in sorted(scratch.rglob("*")) if p.is_file()}
        write_json(scratch / RECORD, {**record, "merged": merge, "dtype": dtype, "files": files})
    return out


def provenance(run: Path) -> dict:
    """Key, commit and artefact hashes of the run's model, of each step that trained it, of whichever run, and of the run's measurements.

    They are named by their folders below the scale's. Raises UserError where one is not what its or a later record says.
    """
    root, (base, links) = run.parents[1], chain_of(run)
    folders = [base, *(step for link in links for step in link.steps), *(path.parent for path in sorted(run.glob("*/run.json")))]
    records = {folder.relative_to(root).as_posix(): record for folder in folders if (record := read_record(folder))}
    for own, record in records.items():
        for role, parent in record["parents"].items():
            made = next((name for name in records if parent["path"].endswith(f"/{name}")), None)  # the scale's folder may have been moved
            if made is not None and parent["key"] != records[made]["key"]:
                raise UserError(f"{root / own} was made from another {role} than {root / made}; {_again(record)}")
        for name, artefact in record["artefacts"].items():
            path = root / own / name
            if not path.is_file() or sha256(path) != artefact["sha256"]:
                raise UserError(f"{path} is not what its run.json says; {_again(record)}")
    stages = {
        name: {"key": r["key"], "commit": r["git"]["commit"], "artefacts": {n: a["sha256"] for n, a in r["artefacts"].items()}}
        for name, r in records.items()
    }
    return {"run": run.name, "stages": stages}


def _again(record: dict) -> str:
    """What to do about a folder that is not as its record says."""
    words = f"measure {record['run']} {record['measure']}" if record.get("measure") else f"{record['stage']} {record['run']}"
    return f"run `relinear {words} --scale {record['scale']}` again"


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
