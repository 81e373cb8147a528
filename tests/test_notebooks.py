"""The notebooks of notebooks/: they run in a clone as it is, and their numbers are those of the committed
results."""

import json
import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from relinear.core import store

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
REFERENCE = NOTEBOOKS.parent / "results" / "reference"
READABLE = ("text/html", "image/png", "text/plain")


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def executed(notebook: nbformat.NotebookNode, *asked: str) -> list:
    """The values of expressions in a notebook's kernel after the notebook has run in a user's folder. Its
    outputs stay in `notebook`."""
    own = len(notebook.cells)
    notebook.cells += [
        nbformat.v4.new_code_cell(f"import json; print(json.dumps({expression}))") for expression in asked
    ]
    where = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=600, startup_timeout=600, resources=where).execute()
    answers = [json.loads(cell.outputs[0].text) for cell in notebook.cells[own:]]
    del notebook.cells[own:]
    return answers


def shown(notebook: nbformat.NotebookNode) -> list[str]:
    """The kinds of outputs that the code cells show. Fails for printed text, such as a warning."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output.text for output in outputs if output.output_type == "stream"]
    return [
        next(
            kind
            for kind in READABLE
            if kind in output.data and (kind != "text/html" or "<table" in output.data[kind])
        )
        for output in outputs
    ]


def tables(notebook: nbformat.NotebookNode) -> list[str]:
    """The tables and values that the code cells show."""
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    return [
        output.data.get("text/html", output.data.get("text/plain"))
        for output in outputs
        if "image/png" not in output.data
    ]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_what_it_shows(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == list(
        range(1, 1 + len(code_of(notebook)))
    )
    assert shown(notebook), "it was never run; `jupyter execute --inplace` does"
    assert path.stat().st_size < 400_000 and not re.search(r"/(tmp|home|root|work)/", path.read_text()), (
        "no path of a machine"
    )


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def on(model: Path, name: str, sizes: dict[str, str]) -> nbformat.NotebookNode:
    """The notebook with another folder of the teacher, and sizes for which seconds are enough."""
    notebook = read(name)
    for old, new in {
        'REPOSITORY / "results/smollm2/models/smollm2-135m-instruct"': f"Path({str(model)!r})",
        **sizes,
    }.items():
        [cell] = [cell for cell in code_of(notebook) if old in cell.source]
        cell.source = cell.source.replace(old, new)
    return notebook


def test_a_users_own_model_is_linearized_and_measured(smollm2):
    committed, notebook = (
        read("linearize"),
        on(
            smollm2, "linearize", {"STEPS, LENGTH, HELDOUT = 30, 256, 4": "STEPS, LENGTH, HELDOUT = 8, 64, 2"}
        ),
    )
    before, after, steps, counted = executed(
        notebook,
        'rows["teacher"]["perplexity"] / rows["LoLCATs, before training"]["perplexity"]',
        'rows["LoLCATs, after transfer"]',
        "losses",
        "[sum(p.numel() for p in parameters), sum(p.requires_grad for p in model.parameters()),"
        " len(parameters)]",
    )
    assert shown(notebook) == shown(committed)
    assert before < 1 and after["perplexity"] > 1 and len(steps) == 8 and sum(steps[4:]) < sum(steps[:4])
    assert counted[0] and counted[1] == counted[2], "only what the method added is trained"


def test_a_feature_map_of_ones_own_has_a_heatmap_and_a_row(smollm2):
    committed, notebook = (
        read("feature_map"),
        on(smollm2, "feature_map", {"LENGTH = 128": "LENGTH = 64", "8 * LENGTH": "2 * LENGTH"}),
    )
    lawful, rows, sums = executed(
        notebook,
        "bool(apart < 1e-4)",
        "rows",
        "[float(abs(weights.sum(-1) - 1).max()) for weights in shown.values()]",
    )
    assert shown(notebook) == shown(committed)
    assert lawful and max(sums) < 1e-4, "a heatmap's rows are weights"
    assert (
        list(rows) == ["relu", "elu", "exp", "softplus"]
        and len({row["perplexity"] for row in rows.values()}) == 4
    )
    assert rows["softplus"]["state, bytes"] == rows["elu"]["state, bytes"]


def test_the_notebook_of_records_agrees_with_them():
    committed, notebook = read("records"), read("records")
    count, accuracy = executed(notebook, "len(records)", 'table["lambada_openai_acc"].dropna().to_dict()')
    assert shown(notebook) == shown(committed)
    assert tables(notebook) == tables(committed), (
        "results were added since it was run; `jupyter execute --inplace` runs it"
    )
    runs = REFERENCE / "lizard_smollm2/runs"
    nodes = [folder for folder in store.nodes(runs.parent) if folder.parents[1] == runs]
    assert count == len(nodes)
    rows = {folder.parent.name for folder in nodes if folder.name == "lambada"}
    assert accuracy.keys() == {row for row in rows if "-seed" not in row}, (
        "MLflow has the runs of further seeds below that of their row"
    )
    for run, value in accuracy.items():
        readings = json.loads(store.read(runs / run / "lambada/metrics.json"))["readings"]
        [found] = [r["value"] for r in readings if (r["metric"], r["of"]) == ("acc", "lambada_openai")]
        assert value == pytest.approx(100 * found, abs=0.006)


# three seeds; one seed, tasks that were not run
@pytest.mark.parametrize("folder", ["smollm2", "table2_mini"])
def test_the_table_notebook_agrees_with_the_table(folder):
    notebook = read("table2")
    place = "results/reference/smollm2"
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and place in cell.source]
    cell.source = cell.source.replace(place, f"results/reference/{folder}")
    differences, sources = executed(
        notebook,
        'paired("lolcats_window", "teacher")[["metric", "difference", "items"]].T.to_dict()',
        'list(map(str, sources("lizard", "ppl")))',
    )
    assert shown(notebook).count("image/png") == 2 and shown(notebook).count("text/html") == 6
    if place.endswith(f"/{folder}"):
        assert tables(notebook) == tables(read("table2")), (
            "results were added since it was run; `jupyter execute --inplace` runs it"
        )

    table = pd.read_csv(REFERENCE / folder / "comparison/table2.csv", index_col="run", na_values=["not run"])
    for task, row in differences.items():
        column = f"{task}_{row['metric']}"
        assert row["items"] == table.loc["teacher", f"{column}_n"]
        # of several, the notebook compares the first's items, the table has their mean
        if table.loc["lolcats_window", "seeds"] == 1:
            assert row["difference"] == pytest.approx(
                table.loc["lolcats_window", column] - table.loc["teacher", column], abs=1e-3
            )
    # PIQA has two
    assert len(differences) == table.loc["teacher"].filter(regex="_acc(_norm)?_n$").notna().sum() - (
        "piqa" in differences
    )
    assert len(sources) == table.loc["lizard", "seeds"] and all(store.has(Path(source)) for source in sources)


def test_the_speed_notebook_agrees_with_the_benchmarks():
    notebook = read("speed")
    committed = shown(notebook)
    [found] = executed(
        notebook, 'against("forward", LIZARD).T.to_dict()["linear_attention"] | (states / growth).to_dict()'
    )
    assert shown(notebook) == committed == ["text/html", "text/html", "image/png", "text/html", "text/plain"]

    bench = pd.read_csv(REFERENCE / "kernels" / "bench.csv").query(
        "op == 'linear_attention' and mode == 'forward' and shape.str.startswith('B16 T2048 H32/32')"
    )
    times = bench.set_index("provider")["ms"]
    assert found["ours, ms"] == times["relinear"]
    assert found["fla chunk_linear_attn"] == pytest.approx(times["fla chunk_linear_attn"] / times["relinear"])
    # Mistral-7B: 32 layers of 8 heads of 128, keys and values of two bytes; LoLCATs' state, float32, of 32
    # heads, 128 features, 128 values, one sum.
    assert found["lolcats_linear"] == pytest.approx(
        32 * 32 * 128 * (128 + 2) * 4 / (32 * 2 * 8 * 128 * 2), rel=1e-3
    )
