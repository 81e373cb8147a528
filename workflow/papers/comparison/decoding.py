"""Constant memory: time of a token and memory against position while one CPU core generates."""

import csv
import json
import re
from pathlib import Path

from matplotlib.figure import Figure

from relinear.draw.claims import Value
from relinear.draw.pictures import page
from relinear.draw.style import lines
from relinear.records import read_committed

MIB = 2**20
NAMES = {
    "softmax": "softmax teacher",
    "t2r": "T2R",
    "hedgehog": "Hedgehog",
    "supra": "SUPRA",
    "lolcats_linear": "LoLCATs, linear",
    "lolcats_window": "LoLCATs, window",
    "lizard": "Lizard",
}
PHASES = {"cpu_ms_per_token": "turns", "state_bytes": "decode"}  # the rows in which claims read a column
POSITIONS = {"early": 0, "late": -1}
PLACES = {"rows": NAMES, "columns": PHASES, "axes": {"position": POSITIONS}}


def figure(spec, measured, about) -> Figure:
    """Time of a token and memory against the position."""
    source = about.files.get(spec.inputs[0], Path(spec.inputs[0]))
    how = json.loads(read_committed(source.with_suffix(".provenance.json")))
    shape = (
        f"{how['model']['num_hidden_layers']} layers of width {how['model']['hidden_size']}, random weights,"
        f" {how['dtype']}"
    )
    shown = page(3.3, [f"{spec.label}: {shape}, {how['threads']} thread of a CPU ({how['cpu']})"])
    time_axis, memory_axis = shown.subplots(1, 2)
    rows = [row for row in _read(spec, about) if row["phase"] == "decode"]
    runs = list(dict.fromkeys(row["run"] for row in rows))
    for run, style in zip(runs, lines(["_".join(re.findall(r"\w+", run)) for run in runs]), strict=True):
        first, *tenths = (row for row in rows if row["run"] == run)
        at = [float(row["tokens"]) / 1024 for row in tenths]
        time_axis.plot(at, [float(row["ms_per_token"]) for row in tenths], label=run, markersize=4, **style)
        memory_axis.plot(
            at,
            [float(row["process_mib"]) - float(first["process_mib"]) for row in tenths],
            markersize=4,
            **style,
        )
        memory_axis.plot(
            at,
            [float(row["state_bytes"]) / MIB for row in tenths],
            **style | {"linestyle": "--", "marker": ""},
        )
    time_axis.set(
        xlabel="position, 1024 tokens",
        ylabel="ms per token",
        title="time of a generated token",
        ylim=(0, None),
    )
    memory_axis.set(
        xlabel="position, 1024 tokens", ylabel="MiB", title="growth of the process (solid), state (dashed)"
    )
    shown.legend(loc="outside lower center", ncols=4, frameon=False)
    for axis in (time_axis, memory_axis):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return shown


def look(spec, about):
    """Processor time of a token in the second and in the last tenth, taken in turns; and the state's bytes
    after the first and the last token."""
    rows = _read(spec, about)

    def find(point):
        run = NAMES.get(point.row)
        own = [row for row in rows if (row["run"], row["phase"]) == (run, PHASES.get(point.column or ""))]
        name = f"{point.row} {point.place}"
        return (
            Value(float(own[POSITIONS[point.at["position"]]][point.column]), 0.0, name)
            if own
            else f"{name}: not measured"
        )

    return find


def _read(spec, about) -> list[dict[str, str]]:
    path = about.files.get(spec.inputs[0], Path(spec.inputs[0]))
    return list(csv.DictReader(read_committed(path).splitlines()))
