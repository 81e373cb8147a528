"""What a training of a shape would take on so many GPUs, on paper: `python -m relinear.benchmarks.planned
--shape llama-3-70b --gpus 8 16 --card h200`.

Nothing is trained and no weights are made. A run's recipe and the scale `paper` say what is trained and how
large a step is; `relinear.train.room` counts the memory of a GPU, with replicas or shards as a training would
choose them. A step takes at least as long as the longest of three, each at the card's own rate:

    products    of the model's weights, with tensor cores
    gathering   of shards: all weights once forward and once backward, and the gradients of trained ones back
    optimiser   AdamW reads and writes weights, gradients and moments of what a GPU holds

Attention, launches and exchanges that nothing hides come on top: of the trainings of an 8B shape that were
measured a step took 2.5 to 5 times the bound, and of all weights in shards 9 times.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer

from relinear.benchmarks import command, plain_loop
from relinear.benchmarks.training import SHAPES, STAGES, random_model, shape_of
from relinear.draw.render import titled
from relinear.machine.distributed import REPLICA_SHARE
from relinear.plan.plan import Plan
from relinear.stage import job_of
from relinear.train.finetune import trained_groups, weights_dtype
from relinear.train.room import GIB, Training, gib, of_job

RUNS = ("lizard", "lolcats_window", "supra")


class Card(NamedTuple):
    """A GPU: bytes of memory that torch finds, and by its maker's data sheet FLOP/s in bfloat16, bytes/s of
    memory, and of NVLink in one direction."""

    memory: float
    flops: float
    bandwidth: float
    link: float


CARDS = {
    "a100-80": Card(79 * GIB, 312e12, 2.0e12, 300e9),
    "h100": Card(79 * GIB, 989e12, 3.35e12, 450e9),
    "h200": Card(139 * GIB, 989e12, 4.8e12, 450e9),
    "b200": Card(178 * GIB, 2250e12, 8.0e12, 900e9),
}


class Planned(NamedTuple):
    """A training on paper: what a GPU holds, and the floating-point operations of a token."""

    run: str
    stage: str
    training: Training
    flops: int  # of a token, forward and backward


def planned(plan: Plan, run: str, stage: str, shape: str) -> Planned:
    """A run's step at a shape, on one GPU, by a model without memory."""
    job = job_of(plan, plan.node(stage, run), out=Path(), work=Path(), leads=False)
    recipe, transfer = job.settings["recipe"], stage == "distill"
    kind = "transfer" if transfer else recipe["kind"]
    dtype = torch.bfloat16 if transfer else weights_dtype(recipe, torch.bfloat16)
    model = random_model(shape_of(shape), job.settings, "meta", dtype)
    flops = plain_loop.flops_a_token(*plain_loop.matrices(model), kind)
    if transfer:
        trained = list(model.method_parameters().values())
    else:
        with torch.device("meta"):  # adapters too
            model, groups = trained_groups(job, model)
        trained = [p for ps, _ in groups for p in ps]
    about: dict[str, Any] = {"beside": kind != "full", "transfer": transfer, "dtype": torch.bfloat16}
    return Planned(run, stage, of_job(job, model, trained, **about), flops)


def chosen(training: Training, gpus: int, memory: float) -> Training:
    """The training on so many GPUs, with replicas where they fit as a training decides it, else shards."""
    whole = training.weights + 4 * training.trained
    return replace(training, gpus=gpus, sharded=gpus > 1 and whole > REPLICA_SHARE * memory)


def bound(training: Training, flops: int, card: Card) -> dict[str, float]:
    """Seconds that a step takes at least, by what takes them."""
    tokens = training.step * training.length / training.gpus
    need, moved = training.need(), 0.0
    if training.sharded:
        part = (training.gpus - 1) / training.gpus
        moved = part * (2 * training.weights + (0 if training.beside else training.trained))
    again = 4 / 3 if training.recompute else 1
    return {
        "products": tokens * flops * again / card.flops,
        "gathering": moved * (training.step // training.gpus // training.sequences) / card.link,
        "optimiser": 7 * need["gradients"] / card.bandwidth,  # reads four numbers and writes three
    }


def breaks(training: Training, gpus: int, memory: float) -> str:
    """The first of what stops a training on so many GPUs, or `nothing`."""
    if training.step % gpus:
        return f"the step: {training.step} sequences cannot be shared"
    if training.total <= memory:
        return "nothing"
    states = sum(count for name, count in training.need().items() if not name.startswith("activations"))
    if states > memory:
        return f"weights, gradients and optimiser: {gib(states - memory)} too much"
    if not training.transfer and replace(training, recompute=True).total <= memory:
        return "activations, unless they are computed again (recompute: true)"
    return "activations"


def rows(plans: Sequence[Planned], gpus: Sequence[int], card: Card) -> list[dict[str, str]]:
    """A row for each training and number of GPUs, by the titles of the table."""
    found = []
    for run, stage, alone, flops in plans:
        for n in gpus:
            fits = chosen(alone, n, card.memory) if alone.step % n == 0 else replace(alone, gpus=n)
            said = breaks(fits, n, card.memory)
            if said.startswith("the step"):
                found.append(_row(run, stage, n, said))
                continue
            again = fits if fits.transfer else replace(fits, recompute=True)
            seconds = bound(again if "recompute" in said else fits, flops, card)
            longest = max(seconds, key=seconds.get)
            rate = fits.step * fits.length / seconds[longest]
            model = "shards" if fits.sharded else "replicas" if n > 1 else "whole"
            recomputed = "" if fits.transfer else f"{again.total / GIB:,.0f}"
            least = f"{seconds[longest]:.2f} ({longest})"
            needs = (f"{fits.total / GIB:,.0f}", recomputed, least, f"{rate / 1000:,.1f}k")
            found.append(_row(run, stage, n, said, model, *needs))
    return found


def _row(run: str, step: str, gpus: int, breaks: str, *numbers: str) -> dict[str, str]:
    titles = ("model", "GiB a GPU", "recomputed", "s a step, at least", "tokens/s, at most")
    own = dict.fromkeys(titles, "") | dict(zip(titles, numbers, strict=False))
    return {"run": run, "step": step, "GPUs": str(gpus), **own, "breaks first": breaks}


def table(shape: str, gpus: Sequence[int], card: str, runs: Sequence[str] = RUNS) -> str:
    """The trainings of runs at a shape as a table of Markdown. Raises UserError for an unknown run."""
    plan = Plan(scale="paper", device="cuda")
    plans = [
        planned(plan, run, stage, shape)
        for run in runs
        for stage in STAGES
        if stage in plan.run(run).run.recipes
    ]
    return titled(rows(plans, gpus, CARDS[card]))


def main(
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)} or a model's config.json")] = "llama-3-70b",
    gpus: Annotated[list[int] | None, typer.Option(help="numbers of GPUs of one machine")] = None,
    card: Annotated[Literal[tuple(CARDS)], typer.Option(help="the GPU")] = "h200",
    runs: Annotated[list[str] | None, typer.Option(help="runs of workflow/papers/*/runs.yaml")] = None,
) -> None:
    """Print the table."""
    print(table(shape, gpus or [1, 2, 4, 8, 16], card, runs or RUNS))


if __name__ == "__main__":
    command.run(main)
