"""The processor that computes: its model, and the instructions that decide its precision and speed."""

import platform
from pathlib import Path

INFO = Path("/proc/cpuinfo")
# Names of x86-64 and of arm64: vectors of 256 and 512 bits, and products of bfloat16 numbers.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def _told() -> dict[str, str]:
    """What Linux says of the first core, by name; nothing elsewhere."""
    try:
        first = INFO.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def model() -> str:
    """The processor's model as its maker names it, else its architecture."""
    return _told().get("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """Those of `INSTRUCTIONS` that the processor has, separated by spaces; empty where the system does not
    say."""
    told = _told()
    flags = set((told.get("flags") or told.get("Features", "")).split())
    return " ".join(name for name in INSTRUCTIONS if name in flags)
