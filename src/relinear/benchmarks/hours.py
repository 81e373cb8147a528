"""The GPU hours of a scale, from measured throughput, and the needs of 70B: `python -m relinear.benchmarks.hours --into docs/plan.md`.

Hours are the training tokens of the scale `paper` over tokens/s a GPU in the files that `relinear.benchmarks.training` left in
results/reference/scaling, on the fewest GPUs that were measured. A cell without a measurement says so. Memory is arithmetic over the models' own
parameters, on the meta device.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from relinear import stages
from relinear.benchmarks import command
from relinear.benchmarks.training import random_model, report, shape_of
from relinear.draw.render import count, markdown, write_text
from relinear.errors import UserError
from relinear.plan.plan import Plan
from relinear.stages._stage import Node

MEASURED = Path("results/reference/scaling")
NONE = "not measured"
NAME = "relinear.benchmarks.hours"  # the name of the block that it writes
GIB = 2**30
ADAMW = 4 + 4 + 4 + 8  # bytes a trained parameter takes: float32 weight, gradient, its flat copy in the all-reduce, two moments
FULL = 4 + 4 + 8  # the same where everything is trained, in shards
GPU_GIB = 139  # an H200's
STATES = ("t2r", "hedgehog", "supra", "lolcats_window", "lizard", "lolcats_window_shared", "lizard_shared")  # runs whose states are compared


def replace_block(page: str, name: str, block: str) -> str:
    """The page with the block of this name exchanged. Raises UserError for a page without its marks."""
    mark, end = f"<!-- {name} -->\n", "<!-- end -->"
    if page.count(mark) != 1 or end not in page.split(mark)[1]:
        raise UserError(f"the page needs the lines {mark.strip()} and {end} once, in this order")
    before, rest = page.split(mark)
    return f"{before}{mark}{block}{end}{rest.split(end, 1)[1]}"


class Cost(NamedTuple):
    """What one stage of one run costs: GPU hours, from tokens per second of a GPU, measured on so many GPUs."""

    speed: int
    gpus: int
    hours: float


def read(folder: Path) -> list[dict[str, Any]]:
    """The measurements in a folder, a record a session; none if it is not there. Raises UserError for a file that is no such record."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(json.loads(path.read_text()))
            records[-1]["rows"]  # noqa: B018
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no file of relinear.benchmarks.training: {error!r}") from error
    return records


def most_telling(rows: list[dict[str, Any]], shape: str, run: str, stage: str) -> dict[str, Any] | None:
    """The row of a stage that says most about a single GPU: the one of weak scaling on the fewest GPUs. None where there is none."""
    same = {"shape": shape, "run": run, "stage": stage, "scaling": "weak"}
    mine = [r for r in rows if "error" not in r and all(r[k] == v for k, v in same.items())]
    return min(mine, key=lambda r: (r["gpus"], -r["tokens_per_second_per_gpu"]), default=None)


def trainings_behind(plan: Plan, model: str) -> dict[str, list[Node]]:
    """`<paper>/<stem>` of each table and figure that shows runs of a model -> the training steps that its measurements are made from."""
    found = {}
    for artefact in plan.artefacts.values():
        if reads := [node for node in plan.reads(artefact).values() if plan.run(node.name).model == model]:
            found[f"{artefact.paper}/{artefact.stem}"] = [node for node in plan.behind(reads) if stages.stage(node.stage).trains]
    return dict(sorted(found.items()))


def costs(plan: Plan, shape: str, rows: list[dict[str, Any]]) -> dict[Node, Cost | None]:
    """The cost of every training step of the runs of a model, at the scale's budget. None where no row of weak scaling has its shape and run."""
    steps = [Node(step, plan.name(name)) for name, run in plan.runs.items() for step in run.recipes if plan.run(plan.name(name)).model == shape]
    found: dict[Node, Cost | None] = {}
    for node in dict.fromkeys([*steps, *(n for nodes in trainings_behind(plan, shape).values() for n in nodes)]):
        best = most_telling(rows, shape, node.name, node.stage)
        text = plan.settings(plan.parents(node)["text"])
        tokens = plan.settings(node)["budget"]["epochs"] * (text["train_tokens"] if "train_tokens" in text else text["examples"] * text["length"])
        speed = best and best["tokens_per_second_per_gpu"]
        found[node] = best and Cost(speed, best["gpus"], tokens / speed / 3600)
    return found


def hours(plan: Plan, shape: str, rows: list[dict[str, Any]]) -> str:
    """Two Markdown tables: the hours of each run's stages, and those of each table and figure. A run counts in every table that shows it."""
    found = costs(plan, shape, rows)
    steps = [stage for stage in stages.training() if stage in {node.stage for node in found}]
    cells = []
    for name in dict.fromkeys(node.name for node in found):
        row = [name]
        for stage in steps:
            node = Node(stage, name)
            cost = found.get(node)
            row += [f"{cost.speed:,}", str(cost.gpus), f"{cost.hours:.2f}"] if cost else ["", "", NONE if node in found else ""]
        cells.append(row)
    sums = []
    shown = trainings_behind(plan, shape)
    shown["all, each run once"] = list(dict.fromkeys(node for nodes in shown.values() for node in nodes))
    for table, nodes in shown.items():
        parts = [[found[node] for node in nodes if node.stage in of] for of in [*([s] for s in steps), steps]]
        sums.append([table, str(len({node.name for node in nodes})), *map(_sum, parts)])
    titles = ["run", *(f"{stage}: {what}" for stage in steps for what in ("tokens/s/GPU", "on GPUs", "GPU hours"))]
    heads = ["table or figure", "trained runs", *(f"{stage}, GPU hours" for stage in steps), "GPU hours"]
    return f"{markdown(titles, cells)}\n\n{markdown(heads, sums)}"


def _sum(parts: list[Cost | None]) -> str:
    if not parts:
        return "none"
    missing = sum(part is None for part in parts)
    return f"{NONE}: {missing} of {len(parts)} stages" if missing else f"{sum(part.hours for part in parts):.2f}"


def memory(plan: Plan, shapes: list[str], gpus: int, rows: list[dict[str, Any]]) -> str:
    """A Markdown table of what a model of each shape keeps in memory, in GiB unless a row says otherwise. Shards are split over `gpus`.

    Activations are measured at the first shape and scaled to the others by hidden size times layers.
    """
    models = {shape: (config := shape_of(shape), random_model(config, {"method": "softmax"}, "meta", torch.bfloat16)) for shape in shapes}
    lines: dict[str, list[str]] = {}

    def gib(values: list[float]) -> list[str]:
        return [f"{v / GIB:.1f}" for v in values]

    weights = [sum(p.numel() for p in model.parameters()) for _, model in models.values()]
    blocks = [sum(p.numel() for p in model.model.layers[0].parameters()) for _, model in models.values()]
    layers = [config.num_hidden_layers for config, _ in models.values()]
    cached = [2 * 2 * c.num_key_value_heads * c.head_dim * c.num_hidden_layers for c, _ in models.values()]
    lines["parameters"] = [count(n) for n in weights]
    lines["weights, bfloat16"] = gib([2 * n for n in weights])
    lines[f"a GPU's shard of them, of {gpus}"] = gib([2 * n / gpus for n in weights])
    lines["one block made whole, and the next one"] = gib([2 * 2 * n for n in blocks])
    lines["embedding and head, whole while the model runs"] = gib([2 * (w - b * n) for w, b, n in zip(weights, blocks, layers, strict=True)])
    lines["full finetuning (SUPRA): weights, gradients, moments"] = gib([FULL * n for n in weights])
    lines[f"full finetuning: a GPU's shard of them, of {gpus}"] = gib([FULL * n / gpus for n in weights])
    lines["inputs of all layers that a transfer keeps, 1024 tokens"] = gib(
        [2 * 1024 * c.hidden_size * n for (c, _), n in zip(models.values(), layers, strict=True)]
    )
    row = most_telling(rows, shapes[0], "lolcats_window", "finetune")
    if row and row["engine"] == "ddp":
        piece = min(row["piece"], row["sequences"]) * row["length"]
        a_token = (row["peak_gib"] * GIB - 2 * weights[0] - ADAMW * row["trainable_params"]) / piece
        sizes = [config.hidden_size * n for (config, _), n in zip(models.values(), layers, strict=True)]
        lines["finetuning: activations, 1024 tokens"] = gib([1024 * a_token * size / sizes[0] for size in sizes])
    else:
        lines["finetuning: activations, 1024 tokens"] = [NONE for _ in shapes]
    lines["softmax: KiB of keys and values a token"] = [f"{n / 2**10:.0f}" for n in cached]
    for name in STATES:
        run = plan.run(name).run
        method = {"method": run.method, "options": run.options}
        linear = [random_model(config, method, "meta", torch.bfloat16) for config, _ in models.values()]
        states = [model.state_bytes() for model in linear]
        lines[f"{name}: parameters of its own, with gradient and AdamW"] = gib(
            [ADAMW * sum(p.numel() for p in model.method_parameters().values()) for model in linear]
        )
        lines[f"{name}: state of a sequence, MiB (as many tokens' keys and values)"] = [
            f"{state / 2**20:.0f} ({state / token:,.0f})" for state, token in zip(states, cached, strict=True)
        ]
        lines[f"{name}: sequences decoded on a GPU of {GPU_GIB} GiB beside the weights"] = [
            f"{max((GPU_GIB * GIB - 2 * n) / state, 0):,.0f}" for n, state in zip(weights, states, strict=True)
        ]
    return markdown(["", *shapes], [[name, *values] for name, values in lines.items()])


def text(folder: Path) -> str:
    """The content of the files in a folder, as Markdown."""
    records, plan = read(folder), Plan(scale="paper")
    rows = [row for record in records for row in record["rows"]]
    sessions = [f"{record['device']}, {record['started']}:\n\n{report(record)}" for record in records if any(r["gpus"] > 1 for r in record["rows"])]
    parts = [
        hours(plan, "llama-3-8b", rows),
        *(sessions or [f"Several GPUs: {NONE}."]),
        memory(plan, ["llama-3-8b", "llama-3-70b"], 8, rows),
    ]
    return "\n\n".join(parts) + "\n"


def main(
    folder: Annotated[Path, typer.Option("--measured", help="folder of throughput's files")] = MEASURED,
    into: Annotated[Path | None, typer.Option(help="a page whose marked block to replace; printed if not given")] = None,
) -> None:
    """Print the tables, or write them into a page."""
    block = text(folder)
    if into is None:
        print(block)
    else:
        write_text(into, replace_block(into.read_text(), NAME, block))


if __name__ == "__main__":
    command.run(main)
