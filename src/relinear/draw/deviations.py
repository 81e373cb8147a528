"""Deviations: the recipe that a paper prints beside that of our runs, read from the records of their
trainings."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relinear.draw import About, Measurements
from relinear.draw.drawing import Drawn
from relinear.draw.provenance import Origin
from relinear.draw.render import count, markdown, write_csv, write_text
from relinear.plan.claims import Spec
from relinear.plan.deviations import ATTENTION, EVERY, OF_STEP, Deviations, OneOf, Recipe
from relinear.plan.forms import form_of, steps_behind
from relinear.plan.measured import Measured
from relinear.plan.specs import Artefact
from relinear.records import trained_at

ROUNDED = 0.05  # the papers' numbers of tokens are round
COLUMNS = ("run", "step", "setting", "paper", "ours", "same")
UNSAID = "not said"
# Constants of the training loop, which no record has; tests hold them to what it does.
OPTIMIZER, EPSILON, LORA_DROPOUT = "AdamW", 1e-8, 0.0
WORDS = {
    "teacher": "model",
    "trained": "trained weights",
    "method_lr": "lr of what the method adds",
    "lr": "peak lr",
    "batch": "sequences a step",
    "batch_tokens": "tokens a step",
    "seq_len": "tokens a sequence",
    "tokens": "tokens trained on",
    "patience": "epochs without a better loss before it stops",
    "min_lr_ratio": "last rate, as a share of the peak",
    "warmup_ratio": "warm-up, as a share of the steps",
}


class Line(NamedTuple):
    """A setting: of the attention, of every step, or of the steps that are named."""

    step: str
    setting: str
    paper: Any
    ours: Any


def drawn(artefact: Artefact, measured: Measurements, about: About) -> Drawn:
    """The table as csv and Markdown, a part a run."""
    spec: Deviations | Any = artefact.spec
    found = {recipe.run: measured.get((recipe.run, recipe.measure)) for recipe in spec.runs}
    lines = {r.run: list(lines_of(r, m)) for r in spec.runs if (m := found[r.run]) is not None}

    def write(out: Path, _: Any) -> None:
        rows = [
            dict(zip(COLUMNS, (run, *_written(line)), strict=True))
            for run, own in lines.items()
            for line in own
        ]
        write_csv(out / f"{artefact.stem}.csv", COLUMNS, rows)
        write_text(out / f"{artefact.stem}.md", _page(spec, lines, about))

    def judge(claim):
        raise ValueError(f"{artefact.name} has no claims; got {claim.claim!r}")

    cells: dict[str, dict[str, Origin]] = {
        recipe.run: {recipe.measure: (m := found[recipe.run]) and m.source.file} for recipe in spec.runs
    }
    return Drawn(write, judge, cells, [m.source for m in found.values() if m])


def _page(spec: Deviations, lines: Mapping[str, list[Line]], about: About) -> str:
    parts = [
        f"**{spec.label}: {spec.says}; {about._replace(teacher=None).where('`')}.**",
        about.demonstration or "",
    ]
    titles = {recipe.run: recipe.title for recipe in spec.runs}
    for run, own in lines.items():
        written = [_written(line) for line in own]
        same = [row[-1] for row in written]
        parts += [
            f"**{titles[run]}**; ours is `{run}`: {same.count('yes')} settings the same, {same.count('no')}"
            f" other, {same.count('')} of which the paper says nothing.",
            markdown(
                ["Step", "Setting", "Paper", "Ours", "Same"],
                [[step, WORDS.get(name, name), *rest] for step, name, *rest in written],
                align="left",
            ),
        ]
    if lacking := [f"`{run}`" for run in titles if run not in lines]:
        parts.append(f"Not in these results: {', '.join(lacking)}.")
    parts.append("Ours are the settings that the trainings ran with, from their records.")
    parts.append("\n".join(f"- {note.where}: {note.text}." for note in spec.misprints))
    parts.append(objected(spec))
    return "\n\n".join(filter(None, parts)) + "\n"


def objected(spec: Spec) -> str:
    """What an author might object, as a sentence; empty where nothing is."""
    return f"An author of the paper might object: {spec.objection}." if spec.objection else ""


def lines_of(recipe: Recipe, found: Measured) -> Iterator[Line]:
    """The settings of a run: those of its attention that the paper names, and all of its own steps, not those
    of the run that it goes on from. Raises BrokenError for a record that cannot be believed."""
    form = form_of(found)
    printed = recipe.paper.get(ATTENTION, {})
    for name in printed:
        yield Line(ATTENTION, name, printed[name], form.get(name))
    own = [record for record in steps_behind(found)[0] if record["run"] == found.folder.parent.name]
    steps = {record["stage"]: settings_of(record) for record in sorted(own, key=lambda each: each["started"])}
    every = recipe.paper.get(EVERY, {})
    for name in OF_STEP:
        theirs = {step: recipe.paper.get(step, {}).get(name, every.get(name)) for step in steps}
        ours = {step: settings.get(name) for step, settings in steps.items()}
        rest = [step for step in steps if ours[step] is not None or theirs[step] is not None]
        while rest:  # steps that are alike in this setting share a line
            alike = [step for step in rest if (theirs[step], ours[step]) == (theirs[rest[0]], ours[rest[0]])]
            rest = [step for step in rest if step not in alike]
            which = EVERY if len(alike) == len(steps) > 1 else " and ".join(alike)
            yield Line(which, name, theirs[alike[0]], ours[alike[0]])


def settings_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a step was trained with, from its record, by the names of `OF_STEP`; what it has not
    is left out."""
    config, hardware = record["config"], record["hardware"]
    recipe, budget, stage = config["recipe"], config["budget"], record.get("stage")
    batch = budget["batch_size"] * budget["accumulate"]
    lora = recipe.get("kind") == "lora"
    found = {
        "teacher": Path(model["path"]).name if (model := record["parents"].get("model")) else None,
        "data": _data(record),
        "loss": recipe.get("loss") or _loss(stage, recipe),
        "trained": _trained(stage, recipe),
        "lora_rank": recipe.get("lora_rank") if lora else None,
        "lora_alpha": recipe.get("lora_alpha") if lora else None,
        "lora_dropout": LORA_DROPOUT if lora else None,
        "lora_targets": recipe.get("lora_targets") if lora else None,
        "optimizer": OPTIMIZER,
        **trained_at(config),
        "schedule": "constant" if recipe["min_lr_ratio"] == 1 else "cosine",
        "warmup_ratio": recipe["warmup_ratio"],
        "min_lr_ratio": recipe["min_lr_ratio"],
        "weight_decay": recipe["weight_decay"],
        "betas": recipe["betas"],
        "clip": recipe["clip"],
        "batch": batch,
        "batch_tokens": batch * budget["seq_len"],
        "seq_len": budget["seq_len"],
        "tokens": record.get("tokens"),
        "epochs": budget["epochs"],
        "patience": recipe.get("patience"),
        "precision": hardware["dtype"],
        "gpu": f"{hardware['processes']} x {gpu}" if (gpu := hardware.get("gpu")) else "none",
    }
    return {name: value for name, value in found.items() if value is not None}


def _data(record: Mapping[str, Any]) -> str | None:
    """The text that a step read, and in brackets what it is made of, if that is called otherwise."""
    name = Path(text["path"]).name.partition("@")[0] if (text := record["parents"].get("text")) else None
    made = [each["name"] for each in record.get("datasets", ()) if each.get("role") == "train"]
    return f"{name} ({', '.join(made)})" if name and made and made != [name] else name


def _loss(stage: str | None, recipe: Mapping[str, Any]) -> str:
    """The loss of a step that is no transfer."""
    if stage == "classify":
        return "the label"
    if stage == "restore":
        return "the hidden states"
    return "the answer alone" if recipe.get("learn") == "last" else "every next token"


def _trained(stage: str | None, recipe: Mapping[str, Any]) -> str:
    """The weights that a step trains."""
    if stage == "distill":
        return "maps"
    kind = {"lora": "LoRA", "method": "maps"}.get(recipe.get("kind", "full"), "all")
    return "LoRA and maps" if kind == "LoRA" and recipe.get("train_method") else kind


def _written(line: Line) -> tuple[str, str, str, str, str]:
    ours = "" if line.ours is None else text(line.ours)
    paper = UNSAID if line.paper is None else text(line.paper)
    return line.step, line.setting, paper, ours, same(line.paper, line.ours)


def text(value: Any) -> str:
    """A setting for reading."""
    if isinstance(value, OneOf):
        return f"one of {text(value.one_of)}"
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value))
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return count(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def same(paper: Any, ours: Any) -> str:
    """`yes` or `no`; empty where the paper says nothing. Counts from ten thousand on are the same within
    `ROUNDED`."""
    if paper is None:
        return ""
    if isinstance(paper, OneOf):
        return _yes(any(same(each, ours) == "yes" for each in paper.one_of))
    if isinstance(paper, list | tuple):
        return _yes(isinstance(ours, Iterable) and list(paper) == list(ours))
    near = (
        isinstance(paper, int)
        and isinstance(ours, int)
        and paper >= 10_000
        and abs(ours / paper - 1) <= ROUNDED
    )
    return _yes(near or paper == ours)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
