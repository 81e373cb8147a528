"""The GPUs that a stage computes on: jobs of one machine never share a device unless told to.

Snakemake counts GPUs and does not say which one a job gets, so each takes a device's lock, in a folder of
this host and user, and sees that device alone. The kernel drops the lock with the process, however that ends.
Devices are known by their UUID: a batch system may show each of its jobs another device as number 0.

RELINEAR_JOBS_PER_GPU lets that many jobs share a device (default 1).
"""

import fcntl
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from relinear.errors import UserError

PER_GPU = "RELINEAR_JOBS_PER_GPU"
VISIBLE = "CUDA_VISIBLE_DEVICES"
BATCH = {"SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "KUBERNETES_SERVICE_HOST"}
_claimed: list[str] = []  # the devices that this process holds to its end


def claim(count: int = 1) -> list[str]:
    """Wait for `count` free GPUs and make them the only ones this process sees. Call it before anything
    initialises CUDA.

    Chooses among those that CUDA_VISIBLE_DEVICES names, if it does, and returns their UUIDs. A process that
    calls it again keeps what it has. Leaves everything alone, and returns none, where a batch system gave
    this job its devices and no others, where nvidia-smi finds none, and in the ranks of a torchrun, whose
    locks were taken before it started: they stay with it across `exec`. Raises UserError for more GPUs than
    there are.
    """
    if count <= len(_claimed):
        return list(_claimed)
    if "LOCAL_RANK" in os.environ or not (devices := visible()):
        return []
    if count > len(devices):
        raise UserError(f"{count} GPUs asked for; there are {len(devices)}: {', '.join(devices)}")
    if count == len(devices) and BATCH & os.environ.keys():
        return []
    folder = _own(Path(tempfile.gettempdir()) / f"relinear-gpus-{os.getuid()}")
    slots = range(_jobs_per_gpu())
    # One process at a time gathers several devices: two processes that hold half of them each would wait for
    # ever.
    alone = count == 1
    turn = None if alone else _lock(folder / "turn")
    held: dict[str, int] = {}
    said = False
    while len(held) < count:
        if turn is None and not alone:
            turn = _lock(folder / "turn")
        else:
            for slot in slots:  # an idle device before a second job on a busy one
                for device in devices:
                    if (
                        len(held) < count
                        and device not in held
                        and (lock := _lock(folder / f"{device}.{slot}")) is not None
                    ):
                        held[device] = lock
        if len(held) < count:
            if not said:
                print(
                    f"waiting for {count} of {len(devices)} GPUs: other jobs hold them ({folder})",
                    file=sys.stderr,
                    flush=True,
                )
                said = True
            time.sleep(0.2)
    if turn is not None:
        os.close(turn)
    os.environ[VISIBLE] = ",".join(held)
    _claimed[:] = held
    return list(held)


def _own(folder: Path) -> Path:
    """A folder in which this user alone writes. Raises UserError for one of its name that another user made,
    or could have: it would hold up jobs."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            f"{folder}, where GPUs are locked, must be a folder that this user alone writes to; remove it, or"
            " set TMPDIR"
        )
    return folder


def visible() -> list[str]:
    """The UUIDs of the GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide; none where nvidia-smi is
    not there."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    found = re.findall(r"^GPU \d+: .*\(UUID: (\S+)\)", listed, re.MULTILINE)
    if VISIBLE not in os.environ:
        return found
    # An index, or a UUID (of a part of a device, with MIG).
    named = [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip()]
    return [found[int(name)] if name.isdigit() and int(name) < len(found) else name for name in named]


def _jobs_per_gpu() -> int:
    text = os.environ.get(PER_GPU, "1")
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{PER_GPU} must be a whole number of jobs, 1 or more; got {text!r}")
    return int(text)


def _lock(path: Path) -> int | None:
    """A file descriptor that holds the lock, also across `exec`; None if another process holds it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    os.set_inheritable(file, True)
    return file
