"""The memory that a training takes on one GPU, counted from shapes and settings before the first step.

Weights, gradients and AdamW's two moments are counted exactly. Activations are what autograd keeps of plain
blocks: of each token and layer the inputs and outputs of both norms, queries, keys, values, the attention's
output in both layouts, and the MLP's inner numbers; of a linearized layer features of queries and keys beside
them; and the gradients of one block. On H200s that was within 15 % of the peaks of trainings without
compilation, and compiled blocks kept more than `LEAST` of it (tests/test_room.py, tests/test_planned.py). A
transfer keeps each layer's input, and one layer's graph at a time. A divergence from the teacher has the
teacher's weights beside, and all logits of both, whose log-probabilities autograd keeps in float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedConfig

from relinear.errors import UserError
from relinear.linearize.model import Linearized
from relinear.machine.distributed import _fits, size
from relinear.plan.job import Job

GIB = 2**30
LEAST = 0.6  # the share of the counted activations that compiled blocks kept at least
LOGIT = 10  # bytes of a logit and its gradient, where all are made at once
# bytes of float32 that a divergence keeps of a logit, and that it takes beside for one sequence at a time
KEPT, PASSING = 8, 12
ADDED = 5  # queries' widths that a linearized layer keeps beside its teacher's
GRAPH = 20  # queries' widths of one layer's graph in a transfer


class TooLargeError(UserError):
    """A training does not fit its GPU."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that count. `inner`: the numbers of a token that the MLP of a layer keeps."""

    hidden: int
    queries: int  # numbers of all query heads
    keys: int  # numbers of all key heads
    inner: int
    layers: int
    vocabulary: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Self:
        """The sizes in a transformers configuration of a decoder."""
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size  # GPT-2 says none
        gated = hasattr(config, "hidden_act")  # gate, its activation, up, their product; else GPT-2's GELU
        return cls(
            config.hidden_size,
            heads * dim,
            (getattr(config, "num_key_value_heads", None) or heads) * dim,
            (4 if gated else 5) * wide,
            config.num_hidden_layers,
            getattr(config, "vocab_size", 0),  # pictures have none
        )


@dataclass(frozen=True)
class Training:
    """A training whose memory is counted.

    weights, trained: bytes of all parameters, and of those that are trained.
    outside: bytes of the embeddings and the head, which shards keep gathered from forward to backward.
    beside: what is trained lies beside frozen weights, and is whole in every process.
    teacher: bytes of the weights of the model that the loss is a divergence from, whole in every process; 0
    without one.
    width: bytes of a number of the activations, on average.
    batch, accumulate, length: the sequences of a step and their tokens.
    """

    shape: Shape
    weights: int
    trained: int
    outside: int
    beside: bool
    width: int
    batch: int
    accumulate: int
    length: int
    transfer: bool = False
    linearized: bool = True
    recompute: bool = False
    gpus: int = 1
    sharded: bool = False
    teacher: int = 0

    @property
    def step(self) -> int:
        """The sequences of a step, over all GPUs."""
        return self.batch * self.accumulate

    @property
    def sequences(self) -> int:
        """The sequences that one GPU has in memory at a time (`relinear.get.packed.micro_batches`)."""
        return math.gcd(self.batch, max(self.step // self.gpus, 1))

    @property
    def kept(self) -> int:
        """The numbers of a token that autograd keeps of one block."""
        shape = self.shape
        own = 4 * shape.hidden + 3 * shape.queries + 2 * shape.keys + shape.inner
        return own + (ADDED * shape.queries if self.linearized else 0)

    def activations(self, share: float = 1.0) -> int:
        """Bytes of what autograd keeps on one GPU, without logits, where blocks keep this share of what is
        counted. The input of a block that is recomputed is kept whole."""
        shape = self.shape
        if self.transfer:
            numbers = share * (shape.layers * shape.hidden + GRAPH * shape.queries)
        else:
            numbers = shape.layers * (shape.hidden if self.recompute else share * self.kept)
            numbers += share * self.kept
        return int(self.sequences * self.length * numbers * self.width)

    def need(self) -> dict[str, int]:
        """Bytes on one GPU, by what they are of."""
        parts = self.gpus if self.sharded else 1
        trained = self.trained if self.beside else self.trained // parts
        weights = trained + (self.weights - self.trained) // parts
        if self.sharded:
            # gathered: this block's, the next one's, and what is no block's
            weights += 2 * (self.weights - self.outside) // self.shape.layers + self.outside
        tokens = self.sequences * self.length
        # one GPU makes a piece of the logits at a time, but not of a head in shards
        logits = tokens * self.shape.vocabulary * LOGIT if self.sharded and not self.transfer else 0
        if self.teacher:
            logits = (tokens * (KEPT + 2 * self.width) + self.length * PASSING) * self.shape.vocabulary
        return {
            "weights": weights,
            **({"teacher": self.teacher} if self.teacher else {}),
            "gradients": trained,
            "AdamW": 2 * trained,
            f"activations of {self.sequences} x {self.length} tokens": self.activations(),
            **({"logits": logits} if logits else {}),
        }

    @property
    def total(self) -> int:
        """Bytes on one GPU."""
        return sum(self.need().values())

    @property
    def least(self) -> int:
        """Bytes on one GPU that compiled blocks take, too."""
        return self.total - self.activations() + self.activations(LEAST)

    def switches(self) -> dict[str, list[Self]]:
        """What can be set otherwise, in words, and the trainings that this makes, the nearest first."""
        found = {}
        if not self.transfer and not self.recompute:
            found["hardware: {{recompute: true}}"] = [replace(self, recompute=True)]
        found["batch_size {0.batch} with accumulate {0.accumulate}, which trains the same,"] = [
            replace(self, batch=n, accumulate=self.step // n)
            for n in range(self.batch - 1, 0, -1)
            if self.step % n == 0
        ]
        found["--gpus {0.gpus} with hardware: {{engine: fsdp}}"] = [
            replace(self, gpus=n, sharded=True)
            for n in range(self.gpus + 1, self.step + 1)
            if self.step % n == 0
        ]
        return {words: some for words, some in found.items() if some}


def gib(count: float) -> str:
    """Bytes as GiB."""
    return f"{count / GIB:,.1f} GiB"


def account(training: Training, free: int) -> str:
    """What a training takes, what is missing, and what each switch frees: the least change that is enough,
    else the largest."""
    total = training.total
    each = ", ".join(f"{name} {gib(count)}" for name, count in training.need().items())
    frees = []
    for words, some in training.switches().items():
        other = next((t for t in some if t.total <= free), some[-1])
        enough = ", which is enough" if other.total <= free else ""
        frees.append(f"{words.format(other)} frees {gib(total - other.total)}{enough}")
    missing = f", so {gib(total - free)} are missing" if total > free else ""
    return (
        f"it takes about {gib(total)} of a GPU ({each}), of which {gib(free)} are free{missing}. Possible:"
        f" {'; '.join(frees) or 'a GPU with more memory'}"
    )


def of_job(
    job: Job,
    model: nn.Module,
    trained: Sequence[nn.Parameter],
    *,
    beside: bool,
    transfer: bool = False,
    dtype: torch.dtype | None = None,
) -> Training:
    """The training of a job, before its model is moved; `dtype`: what autocast computes in."""
    weight = next(model.parameters())
    budget, gpus = job.settings["budget"], size()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = {id(end.weight): end.weight.nbytes for end in ends if hasattr(end, "weight")}  # may be tied
    taught = job.settings["recipe"].get("kl", 0) > 0
    numbers = sum(p.numel() for p in model.parameters()) - (sum(p.numel() for p in trained) if beside else 0)
    sharded = gpus > 1 and job.engine != "ddp"
    if sharded and job.engine == "auto":
        sharded = not _fits(model, list(trained) if beside else None, "cuda")
    return Training(
        Shape.of(model.config),
        sum(p.nbytes for p in model.parameters()),
        sum(p.nbytes for p in trained),
        sum(outside.values()),
        beside,
        (weight.element_size() + (dtype or weight.dtype).itemsize) // 2,  # autocast keeps half in float32
        budget["batch_size"],
        budget["accumulate"],
        budget["seq_len"],
        transfer=transfer,
        linearized=any(isinstance(module, Linearized) for module in model.modules()),
        recompute=job.recompute and not transfer,
        gpus=gpus,
        sharded=sharded,
        teacher=numbers * (dtype or weight.dtype).itemsize if taught else 0,
    )


def free(model: nn.Module) -> int:
    """Bytes of this process's GPU that a model may have: what is free, and what the model takes already."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached + sum(p.nbytes for p in model.parameters() if p.is_cuda)


class Fits:
    """A training that fits the GPU, as far as counting tells; as a context, one in which running out of
    memory is a TooLargeError too. `about` is `of_job`'s. Nothing is counted for a CPU.

    Raises TooLargeError where a GPU has less memory than even compiled blocks take. Where it has less than
    plain ones take, one line says so.
    """

    def __init__(
        self, job: Job, model: nn.Module, trained: Sequence[nn.Parameter], device: str, **about: Any
    ):
        self.name, self.said = job.name, ""
        if device != "cuda":
            return
        training, room = of_job(job, model, trained, **about), free(model)
        self.said = account(training, room)
        if training.least > room:
            raise TooLargeError(f"{job.name} does not fit: {self.said}")
        if training.total > room and job.leads:
            print(f"{job.name} may not fit: {self.said}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise TooLargeError(f"{self.name}: the GPU is out of memory: {self.said}") from error
