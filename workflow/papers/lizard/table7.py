"""Lizard Table 7: each hyperparameter of the paper beside that of the run's records, and whether they are the
same."""

import json
from pathlib import Path

from relinear.core import store
from relinear.draw.deviations import EPSILON, same, settings_of, text
from relinear.draw.render import NOT_RUN, markdown, write_csv, write_text
from relinear.plan.options import method_file, schema
from relinear.records import read_committed

UNSAID = "not in the record"


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write table7.csv and table7.md."""
    found = measured[spec.reads()[0]]
    steps = {step: _record(found.folder.parent / step) for step in ("distill", "finetune")} if found else {}
    ours = (
        _ours(steps["distill"], steps["finetune"])
        if all(steps.values()) and steps
        else dict.fromkeys(spec.options, NOT_RUN)
    )
    rows = [
        {"setting": name, "paper": text(paper), "ours": text(ours[name]), "same": _same(paper, ours[name])}
        for name, paper in spec.options.items()
    ]
    files = [out / f"table7.{suffix}" for suffix in spec.makes]
    columns = ("setting", "paper", "ours", "same")
    write_csv(files[0], columns, rows)
    shown = markdown(
        ["Setting", "Paper", f"Ours, `{about.scale}`", "Same"],
        ([row[c] for c in columns] for row in rows),
        align="left",
    )
    notes = [f"- {note.where}: {note.text}." for note in spec.misprints]
    write_text(files[1], "\n".join(["**Lizard Table 7, hyperparameters.**", "", shown, "", *notes]) + "\n")
    return files


def _record(folder: Path) -> dict | None:
    file = folder / "run.json"
    return json.loads(read_committed(file)) if store.exists(file) else None


def _ours(distill: dict, finetune: dict) -> dict:
    """The settings in the records of both steps, by the names of the spec."""
    config, hardware = finetune["config"], finetune["hardware"]
    first, second = settings_of(distill), settings_of(finetune)
    options = schema(method_file(config["method"])).model_validate(config["options"])
    return {
        "gpus": second["gpu"],
        "engine": hardware.get("engine", UNSAID),
        "precision": second["precision"],
        "sequence_length": second["seq_len"],
        "feature_dimension": UNSAID,
        "feature_activation": options.feature.removesuffix("_pm"),
        "optimizer": second["optimizer"],
        "betas": second["betas"],
        "epsilon": EPSILON,
        "min_lr_ratio": second["min_lr_ratio"],
        "global_batch": second["batch"],
        "micro_batch": config["budget"]["batch_size"] // hardware["processes"],
        "clip": second["clip"],
        "schedule": second["schedule"],
        "distill_tokens": distill["tokens"],
        "distill_lr": first["lr"],
        "finetune_tokens": finetune["tokens"],
        "finetune_lr": second["lr"],
        "lora_rank": second["lora_rank"],
        "lora_alpha": second["lora_alpha"],
        "lora_dropout": second["lora_dropout"],
        "lora_targets": second["lora_targets"],
    }


def _same(paper, ours) -> str:
    return "" if ours in (UNSAID, NOT_RUN) else same(paper, ours)
