"""Verbs of `relinear`, one a line, in one process or process group: `[torchrun] verbs.py DEVICE "distill
lizard --scale ddp" ...`

A line that begins with `until N` stops before step N, as if the process had died there.
"""

import sys

from relinear.cli import app
from relinear.machine import distributed
from relinear.plan.job import Job


class Stop(Exception):
    """The process dies here."""


def until(step: int):
    log = Job.log

    def dies(self, metrics, at):
        if at == step:
            raise Stop
        log(self, metrics, at)

    Job.log = dies
    return log


device, *lines = sys.argv[1:]
with distributed.joined(device):
    for line in lines:
        words = line.split()
        if words[0] != "until":
            app(words, standalone_mode=False)
            continue
        log = until(int(words[1]))
        try:
            app(words[2:], standalone_mode=False)
        except Stop:
            Job.log = log
