"""The time of whole targets from a fresh clone: `python -m relinear.benchmarks.whole lolcats supra lizard --scale smoke --cores 2`.

The clone is of HEAD, in a temporary folder; what is not committed is not in it. All that is behind the targets is made there, with the libraries of
this Python. Writes seconds, seconds of a core in all processes that Snakemake started, and seconds of a core that the rest of the machine took
meanwhile: on a busy machine the first are more than the second over the cores. Linux only.
"""

import ctypes
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from relinear.benchmarks import command
from relinear.benchmarks.campaign import Campaign, session
from relinear.draw.render import markdown
from relinear.errors import UserError
from relinear.machine import warm
from relinear.plan.strict import WORKFLOW

COLUMNS = ("targets", "scale", "cores", "jobs", "seconds", "core_seconds", "core_seconds_of_others")
ADOPT = 36  # PR_SET_CHILD_SUBREAPER: a process whose parent has ended becomes a child of this one, which so learns what it took


def used() -> tuple[float, float]:
    """Seconds of a core: those of this process' children that have ended, and those of the whole machine."""
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return own.ru_utime + own.ru_stime, (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def run(words: list[str], folder: Path) -> str:
    """What a command and all that it leaves behind say until the last of them has ended. Raises UserError where it fails."""
    ctypes.CDLL(None).prctl(ADOPT, 1)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", warm.ADDRESS)}
    done = subprocess.run(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    if done.returncode:
        raise UserError(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}")
    return done.stdout


def main(
    targets: Annotated[list[str], typer.Argument(help="as snakemake takes them, such as lolcats")],
    scale: Annotated[str, typer.Option(help="a file of workflow/scales")] = "smoke",
    cores: Annotated[int, typer.Option(help="jobs side by side", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="a .json; a row is added to it")] = Path("results/reference/whole/whole.json"),
) -> None:
    """Make the targets, and print the row."""
    about = session("python -m relinear.benchmarks.whole")
    with tempfile.TemporaryDirectory() as folder:
        run(["git", "clone", "--quiet", str(WORKFLOW.parent), folder], Path.cwd())
        (ours, all_), begin = used(), time.monotonic()
        said = run([sys.executable, "-m", "snakemake", "--cores", str(cores), *targets, "--config", f"scale={scale}"], Path(folder))
        seconds, (ours_then, all_then) = time.monotonic() - begin, used()
    jobs = re.findall(r"^(\d+) of \1 steps", said, re.MULTILINE)
    took = {"seconds": seconds, "core_seconds": ours_then - ours, "core_seconds_of_others": all_then - all_ - (ours_then - ours)}
    row = {"targets": " ".join(targets), "scale": scale, "cores": cores, "jobs": int(jobs[-1]), **{name: round(s, 1) for name, s in took.items()}}
    campaign = Campaign(out)
    campaign.describe(**about, machine=platform.machine(), cores_of_machine=os.cpu_count())
    campaign.add(row)
    print(markdown(COLUMNS, [[str(row[name]) for name in COLUMNS]]))


if __name__ == "__main__":
    command.run(main)
