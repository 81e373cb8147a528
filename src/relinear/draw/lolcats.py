"""LoLCATs (arXiv 2410.10254, workshop version): feature maps with and without attention transfer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from pydantic import model_validator
from safetensors.numpy import load_file

from relinear.draw._efficiency import Cost, CostFigure, curves, measured, render
from relinear.draw._inputs import (
    Evaluation,
    Fidelity,
    Misprint,
    Origin,
    PaperFile,
    Source,
    Strict,
    read_stage,
    read_yaml,
)
from relinear.draw._render import (
    NOT_RUN,
    count,
    demonstration,
    markdown,
    number,
    plus_minus,
    write_csv,
    write_figure,
    write_provenance,
    write_text,
)
from relinear.draw.claims import Claim, Judgement, tally, write_claims

if TYPE_CHECKING:
    from relinear.plan.plan import Plan

Value = Literal["ppl_at_0", "ppl_at_2", "mse", "kl"]
VALUES: tuple[Value, ...] = ("ppl_at_0", "ppl_at_2", "mse", "kl")
COLUMNS = (
    *("run", "feature_map", "transfer", "ppl_at_0", "ppl_at_0_stderr", "ppl_at_2", "ppl_at_2_stderr"),
    *("ppl_at_0_chunk_mean_exp", "ppl_at_2_chunk_mean_exp", "mse", "kl"),
    *(f"published_{value}" for value in VALUES),
    *("published_model", "published_source"),
)


class Row(Strict):
    """A run, and for the softmax row the run that is the same after finetuning."""

    run: str
    finetuned: str | None = None
    feature_map: str
    transfer: bool | None  # None: softmax, which has nothing to transfer
    published: dict[Value, float]

    @property
    def run_at_2(self) -> str:
        """The run whose evaluation is PPL@2."""
        return self.finetuned or self.run


class Table(Strict):
    label: str
    model: str
    origin: Origin
    rows: tuple[Row, ...]
    misprints: tuple[Misprint, ...]
    claims: tuple[Claim, ...]

    @model_validator(mode="after")
    def _claims_fit(self) -> Self:
        runs = [row.run for row in self.rows]
        for claim in self.claims:
            if unknown := set(claim.runs) - set(runs):
                raise ValueError(f"claim {claim.claim!r} names runs {sorted(unknown)}; have {runs}")
            if claim.column not in ("ppl_at_0", "ppl_at_2"):
                raise ValueError(f"claim {claim.claim!r}: no standard error for column {claim.column!r}")
        return self


class Weights(Strict):
    """A figure of one run's attention weights."""

    label: str
    run: str
    caption: str


class Lolcats(PaperFile):
    """workflow/papers/lolcats.yaml."""

    title: str
    arxiv: str
    note: str
    table1: Table
    figure2: CostFigure
    figures: dict[Literal["figure3", "figure4", "figure5", "figure6"], Weights]


def read(path: str | Path) -> Lolcats:
    """Read and validate workflow/papers/lolcats.yaml. Raises ValueError naming every offending key."""
    return read_yaml(path, Lolcats)


def table1(
    fidelity: Mapping[str, str | Path | None],
    evaluate: Mapping[str, str | Path | None],
    paper: Lolcats,
    out: Path,
    scale: str,
    teacher: str | None = None,
) -> list[Path]:
    """LoLCATs Table 1: perplexity and distance from softmax attention, per feature map.

    fidelity: run -> its fidelity/metrics.json, for PPL@0, MSE of attention outputs, KL of attention weights.
    evaluate: run -> its evaluate/metrics.json, for PPL@2, and for both PPLs of the softmax row, which are
    those of `teacher` and `teacher_lora`. In both, run.json lies beside the file, and a run that is None or
    missing makes the cells that need it `not run`.
    teacher: name of the pretrained model, for the Markdown's first line.

    Writes table1.csv, table1.md, table1.provenance.json and table1.claims.csv into the folder `out`, returns
    their paths. Raises FileNotFoundError for a path that is not there, ValueError for metrics of another run,
    stage or scale, and for a run that the table does not have.
    """
    table = paper.table1
    _refuse_unknown("fidelity", fidelity, [row.run for row in table.rows if row.finetuned is None])
    _refuse_unknown("evaluate", evaluate, [run for row in table.rows for run in (row.run, row.run_at_2)])
    before = _read(fidelity, Fidelity, "fidelity", scale)
    after = _read(evaluate, Evaluation, "evaluate", scale)

    rows: dict[str, dict[str, Any]] = {}
    cells: dict[str, dict[str, str | None]] = {}
    for index, row in enumerate(table.rows):
        is_softmax = row.finetuned is not None
        at_0, at_2 = (after if is_softmax else before).get(row.run), after.get(row.run_at_2)
        # Softmax against itself: zero by definition, as the paper prints it.
        distance = {"mse": 0.0, "kl": 0.0} if is_softmax else _distance(at_0)
        rows[row.run] = {
            "run": row.run,
            "feature_map": row.feature_map,
            "transfer": row.transfer,
            **_perplexity("ppl_at_0", at_0),
            **_perplexity("ppl_at_2", at_2),
            **distance,
            **{f"published_{value}": row.published.get(value) for value in VALUES},
            "published_model": table.model,
            "published_source": f"{table.label} ({table.origin})",
        }
        origins = {"ppl_at_0": at_0, "ppl_at_2": at_2, "mse": at_0, "kl": at_0}
        entry = paper.at(f"table1/rows/{index}")
        cells[row.run] = {column: _origin(column, entry, origins) if rows[row.run][column] not in (None, NOT_RUN) else None for column in COLUMNS}

    out = Path(out)
    written = [out / f"table1.{suffix}" for suffix in ("csv", "md", "provenance.json", "claims.csv")]
    write_csv(written[0], COLUMNS, rows.values())
    judgements = write_claims(written[3], table.claims, rows, scale)
    stages = [*before.values(), *after.values()]
    write_text(written[1], _as_markdown(table, rows, stages, judgements, scale, teacher))
    write_provenance(written[2], "table1.csv", scale, cells, [stage.source for stage in stages])
    return written


class _Stage(NamedTuple):
    metrics: Any  # Fidelity or Evaluation
    source: Source


def _refuse_unknown(what: str, given: Mapping[str, Any], known: list[str]) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{what}: got runs {unknown} that the table does not have; have {known}")


def _read(paths: Mapping[str, str | Path | None], schema: type, stage: str, scale: str) -> dict[str, _Stage]:
    return {r: _Stage(*read_stage(path, schema, r, stage, scale)) for r, path in paths.items() if path is not None}


def _perplexity(column: str, stage: _Stage | None) -> dict[str, Any]:
    names = (column, f"{column}_stderr", f"{column}_chunk_mean_exp")
    if stage is None:
        return dict.fromkeys(names, NOT_RUN)
    perplexity = stage.metrics.perplexity
    return dict(zip(names, (perplexity.value, perplexity.stderr, perplexity.chunk_mean_exp), strict=True))


def _distance(stage: _Stage | None) -> dict[str, Any]:
    if stage is None:
        return {"mse": NOT_RUN, "kl": NOT_RUN}
    return {"mse": stage.metrics.mse, "kl": stage.metrics.kl}


def _origin(column: str, entry: str, origins: Mapping[str, _Stage | None]) -> str:
    """Where a cell comes from: a run.json, or the paper's YAML for published cells and names."""
    if column.startswith("published_"):
        return f"{entry}/published"
    for prefix, stage in origins.items():
        if column.startswith(prefix) and stage is not None:
            return stage.source.file
    return entry


def _as_markdown(
    table: Table,
    rows: Mapping[str, Mapping[str, Any]],
    stages: list[_Stage],
    judgements: list[Judgement],
    scale: str,
    teacher: str | None,
) -> str:
    """Ours and the paper's in one table, then what a reader must know about both."""
    names = ("PPL@0", "PPL@2", "MSE", "KL")
    header = ["Feature map", "Transfer", *names, *(f"paper's {name}" for name in names)]
    tokens = max((stage.metrics.perplexity.tokens for stage in stages), default=0)
    lines = [
        f"**{table.label}. Ours, scale `{scale}`" + (f", teacher {teacher}" if teacher else "") + f"; the paper's, {table.model}.**",
        f"PPL@0, PPL@2: perplexity of {count(tokens)} held-out tokens before and after finetuning,",
        "± its standard error. MSE: attention outputs. KL: attention weights.",
        *demonstration(scale),
        "",
        markdown(header, [_markdown_row(row) for row in rows.values()]),
        "",
        *(f"- {note.where}: {note.text}." for note in table.misprints),
        f"- Of the paper's claims: {tally(judgements)} (`table1.claims.csv`).",
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(row: Mapping[str, Any]) -> list[str]:
    transfer = {None: "", True: "yes", False: "no"}[row["transfer"]]
    shown = {c: plus_minus(row[c], row[f"{c}_stderr"]) for c in ("ppl_at_0", "ppl_at_2") if row[c] != NOT_RUN}
    shown |= {c: f"{row[c]:.3g}" for c in ("mse", "kl") if row[c] != NOT_RUN}
    published = [number(row[f"published_{value}"]) for value in VALUES]
    return [row["feature_map"], transfer, *(shown.get(value, NOT_RUN) for value in VALUES), *published]


def figure2(costs: Path, paper: Lolcats, out: Path) -> list[Path]:
    """LoLCATs Figure 2: throughput and memory against batch (a) and against the number of generated tokens (b, c).

    costs: efficiency.csv. Writes figure2.pdf, .png, .claims.csv and .provenance.json into the folder `out`. Raises FileNotFoundError and
    ValueError for rows that are missing or malformed.
    """

    def draw(figure: Figure, rows: list[Cost]) -> None:
        axes = figure.subplots(2, 3)
        a, b, c = "(a) prompt 2048, 128 generated", "(b) batch 1, prompt 128", "(c) batch 1, prompt 128"
        curves(axes[0, 0], rows, "batch", "decode_tokens_per_second", f"{a}: decoding", "tokens / s", log=True)
        curves(axes[0, 1], rows, "batch", "prefill_tokens_per_second", f"{a}: the prompt", "tokens / s")
        curves(axes[0, 2], rows, "batch", "peak_gib", f"{a}: memory (cross: it ends)", "peak, GiB")
        curves(axes[1, 0], rows, "length", "decode_tokens_per_second", f"{b}: mean over the generation", "tokens / s")
        curves(axes[1, 1], rows, "length", "ms_per_token", f"{b}: the last token alone", "ms")
        curves(axes[1, 2], rows, "length", "peak_gib", f"{c}: memory", "peak, GiB")

    return render("figure2", "lolcats", paper.figure2, Path(costs), Path(out), draw, (13, 8))


def figure3(fidelity: Path, paper: Lolcats, out: Path, scale: str) -> list[Path]:
    """LoLCATs Figure 3: softmax and linear attention weights, exp feature map, with transfer.

    This and the three below take the fidelity folder of the run that the paper's YAML names (metrics.json,
    run.json, weights.safetensors), and write <name>.pdf, <name>.png and <name>.provenance.json into the
    folder `out`. Beside the pairs of weights stand layer x head maps of KL and MSE. They raise
    FileNotFoundError for a missing file, ValueError for another run, stage or scale and for weights that are
    missing or not finite.
    """
    return _attention_figure("figure3", fidelity, paper, out, scale)


def figure4(fidelity: Path, paper: Lolcats, out: Path, scale: str) -> list[Path]:
    """LoLCATs Figure 4: softmax and linear attention weights, exp feature map, without transfer."""
    return _attention_figure("figure4", fidelity, paper, out, scale)


def figure5(fidelity: Path, paper: Lolcats, out: Path, scale: str) -> list[Path]:
    """LoLCATs Figure 5: softmax and linear attention weights, ReLU feature map, with transfer."""
    return _attention_figure("figure5", fidelity, paper, out, scale)


def figure6(fidelity: Path, paper: Lolcats, out: Path, scale: str) -> list[Path]:
    """LoLCATs Figure 6: softmax and linear attention weights, ReLU feature map, without transfer."""
    return _attention_figure("figure6", fidelity, paper, out, scale)


def _attention_figure(name: str, fidelity: Path, paper: Lolcats, out: Path, scale: str) -> list[Path]:
    spec = paper.figures[name]
    fidelity, out = Path(fidelity), Path(out)
    metrics, source = read_stage(fidelity / "metrics.json", Fidelity, spec.run, "fidelity", scale)
    pairs = _read_weights(fidelity / "weights.safetensors", metrics.shown)
    kl, mse = np.array(metrics.kl_per_head), np.array(metrics.mse_per_head)

    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 9, "pdf.fonttype": 42}):
        figure = Figure(figsize=(11.0, 0.9 + 2.5 * max(2, len(pairs))), layout="constrained")
        figure.suptitle(f"{spec.label}: {spec.caption}\nrun {spec.run}, scale {scale}")
        left, right = figure.subfigures(1, 2, width_ratios=[6, 4])
        _draw_pairs(left, pairs, kl, mse)
        _draw_heads(right, kl, mse)
        written = [out / f"{name}.{suffix}" for suffix in ("pdf", "png")]
        for path in written:
            write_figure(path, figure)
    record = out / f"{name}.provenance.json"
    cells = {spec.run: dict.fromkeys(("weights", "kl", "mse"), source.file)}
    write_provenance(record, name, scale, cells, [source])
    return [*written, record]


# (layer, head) -> softmax [T, T], method [T, T]
Pairs = Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]]


def _read_weights(path: Path, shown: list[tuple[int, int]]) -> Pairs:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the fidelity stage did not finish")
    tensors = load_file(path)
    pairs = {}
    for layer, head in shown:
        names = [f"{kind}.{layer}.{head}" for kind in ("softmax", "method")]
        for key in names:
            if key not in tensors:
                raise ValueError(f"{path}: no weights {key!r}; have {sorted(tensors)}")
            if not np.isfinite(tensors[key]).all():
                raise ValueError(f"{path}: {key!r} is not finite")
        pairs[layer, head] = (tensors[names[0]], tensors[names[1]])
    if not pairs:
        raise ValueError(f"{path.with_name('metrics.json')}: `shown` names no layer and head")
    return pairs


def _draw_pairs(area: SubFigure, pairs: Pairs, kl: np.ndarray, mse: np.ndarray) -> None:
    """TRUE and PRED side by side, one row per (layer, head), one logarithmic colour scale per row."""
    axes = area.subplots(len(pairs), 2, squeeze=False, sharex=True, sharey=True)
    for row, ((layer, head), (true, pred)) in zip(axes, pairs.items(), strict=True):
        # Uniform attention over the text is 1/T; a hundredth of that, and all below, is one colour.
        norm = LogNorm(vmin=0.01 / len(true), vmax=max(true.max(), pred.max()), clip=True)
        future = np.triu(np.ones_like(true, dtype=bool), k=1)
        for axis, weights in zip(row, (true, pred), strict=True):
            image = axis.imshow(np.ma.array(weights, mask=future), norm=norm, cmap="magma", interpolation="nearest")
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_title(f"TRUE: softmax, layer {layer}, head {head}")
        row[1].set_title(f"PRED: linear, KL {kl[layer, head]:.2g}, MSE {mse[layer, head]:.2g}")
        row[0].set_ylabel("query position")
        area.colorbar(image, ax=list(row), label="weight, log scale", extend="min", shrink=0.9)
    for axis in axes[-1]:
        axis.set_xlabel("key position")


def _draw_heads(area: SubFigure, kl: np.ndarray, mse: np.ndarray) -> None:
    """KL and MSE of every head, layers downwards, each with its own logarithmic colour scale."""
    axes = area.subplots(1, 2)
    for axis, values, title in zip(axes, (kl, mse), ("KL of weights", "MSE of outputs"), strict=True):
        low, high = values[values > 0].min(initial=np.inf), values.max()
        norm = LogNorm(low, high) if low < high else None  # all equal, or all zero: nothing to scale
        image = axis.imshow(values, norm=norm, cmap="viridis", interpolation="nearest")
        axis.set(xlabel="head", ylabel="layer")
        for ruler in (axis.xaxis, axis.yaxis):
            ruler.set_major_locator(MaxNLocator(nbins=8, integer=True))
        bar = area.colorbar(image, ax=axis, location="top")
        bar.set_label(f"{title}{', log scale' if norm else ''}\nmean {values.mean():.2g}")
        if norm:
            ticks = np.geomspace(low, high, 3)  # more of them run into each other
            bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
            bar.minorticks_off()


def _table1(plan: "Plan") -> list[Path]:
    paper = read(plan.workflow / "papers" / "lolcats.yaml")
    runs = [row.run for row in paper.table1.rows if row.finetuned is None]
    tuned = list(dict.fromkeys(run for row in paper.table1.rows for run in (row.run, row.run_at_2)))
    return table1(
        plan.finished("fidelity", runs), plan.finished("evaluate", tuned), paper, plan.root / "lolcats", plan.scale, plan.config.teacher.asset
    )


def _figure(name: str, draw: Callable[..., list[Path]]) -> Callable[["Plan"], list[Path]]:
    def make(plan: "Plan") -> list[Path]:
        paper = read(plan.workflow / "papers" / "lolcats.yaml")
        return draw(plan.folder(plan.step("fidelity", paper.figures[name].run)), paper, plan.root / "lolcats", plan.scale)

    return make


def _figure2(plan: "Plan") -> list[Path]:
    return figure2(measured(plan), read(plan.workflow / "papers" / "lolcats.yaml"), plan.results / "lolcats")


ARTEFACTS = {"table1": _table1, "figure2": _figure2, **{f.__name__: _figure(f.__name__, f) for f in (figure3, figure4, figure5, figure6)}}
