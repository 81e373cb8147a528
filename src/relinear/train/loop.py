"""The training loop, one for every stage: AdamW, warm-up and cosine, clipping, checkpoints, resume to the
bit. The loss is an argument."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from relinear.linearize.graph import Recorded
from relinear.machine.distributed import agreed, rank, sharded, sum_gradients, summed, whole
from relinear.machine.hardware import Reading, memory_bytes
from relinear.plan.job import Job
from relinear.train.checkpoint import restore, save
from relinear.train.compiled import OrEager

WINDOW = 8  # steps whose mean loss must reach chance before the run counts as collapsed
BELOW = 0.95  # the share of chance below which a run must begin, or it cannot collapse


class CollapseError(RuntimeError):
    """The model fell to chance level during training, where it did not start."""


def rate(step: int, steps: int, warmup_ratio: float, min_ratio: float) -> float:
    """Learning-rate factor of step 0..steps-1: linear warm-up, then cosine down to `min_ratio`."""
    warmup = math.ceil(steps * warmup_ratio)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def of_job(job: Job, device: str) -> dict[str, Any]:
    """The arguments by which `train` knows a job's recipe, keeps its checkpoints and goes on from them, and
    writes its curve."""
    return {
        "recipe": job.settings["recipe"],
        "checkpoint": job.work / "checkpoints",
        "checkpoint_seconds": job.checkpoint_seconds,
        "beside": (job.history,),
        "log": job.log,
        "resumed": job.resume,
        "memory": lambda: memory_bytes(device),
        "name": job.name,
    }


def train(
    loss: Callable[..., Iterable[tuple[str, Tensor]]],
    groups: Sequence[tuple[list[nn.Parameter], float]],
    *,
    batches: Callable[[int], Iterable[tuple]],
    steps: int,
    tokens_per_step: int,
    recipe: dict[str, Any],
    checkpoint: Path,
    checkpoint_seconds: float,
    log: Callable[[dict[str, Any], int], None],
    resumed: Callable[[int], None],
    memory: Callable[[], int],
    name: str,
    loss_scale: float = 1.0,
    chance: float | None = None,
    recorded: bool = False,
    eager: Callable[[], None] | None = None,
    beside: Sequence[Path] = (),
) -> None:
    """Minimise `loss` over the parameters, in place.

    `batches(step)` yields a step's micro-batches, and `loss(*batch)` named terms; the sum of them all is the
    step's loss. Each is back-propagated (times `loss_scale`) as it comes, so that one term's graph lives at a
    time: one layer in a transfer, one micro-batch in finetuning. `groups` are parameters with their peak
    learning rate. `recipe` has betas, weight_decay, warmup_ratio, min_lr_ratio and clip.

    `recorded`: after a few steps, replay loss and gradients of a micro-batch (tensors on a GPU, all of one
    shape) as one CUDA graph. A small model is then bound by its kernels and not by Python, which launches
    thousands of them a step.

    `eager`: what takes the compiled parts out of the loss again, where it has some
    (`relinear.train.compiled`).

    Of several processes each has its part of the loss: what counts, is logged and clipped is the sum over
    all.

    A checkpoint is written into the folder `checkpoint` at most every `checkpoint_seconds`, with a copy of
    the files `beside`; if one is there, training goes on from it as if it had never stopped, after
    `resumed(step)`, also with another number of processes. Raises FloatingPointError at a loss or gradient
    that is not finite, and CollapseError if the mean loss of the last steps reaches `chance` although it
    began clearly below.
    """
    optimiser = _optimiser(groups, recipe)
    parameters = [p for ps, _ in groups for p in ps]
    shards = sharded(parameters)
    first, recent = restore(checkpoint, parameters, optimiser, beside, name)
    if first and rank() == 0:
        print(f"{name}: goes on at step {first} of {steps}", flush=True)
    resumed(first)
    names: list[str] = []
    gradients = _gradients(loss, loss_scale, names)
    if eager is not None:
        gradients = OrEager(gradients, eager, parameters, name)
    if recorded:
        gradients = Recorded(gradients)
    saved = time.monotonic()
    given = list(batches(first)) if first < steps else []
    with (
        _stream(recorded),
        tqdm(
            total=steps * tokens_per_step,
            initial=first * tokens_per_step,
            desc=name,
            unit="tok",
            unit_scale=True,
            mininterval=5,
            disable=rank() > 0,
        ) as bar,
    ):
        for step in range(first, steps):
            began = time.monotonic()
            factor = rate(step, steps, recipe["warmup_ratio"], recipe["min_lr_ratio"])
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * factor
            optimiser.zero_grad(set_to_none=not recorded)  # a graph adds to the same memory each time
            values = sum(gradients(*batch) for batch in given)
            sum_gradients(parameters)
            norm = whole(nn.utils.clip_grad_norm_(parameters, recipe["clip"]))
            numbers = torch.cat([values, norm.to(values).reshape(1)])
            bad = (~numbers.sum().isfinite()).float()
            if not shards:
                optimiser.found_inf = bad  # the optimiser's kernels then leave everything as it is
            if not (shards and bad):
                optimiser.step()
            # All that the GPU has to do is queued: the next batch is made meanwhile, and numbers are read
            # together, since a reading waits.
            reading = Reading(numbers)
            given = list(batches(step + 1)) if step + 1 < steps else []
            *values, norm = reading()
            terms = summed(dict(zip(names, values, strict=True)))
            total = sum(terms.values())
            if not (math.isfinite(total) and math.isfinite(norm)):
                raise FloatingPointError(
                    f"{name}: loss {total}, gradient norm {norm} at step {step} of {steps}, learning rate"
                    f" factor {factor:.3g}; possible: a smaller `lr` of this step, or a method whose outputs"
                    " and gradients are finite"
                )
            recent.append(total)
            _require_learning(recent, chance, name, step)
            seconds = time.monotonic() - began
            metrics = {
                "loss": total, "lr": optimiser.param_groups[0]["lr"], "grad_norm": norm,
                "tokens_per_second": tokens_per_step / seconds, "memory_bytes": memory(),
            }  # fmt: skip
            log(metrics if len(terms) == 1 else {**metrics, "terms": terms}, step)
            bar.update(tokens_per_step)
            bar.set_postfix(loss=f"{total:.4g}", refresh=False)
            if step + 1 < steps and agreed(time.monotonic() - saved >= checkpoint_seconds):
                save(checkpoint, step + 1, recent, parameters, optimiser, beside)
                saved = time.monotonic()


def _optimiser(
    groups: Sequence[tuple[list[nn.Parameter], float]], recipe: dict[str, Any]
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [{"params": ps, "lr": lr, "peak": lr} for ps, lr in groups],
        betas=tuple(recipe["betas"]),
        weight_decay=recipe["weight_decay"],
        fused=True,
    )


def _gradients(
    loss: Callable[..., Iterable[tuple[str, Tensor]]], scale: float, names: list[str]
) -> Callable[..., Tensor]:
    """A function of a micro-batch that adds its gradients to the parameters' and returns its terms; it writes
    their names into `names`."""

    def gradients(*batch) -> Tensor:
        terms: dict[str, Tensor] = {}
        for term, value in loss(*batch):
            (value * scale).backward()
            terms[term] = terms.get(term, 0.0) + value.detach().double()
        names[:] = terms
        return torch.stack(list(terms.values()))

    return gradients


def _require_learning(losses: list[float], chance: float | None, name: str, step: int) -> None:
    """Raises CollapseError where the mean of the last losses is at chance although the first was clearly
    below it."""
    if chance is None or losses[0] >= BELOW * chance or len(losses) <= WINDOW:
        return
    if (mean := sum(losses[-WINDOW:]) / WINDOW) >= chance:
        raise CollapseError(
            f"{name}: the loss began at {losses[0]:.3f} and is {mean:.3f} at step {step}: at or above chance "
            f"({chance:.3f}, word frequencies alone). Lower the learning rate of this run"
        )


@contextmanager
def _stream(own: bool) -> Iterator[None]:
    """A CUDA stream for all steps, plain and replayed: the default stream cannot be recorded."""
    if not own:
        yield
        return
    outside, inside = torch.cuda.current_stream(), torch.cuda.Stream()
    inside.wait_stream(outside)
    with torch.cuda.stream(inside):
        yield
    outside.wait_stream(inside)
