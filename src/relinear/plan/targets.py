"""A guess at what was meant by a target of `snakemake` that no rule makes."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from relinear import stages
from relinear.plan.names import ROOT
from relinear.plan.plan import Plan
from relinear.plan.scale import scales
from relinear.plan.specs import Artefact
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node

# step -> a run with it
EXAMPLES = {
    "distill": "lizard",
    "finetune": "lizard",
    "classify": "cola_softmax",
    "pretrain": "recall_softmax",
    "restore": "encoder",
}
MEASURE = "measure"
HEADLINE = "comparison_table2"


def _of_one_run(rule: str, plan: Plan) -> str | None:
    """A sentence that says how to ask for one run's step or measurement, or why the example has no such step
    at this scale; None for any other rule."""
    run = "lizard" if rule == MEASURE else EXAMPLES.get(rule)
    if run is None:
        return None
    part, verb = ("perplexity", f"measure {run} perplexity") if rule == MEASURE else (rule, f"{rule} {run}")
    file = plan.root / "runs" / run / part / "run.json"
    try:
        plan.node(rule, run, part if rule == MEASURE else "")
    except ConfigError as error:
        return f"rule {rule!r} is for one run; {error}"
    return (
        f"rule {rule!r} is for one run; name its result, such as `snakemake {file.as_posix()}`, or call"
        f" `relinear {verb} --scale {plan.scale}`"
    )


def shown_by(target: str, plan: Plan) -> list[Artefact]:
    """The tables and figures that a target of `snakemake` asks for; none for a step or a measurement of a
    run."""
    every = plan.artefacts
    if target in ("evaluate", "plot"):
        return list(every.values())
    if target == "table2" or Path(target).parent == plan.results and Path(target).name.startswith("table2."):
        return [every[HEADLINE]] if HEADLINE in every else []
    return [
        a
        for a in every.values()
        if target in (a.name, a.paper) or target in a.outputs(plan.out(a).as_posix())
    ]


def places(plan: Plan) -> Iterator[Path]:
    """Where the results of a scale have folders: those of papers and of kinds of data, and what stands in the
    place of a model, of data, of a run or of one of its steps."""
    yield from {plan.out(artefact) for artefact in plan.artefacts.values()}
    made = (stages.stage(name).folder(Node(name, "any")) for name in stages.available() if name != MEASURE)
    kinds = {plan.root / Path(folder).parts[0] for folder in made}
    yield from kinds
    known = {*plan.models, *plan.catalogue, *plan.runs}
    for kind in kinds:
        yield from (path for path in kind.glob("*") if path.name in known or "@" in path.name)
    steps = {*stages.training(), *plan.measures}
    yield from (path for path in plan.root.glob("runs/*/*") if path.name in steps)


def check_target(target: str, plan: Plan) -> None:
    """Raise ConfigError for a mistake in what stands behind a target of `snakemake`."""
    for artefact in shown_by(target, plan):
        plan.check_artefact(artefact)
    path = Path(target)
    if path.name not in ("run.json", "metrics.json") or not path.is_relative_to(plan.root):
        return
    match path.relative_to(plan.root).parts:
        case ("runs", run, part, _):
            plan.check_node(
                plan.node(part, run) if part in stages.training() else plan.node(MEASURE, run, part)
            )
        case (folder, name, _):
            for stage in set(stages.available()) - {MEASURE, *stages.training()}:
                if stages.stage(stage).folder(Node(stage, name)) == f"{folder}/{name}":
                    plan.check_node(plan.node(stage, name))


def explain_target(target: str, rules: Iterable[str], plan: Plan) -> str | None:
    """A sentence that says what is wrong with a target and which names are near it; None where a rule may
    make it or it exists."""
    if Path(target).exists():
        return None
    if "/" not in target:
        known = sorted(rules)
        if target in known:
            return _of_one_run(target, plan)
        near = get_close_matches(target, known, 5)
        return (
            f"no rule {target!r}; {'near it: ' + ', '.join(near) if near else 'nothing is near it'}."
            " `snakemake --list` prints all"
        )
    try:
        first, *rest = Path(target).relative_to(plan.results).parts
    except ValueError:
        return None
    other = ROOT.fullmatch(first)
    if not rest or other is None or first == plan.root.name or other["scale"] not in scales(plan.workflow):
        return None
    wanted = " ".join(f"{name}={value}" for name, value in other.groupdict().items() if value)
    return f"{target} is of {first}, but the results asked for are {plan.root.name}; add `--config {wanted}`"
