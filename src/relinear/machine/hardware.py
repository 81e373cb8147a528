"""The machine a stage runs on: device, precision, threads, memory."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from relinear.errors import UserError
from relinear.plan.job import PRECISIONS, Job


def device_of(wanted: str) -> str:
    """The device itself. Raises UserError for another than cpu and cuda, and where a GPU is asked for and
    none is."""
    if wanted not in ("cpu", "cuda"):
        raise UserError(f"no device {wanted!r}; have cpu, cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device 'cuda' asked for, but torch finds no GPU; possible here: cpu (--device cpu of relinear,"
            " --config device=cpu of snakemake)"
        )
    return wanted


def dtype_of(wanted: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 on GPUs and on processors with instructions for it, where it is 2 (AVX-512) to 4
    times (AMX) faster, else float32."""
    if wanted not in PRECISIONS:
        raise UserError(f"no dtype {wanted!r}; have {', '.join(PRECISIONS)}")
    if wanted != "auto":
        return getattr(torch, wanted)
    # These names are private to torch, so their absence is no error.
    supported = (
        getattr(torch.cpu, f"_is_{unit}_supported", lambda: False) for unit in ("amx_tile", "avx512_bf16")
    )
    return torch.bfloat16 if device == "cuda" or any(unit() for unit in supported) else torch.float32


def set_threads(threads: int | None) -> int:
    """Use `threads` cores (all that this process may use if None), shared with the others that torchrun
    started here."""
    n = max((threads or len(os.sched_getaffinity(0))) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    torch.set_num_threads(n)
    return n


def memory_bytes(device: str) -> int:
    """Peak memory of this process: on the GPU where it computes there, else resident."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def place(job: Job) -> tuple[str, torch.dtype]:
    """Device and dtype of a job, and a note of them in its record."""
    device = device_of(job.device)
    dtype = dtype_of(job.dtype, device)
    if device == "cuda" and dtype == torch.bfloat16:
        # Parts that stay float32 beside it (adapters, gates, feature maps) have bfloat16 inputs, and TF32
        # keeps more digits than those have.
        torch.set_float32_matmul_precision("high")
    name = torch.cuda.get_device_name() if device == "cuda" else None
    job.hardware |= {
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "gpu": name,
    }
    return device, dtype


def moved(x: Tensor, device: str | torch.device) -> Tensor:
    """A tensor of main memory on a device. The copy to a GPU runs behind the work that is queued there, and
    nothing waits for it."""
    return (
        x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x.to(device)
    )


class Reading:
    """Numbers on their way from the device to main memory: to be asked for once something else has been done
    meanwhile."""

    def __init__(self, numbers: Tensor):
        self.ready = torch.cuda.Event() if numbers.is_cuda else None
        self.numbers = numbers
        if self.ready is not None:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(
                numbers, non_blocking=True
            )
            self.ready.record()

    def __call__(self) -> list[float]:
        """The numbers. Waits until they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.numbers.tolist()


@contextmanager
def products(precision: str) -> Iterator[None]:
    """A context in which torch multiplies float32 matrices with this precision: "highest", where all are
    float32, or "medium", which multiplies numbers as if they were bfloat16 and adds in float32. The latter is
    exact where they are, and twice as fast on a processor with instructions for bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
