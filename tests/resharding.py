"""A small training in shards, on as many processes as there are: `[torchrun] resharding.py FOLDER STOP`
trains up to step STOP as if it had died there, and writes what it saw.

Sizes that no number of processes divides: some shards are shorter, and some processes have none of a tensor.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from relinear.get.packed import micro_batches
from relinear.machine.distributed import gathered, joined, rank, size, spread
from relinear.train.loop import train

STEPS, SEQUENCES, BATCH = 12, 20, 8
RECIPE = {"betas": (0.9, 0.99), "weight_decay": 0.1, "warmup_ratio": 0.1, "min_lr_ratio": 0.1, "clip": 1.0}


class Stop(Exception):
    """The process dies here."""


class Block(nn.Module):
    """Of 3 and 7 rows, and a part that gets no gradient and so has no moments."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(3, 7), nn.Linear(7, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Its input and what it adds."""
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """Two blocks."""

    _no_split_modules = ["Block"]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        """What the last block gives."""
        for block in self.blocks:
            x = block(x)
        return x


def run(folder: Path, stop: int) -> None:
    """Train, and write the losses and the sequences of each step that is taken here."""
    torch.manual_seed(0)
    model, data = Model(), torch.randn(SEQUENCES, 4, 3)
    engine = spread(model, None, "cpu", "fsdp")
    seen: dict[int, list[int]] = {}
    lines = folder / "lines.jsonl"

    def batches(step):
        of = {"n": SEQUENCES, "batch_size": BATCH, "accumulate": 1, "seed": 0, "rank": rank(), "size": size()}
        for chosen, _ in micro_batches(step, **of):
            seen[step] = chosen
            yield (data[chosen],)

    def loss(x):
        yield "square", (model(x) - x.flip(-1)).square().sum() / (BATCH * 12)

    def log(metrics, step):
        if step == stop:
            raise Stop
        chosen = gathered(seen[step])
        if rank() == 0:
            with lines.open("a") as file:
                values = {key: metrics[key] for key in ("loss", "grad_norm")}
                line = {"step": step, "processes": size(), "engine": engine, "sequences": chosen, **values}
                file.write(json.dumps(line) + "\n")

    parameters = list(model.parameters())
    try:
        train(
            loss,
            [(parameters[:6], 1e-2), (parameters[6:], 1e-3)],
            batches=batches,
            steps=STEPS,
            tokens_per_step=BATCH,
            recipe=RECIPE,
            checkpoint=folder / "checkpoints",
            checkpoint_seconds=0,
            log=log,
            resumed=lambda step: None,
            memory=lambda: 1,
            name="toy",
        )
    except Stop:
        pass


if __name__ == "__main__":
    with joined("cpu"):
        run(Path(sys.argv[1]), int(sys.argv[2]))
