"""The model card of an exported folder, with the model, its making, its scores, the work that it stands on
and its limits; and texts of licences."""

from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from relinear.draw.render import markdown
from relinear.get.assets import default_cache
from relinear.plan.measured import load
from relinear.plan.plan import Plan
from relinear.plan.scale import scales
from relinear.plan.strict import WORKFLOW
from relinear.records import trained_at
from relinear.share.runs import Chain

# measure -> the metric that is shown
SCORES = {"perplexity": "perplexity", "lambada": "acc", "commonsense": "acc", "boolq": "acc", "mmlu": "acc"}
NO_TRAINING = "Nothing was trained."
TABLES = " The teacher's own numbers are in the suite's tables."
MADE_HERE = ("smoke", "written")  # texts that come with no asset
UNKNOWN = "not stated"  # a licence


def card(
    run: str,
    chain: Chain,
    records: Mapping[Path, dict[str, Any]],
    measured: Iterable[Path],
    *,
    plain: bool = False,
) -> str:
    """The text of README.md: `records` are those of the pretrained model and of the steps that trained the
    run's, by their folders; `measured` the folders of the measurements to show; `plain` as `export` has
    it."""
    plan = Plan(scale=next(iter(records.values()))["scale"])
    teacher = chain.model.name
    methods = [link.method for link in chain.links if link.method != "softmax"]
    title = f"{run}, {'linearized from' if methods else 'adapted from'} {teacher}"
    sources = dict(_sources(plan, teacher, records))
    head = [
        "---",
        "library_name: transformers",
        f"tags: [{', '.join(['relinear', *dict.fromkeys(methods)])}]",
        f"base_model: {teacher}",
    ]
    if sources and (licence := next(iter(sources.values()))[0]) != UNKNOWN:
        head.append(f"license: {licence.lower()}")
    made = [_made(link.method, link.options) for link in chain.links]
    steps = [_step(folder, records[folder]) for folder in chain.steps]
    lines = [
        *head,
        "---",
        "",
        f"# {title}",
        "",
        *made,
        "",
        "## How it was made",
        "",
        markdown(["Step", "Tokens", "Rate", "Data", "Commit"], steps, align="left") if steps else NO_TRAINING,
        "",
        "`relinear.json` has the hashes of everything it was made from.",
        "",
        "## Scores",
        "",
        (
            markdown(["Of", "Metric", "Value", "n"], scores, align="left")
            if (scores := [*_scores(measured)])
            else "None was measured."
        ),
        "",
        (
            f"At scale `{plan.scale}` of relinear. Accuracies are shares; ± is one standard"
            f" error.{TABLES if plan.scale in scales() else ''}"
        ),
        "",
        "## Whose work it stands on",
        "",
        *(f"- {name}: {whose} ({licence})" for name, (licence, whose) in sources.items()),
        *(f"- `{name}`: {of}" for name, (of, _) in licences(chain, records).items()),
        "",
        "## What it does not do",
        "",
        *(f"- {line}" for line in _limits(methods, plain)),
    ]
    return "\n".join(lines) + "\n"


def card_of_model(model: PreTrainedModel, *, plain: bool = False) -> str:
    """The text of README.md for a linearized model that no run made; `plain` as `export` has it."""
    recipe = model.config.relinear
    teacher = type(model).__bases__[1].__name__
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [relinear, {recipe['method']}]",
        "---",
        "",
        f"# A linearized {teacher}",
        "",
        _made(recipe["method"], recipe["options"]),
        "",
        "## How it was made",
        "",
        (
            "It was given to `relinear.export` as it is. relinear has no record of how it was trained, of its"
            " data or of their licences."
        ),
        "",
        "## What it does not do",
        "",
        *(f"- {line}" for line in _limits([recipe["method"]], plain)),
    ]
    return "\n".join(lines) + "\n"


def licence() -> Path | None:
    """The text of this suite's licence, in the clone or in the installed package; None where neither has
    one."""
    if (clone := WORKFLOW.parent / "LICENSE").is_file():
        return clone
    try:
        installed = metadata.files("relinear") or ()
    except metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in installed if file.name == "LICENSE"), None)


def licences(chain: Chain, records: Mapping[Path, dict[str, Any]]) -> dict[str, tuple[str, Path]]:
    """The texts of licences that lie in the folder, by their names there: what each is of, and where it is
    taken from.

    They are this suite's, and those that came with the assets. An asset whose package has no such text, or
    which is no longer in the cache, has its licence in the card alone.
    """
    plan = Plan(scale=next(iter(records.values()))["scale"])
    found = {"LICENSE": ("of relinear, whose code and numbers are here", WORKFLOW.parent / "LICENSE")}
    for name in (name for name, _ in _sources(plan, chain.model.name, records) if name in plan.catalogue):
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
    return [
        folder.name,
        f"{record['tokens']:,}",
        str(trained_at(record["config"])["lr"] if "lr" in recipe else ""),
        data,
        f"`{commit}`",
    ]


def _scores(measured: Iterable[Path]) -> Iterator[list[str]]:
    """One row for each reading of these measurements that is shown."""
    folders = {folder.name: folder for folder in measured}
    for measure, metric in SCORES.items():
        if measure not in folders:
            continue
        for reading in load(folders[measure]).readings:
            if reading.metric == metric and reading.value is not None:
                error = f" ± {reading.stderr:.2g}" if reading.stderr is not None else ""
                yield [reading.of, reading.metric, f"{reading.value:.4g}{error}", f"{reading.n:,}"]


def _sources(
    plan: Plan, teacher: str, records: Mapping[Path, dict[str, Any]]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """The assets that the model began with and was trained on: name -> licence and attribution."""
    known = plan.models.get(teacher)
    data = [
        entry["name"]
        for record in records.values()
        for entry in record["datasets"]
        if entry.get("role") == "train"
    ]
    for name in dict.fromkeys([*(known.assets if known else [teacher]), *data]):
        if asset := plan.catalogue.get(name):
            yield name, (asset.licence, asset.attribution)
        elif name not in MADE_HERE:
            yield name, (UNKNOWN, "brought by who made this folder; its licence is theirs to say")


def _limits(methods: list[str], plain: bool) -> Iterator[str]:
    yield (
        "It is the result of an experiment, trained on the tokens above and no more; nobody has looked at"
        " what it says for harm or for truth."
    )
    if methods:
        yield (
            "Its state has a fixed size: what it read long ago can be lost. Measure recall on your own texts"
            " before you rely on it."
        )
    if methods and not plain:
        yield (
            "Batches are padded on the left; assisted decoding is refused, since a recurrent state takes no"
            " token back."
        )
