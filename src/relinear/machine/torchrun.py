"""The command that runs a module in several processes of this machine."""

import sys


def torchrun(processes: int, *arguments: str) -> list[str]:
    """The words of the command that runs `python *arguments`, such as `-m module`, in so many processes, one
    a GPU."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        *arguments,
    ]
