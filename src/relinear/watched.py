"""The headline table by Snakemake, for someone who watches: its needs, a line a job, a bar, the committed
table.

Snakemake's whole output lies in .snakemake/log, and that of each job in results/<scale>/logs. Here a job is
one line; from an error on, every line is shown. Where the output is no terminal there is no bar, and a line
says every `QUIET` seconds what is at work.
"""

import csv
import math
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from relinear import campaign, records
from relinear.draw.render import markdown
from relinear.plan.plan import Plan
from relinear.plan.targets import HEADLINE
from relinear.stages._stage import Node

TABLE = Path("results/table2.csv")
QUIET = 15  # seconds
UNTRAINED, TRAINED = 1.01, 1.5  # perplexities of one row on two machines: so many times as large, at most
ERRORS = 3  # an average of tasks: so many standard errors of the difference
# The records' pace counts as much as this share of all work, done here. So the first jobs, which are short
# and wait for each other, do not decide alone how long the rest takes.
TRUST = 0.1
BEGUN = re.compile(r"^(?:local)?rule (\w+):$")
FIELD = re.compile(r"^    (jobid|wildcards): (.+)$")
FINISHED = re.compile(r"^Finished jobid: (\d+)\b")
STEPS = re.compile(r"^(\d+) of (\d+) steps")
FAILED = re.compile(r"^(Error in |Traceback|error: |\w*(Error|Exception)\b)")
TOLD = re.compile(r"^(WARNING|Nothing to be done)|again$")


class Needs(NamedTuple):
    """What the jobs that are left take. `longest`: seconds of the longest chain of nodes that wait for each
    other."""

    seconds: dict[Node, float | None]  # of its work; None where no record says
    longest: float
    memory_bytes: int
    download_bytes: int
    disk_bytes: int


def needs(plan: Plan) -> Needs:
    """What the headline table still takes: by earlier results' records, else by committed ones of the
    scale."""
    left = [node for node in campaign.nodes_of(plan, [HEADLINE]) if not plan.finished(node)]
    names = sorted({name for node in left for name in plan.settings(node)["assets"]})
    assets = (plan.node("asset", name) for name in names)
    obtained = [node for node in assets if not plan.finished(node)]
    seconds: dict[Node, float | None] = {}
    ends: dict[Node, float] = {}  # parents come first
    memory = disk = 0
    for node in [*obtained, *left]:
        earlier = records.finished(plan.folder(node))
        told = [earlier] if earlier else campaign.records_of(plan, node)
        seconds[node] = max((record["wall_seconds"] for record in told), default=None)
        begins = max((ends.get(parent, 0) for parent in plan.parents(node).values()), default=0)
        ends[node] = begins + (seconds[node] or 0)
        memory = max([memory, *(record["peak_rss_bytes"] for record in told)])
        disk += max((_bytes_of(record) for record in told), default=0)
    download = sum(plan.catalogue[node.name].download_bytes for node in obtained)
    return Needs(seconds, max(ends.values(), default=0), memory, download, disk)


def _bytes_of(record: dict[str, Any]) -> int:
    return sum(entry["bytes"] for entry in record["artefacts"].values())


def before(plan: Plan, found: Needs, cores: int) -> str:
    """One sentence for the start: minutes, memory and disk of the jobs that are left."""
    known = [seconds for seconds in found.seconds.values() if seconds is not None]
    lacking = len(found.seconds) - len(known)
    if not found.seconds:
        return "nothing but the drawing may be left"
    jobs = f"{len(found.seconds)} job{'s' * (len(found.seconds) > 1)} and the drawing are left"
    if not known:
        return f"{jobs}; no record of scale {plan.scale} says how long they take"
    minutes = max(sum(known) / cores, found.longest) / 60
    unknown = f" (not counted: {lacking} without a record)" if lacking else ""
    download = ""
    if found.download_bytes:
        download = f", {found.download_bytes / 1e9:.1f} GB to download unless the cache has them"
    free = shutil.disk_usage(".").free
    return (
        f"{jobs}: about {minutes:.0f} minutes on {cores} cores as fast as those of earlier or committed runs"
        f"{unknown}; {found.memory_bytes / 2**30:.1f} GiB of memory for the largest job, "
        f"{min(cores, len(found.seconds))} at a time; {found.disk_bytes / 1e9:.1f} GB on disk{download} "
        f"({free / 1e9:.0f} GB are free)"
    )


class Watch:
    """What Snakemake's lines say of its jobs, `slots` at a time."""

    def __init__(self, seconds: Mapping[str, float], slots: int = 1) -> None:
        """`seconds`: expected of each job, by its rule and wildcards, such as `measure lizard perplexity`."""
        self.seconds, self.total, self.slots = seconds, sum(seconds.values()), slots
        self.done = 0.0  # of `total`
        self.began: float | None = None  # the first job
        self.steps = ""
        self.running: dict[str, tuple[str, float]] = {}  # jobid -> the job, and when it began
        self.failed = False
        self._rule = self._job = ""

    def read(self, line: str) -> str | None:
        """What to show for a line of Snakemake's; None for nothing."""
        self.failed = self.failed or bool(FAILED.match(line))
        if found := FINISHED.match(line):
            job, began = self.running.pop(found[1], ("", time.monotonic()))
            self.done += self.seconds.get(job, 0)
            return f"{job}: {time.monotonic() - began:.0f} s"
        if self.failed:
            return line
        if found := BEGUN.match(line):
            self._rule = found[1]
        elif found := FIELD.match(line):
            if found[1] == "jobid":
                self._job = found[2]
                self.running[self._job] = self._rule, time.monotonic()
                self.began = self.began or time.monotonic()
            elif self._job in self.running:
                values = [value.partition("=")[2] for value in found[2].split(", ")]
                self.running[self._job] = " ".join([self._rule, *values]), self.running[self._job][1]
        elif found := STEPS.match(line):
            self.steps = f"{found[1]} of {found[2]} jobs"
        return line if TOLD.search(line) else None

    def state(self, elapsed: float) -> str:
        """One line: the jobs that are done, the time that is left, and what is at work."""
        now = ", ".join(f"{job} ({time.monotonic() - began:.0f} s)" for job, began in self.running.values())
        done = f"{self.steps or 'no job'} done in {tqdm.format_interval(elapsed)}"
        return f"{done}{self.left()}; at work: {now or 'Snakemake, which chooses the jobs'}"

    def left(self) -> str:
        """`, about 12:30 left`: at the records' pace, corrected by that of the jobs so far; nothing before
        the first job."""
        if self.began is None or not self.total:
            return ""
        now, trusted = time.monotonic(), TRUST * self.total
        done = self.done + sum(
            min(now - began, self.seconds.get(job, 0)) for job, began in self.running.values()
        )
        pace = ((now - self.began) * self.slots + trusted) / (done + trusted)
        return f", about {tqdm.format_interval(pace * max(self.total - done, 0) / self.slots)} left"


def lines_of(process: subprocess.Popen) -> Iterator[str | None]:
    """The lines of a process as they come, and None for each second without one."""
    waiting: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            waiting.put(line.rstrip("\n"))
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            if (line := waiting.get(timeout=1)) is None:
                return
            yield line
        except queue.Empty:
            yield None


def run(command: Sequence[str], seconds: Mapping[str, float], slots: int = 1) -> int:
    """Run Snakemake and show its jobs, `slots` at a time; its exit status."""
    watch, began = Watch(seconds, slots), time.monotonic()
    shown = began
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    process = subprocess.Popen(command, stdout=pipe, stderr=both, text=True, errors="replace")
    shape = "{percentage:3.0f}% |{bar}| {postfix} [{elapsed}]"
    last: list[str] = []
    try:
        with tqdm(total=watch.total or 1, bar_format=shape, smoothing=0, disable=None) as bar:
            for line in lines_of(process):
                last = [*last, line][-30:] if line is not None else last
                said = None if line is None else watch.read(line)
                if said is None and bar.disable and time.monotonic() - shown > QUIET:
                    said = watch.state(time.monotonic() - began)
                if said is not None:
                    tqdm.write(said)
                    sys.stdout.flush()
                    shown = time.monotonic()
                bar.n = min(watch.done, bar.total)
                bar.set_postfix_str(
                    f"{watch.steps or 'Snakemake chooses the jobs'}{watch.left()}", refresh=False
                )
                bar.refresh()
        code = process.wait()
    except KeyboardInterrupt:  # Snakemake had it too, and ends its jobs
        code = process.wait() or 130
        print("relinear: stopped; the same command goes on")
        return code
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code and not watch.failed:
        print("\n".join(last))
    return code


def compared(ours: Path, committed: Path) -> str:
    """Both tables' perplexities and averages of tasks, and whether they are as near as two machines' are:
    Markdown."""
    tables = []
    for path in (ours, committed):
        with path.open(newline="") as file:
            tables.append({row["run"]: row for row in csv.DictReader(file)})
    lines = []
    for run in (run for run in tables[0] if run in tables[1]):
        here, there = (table[run] for table in tables)
        cells = [run]
        for column in ("ppl", "avg_no_mmlu"):
            try:
                one, other = float(here[column]), float(there[column])
                near = _near(column, here, there)
            except (KeyError, ValueError):  # a cell in words, such as `not run`
                cells += ["", "", "no number"]
            else:
                cells += [
                    f"{one:.2f}",
                    f"{other:.2f}",
                    "as near as expected" if near else "FURTHER THAN EXPECTED",
                ]
        lines.append(cells)
    return markdown(["run", "ppl", "committed", "", "average", "committed", ""], lines)


def _near(column: str, here: Mapping[str, str], there: Mapping[str, str]) -> bool:
    one, other = float(here[column]), float(there[column])
    if column == "ppl":
        trained = any(float(there[f"{step}_tokens"]) for step in ("distill", "finetune"))
        factor = TRAINED if trained else UNTRAINED
        return 1 / factor <= one / other <= factor
    error = math.hypot(*(float(row[f"{column}_stderr"]) for row in (here, there)))
    return abs(one - other) <= ERRORS * error


EXPECTED = f"""\
Expected: the perplexity of a model as it is, within {UNTRAINED - 1:.0%}. Of a row that was trained, within a factor of
{TRAINED}: training on another CPU ends elsewhere (T2R at 400 and 499 on two of them). Averages of tasks, within
{ERRORS} standard errors of their difference.
"""  # noqa: E501


def table2(plan: Plan, choices: Sequence[str], cores: str) -> int:
    """Make results/table2.csv at a plan's scale, by Snakemake with `--config CHOICES`; its exit status."""
    found = needs(plan)
    slots = int(cores) if cores.isdigit() else os.cpu_count() or 1
    print(f"relinear: {TABLE} at scale {plan.scale}: {before(plan, found, slots)}.")
    print("relinear: stop it at any time; the same command goes on.", flush=True)
    typical = median([known for known in found.seconds.values() if known is not None] or [1.0])
    expected = {str(node): typical if seconds is None else seconds for node, seconds in found.seconds.items()}
    config = ["--config", *choices] if choices else []
    command = [sys.executable, "-m", "snakemake", "--cores", cores, str(TABLE), *config]
    if code := run(command, expected, slots):
        return code
    print(f"\n{TABLE.with_suffix('.md').read_text()}")
    committed = campaign.REFERENCE / f"table2_{plan.root.name}"
    if committed.is_dir() and plan.teacher is None:
        print(f"Beside results/reference/{committed.name}, made on another machine:\n")
        print(f"{compared(TABLE, committed / 'comparison' / TABLE.name)}\n\n{EXPECTED}")
    print(
        f"relinear: {TABLE} is there; {TABLE.with_suffix('.md')} is the table above, `make ui` for its runs."
    )
    return 0
