"""The processes of one stage: torchrun starts one a GPU; without it a process is a world of its own, for
which all of this does nothing.

Training is data-parallel: a replica of the model a process (the semantics of DDP) or, where no replica fits,
the shards of FSDP2.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from relinear.errors import UserError

# for a collective: a process that has not come by then is taken for dead, and all end
TIMEOUT = timedelta(minutes=30)
PATIENCE = timedelta(days=365)  # for the first process to get the stage's lock, which another job may hold
# the share of a GPU's memory that a replica and its optimiser may take; the rest is for activations
REPLICA_SHARE = 0.5


def rank() -> int:
    """The number of this process among those of torchrun; 0 for one alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """The number of processes of torchrun; 1 for one alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def joined(device: str) -> Iterator[None]:
    """The process group, where torchrun started this process and none is there yet. Raises UserError for more
    processes than GPUs.

    A process that fails leaves the group open: torchrun stops the others when it ends.
    """
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if device == "cuda":
        local, here, have = (
            int(os.environ["LOCAL_RANK"]),
            int(os.environ["LOCAL_WORLD_SIZE"]),
            torch.cuda.device_count(),
        )
        if 1 < have < here:
            raise UserError(
                f"{here} processes on this machine, one a GPU, but torch finds {have} GPUs; possible: 1 to"
                f" {have} processes"
            )
        # a process that may see one GPU only (CUDA_VISIBLE_DEVICES) has that one
        torch.cuda.set_device(local % have)
    # Gloo also beside NCCL, for messages between the processes that lie in main memory.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


# --- what the processes tell each other ---


def started(here: bool = True) -> bool:
    """Whether there is work to do. The first process decides it and may wait for the stage's lock; all others
    wait here until it has told them."""
    if size() == 1:
        return here
    told = [here]
    dist.broadcast_object_list(told, group=dist.new_group(timeout=PATIENCE, backend="gloo"))
    return told[0]


def agreed(value: Any) -> Any:
    """The `value` that the first process has, in every process."""
    told = [value]
    if size() > 1:
        dist.broadcast_object_list(told, device=torch.device("cpu"))
    return told[0]


def share(items: Sequence) -> Sequence:
    """Every `size()`-th of the items: this process's."""
    return items[rank() :: size()]


def gathered(rows: list) -> list:
    """The rows of all processes, one process after the other."""
    if size() == 1:
        return rows
    parts: list[list] = [[] for _ in range(size())]
    dist.all_gather_object(parts, rows)
    return [row for part in parts for row in part]


def summed(terms: dict[str, float]) -> dict[str, float]:
    """Name -> the sum of that term over all processes. All of them have the same terms."""
    if size() == 1:
        return terms
    values = torch.tensor(list(terms.values()), dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(terms, values.tolist(), strict=True))


# --- training ---


def spread(model: nn.Module, trained: list[nn.Parameter] | None, device: str, engine: str) -> str:
    """Move a model to this process's device, in place, and say how: "ddp", a whole replica, or "fsdp", its
    shards. `engine` may be "auto".

    `trained` are the parameters to train beside frozen weights, which stay whole; None: all of them.
    Parameters of a sharded model are new objects. A single process has the whole model, whatever `engine`.
    """
    if size() == 1 or engine == "ddp" or (engine == "auto" and agreed(_fits(model, trained, device))):
        model.to(device)
        return "ddp"
    whole = set(trained or [])
    for p in whole:
        p.data = p.data.to(device)
    mesh = init_device_mesh(device, (size(),))
    blocks = next(m._no_split_modules for m in model.modules() if getattr(m, "_no_split_modules", None))
    for module in [*(m for m in model.modules() if type(m).__name__ in blocks), model]:
        fully_shard(module, mesh=mesh, ignored_params=whole)
        # The loss of each process is its part of the whole loss: gradients are added, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return "fsdp"


def _fits(model: nn.Module, trained: list[nn.Parameter] | None, device: str) -> bool:
    """Whether a replica fits: its weights, and for what is trained a gradient, its flat copy and AdamW's two
    moments."""
    if device == "cpu":
        return True
    weights = list(model.parameters())
    need = sum(p.nbytes for p in weights) + 4 * sum(
        p.nbytes for p in (weights if trained is None else trained)
    )
    return need <= REPLICA_SHARE * torch.cuda.get_device_properties(device).total_memory


def sum_gradients(parameters: list[nn.Parameter]) -> None:
    """Add up the processes' gradients, in place. FSDP has already, for parameters that it shards.

    One flattened all-reduce a step is what DDP does; its wrapper does it in each backward pass, of which a
    transfer has one per layer.
    """
    if size() == 1 or sharded(parameters):
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten().float() for g in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def sharded(parameters: list[nn.Parameter]) -> bool:
    """Whether any of the parameters is split over processes."""
    return any(isinstance(p, DTensor) for p in parameters)


def whole(x: Tensor) -> Tensor:
    """The whole tensor, joined from its shards. All processes must call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@contextmanager
def unsharded(block: nn.Module) -> Iterator[None]:
    """A context in which the weights of a block are whole, for computing something other than its forward
    pass."""
    if not isinstance(block, FSDPModule):
        yield
        return
    block.unshard()
    yield
    block.reshard()
