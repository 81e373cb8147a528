# The plan that all rules read, from `--config scale=.. budget=.. seed=.. seeds=.. teacher=.. device=..`, checked before any work starts.
import math
import sys
from pathlib import Path

REPOSITORY = Path(workflow.basedir)
sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "kernels")]

from relinear.plan.code import code_hash
from relinear.errors import UserError
from relinear.plan.plan import Plan, from_cli

try:
    plan = from_cli(config, workflow=REPOSITORY / "workflow")
    plan.check()
except UserError as error:
    raise WorkflowError(str(error)) from None


pathvars:
    results=plan.root.as_posix(),


wildcard_constraints:
    run="|".join(map(str, plan.runs)),


# `python -m`: the code is that of this clone, also where another copy of the package is installed.
RELINEAR = f"PYTHONPATH={REPOSITORY / 'src'}:{REPOSITORY / 'kernels'} {sys.executable} -m relinear.cli"
OPTIONS = plan.as_options()
# The log's writer outlives an interruption: what the job says on its way out is kept, and saying it is no error.
TEE = "trap '' INT TERM; exec tee"


def records(*steps):
    """run.json of finished steps."""
    return [(plan.folder(step) / "run.json").as_posix() for step in steps]


def parents(stage):
    """A stage's parents, from the run's name."""
    return lambda wildcards: records(
        *plan.parents(plan.step(stage, wildcards.get("run"))).values()
    )


def shown(paper, figure):
    """The record of the run whose attention weights a figure shows."""
    [run] = plan.rows(paper, figure)
    return records(plan.step("fidelity", run))


def key(stage):
    """What makes a step rerun: its settings, the code it reaches, its parents' keys. Whitespace and comments do not."""
    return lambda wildcards: plan.key(plan.step(stage, wildcards.get("run")))


def gpus(wildcards):
    return plan.gpus("activations")


# The stages that `relinear --gpus` spreads: it starts torchrun where a rule has more than one.
def spread_gpus(wildcards):
    return plan.gpus("finetune")


# On a CPU, one core a job: jobs side by side use the cores better than one job's threads do. With GPUs, each brings its share of them.
def cores(wildcards, wanted=gpus):
    wanted = wanted(wildcards)
    slots = workflow.global_resources.get("gpu").value or wanted
    return max(1, workflow.cores * min(wanted, slots) // max(slots, 1))


def spread_cores(wildcards):
    return cores(wildcards, spread_gpus)


# What a cluster reserves for a stage. More tokens and items take more time, not more memory.
MEMORY = plan.config.jobs.memory_mb
MINUTES = {
    stage: math.ceil(minutes * max(plan.budget, 1))
    for stage, minutes in plan.config.jobs.minutes
}


# The cost of generating: what `benchmark` measured here, else what is committed, else `benchmark` measures it.
EFFICIENCY = "results/efficiency/efficiency.csv"
COMMITTED = "results/reference/efficiency/efficiency.csv"
if Path(COMMITTED).is_file() and not Path(EFFICIENCY).is_file():
    EFFICIENCY = COMMITTED


# A machine without the GPU is told so before its first job; on a cluster only the nodes need one.
onstart:
    if gpus(None) and workflow.local_exec:
        from relinear.machine.hardware import device_of

        try:
            device_of("cuda")
        except UserError as error:
            raise WorkflowError(str(error)) from None
