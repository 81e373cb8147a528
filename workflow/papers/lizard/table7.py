"""Lizard Table 7: each hyperparameter of the paper beside that of the run's records, and whether they are the
same."""

import json
from pathlib import Path

from relinear.core import store
from relinear.draw.render import NOT_RUN, count, markdown, write_csv, write_text
from relinear.records import read_committed, trained_at

UNSAID = "not in the record"
ROUNDED = 0.05  # the paper's numbers of tokens are round


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
        {"setting": name, "paper": _text(paper), "ours": _text(ours[name]), "same": _same(paper, ours[name])}
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
    recipe, budget = config["recipe"], config["budget"]
    return {
        "gpus": f"{hardware['processes']} x {gpu}" if (gpu := hardware.get("gpu")) else "none",
        "engine": hardware.get("engine", UNSAID),
        "precision": hardware["dtype"],
        "sequence_length": budget["seq_len"],
        "feature_dimension": config["options"].get("feature_dimension", UNSAID),
        "feature_activation": config["options"].get("feature", UNSAID),
        "optimizer": UNSAID,
        "betas": recipe["betas"],
        "epsilon": UNSAID,
        "min_lr_ratio": recipe["min_lr_ratio"],
        "global_batch": budget["batch_size"] * budget["accumulate"],
        "micro_batch": budget["batch_size"] // hardware["processes"],
        "clip": recipe["clip"],
        "schedule": UNSAID,
        "distill_tokens": distill["tokens"],
        "distill_lr": trained_at(distill["config"])["lr"],
        "finetune_tokens": finetune["tokens"],
        "finetune_lr": trained_at(config)["lr"],
        "lora_rank": recipe["lora_rank"],
        "lora_alpha": recipe["lora_alpha"],
        "lora_dropout": recipe.get("lora_dropout", UNSAID),
        "lora_targets": recipe["lora_targets"],
    }


def _text(value) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return count(value) if isinstance(value, int) and value >= 10_000 else str(value)


def _same(paper, ours) -> str:
    if ours in (UNSAID, NOT_RUN):
        return ""
    if isinstance(paper, list | tuple):
        return "yes" if list(paper) == list(ours) else "no"
    near = (
        isinstance(paper, int)
        and isinstance(ours, int)
        and paper >= 10_000
        and abs(ours / paper - 1) <= ROUNDED
    )
    return "yes" if near or paper == ours else "no"
