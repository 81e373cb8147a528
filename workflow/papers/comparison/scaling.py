"""Scaling: what students of two teachers keep, against the teacher's size, and speed against GPUs."""

import json
import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from relinear.core import store
from relinear.draw.beside import PROVENANCE, lines_of
from relinear.draw.claims import Value
from relinear.draw.pictures import page
from relinear.draw.quote import SHOWN_AS
from relinear.draw.render import NOT_RUN, count
from relinear.draw.style import lines
from relinear.records import read_committed

SIZE = re.compile(r"[-_](\d+(?:\.\d+)?)([mb])\b")  # in a model's name
UNITS = {"m": 1e6, "b": 1e9}
STEPS = {"distill": "-", "finetune": "--"}
# what claims may name: runs and shapes of `python -m relinear.benchmarks.training`, on 1 to 8 GPUs
PLACES = {
    "rows": ("lolcats_window", "lizard"),
    "columns": [f"{step}, {shape}" for shape in ("smollm2-135m", "llama-3-8b") for step in STEPS],
    "axes": {"gpus": range(1, 9)},
}


def figure(spec, measured, about) -> Figure:
    """Panels over the teacher's parameters above, panels over GPUs below."""
    *tables, bench = (about.files.get(name, Path(name)) for name in spec.inputs)
    runs = list(spec.options["runs"])
    teachers = [teacher_of(path) for path in tables]
    sized = {
        size_of(teacher): {row["run"]: row for row in lines_of(path)}
        for teacher, path in zip(teachers, tables, strict=True)
    }
    record = json.loads(read_committed(bench))
    shown = page(
        5.6,
        [f"{spec.label}: {spec.says}"],
        [
            f"Above: students of {' and '.join(teachers)}, each by one recipe, ± a standard error; dotted:"
            " the teacher. Two sizes are no law, and the teachers differ in more than size.",
            f"Below: replicas with as many sequences a GPU, {record['device']}, random weights. Solid:"
            " transfer, dashed: finetuning. At 100 % n GPUs train on n times the tokens a second.",
        ],
    )
    above, below = shown.subfigures(2, 1, height_ratios=[2.9, 2.7])
    looks = dict(zip(runs, lines(runs), strict=True))
    for axis, (column, title) in zip(
        above.subplots(1, len(spec.options["of_size"])), spec.options["of_size"].items(), strict=True
    ):
        _over_size(axis, sized, column, title, looks)
    _legend(above)
    for axis, shape in zip(
        below.subplots(1, len(spec.options["shapes"]), sharey=True), spec.options["shapes"], strict=True
    ):
        _over_gpus(axis, record["rows"], shape)
    _legend(below)
    return shown


def teacher_of(table: Path) -> str:
    """The model that the runs of a committed table begin with, as the record behind its first cell says."""
    place, _, node = next(iter(PROVENANCE.of(table.with_suffix(""))["sources"])).partition("#")
    folder = Path(place).parent / node if node else Path(place).parent
    record = json.loads(store.read(folder / "run.json"))
    return Path(record["parents"]["model"]["path"]).name


def size_of(model: str) -> float:
    """The parameters of a model, as its name says them. Raises ValueError for a name that does not."""
    if (found := SIZE.search(f"-{model}")) is None:
        raise ValueError(f"no size, such as -135m or -1.5b, in the model's name {model!r}")
    return float(found[1]) * UNITS[found[2]]


def _over_size(axis: Axes, sized, column: str, title: str, looks) -> None:
    """A run's line over the teachers' sizes, and the teacher's own."""
    sizes = sorted(sized)
    for run in looks:
        at = [size for size in sizes if _number(sized[size].get(run), column) is not None]
        y = [_number(sized[size][run], column) for size in at]
        errors = [_number(sized[size][run], f"{column}_stderr") or 0.0 for size in at]
        axis.errorbar(at, y, errors, label=SHOWN_AS.get(run, run), markersize=4.5, capsize=2, **looks[run])
    teacher = [_number(sized[size]["teacher"], column) for size in sizes]
    if None not in teacher:
        axis.plot(sizes, teacher, color="black", linestyle=":", linewidth=1, zorder=0)
    axis.set(xscale="log", title=title, xlabel="parameters of the teacher")
    axis.set_xticks(sizes, labels=[count(size) for size in sizes])
    axis.set_xlim(0.7 * sizes[0], 1.4 * sizes[-1])
    axis.minorticks_off()
    _plain(axis)


def _over_gpus(axis: Axes, rows, shape: str) -> None:
    """Speed as a share of as many times one GPU's as there are GPUs, of a step of each run."""
    found = speeds(rows, shape)
    runs = list(dict.fromkeys(run for run, _ in found))
    looks = dict(zip(runs, lines(runs), strict=True))
    for (run, step), own in found.items():
        look = looks[run] | {"linestyle": STEPS[step]}
        axis.plot(
            list(own),
            [100 * own[n] / own[1] / n for n in own],
            label=f"{SHOWN_AS.get(run, run)}, {step}",
            markersize=5,
            **look,
        )
    most = max((n for own in found.values() for n in own), default=1)
    axis.set(title=f"shape of {shape}", xlabel="GPUs")
    if most == 1:
        axis.text(0.5, 0.5, f"{NOT_RUN} on several GPUs", ha="center", transform=axis.transAxes, color="0.4")
    axis.set(ylabel="speed, % of n GPUs'", ylim=(None, 101))
    axis.set_xticks(sorted({n for own in found.values() for n in own}))
    _plain(axis)


def speeds(rows, shape: str) -> dict[tuple[str, str], dict[int, float]]:
    """(run, step) -> GPUs -> tokens a second, of replicas that have as many sequences each; those that were
    measured on one GPU, too."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["scaling"] == "weak" and row["engine"] == "ddp" and row["shape"] == shape:
            found.setdefault((row["run"], row["stage"]), {})[row["gpus"]] = row["tokens_per_second"]
    return {place: dict(sorted(own.items())) for place, own in found.items() if 1 in own}


def _number(row, column: str) -> float | None:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        return None


def _plain(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(area) -> None:
    """Every label of the panels once, below them."""
    handles = {
        label: handle
        for axis in area.axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    area.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)


def look(spec, about):
    """A claim's number: tokens a second of a run on GPUs; the column names step and shape."""
    rows = json.loads(read_committed(about.files.get(spec.inputs[-1], Path(spec.inputs[-1]))))["rows"]

    def at(point) -> Value | str:
        step, _, shape = point.column.partition(", ")
        gpus = point.at["gpus"]
        speed = speeds(rows, shape).get((point.row, step), {}).get(gpus)
        name = f"{point.row}, {step} at {shape} on {gpus} GPUs"
        return f"{name}: {NOT_RUN}" if speed is None else Value(speed, 0.0, name)

    return at
