"""The values that a stage's work is given, and the notes it leaves. No plan, no torch."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from relinear.files import aside

DTYPES = ("bfloat16", "float16", "float32")  # of a model's weights
# that work computes in: trainings do not scale their losses, as float16 would want
PRECISIONS = ("auto", "float32", "bfloat16")
PREPARES = ("restore",)  # stages that make the model which a run begins with: no training of the run
TIMED = ("step", "time")  # fields of a line of history that are no metrics


class Link(NamedTuple):
    """A part of a run's model: a method with its options, and the folders of the steps that trained it, in
    order."""

    method: str  # "softmax": the model's own attention, as transformers has it
    options: dict[str, Any] = {}
    steps: tuple[Path, ...] = ()


@dataclass
class Job:
    """One stage of one run, or one input.

    `work` is a folder that outlives an interruption; `out` becomes the stage's folder when the work has
    ended. Where torchrun started several processes, one of them `leads` and writes; the others compute and
    write nothing.
    """

    name: str  # for progress bars
    settings: Mapping[str, Any]  # everything that the key counts besides code and parents
    parents: Mapping[str, Path]  # role -> folder of a finished stage
    out: Path
    work: Path
    # name -> folder of an asset that the settings name
    assets: Mapping[str, Path] = field(default_factory=dict)
    links: tuple[Link, ...] = ()  # the model to begin with
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    engine: str = "auto"
    compile: str = "auto"  # the blocks of a model that is trained: auto is on for a GPU
    recompute: bool = False  # the activations of each block, in the backward pass
    checkpoint_seconds: float = 0.0
    leads: bool = True
    workflow: Path = Path("workflow")  # the folder of the repository's files that the settings name
    mirror: Callable[[dict[str, Any], int, float], None] = lambda metrics, step, time: None
    tokens: int = 0  # training tokens seen, noted by stages that train
    # noted by the work: device, dtype, threads, engine
    hardware: dict[str, Any] = field(default_factory=dict)

    @property
    def history(self) -> Path:
        """The path of the history. It is in the work folder while the stage runs, so that an interrupted
        stage goes on with it."""
        return self.work / "history.jsonl"

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """One line of history, mirrored to MLflow."""
        if not self.leads:
            return
        now = time.time()
        with self.history.open("a") as file:
            file.write(json.dumps({"step": step, "time": now, **metrics}) + "\n")
        self.mirror(metrics, step, now)

    def resume(self, step: int) -> None:
        """Drop the lines of history from `step` on, which will be logged again, and give the rest to the
        mirror."""
        if not self.leads:
            return
        text = self.history.read_text() if self.history.is_file() else ""
        # Only whole lines: the last one may have been cut short.
        lines = [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]
        kept = [x for x in lines if x["step"] < step]
        with aside(self.history) as unfinished:
            unfinished.write_text("".join(json.dumps(x) + "\n" for x in kept))
        for line in kept:
            self.mirror({k: v for k, v in line.items() if k not in TIMED}, line["step"], line["time"])

    def losses(self) -> dict[str, float]:
        """Mean loss over the first and the last tenth of the steps; nothing where this process does not
        lead."""
        if not self.leads:
            return {}
        losses = [json.loads(x)["loss"] for x in self.history.read_text().splitlines()]
        tenth = max(len(losses) // 10, 1)
        return {"first_loss": sum(losses[:tenth]) / tenth, "last_loss": sum(losses[-tenth:]) / tenth}

    def items(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write `items.jsonl`, the outcome of each scored item, so that differences between runs can be
        paired."""
        if self.leads:
            (self.out / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
