"""The cost of a job beyond importing its libraries: `python -m relinear.benchmarks.overhead`, in seconds of processor time, at scale smoke.

Each job runs as Snakemake would start it. The libraries are all modules, Python's own too, that it has loaded by its end, imported again in the
same order by a process that does nothing else; tests hold that a stage loads none that it does not need. The work is what the stage's own function
takes once they are loaded. What is left is the command line, the plan and its keys, the record and the mirror.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from relinear.benchmarks import command
from relinear.plan.code import PACKAGES
from relinear.plan.plan import Plan

BEFORE = ("model tiny", "written stories@tiny", "text stories@tiny", "measure teacher gate")
JOBS = ("draw comparison table2", "measure teacher perplexity", "finetune teacher_lora")
RUN = "from relinear.cli import main; main()"
# The same, and the names of the modules that it has loaded.
LISTED = """
import json, sys
out = sys.argv.pop(1)
try:
    from relinear.cli import main
    main()
finally:
    json.dump([n for n in sys.modules if n.partition(".")[0] not in ("__main__", "relinear", "relinear_kernels")], open(out, "w"))
"""
IMPORTED = """
import contextlib, gc, importlib, json, sys
gc.disable() # as a job imports
for name in json.load(open(sys.argv[1])):
    with contextlib.suppress(Exception):  # modules that a library makes while it runs
        importlib.import_module(name)
"""
# Both, and the processor time of the stage's work.
TIMED = """
import sys, time
listed, out = sys.argv.pop(1), sys.argv.pop(1)
import contextlib, importlib, json
for name in json.load(open(listed)):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
from relinear import stage
from relinear.cli import main

run_stage = stage.run_stage

def timed(plan, node, work):
    def timed_work(job):
        begin = time.process_time()
        try:
            return work(job)
        finally:
            json.dump(time.process_time() - begin, open(out, "w"))
    return run_stage(plan, node, timed_work)

stage.run_stage = timed
main()
"""


def seconds(code: str, *args: str) -> float:
    """Processor time of a new process and of its children. Raises CalledProcessError where it fails."""
    paths = os.pathsep.join(str(path.parent) for path in PACKAGES.values())
    words, env = [sys.executable, "-c", code, *args], os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(words, env=env, stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words, said.read().decode())
    return used.ru_utime + used.ru_stime


def measure(job: str, plan: Plan, repeats: int) -> dict[str, float]:
    """The median processor time of a job, of importing its modules, and of its work."""
    words = [*job.split(), "--scale", plan.scale, "--results", str(plan.results)]
    stage, *name = job.split()
    folder = None if stage == "draw" else plan.folder(plan.node(stage, *name))
    names, work = plan.results / "modules.json", plan.results / "work.json"

    def again(code: str, *args: str) -> float:
        if folder is not None and folder.exists():
            shutil.rmtree(folder)
        return seconds(code, *args, *words)

    again(LISTED, str(names))
    found: dict[str, list[float]] = {"job": [], "libraries": [], "work": []}
    for _ in range(repeats):
        found["job"].append(again(RUN))
        found["libraries"].append(seconds(IMPORTED, str(names)))
        if folder is not None:  # drawing has no model, and no function apart
            again(TIMED, str(names), str(work))
        found["work"].append(0.0 if folder is None else json.loads(work.read_text()))
    return {name: statistics.median(values) for name, values in found.items()}


def main(repeats: Annotated[int, typer.Option(help="the median of as many is printed")] = 3) -> None:
    """Measure the jobs, and print them as a table."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(scale="smoke", results=Path(folder))
        for node in BEFORE:
            seconds(RUN, *node.split(), "--scale", plan.scale, "--results", folder)
        print("| Job | CPU s | importing its libraries | its work | overhead |\n|---|---|---|---|---|")
        for job in JOBS:
            found = measure(job, plan, repeats)
            left = found["job"] - found["libraries"] - found["work"]
            print(f"| `{job}` | {found['job']:.1f} | {found['libraries']:.1f} | {found['work']:.1f} | {left:.1f} |", flush=True)


if __name__ == "__main__":
    command.run(main)
