"""Drawing a table or figure: for a plan from its finished measurements, for committed results from their
records."""

import fcntl
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from relinear import records, stages
from relinear.core import store
from relinear.draw import About, Measurements, spreads
from relinear.draw.beside import PROVENANCE, TOLD
from relinear.draw.drawing import make, verdicts
from relinear.draw.provenance import joined
from relinear.draw.render import paint
from relinear.errors import UserError
from relinear.files import MANIFEST, sha256, write_json
from relinear.plan.claims import GATE
from relinear.plan.forms import Form, form_with, forms_of, told_behind
from relinear.plan.measured import Measured, load
from relinear.plan.names import ROOT, Node, split
from relinear.plan.plan import Plan
from relinear.plan.specs import Artefact
from relinear.plan.tables import Address, Table
from relinear.stages.measure import of_shape


def draw_planned(plan: Plan, artefact: Artefact, finished: bool = False) -> list[Path]:
    """Draw an artefact into the plan's folder for it, with a record of the files; measurements that are not
    finished, or left out at the scale, are `not run`.

    A measurement of which a file is not what its record says counts as not finished. With `finished`,
    UserError says which are not finished, and the next command of Snakemake makes them again.
    """
    nodes = plan.reads(artefact)
    measured = {address: _measured(plan, node, address, finished) for address, node in nodes.items()}
    if finished and (missing := [node for address, node in nodes.items() if measured[address] is None]):
        raise UserError(
            f"{artefact.name}: {len(missing)} of {len(nodes)} measurements are not finished as this plan"
            f" would make them: {', '.join(map(str, missing[:3]))}{', ...' if len(missing) > 3 else ''}; run"
            f" `relinear {missing[0]} {plan.node_options()}`"
        )
    measured |= {address: None for address in artefact.reads() if address not in nodes}
    written = _draw(plan, artefact, measured, plan.out(artefact), make)
    not_run = sum(measured[address] is None for address in nodes)
    records.write_drawing(plan.drawing(artefact), artefact.name, written, not_run)
    return written


def _draw(
    plan: Plan, artefact: Artefact, measured: Measurements, out: Path, how: Callable[..., list[Path]]
) -> list[Path]:
    """The files that `how` writes of an artefact into the folder `out`. Raises BrokenError for a committed
    input that is not as it was committed."""
    files = dict(zip(artefact.files(), map(Path, plan.files(artefact)), strict=True))
    for path in files.values():
        records.require_committed(path)
    about, forms = _about(plan, artefact), forms_of(measured)
    unmade = {run: form_of_plan(plan, run) for run, _ in artefact.spec.draws() if run not in forms}
    later = _later(plan, measured, about.of_shape)
    return how(artefact, measured, about._replace(files=files, forms=forms, planned=unmade, later=later), out)


def _later(plan: Plan, measured: Measurements, of_shape: Collection[str]) -> dict[str, list[str]]:
    """Stage -> the runs of which a measurement has no step of that stage behind it, where the plan's run
    comes after a run that has one: their entry was another when they were measured."""
    found: dict[str, dict[str, None]] = {}
    for (run, measure), each in measured.items():
        if each is None or measure in of_shape or not store.has(each.folder):
            continue
        name, had = plan.name(run), {records.place(told["path"]).name for told, _ in told_behind(each)}
        for stage in {
            step.stage for link in plan.chain(name) for step in link.steps if step.name != name
        } - had:
            found.setdefault(stage, {})[split(run)[0]] = None
    return {stage: list(runs) for stage, runs in sorted(found.items())}


def form_of_plan(plan: Plan, run: str) -> Form:
    """The form that a run would have, as its entry in runs.yaml and the scale make it. Raises ConfigError for
    a run that cannot be planned."""
    found = plan.run(plan.name(run))
    steps = [step for link in plan.chain(found.name) for step in link.steps]
    settings = (plan.work(step).settings for step in steps if step.stage in stages.training())
    return form_with(found.run.method, found.run.options, settings)


def _about(plan: Plan, artefact: Artefact) -> About:
    """The facts that a table or figure states about its scale: the models that its runs begin with, and the
    data that stand in."""
    models = dict.fromkeys(plan.run(plan.name(run)).model for run, _ in artefact.reads())
    warnings = [plan.config.demonstration, changes(plan, artefact)]
    names = {measure: plan.measures[measure].data for _, measure in artefact.reads() if measure != GATE}
    return About(
        scale=plan.scale,
        budget=plan.budget,
        seed=plan.seed,
        teacher=", ".join(models) or None,
        kind="model" if any(plan.models[model].init == "random" for model in models) else "teacher",
        demonstration=" ".join(filter(None, warnings)) or None,
        nothing_to_judge=plan.config.nothing_to_judge,
        data={
            measure: plan.scaled.stand_in("data", name) for measure, name in names.items() if name is not None
        },
        own_data=_own_data(plan, artefact),
        undefined=plan.undefined(artefact),
        spreads=spreads.committed(),
        of_shape=[measure for measure in names if of_shape(plan.measures[measure])],
    )


def changes(plan: Plan, artefact: Artefact) -> str | None:
    """How the scale changes the recipes of the runs that an artefact shows: raised learning rates, shorter
    sequences. None if it changes none."""
    runs = dict.fromkeys(
        plan.name(run) for run, measure in artefact.reads() if not of_shape(plan.measures[measure])
    )
    steps = dict.fromkeys(step for run in runs for link in plan.chain(run) for step in link.steps)
    works = {step: plan.work(step) for step in steps}
    raised = {(step.stage, work.raised) for step, work in works.items() if work.raised is not None}
    cut = {
        (work.shortened, work.settings["budget"]["seq_len"], step.stage)
        for step, work in works.items()
        if work.shortened
    }
    said = []
    if raised:
        rates = " and ".join(f"{floor:g} ({stage})" for stage, floor in sorted(raised))
        said.append(
            f"This scale raises learning rates to at least {rates}: it compares methods, not the papers'"
            " recipes."
        )
    for asked in sorted({asked for asked, _, _ in cut}):
        had = " and ".join(f"{tokens} ({stage})" for of, tokens, stage in sorted(cut) if of == asked)
        said.append(f"It cuts training sequences of {asked} tokens to {had}.")
    return " ".join(said) or None


def _own_data(plan: Plan, artefact: Artefact) -> dict[str, str]:
    """The data of each column of a table whose runs' models have the vocabulary of one data set alone."""
    lines = artefact.spec.lines if isinstance(artefact.spec, Table) else ()
    runs = {
        column: cell.run for line in lines for column, cell in line.cells.items() if isinstance(cell, Address)
    }
    own = {column: plan.models[plan.run(plan.name(run)).model].data for column, run in runs.items()}
    return {column: data for column, data in own.items() if data is not None}


def _measured(plan: Plan, node: Node, address: tuple[str, str], put_aside: bool) -> Measured | None:
    """A finished measurement under the names that the spec has for it. Raises ValueError where the record is
    of another node.

    None where `measured_in` does not believe it, which one line on stderr says; `put_aside`: the record is
    put aside, too.
    """
    if (folder := plan.finished(node)) is None:
        return None
    try:
        found = measured_in(folder.parent, folder.name)
    except records.BrokenError as error:
        print(f"{error}; it counts as not finished", file=sys.stderr)
        if put_aside:
            records.put_aside(folder)
        return None
    if (found.run, found.measure) != (node.name, node.part):
        raise ValueError(
            f"{found.source.file} is of {found.run} {found.measure}, expected {node.name} {node.part}"
        )
    return found._replace(run=address[0], measure=address[1])


def draw_committed(folder: Path, artefact: Artefact, claims: bool = False) -> list[Path]:
    """Draw a table or figure into `<folder>/<paper>/`, write where its cells come from and the verdicts on
    its claims into the folder's provenance.json and claims.csv, and name the files in the folder's manifest;
    returns them.

    A run that the folder does not have is `not run`. A benchmark's folder has no manifest and no runs: a
    figure of its rows is drawn from these alone. Raises UserError where the folder has none of the runs or
    not the rows, where it is no committed folder, and for a figure of attention weights that were not
    committed. With `claims` the verdicts alone are written, which need no weights, and what they were made
    from is added to what the drawing was; UserError where the artefact has no claims. Records are named from
    the working folder, where the results lie in it, so that no path of a machine is committed.
    """
    if folder.is_absolute() and folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    manifest, how, out = folder / MANIFEST, verdicts if claims else make, folder / artefact.paper
    if artefact.files() and not manifest.is_file():
        files = {name: _beside(folder, Path(name)) for name in artefact.files()}
        if missing := [path for path in files.values() if not path.is_file()]:
            raise UserError(
                f"{missing[0]} is missing: {artefact.name} is drawn from it{_elsewhere(folder, artefact)}"
            )
        with _alone(folder):
            return _small(folder, artefact, how(artefact, {}, About(scale="", files=files), out), claims)
    if not manifest.is_file():
        raise UserError(
            f"{folder} has no {MANIFEST}: it is no folder of committed results{_elsewhere(folder, artefact)}"
        )
    scale = records.read_manifest(manifest)["scale"]
    measured = _all(folder, artefact.reads())
    if (artefact.reads() or artefact.files()) and not any(measured.values()):
        have = ", ".join(store.runs(folder))
        lacks = (
            f"none of the runs of {artefact.name}; have {have}"
            if artefact.reads()
            else f"not what {artefact.name} is drawn from"
        )
        raise UserError(f"{folder} has {lacks}{_elsewhere(folder, artefact)}")
    if (found := ROOT.fullmatch(scale)) is None:
        raise UserError(
            f"{manifest} names the results {scale!r}; possible: <scale>, with -x<budget> and -seed<n> where"
            " they are not 1 and 0"
        )
    plan = Plan(scale=found["scale"], budget=float(found["budget"] or 1), seed=int(found["seed"] or 0))
    try:
        drawn = _draw(plan, artefact, measured, out, how)
    except FileNotFoundError as error:
        command = (
            f"relinear draw {artefact.paper} {artefact.stem} --scale {plan.scale} --budget {plan.budget:g}"
        )
        alone = "; its verdicts alone: the same with --claims" * bool(artefact.spec.claims)
        raise UserError(f"{artefact.name}: {error}; where they were measured: {command}{alone}") from None
    with _alone(folder):  # what was drawn meanwhile stays in the manifest
        written = _small(folder, artefact, drawn, claims)
        facts = records.read_manifest(manifest)
        told = [folder / kind.file for kind in TOLD]
        names = {path.relative_to(folder).as_posix(): path for path in (*drawn, *written, *told)}
        kept = {name: hashed for name, hashed in facts["files"].items() if name not in names}
        made = {name: sha256(path) for name, path in names.items() if path.is_file()}
        facts["files"] = dict(sorted((kept | made).items()))
        write_json(manifest, facts)
    return written


def _beside(folder: Path, name: Path) -> Path:
    """Where a file that an artefact is drawn from is committed: in a benchmark's folder, or where it lies in
    the folders beside it."""
    own = folder / name.name
    return own if own.is_file() else folder.parent.joinpath(*name.parts[1:])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While this lasts, no other process that asks for the same folder goes on. Leaves no file there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _elsewhere(folder: Path, artefact: Artefact) -> str:
    """For an error: the folders beside a folder or in it that have a run or a file that the artefact is drawn
    from; nothing where there are none."""
    runs, files = {run for run, _ in artefact.reads()}, [Path(name).name for name in artefact.files()]
    near = [*folder.parent.glob("*/"), *folder.glob("*/")]
    found = sorted(
        {
            path.as_posix()
            for path in near
            if runs & {*store.runs(path)} or any((path / name).exists() for name in files)
        }
    )
    return f"; possible: {', '.join(found)}" if found else ""


def _small(folder: Path, artefact: Artefact, written: list[Path], claims: bool) -> list[Path]:
    """Make drawn files small enough to commit: PNGs in 256 colours, no PDF, and what is told of drawings in
    the one file of the folder for it, where the provenance of `claims` alone is added to their drawing's, and
    where nothing stays of a drawing that has no claims any more. Returns their paths."""
    for kind in TOLD:
        told, had = kind.of_drawings(folder, written), kind.committed(folder)
        if claims and kind is PROVENANCE:
            told = {name: joined(had.get(name, each), each) for name, each in told.items()}
        others = {name: each for name, each in had.items() if name != f"{artefact.paper}/{artefact.stem}"}
        if told or others != had:
            written = [*written, *kind.write(folder, others | told)]
        for name in told:
            (folder / f"{name}{kind.ending}").unlink()
    for path in written:
        if path.suffix == ".png":
            paint(path, path)
            path.with_suffix(".pdf").unlink(missing_ok=True)
    return [path for path in written if path.is_file()]


def _all(folder: Path, reads: Iterable[tuple[str, str]]) -> Measurements:
    """The measurements of these runs, and of their trainings with further seeds; None for a run that the
    folder does not have."""
    have = store.runs(folder)
    found: dict[tuple[str, str], Measured | None] = {}
    for run, measure in reads:
        found |= {
            (own, measure): measured_in(folder / "runs" / own, measure)
            for own in (run, *have)
            if own == run or split(own)[0] == run
        }
    return found


def measured_in(run: Path, measure: str) -> Measured | None:
    """The measurement in a run's folder; None where it was not measured.

    Raises BrokenError for one whose record cannot be believed, and for one of which a file is gone or
    another: of a committed one, than its reference.json says, of any other, than its run.json says.
    """
    if (record := records.believed(run / measure)) is None:
        return None
    if wrong := records.otherwise(run / measure, record):
        raise records.BrokenError(wrong)
    records.check_metrics(run / measure, measured=True)
    return load(run / measure)
