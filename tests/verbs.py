"""Verbs of `relinear`, one a line, in one process or process group: `[torchrun] verbs.py DEVICE "distill
lizard --scale ddp" ...`

A line that begins with `until N` stops before step N, as if the process had died there. Lines of one plan
share it: reading `workflow/` anew takes longer than most of a smoke scale's nodes.
"""

import functools
import sys

from relinear import cli
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


cli.Plan = functools.cache(cli.Plan)
device, *lines = sys.argv[1:]
with distributed.joined(device):
    for line in lines:
        words = line.split()
        if words[0] != "until":
            cli.app(words, standalone_mode=False)
            continue
        log = until(int(words[1]))
        try:
            cli.app(words[2:], standalone_mode=False)
        except Stop:
            Job.log = log
