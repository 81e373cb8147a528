# The plan that all rules read, from `--config scale=.. budget=.. seed=.. seeds=.. teacher=.. device=..`, checked before any work starts: the choices here,
# and what stands behind a target where its rules ask for it. `snakemake check` checks everything.
import functools
import gc
import math
import os
import shlex
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from shlex import quote

REPOSITORY = Path(workflow.basedir).resolve()

gc.disable()  # until all rules are read: what is read stays, and looking for garbage in it takes a second

# Snakemake puts the clone's folder first: a file there, such as yaml.py, would be imported in a library's place.
sys.path[:] = [
    *(str(REPOSITORY / folder) for folder in ("src", "kernels")),
    *(p for p in sys.path if Path(p).resolve() not in (REPOSITORY, Path.cwd())),
]

# Ctrl-C while rules are read and jobs are chosen is no fault of the code. While jobs run, Snakemake ends them itself (OneLine).
from relinear.machine.interrupt import OneLine, patient

patient()

from snakemake.cli import parse_args
from snakemake.io import IOFile
from snakemake.logging import logger

from relinear import stages
from relinear.errors import UserError
from relinear.machine import warm
from relinear.machine.disk import make_writable, require_possible
from relinear.plan.code import code_hash
from relinear.plan.plan import from_cli
from relinear.plan.targets import check_target, explain_target, places
from relinear.records import (
    drawing,
    drawn_early,
    drawn_otherwise,
    from_the_future,
    set_aside,
)
from relinear.retime import retime
from relinear.stages._stage import Node

logger.addFilter(OneLine())

try:
    plan = from_cli(config, workflow=REPOSITORY / "workflow")
    plan.check_choices()
    # Snakemake's own folders, which it makes after this, those of the logs, and those of results: it ends with a traceback where a file stands there.
    own = (Path(".snakemake", name) for name in ("metadata", "incomplete", "locks"))
    require_possible(*own, plan.root / "logs", plan.results / "logs", *places(plan))
except UserError as error:
    raise WorkflowError(str(error)) from None

# A record that is cut short, or whose files are others than it names, counts as missing. Snakemake compares times: it ends with an error where a
# file is from the future, as after a clock that was wrong, and gives a job to each step that is older than what it is made from.
if workflow.is_main_process:
    for line in from_the_future(plan.root, plan.workflow.glob("papers/*/*.yaml")):
        print(line, file=sys.stderr)
    for line in set_aside(plan.root):
        print(line, file=sys.stderr)
    if kept := retime(plan):
        print(
            f"{kept} results of {plan.root} stand, and were older than what they are made from, as after a copy without times; they have the time of now",
            file=sys.stderr,
        )


pathvars:
    results=plan.root.as_posix(),


wildcard_constraints:
    name=r"[\w.@+-]+",
    measure="|".join(plan.measures),


# `python -m`: the code is that of this clone, also where another copy of the package is installed.
# Quoted: the folder of a clone may have any name.
SOURCES = f"{REPOSITORY / 'src'}:{REPOSITORY / 'kernels'}"
# PYTHONSAFEPATH: nor is a file of the folder that the command was given in taken for a library.
PYTHON = f"PYTHONSAFEPATH=1 PYTHONPATH={quote(SOURCES)} {quote(sys.executable)} -m"
RELINEAR = f"{PYTHON} relinear.cli"
# On this machine a job is a fork of a process that has imported the libraries, where `onstart` made one.
if workflow.local_exec:
    RELINEAR = f"PYTHONSAFEPATH=1 PYTHONPATH={quote(SOURCES)} {quote(sys.executable)} -I -S {quote(warm.__file__)} -m relinear.cli"
OPTIONS = plan.node_options()
# `tee` ignores INT and TERM, so a job's last messages reach the log and writing them does not fail with a broken pipe.
TEE = "trap '' INT TERM; exec tee"


def node(stage, wildcards):
    """The checked node that a rule's wildcards name. An unknown run or model is an error that says which there are."""
    try:
        made = plan.node(stage, wildcards.name, getattr(wildcards, "measure", ""))
        plan.check_node(made)
        return made
    except UserError as error:
        raise WorkflowError(str(error)) from None


def records(nodes):
    """run.json of finished nodes."""
    return [(plan.folder(n) / "run.json").as_posix() for n in nodes]


def measurements(artefact):
    """The records of the measurements that a checked table or figure shows."""

    def checked(wildcards):
        try:
            plan.check_artefact(artefact)
            return records(plan.reads(artefact).values())
        except UserError as error:
            raise WorkflowError(str(error)) from None

    return checked


def guarded_node(stage, wildcards):
    """A node whose inputs are asked for. Without its record, which may have been put aside, it runs, also behind a table that is there."""
    made = node(stage, wildcards)
    folder = plan.folder(made)
    if workflow.is_main_process and folder.is_dir():
        if not (folder / "run.json").is_file():
            workflow.dag.forcefiles.add((folder / "run.json").as_posix())
    return made


def outputs(artefact):
    """The files of a table or figure, and their record."""
    return [
        *artefact.outputs(plan.out(artefact).as_posix()),
        plan.drawing(artefact).as_posix(),
    ]


@functools.cache
def guarded(record, copy_of=None):
    """Nothing, as a further input of what draws. On the way Snakemake is told to run the rule where a file that was drawn is not what `record` says, or where
    `record` is not the same as that of the files which the rule copies. Snakemake itself sees only whether files are there and how old they are.
    """
    drawn_before = any(record.parent.glob(f"{record.stem.removeprefix('.')}.*"))
    if workflow.is_main_process and drawn_before:
        wrong = drawn_otherwise(record) or drawn_early(record)
        if not wrong and copy_of is not None and copy_of.is_file():
            if record.read_bytes() != copy_of.read_bytes():
                wrong = f"{record} is of other results than {copy_of}"
        if wrong:
            print(f"{wrong}; it is drawn again", file=sys.stderr)
            workflow.dag.forcefiles.add(record.as_posix())
    return []


def shown(artefact):
    """An artefact's outputs; its tables, figures and claims are in `snakemake --report`."""
    about = {
        "caption": "../report.rst",
        "category": artefact.paper,
        "subcategory": artefact.spec.label,
    }
    marked = lambda path: report(path, labels={"file": Path(path).name}, **about)
    return [
        marked(path) if path.endswith((".csv", ".png", ".md")) else path
        for path in outputs(artefact)
    ]


def reads(stage):
    """The records that a stage reads: of its parents, and of assets, which must have been obtained, whenever that was."""

    def found(wildcards):
        made = guarded_node(stage, wildcards)
        names = () if stages.stage(stage).obtains else plan.settings(made)["assets"]
        obtained = records(plan.node("asset", name) for name in names)
        return records(plan.parents(made).values()) + [ancient(r) for r in obtained]

    return found


def record_of(stage):
    """run.json of a stage's node `{name}`."""
    return (plan.folder(Node(stage, "{name}")) / "run.json").as_posix()


def log_of(stage):
    """The log of a stage's node `{name}`: of a run by the run's name, of all else by the stage's."""
    named = f"{{name}}.{stage}" if stages.stage(stage).trains else f"{stage}.{{name}}"
    return f"<results>/logs/{named}.log"


# `update(...)` around a record keeps it until its stage replaces it. The stage sees then whether it still stands: a parent that was made again with
# the same contents makes nothing after it run again.
def key(stage):
    """The key, by whose change a node reruns: its settings, the code it reaches, its parents' keys. Whitespace and comments do not count.

    Snakemake notes the key of a failed job too, though `update` has put the older record back (snakemake/snakemake#3808). A node whose record has
    another key than the noted one gets the key in other words, so that it runs again.
    """

    def words(wildcards):
        made = node(stage, wildcards)
        record = IOFile((plan.folder(made) / "run.json").as_posix())
        noted = workflow.persistence.params(record) or []
        first, again = plan.key(made), f"{plan.key(made)} again"
        before = next((text for text in (first, again) if repr(text) in noted), None)
        if plan.finished(made):
            return before or first
        return again if before == first else first

    return words


def cores(stage):
    """On a CPU, one core a job: jobs side by side use the cores better than one job's threads do. With GPUs, each brings its share of them."""
    wanted = plan.gpus(stage)
    slots = workflow.global_resources.get("gpu").value or wanted
    return max(1, workflow.cores * min(wanted, slots) // max(slots, 1))


# More tokens and items take more time, not more memory.
MEMORY = plan.config.jobs.memory_mb


def minutes(stage):
    """The longest that a stage may take, for a cluster."""
    return math.ceil(plan.config.jobs.longest(stage) * max(plan.budget, 1))


# Two mistakes are found before the first job: a missing GPU where a job asks for one (on a cluster only the
# nodes need one), and a folder that cannot be written to.
onstart:
    if workflow.local_exec and any(
        job.resources.get("gpu") for job in workflow.dag.needrun_jobs()
    ):
        from relinear.machine.hardware import device_of

        try:
            device_of("cuda")
        except UserError as error:
            raise WorkflowError(str(error)) from None
    try:
        make_writable([plan.results, plan.root / "logs", plan.results / "logs"])
    except UserError as error:
        raise WorkflowError(str(error)) from None
    # In MLflow the run of every row is made before the first job, which then finds it, on whatever node it is.
    work = [
        j for j in workflow.dag.needrun_jobs() if j.rule.name in stages.available()
    ]
    if work and not workflow.touch:
        from relinear import campaign

        nodes = [
            Node(j.rule.name, j.wildcards.name, j.wildcards.get("measure", ""))
            for j in work
            if j.rule.name != "asset"
        ]
        missing = campaign.downloads_of(plan, nodes)
        for line in campaign.lacking(plan, missing):
            print(line, file=sys.stderr)
        of_runs = [
            j
            for j in work
            if j.rule.name == "measure" or stages.stage(j.rule.name).trains
        ]
        rows = shlex.quote(" ".join(sorted({j.wildcards.name for j in of_runs})))
        # Importing all libraries once takes as long as a few jobs' imports.
        here = workflow.local_exec and warm.possible()
        if here and len(work) >= 6 and warm.ADDRESS not in os.environ:
            warm.start(shlex.split(OPTIONS), SOURCES)
        shell("{RELINEAR} track init {OPTIONS} --rows {rows}")


# `make ui` copies tables and figures into a store of its own; a server gets them here.
onsuccess:
    if not workflow.touch and not plan.store.startswith("sqlite:"):
        shell("{RELINEAR} track tables {OPTIONS}")
