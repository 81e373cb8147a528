"""A campaign: what tables and figures need, in the order given, within a given time, on as many GPUs as there
are.

For a GPU that is lent by the hour. `snakemake` makes a target whole; a campaign makes as much of a list of
targets as the time allows, the first target first, and says what is left. It needs no Snakemake. Results are
the same nodes in the same folders: a later campaign, or Snakemake, goes on from them.

Each GPU has places for trainings and places for measurements: trainings of long sequences side by side slow
each other down. Work that needs no GPU has a place for every four cores. A training is not begun when its
committed record says that it takes longer than the time that is left.

The assets that the cache lacks are printed before the first job. Their downloads begin at once, one after the
other, beside the work that does not wait for them.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relinear import stages
from relinear.core import store
from relinear.get.bundle import HERE
from relinear.get.cached import cached
from relinear.machine import gpus, warm
from relinear.machine.disk import WORK
from relinear.plan.assets import default_cache
from relinear.plan.near import possible
from relinear.plan.plan import Plan
from relinear.plan.strict import WORKFLOW, ConfigError
from relinear.stages._stage import Node

STOP_SECONDS = 20  # a stopped job ends in this time, or is killed; the time of a campaign has them in it
# a training may take so many times as long as its record says, and begins in so many seconds
MARGIN, BEGIN_SECONDS = 1.1, 20
REPORT_SECONDS = 15  # no longer than this without a line
SHOWN = 20  # lines on what is left
NAMED = 2  # nodes that read an asset, in a line on it
REFERENCE = WORKFLOW.parent / "results" / "reference"


@dataclass
class Place:
    """Room for one job at a time. `device`: a GPU's UUID; None: no GPU."""

    kind: str  # training, measurement, cpu, download
    device: str | None
    node: Node | None = None
    process: subprocess.Popen | None = None
    began: float = 0.0


@dataclass
class Outcome:
    """What became of a campaign's nodes, each in one list, in the campaign's order."""

    stood: list[Node] = field(default_factory=list)  # were there before
    made: list[Node] = field(default_factory=list)
    failed: dict[Node, str] = field(default_factory=dict)  # -> the last line that it printed
    left: dict[Node, str] = field(default_factory=dict)  # -> why


def nodes_of(plan: Plan, targets: Iterable[str]) -> list[Node]:
    """The targets' measurements and what they still need, each once: those of the first target first, parents
    before their children.

    What a finished node was made of is not needed again, and may be gone. A target is a table or figure
    (`lolcats_table1`), a paper (`lolcats`) or one measurement (`lizard/perplexity`). Raises ConfigError for
    another.
    """
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in found:
            return
        if not plan.finished(node):
            for parent in plan.parents(node).values():
                visit(parent)
        found[node] = None

    for target in targets:
        for node in _measurements(plan, target):
            visit(node)
    return list(found)


def _measurements(plan: Plan, target: str) -> list[Node]:
    run, _, measure = target.partition("/")
    if measure:
        return [plan.measured(run, measure)]
    papers = {artefact.paper for artefact in plan.artefacts.values()}
    if target not in plan.artefacts and target not in papers:
        kinds = (
            "a target is a table or figure (lolcats_table1), a paper (lolcats) or a measurement"
            " (lizard/perplexity)"
        )
        raise ConfigError(f"no target {target!r}; {possible(target, [*plan.artefacts, *papers])}; {kinds}")
    shown = [artefact for name, artefact in plan.artefacts.items() if target in (name, artefact.paper)]
    return [node for artefact in shown for node in plan.reads(artefact).values()]


def downloads_of(plan: Plan, nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """The node of each asset that is not on this machine -> the nodes that read it, both in their order."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        for name in plan.settings(node)["assets"]:
            found.setdefault(name, []).append(node)
    return {Node("asset", name): of for name, of in found.items() if not cached(plan.catalogue[name])}


def lacking(plan: Plan, downloads: Mapping[Node, Sequence[Node]], targets: Iterable[str] = ()) -> list[str]:
    """Lines on assets that are not on this machine: what reads each, and how to bring them where there is no
    network, for the targets or all of the scale; none without any."""
    lines = []
    for download, of in downloads.items():
        asset = plan.catalogue[download.name]
        where = "the hub's cache" if asset.source == "hub" else f"the cache {default_cache()}"
        more = f" and {len(of) - NAMED} more" if len(of) > NAMED else ""
        lines.append(
            f"{where} lacks {asset.name} ({asset.source}, {asset.download_bytes / 2**20:.1f} MiB), to be"
            f" downloaded for {', '.join(f'`{node}`' for node in of[:NAMED])}{more}"
        )
    if lines:
        asked = " ".join(("FILE", *targets, plan.node_options()))
        lines.append(
            f"without a network here: `relinear bundle {asked}` on a machine that has one, then `relinear"
            f" bundle FILE --unpack` here; {HERE}"
        )
    return lines


def kind_of(node: Node) -> str:
    """The kind of place that a node's job takes."""
    stage = stages.stage(node.stage)
    if not stage.device:
        return "download" if stage.obtains else "cpu"
    return "measurement" if node.stage == "measure" else "training"


def places_of(devices: Sequence[str | None], trainings: int, measurements: int, cores: int) -> list[Place]:
    """The places of a machine. `devices`: UUIDs of GPUs; `[None]` where the plan computes on the CPU."""
    found = [Place("download", None), *(Place("cpu", None) for _ in range(max(cores // 4, 1)))]
    for kind, count in (("training", trainings), ("measurement", measurements)):
        found += [Place(kind, device) for _ in range(count) for device in devices]
    return found


def devices_of(plan: Plan) -> list[str | None]:
    """The UUIDs of the GPUs that a plan's jobs may take; `[None]` where it computes on the CPU.

    Raises ConfigError where the plan needs a GPU and none is there.
    """
    if not plan.gpus("finetune"):
        return [None]
    if not (found := gpus.visible()):
        raise ConfigError(
            f"scale {plan.scale!r} computes on GPUs, and nvidia-smi lists none; possible: --device cpu, or a"
            " machine with a GPU"
        )
    return list(found)


def records_of(plan: Plan, node: Node) -> list[dict[str, Any]]:
    """The committed records of a node at the plan's scale."""
    place = stages.stage(node.stage).folder(node)
    files = (folder / place / store.RECORD for folder in store.campaigns(REFERENCE))
    records = (json.loads(store.read(file)) for file in files if store.exists(file))
    return [record for record in records if record.get("scale") == plan.scale]


def seconds_of(plan: Plan, node: Node) -> float | None:
    """How long a committed record says that a node's work took, the longest of several; None where none is
    committed."""
    return max((record["wall_seconds"] for record in records_of(plan, node)), default=None)


def command_of(plan: Plan, node: Node, threads: int, device: str | None = None) -> list[str]:
    """The command that makes a node, on one GPU where it has a device: a fork of the process with the
    libraries, else a Python of its own."""
    script = ["-I", "-S", warm.__file__] if warm.ADDRESS in os.environ else []
    given = ["--threads", str(threads)] if stages.stage(node.stage).torch else []
    given += ["--gpus", "1"] if device is not None else []
    return [
        sys.executable,
        *script,
        "-m",
        "relinear.cli",
        *str(node).split(),
        *given,
        *shlex.split(plan.node_options()),
    ]


def begun(plan: Plan, node: Node) -> bool:
    """Whether an earlier campaign left a checkpoint of a training."""
    return any((plan.root / WORK / f"{node.name}.{node.stage}" / "checkpoints").glob("*"))


def copy_results(folder: Path, root: Path, out: Path, largest: int) -> None:
    """Copy the files of a node's folder that have at most `largest` bytes to the same place below `out`, its
    record last."""
    place = out / root.name / folder.relative_to(root)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size <= largest]
    for path in sorted(files, key=lambda path: path.name == "run.json"):
        copy = place / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


class Campaign:
    """The state of one campaign. `run` does it and returns what became of each node."""

    def __init__(
        self,
        plan: Plan,
        nodes: list[Node],
        places: list[Place],
        minutes: float,
        *,
        out: Path | None = None,
        largest: int = 16 << 20,
        threads: int = 2,
        downloads: Mapping[Node, Sequence[Node]] | None = None,
    ) -> None:
        self.plan, self.places, self.out, self.largest, self.threads = plan, places, out, largest, threads
        self.begin = time.monotonic()
        self.end = self.begin + 60 * minutes - min(STOP_SECONDS, 6 * minutes)
        self.outcome = Outcome(stood=[node for node in nodes if plan.finished(node)])
        self.waiting = [node for node in nodes if node not in self.outcome.stood]
        self.parents = {node: list(plan.parents(node).values()) for node in self.waiting}
        for download, of in (downloads or {}).items():
            self.waiting.insert(self.waiting.index(of[0]), download)
            self.parents[download] = []
            for node in of:
                self.parents[node].append(download)
        self.total = len(self.waiting)
        self.logs = plan.root / "logs"

    def run(self) -> Outcome:
        """Do the work until all is made or the time is over. Ctrl-C and SIGTERM end it as the end of the time
        does."""
        last, changed = time.monotonic(), True
        try:
            while self.waiting or self.busy():
                changed |= self.collect()
                if time.monotonic() >= self.end:
                    break
                if changed:  # else each place is as it was, and so is what is ready
                    self.start()
                if not self.busy():
                    break  # what is left waits for something that failed, or takes too long
                if changed or time.monotonic() - last > REPORT_SECONDS:
                    last = time.monotonic()
                    self.say(self.state())
                changed = False
                time.sleep(0.1)
        except (KeyboardInterrupt, SystemExit):  # SystemExit is what SIGTERM raises (relinear.tracking.live)
            self.say("stopped")
        finally:
            self.stop()
        for node in self.waiting:
            self.outcome.left.setdefault(node, self.why(node))
        return self.outcome

    def busy(self) -> list[Place]:
        """The places at work."""
        return [place for place in self.places if place.process is not None]

    def why(self, node: Node) -> str:
        """Why a node was not begun."""
        for parent in self.parents[node]:
            if parent in self.outcome.failed:
                return f"`{parent}` failed"
            if parent in self.outcome.left or parent in self.waiting:
                return f"waits for `{parent}`"
        return "no time was left" if time.monotonic() >= self.end else "no place of its kind was free"

    def start(self) -> None:
        """Give each free place the first waiting node that it can do."""
        waits = (
            set(self.waiting)
            | {place.node for place in self.busy()}
            | set(self.outcome.failed)
            | set(self.outcome.left)
        )
        for place in self.places:
            if place.process is None and (node := self.next_for(place, waits)) is not None:
                self.waiting.remove(node)
                self.launch(place, node)

    def next_for(self, place: Place, waits: set[Node]) -> Node | None:
        """The first node for a place whose parents are all made and whose work fits into the time that is
        left."""
        for node in list(self.waiting):
            if kind_of(node) != place.kind or any(parent in waits for parent in self.parents[node]):
                continue
            takes, has = seconds_of(self.plan, node), self.end - time.monotonic()
            late = takes is not None and MARGIN * takes + BEGIN_SECONDS > has
            if late and place.kind == "training" and not begun(self.plan, node):
                self.outcome.left[node] = f"takes {takes:.0f} s, and {has:.0f} s were left"
                self.waiting.remove(node)
                waits.add(node)
                continue
            return node
        return None

    def launch(self, place: Place, node: Node) -> None:
        """Start a node's job at a place."""
        self.logs.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if place.device is not None:
            shared = sum(other.device == place.device for other in self.places)
            environment |= {gpus.VISIBLE: place.device, gpus.PER_GPU: str(shared)}
        with self.log(node).open("wb") as log:
            command = command_of(self.plan, node, self.threads, place.device)
            place.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        place.node, place.began = node, time.monotonic()

    def log(self, node: Node) -> Path:
        """The file with what a node's job prints."""
        return self.logs / f"{'.'.join(part for part in (node.stage, node.name, node.part) if part)}.log"

    def collect(self) -> bool:
        """Take what has ended off its place. Returns whether any had."""
        ended = [place for place in self.busy() if place.process.poll() is not None]
        for place in ended:
            node, took = place.node, time.monotonic() - place.began
            if place.process.returncode == 0 and self.made(node):
                self.say(f"{took:5.0f} s  {node}")
            else:
                lines = self.log(node).read_text(errors="replace").strip().splitlines()
                self.outcome.failed[node] = lines[-1] if lines else f"exit status {place.process.returncode}"
                self.say(f"FAILED after {took:.0f} s  {node}: {self.outcome.failed[node]} ({self.log(node)})")
            place.process = place.node = None
        return bool(ended)

    def made(self, node: Node) -> bool:
        """Whether a node whose job has ended is made; then its results are copied out."""
        if not self.plan.finished(node):
            return False
        self.outcome.made.append(node)
        if self.out is not None:
            copy_results(self.plan.folder(node), self.plan.root, self.out, self.largest)
        return True

    def stop(self) -> None:
        """End what still runs. Where the results folder stays, a training goes on from the last checkpoint
        that it had written."""
        self.collect()
        for place in self.busy():
            place.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        for place in self.busy():
            try:
                place.process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                place.process.kill()
                place.process.wait()
            if not self.made(place.node):
                self.outcome.left[place.node] = (
                    "was not at its end when the time was over; where this folder stays, it goes on from its"
                    " last checkpoint"
                )
            place.process = place.node = None

    def state(self) -> str:
        """One line on where the campaign stands."""
        ended = len(self.outcome.made) + len(self.outcome.failed)
        now = ", ".join(str(place.node) for place in self.busy())
        return (
            f"{ended} of {self.total} made, {max(self.end - time.monotonic(), 0) / 60:.1f} min left; at work:"
            f" {now or 'nothing'}"
        )

    def say(self, line: str) -> None:
        """Print a line with the seconds since the begin."""
        print(f"[{time.monotonic() - self.begin:6.0f} s] {line}", flush=True)


def summary(outcome: Outcome, targets: Sequence[str], plan: Plan) -> list[str]:
    """Lines for the end: what was made, which targets are whole, what failed and what is left."""
    lines = [
        f"{len(outcome.made)} made, {len(outcome.stood)} that these need stood before, {len(outcome.failed)}"
        f" failed, {len(outcome.left)} left"
    ]
    for target in targets:
        lacks = [node for node in _measurements(plan, target) if not plan.finished(node)]
        drawn = plan.artefacts.get(target) if "/" not in target else None
        draw = (
            f"; `relinear draw {drawn.paper} {drawn.stem} {plan.node_options()}` draws it"
            if drawn is not None
            else ""
        )
        lines.append(
            f"{target}:"
            f" {f'{len(lacks)} measurements are missing' if lacks else f'all measurements are there{draw}'}"
        )
    lines += [f"failed: {node}: {why}" for node, why in outcome.failed.items()]
    lines += [f"left: {node}: {why}" for node, why in list(outcome.left.items())[:SHOWN]]
    if len(outcome.left) > SHOWN:
        lines.append(f"left: {len(outcome.left) - SHOWN} more")
    return lines
