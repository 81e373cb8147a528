"""SUPRA in text: shares of tokens, steps and speed, from the paper's tables and our records."""

import json
import re
from pathlib import Path

from relinear.draw.intext import Said, write
from relinear.draw.render import NOT_RUN, count
from relinear.plan.published import published
from relinear.records import read_committed

STEP, WARM_UP, SPEED = 2_000_000, 1000, 4300  # tokens a step, steps, tokens a second and GPU; section 7
TOKENS, UNITS = re.compile(r"([\d.]+)([BT]) tokens"), {"B": 1e9, "T": 1e12}
SHAPE = "llama-3-8b"


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write intext.csv and intext.md."""
    tokens = tokens_of()
    mistral, llama = tokens["supra", "Mistral-7B"], tokens["teacher", "Llama-2-7B"]
    short, most = min(mistral), max(mistral)
    rwkv, retnet = tokens["RWKV-5 7B", "RWKV-5 7B"][0], tokens["RetNet 6.7B", "RetNet 6.7B"][0]
    run = measured["supra", "perplexity"]
    had = sum(run.facts["tokens"].values()) if run else None
    our_tokens = f"{count(had)} tokens" if had else NOT_RUN
    path = about.files.get(spec.inputs[0], Path(spec.inputs[0]))
    shares = (100 * short / rwkv, 100 * short / retnet)
    rows = [
        Said(
            "SUPRA needs 5 % of the training cost",
            "5 %",
            f"{100 * most / llama[0]:.1f} % of Llama-2's tokens at {count(int(most))}",
            round(100 * most / llama[0]) == 5,
            our_tokens,
        ),
        Said(
            "20B tokens are 2 to 10 % of the training cost of RWKV and RetNet",
            "2 to 10 %",
            f"{shares[0]:.1f} % and {shares[1]:.1f} %",
            [round(share) for share in shares] == [2, 10],
        ),
        Said(
            "1000 steps of 2M tokens warm up",
            "1000 steps",
            " and ".join(f"{100 * WARM_UP * STEP / n:.0f} % of {count(int(n))}" for n in (short, most)),
        ),
        Said(
            "Uptraining a 7B model takes some 4,300 tokens a second and GPU (H100)",
            f"{SPEED}",
            "",
            None,
            speed(json.loads(read_committed(path))),
        ),
    ]
    return write(spec, about, out, rows)


def tokens_of() -> dict[tuple[str, str], list[float]]:
    """(row, model) of Table 1 -> the tokens that the paper names beside it."""
    found: dict[tuple[str, str], list[float]] = {}
    for row, entries in published(Path(__file__).parent, "table1").items():
        for entry in entries:
            if told := TOKENS.search(entry.model):
                name = entry.model.partition(",")[0]
                found.setdefault((row, name), []).append(float(told[1]) * UNITS[told[2]])
    return found


def speed(record) -> str:
    """Tokens a second and GPU of our full finetuning at the shape of an 8B model; `not run` without rows."""
    asked = ("supra", "finetune", SHAPE)
    rows = [row for row in record["rows"] if (row["run"], row["stage"], row["shape"]) == asked]
    rows = [row for row in rows if "tokens_per_second" in row]  # a curve has none
    if not rows:
        return NOT_RUN
    best = max(rows, key=lambda row: row["tokens_per_second_per_gpu"])
    where = f"{best['engine']} on {best['gpus']} x {record['device']}"
    return f"{best['tokens_per_second_per_gpu']:.0f} at the shape of {SHAPE}, {where}"
