"""Drawing a table or figure of a plan: from the measurements that are finished as the plan would make them."""

from pathlib import Path

from relinear.draw import About, make
from relinear.plan.plan import Plan
from relinear.plan.readings import Measured, load
from relinear.plan.specs import Artefact
from relinear.stages._stage import Node


def draw_planned(plan: Plan, artefact: Artefact) -> list[Path]:
    """Draw an artefact into the plan's folder for it; measurements that are not finished, or left out at the scale, are `not run`."""
    nodes = plan.reads(artefact)
    measured = {address: _measured(plan, node, address) for address, node in nodes.items()}
    measured |= {address: None for address in artefact.reads() if address not in nodes}
    runs = dict.fromkeys(run for run, _ in artefact.reads())
    about = About(
        scale=plan.scale, teacher=", ".join(dict.fromkeys(plan.run(plan.name(run)).model for run in runs)) or None,
        demonstration=plan.config.demonstration, nothing_to_judge=plan.config.nothing_to_judge,
        data={measure: plan.stand_in("data", name) for _, measure in artefact.reads() if (name := plan.measures[measure].data) is not None},
        repeats={run: plan.repeats(run) for run in runs} if artefact.seeds else {},
        files=dict(zip(artefact.files(), map(Path, plan.files(artefact)), strict=True)),
    )  # fmt: skip
    return make(artefact, measured, about, plan.out(artefact))


def _measured(plan: Plan, node: Node, address: tuple[str, str]) -> Measured | None:
    """A finished measurement under the names that the spec has for it. Raises ValueError where the record is of another node."""
    if (folder := plan.finished(node)) is None:
        return None
    found = load(folder)
    if (found.run, found.measure) != (node.name, node.part):
        raise ValueError(f"{found.source.file} is of {found.run} {found.measure}, expected {node.name} {node.part}")
    return found._replace(run=address[0], measure=address[1])
