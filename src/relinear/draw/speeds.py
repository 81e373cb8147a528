"""Tables of docs/efficiency.md, docs/kernels.md and docs/running.md from the rows of the benchmarks."""

import json

from relinear.draw.costs import Row, how_measured, read_costs
from relinear.draw.quote import REFERENCE, SHOWN_AS, listed
from relinear.draw.render import markdown
from relinear.records import read_committed

COSTS = REFERENCE / "efficiency/efficiency.csv"


def costs(model: str, sweep: str) -> list[Row]:
    """The committed rows of generation at a model's shape, as `mistral-7b`, over one axis: `batch`, `length`, `input`."""
    return [row for row in read_costs(COSTS) if (row.model, row.sweep) == (model, sweep) and row.ok]


def largest() -> dict[str, Row]:
    """Each run at the largest batch that fits, at Mistral-7B's shape."""
    return {row.run: row for row in sorted(costs("mistral-7b", "batch"), key=lambda row: row.batch)}


def gains() -> dict[str, tuple[float, float]]:
    """Each run's speed of decoding over softmax attention's at its largest batch: at that batch, and at the run's own."""
    most = largest()
    teacher = most["teacher"]
    same = {row.run: row.decode_tokens_per_second for row in costs("mistral-7b", "batch") if row.batch == teacher.batch}
    speed = teacher.decode_tokens_per_second
    return {run: (same[run] / speed, row.decode_tokens_per_second / speed) for run, row in most.items()}


def generating() -> str:
    """Decoding at Mistral-7B's shape, at the largest batch of softmax attention and at a run's own.

    A plus follows the commit of a session whose tree had uncommitted changes.
    """
    teacher = largest()["teacher"]
    same = {row.run: row for row in costs("mistral-7b", "batch") if row.batch == teacher.batch}
    changed = tuple(session["commit"] for session in how_measured(COSTS)["sessions"] if session["dirty"])
    runs = {row.run: None for row in costs("mistral-7b", "batch")}
    found = []
    for run in runs:
        most, (gain, own) = largest()[run], gains()[run]
        cells = [f"{same[run].decode_tokens_per_second:,.0f} ({gain:.1f}x)", f"{most.batch:,}"]
        cells.append(f"{most.decode_tokens_per_second:,.0f} ({own:.1f}x)")
        commit = f"`{most.commit}`{'+' * any(name.startswith(most.commit) for name in changed)}"
        found.append([SHOWN_AS.get(run, run), f"{most.cache_bytes / most.batch / 2**20:.0f}", *cells, commit])
    head = ["Run", "MiB a sequence", f"tokens/s, batch {teacher.batch}", "largest batch", "tokens/s there", "commit"]
    return markdown(head, found)


def inputs() -> str:
    """Decoding at Llama-3-8B's shape, a batch of 16, against the length of the input; and memory."""
    cells = {(row.run, row.prompt): row for row in costs("llama-3-8b", "input")}
    runs, lengths = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    found = []
    for prompt in sorted(lengths):
        mine = [cells[run, prompt] for run in runs]
        speeds = [f"{row.decode_tokens_per_second:,.0f}" for row in mine]
        found.append([f"{prompt:,}", *speeds, *(f"{row.peak_bytes / 2**30:.0f}" for row in mine)])
    names = [SHOWN_AS.get(run, run) for run in runs]
    units = [f"{name}, {unit}" for unit in ("tokens/s", "GiB") for name in names]
    return markdown(["Input, tokens", *units], found)


def seconds_of_reading() -> dict[tuple[str, int], float]:
    """(run, length of the input) -> seconds of reading a batch of 16 at Llama-3-8B's shape."""
    return {(row.run, row.prompt): row.batch * row.prompt / row.prefill_tokens_per_second for row in costs("llama-3-8b", "input")}


def reading() -> str:
    """Seconds of reading whole inputs against their length: the teacher beside the hybrids."""
    seconds = seconds_of_reading()
    hybrids = [run for run in dict.fromkeys(run for run, _ in seconds) if run != "teacher"]
    found = []
    for prompt in sorted({prompt for _, prompt in seconds}):
        own = seconds["teacher", prompt]
        cells = [f"{seconds[run, prompt]:.2f} ({own / seconds[run, prompt]:.2f}x)" for run in hybrids]
        found.append([f"{prompt:,}", f"{own:.2f}", *cells])
    return markdown(["Input, tokens", "teacher, s", *(f"{SHOWN_AS.get(run, run)}, s" for run in hybrids)], found)


def growth() -> str:
    """The effect of generating 32,768 tokens on the time of a token, on a process and on a prefill."""
    groups: dict[str, dict[str, list]] = {}
    for row in listed("decoding/decoding"):
        groups.setdefault(row["run"], {}).setdefault(row["phase"], []).append(row)
    found = []
    for run, own in groups.items():
        early, late = (row["cpu_ms_per_token"] for row in own["turns"])
        mib = [row["process_mib"] for row in own["decode"]]
        state = [row["state_bytes"] for row in own["decode"]]
        short, long = (row["seconds"] for row in own["prefill"])
        cells = [f"{late / early:.3f}x", f"{100 * (mib[-1] / mib[0] - 1):.2f} %", f"{state[-1] / state[0]:,.0f}x"]
        found.append([run, *cells, f"{long / short:.2f}x"])
    head = ["Run", "time of a token, last over second tenth", "growth of the process", "growth of the state", "prefill, 16k over 8k"]
    return markdown(head, found)


def training() -> str:
    """Tokens per second of training SmolLM2-135M's shape on one GPU, at two lengths."""
    speeds: dict[tuple[str, str], str] = {}
    for file in ("smollm2", "smollm2_2048"):
        for row in json.loads(read_committed(REFERENCE / f"scaling/{file}.json"))["rows"]:
            speeds[row["run"], f"{row['stage']}, {row['length']}"] = f"{row['tokens_per_second'] / 1000:.0f}k"
    columns = ("distill, 1024", "distill, 2048", "finetune, 1024", "finetune, 2048")
    runs = dict.fromkeys(run for run, _ in speeds)
    lines = [[SHOWN_AS.get(run, run), *(speeds.get((run, column), "") for column in columns)] for run in runs]
    return markdown(["Run", *columns], lines)
