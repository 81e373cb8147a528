"""MLflow's UI as a person sees it: over imported results, in a headless browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from browser import chromium, open_page
from conftest import ROOT, free_port, wait_for_server

from relinear.core import store
from relinear.draw.beside import PROVENANCE

COMMITTED = ROOT / "results/reference/smollm2"
SHOWN = ("teacher", "lolcats_window", "lizard")
STAGES = ("distill", "finetune", "gate", "perplexity", "commonsense", "ppl_novels", "state_bytes")


@pytest.fixture(scope="module")
def ui(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The links that `relinear track ui` prints, as `runs` and `rows`, once its server answers."""
    chromium()
    folder = tmp_path_factory.mktemp("ui")
    committed, wanted = (
        store.opened(COMMITTED).all(),
        {f"runs/{run}/{stage}" for run in SHOWN for stage in STAGES},
    )
    (folder / "theirs").mkdir()
    store.write(
        folder / "theirs", {n: own for n, own in committed.items() if n in wanted or n.startswith("models/")}
    )
    shutil.copytree(COMMITTED / "comparison", folder / "theirs/comparison")
    for name, told in PROVENANCE.committed(COMMITTED).items():
        if name.startswith("comparison/"):
            (folder / f"theirs/{name}{PROVENANCE.ending}").write_text(json.dumps(told))
    relinear = [sys.executable, "-m", "relinear.cli", "track"]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "DISPLAY", "WAYLAND_DISPLAY")
    }
    subprocess.run([*relinear, "import", "theirs"], cwd=folder, env=environment, check=True)
    port = free_port()
    with (folder / "log").open("w") as log:
        command = [*relinear, "ui", "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for_server(process, port, folder / "log")
        printed = (folder / "log").read_text()
        compared, runs = re.search(
            r"^relinear-smollm2-reference: (\S+)\n  all its runs, as a list: (\S+)$", printed, re.M
        ).groups()
        yield {"runs": runs, "rows": compared}
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(5)


def named(page: str) -> list[str]:
    """The runs that a page links to, in the order shown."""
    return re.findall(
        r'<a [^>]*href="[^"]*#/experiments/\d+/runs/[0-9a-f]{32}"[^>]*>(?:<[^>]*>)*([^<]+)', page
    )


def test_the_printed_link_opens_the_runs(ui):
    assert {*SHOWN, "inputs", "tables and figures"} == set(named(open_page(ui["runs"]))), (
        "no stage among them: each is below its row"
    )


def test_rows_are_compared_by_window_rank_and_gate_by_bytes_and_by_what_differs(ui):
    page = open_page(ui["rows"], seconds=90, size=(2400, 3000))  # a chart is drawn where it is seen
    assert set(named(page)) == set(SHOWN), "rows and nothing else"
    texts = set(re.findall(r">([^<>]+)<", page))
    assert {"window", "rank", "gate", "state_mib", "ppl_long", "ppl", "avg_no_mmlu"} <= texts
    assert {"finetune.lr", "method"} <= texts, "what differs"
    assert "Error loading" not in page


def test_the_rows_have_the_columns_of_the_tables(ui):
    page = open_page(ui["rows"].replace("compareRunsMode=CHART", "compareRunsMode=TABLE"))
    assert set(named(page)) == set(SHOWN)
    for column in ("method", "window", "rank", "gate", "ppl", "ppl_long", "avg_no_mmlu", "state_mib"):
        assert re.search(rf">{column}<", page), column
    table = (COMMITTED / "comparison/controls.csv").read_text().splitlines()
    first = dict(zip(table[0].split(","), table[1].split(","), strict=False))
    assert any(f"{float(first['ppl']):.{digits}f}" in page for digits in (2, 3, 4)), first["ppl"]


def test_a_page_of_a_folder_is_opened(tmp_path: Path):
    (tmp_path / "page.html").write_text(
        "<p id=p>before</p><script>document.getElementById('p').textContent = 'after'</script>"
    )
    assert "after</p>" in open_page(tmp_path / "page.html", seconds=1)


# --- the site's first page and its search, from files ---


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site of two pages, with the settings of this one but for its pages."""
    folder = tmp_path_factory.mktemp("search")
    settings = {
        k: v
        for k, v in yaml.safe_load((ROOT / "properdocs.yml").read_text()).items()
        if k not in ("nav", "extra_css")
    }
    settings |= {"hooks": [str(ROOT / hook) for hook in settings["hooks"] if "repository" not in hook]}
    (folder / "properdocs.yml").write_text(yaml.safe_dump(settings))
    (folder / "docs").mkdir()
    (folder / "docs/index.md").write_text("# Home\n\nA first page.\n")
    (folder / "docs/other.md").write_text("# Chungus\n\nA page about linearized elephants.\n")
    done = subprocess.run(
        [sys.executable, "-m", "properdocs", "build"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.mark.parametrize(("asked", "found"), [("elephants", ["other.html"]), ("giraffes", [])])
def test_a_search_is_answered_from_files(site, asked, found):
    page = open_page(f"{(site / 'search.html').as_uri()}?q={asked}", seconds=5)
    results = re.search(r'<div id="properdocs-search-results".*?</div>', page, re.DOTALL)[0]
    assert sorted(set(re.findall(r'href="\./([a-z.]+)', results))) == found and "Searching..." not in results
    assert bool(found) != ("No results found</p>" in results)


def test_other_pages_load_no_index(site):
    assert (
        "embedded.js" not in (site / "index.html").read_text()
        and "embedded.js" in (site / "search/main.js").read_text()
    )


def test_the_first_page_opens_with_the_quickstart_of_the_readme(site):
    first, other = (
        re.sub(r"<[^>]+>", "", (site / name).read_text()) for name in ("index.html", "other.html")
    )
    assert re.search(
        r"Home\s+(?:¶\s*)?Quickstart\s+make setup &amp;&amp; source .venv/bin/activate",
        first.partition("Docs &raquo;")[2] or first,
    ), first[-3000:]
    assert first.index("relinear generate") < first.index("A first page.") and "make setup" not in other
