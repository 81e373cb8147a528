"""The model card of an exported folder, with the model, its making, its scores, the work that it stands on and its limits; and texts of licences."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relinear.draw.planned import measured_in
from relinear.draw.render import markdown
from relinear.get.assets import default_cache
from relinear.plan.plan import Plan
from relinear.plan.strict import WORKFLOW
from relinear.records import trained_at
from relinear.share.runs import Chain

SCORES = {"perplexity": "perplexity", "lambada": "acc", "commonsense": "acc", "boolq": "acc", "mmlu": "acc"}  # measure -> the metric that is shown
NO_TRAINING = "Nothing was trained."


def card(run: Path, chain: Chain, records: Mapping[Path, dict[str, Any]]) -> str:
    """The text of README.md: `records` are those of the pretrained model and of the steps that trained the run's, by their folders."""
    plan = Plan(scale=next(iter(records.values()))["scale"])
    teacher = chain.model.name
    methods = [link.method for link in chain.links if link.method != "softmax"]
    title = f"{run.name}, {'linearized from' if methods else 'adapted from'} {teacher}"
    sources = dict(_sources(plan, teacher, records))
    head = ["---", "library_name: transformers", f"tags: [{', '.join(['relinear', *dict.fromkeys(methods)])}]", f"base_model: {teacher}"]
    if sources:
        head.append(f"license: {next(iter(sources.values()))[0].lower()}")
    made = [_made(link.method, link.options) for link in chain.links]
    steps = [_step(folder, records[folder]) for folder in chain.steps]
    lines = [
        *head, "---", "", f"# {title}", "", *made, "", "## How it was made", "",
        markdown(["Step", "Tokens", "Rate", "Data", "Commit"], steps, align="left") if steps else NO_TRAINING, "",
        "`relinear.json` has the hashes of everything it was made from.", "", "## Scores", "",
        markdown(["Of", "Metric", "Value", "n"], scores, align="left") if (scores := [*_scores(run)]) else "None was measured.", "",
        f"At scale `{plan.scale}` of relinear. Accuracies are shares; ± is one standard error. The teacher's own numbers are in the suite's tables.",
        "", "## Whose work it stands on", "", *(f"- {name}: {whose} ({licence})" for name, (licence, whose) in sources.items()),
        *(f"- `{name}`: {of}" for name, (of, _) in licences(chain, records).items()), "",
        "## What it does not do", "", *(f"- {line}" for line in _limits(methods)),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def licences(chain: Chain, records: Mapping[Path, dict[str, Any]]) -> dict[str, tuple[str, Path]]:
    """The texts of licences that lie in the folder, by their names there: what each is of, and where it is taken from.

    They are this suite's, and those that came with the assets. An asset whose package has no such text, or which is no longer in the cache, has its
    licence in the card alone.
    """
    plan = Plan(scale=next(iter(records.values()))["scale"])
    found = {"LICENSE": ("of relinear, whose code and numbers are here", WORKFLOW.parent / "LICENSE")}
    for name, _ in _sources(plan, chain.model.name, records):
        for path in sorted((default_cache() / plan.catalogue[name].folder).rglob("LICENSE")):
            found[f"LICENSE-{name}"] = (f"as it came with {name}", path)
    return found


def _made(method: str, options: Mapping[str, Any]) -> str:
    if method == "softmax":
        return "Softmax attention, as the teacher has it."
    given = ", ".join(f"{name} {value}" for name, value in options.items()) or "its options as by default"
    return f"`{method}` in place of softmax attention ({given})."


def _step(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """A training step as a row."""
    recipe = record["config"].get("recipe", {})
    data = ", ".join(dict.fromkeys(entry["name"] for entry in record["datasets"]))
    commit = str((record.get("git") or {}).get("commit"))[:7]
    return [folder.name, f"{record['tokens']:,}", str(trained_at(record["config"])["lr"] if "lr" in recipe else ""), data, f"`{commit}`"]


def _scores(run: Path) -> Iterator[list[str]]:
    """The measurements of the run, one row for each reading."""
    for measure, metric in SCORES.items():
        if (found := measured_in(run, measure)) is None:
            continue
        for reading in found.readings:
            if reading.metric == metric and reading.value is not None:
                error = f" ± {reading.stderr:.2g}" if reading.stderr is not None else ""
                yield [reading.of, reading.metric, f"{reading.value:.4g}{error}", f"{reading.n:,}"]


def _sources(plan: Plan, teacher: str, records: Mapping[Path, dict[str, Any]]) -> Iterator[tuple[str, tuple[str, str]]]:
    """The assets that the model began with and was trained on: name -> licence and attribution."""
    known = plan.models.get(teacher)
    data = [entry["name"] for record in records.values() for entry in record["datasets"] if entry.get("role") == "train"]
    for name in dict.fromkeys([*(known.assets if known else ()), *data]):
        if asset := plan.catalogue.get(name):
            yield name, (asset.licence, asset.attribution)


def _limits(methods: list[str]) -> Iterator[str]:
    yield "It is the result of an experiment, trained on the tokens above and no more; nobody has looked at what it says for harm or for truth."
    if methods:
        yield "Its state has a fixed size: what it read long ago can be lost. Measure recall on your own texts before you rely on it."
        yield "Batches are padded on the left; assisted decoding is refused, since a recurrent state takes no token back."
