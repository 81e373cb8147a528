"""The page's table of what each scale needs is what the catalogue says; the package's version is the one that
the changelog begins with."""

import re

import pytest
from conftest import ROOT

import relinear
from relinear.get.assets import CLIENTS
from relinear.plan.plan import Plan
from relinear.plan.scale import scales

TABLE = re.search(
    r"<!-- requirements -->\n(.*?)<!-- end -->", (ROOT / "docs/running.md").read_text(), re.DOTALL
)[1]
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in TABLE.splitlines()[2:]
    for cells in [[c.strip() for c in line.strip("| ").split("|")]]
}
SAID = {"huggingface_hub": "the hub"}


@pytest.mark.parametrize("scale", scales())
def test_clients_and_downloads_of_a_scale_are_those_of_its_assets(scale):
    plan = Plan(scale=scale)

    def needs(artefacts) -> tuple[set[str], str]:
        nodes = plan.behind([node for artefact in artefacts for node in plan.reads(artefact).values()])
        assets = [
            plan.catalogue[name]
            for name in {name for node in nodes for name in plan.settings(node)["assets"]}
        ]
        clients = {SAID.get(CLIENTS[asset.source], CLIENTS[asset.source]) for asset in assets}
        return clients, f"{sum(asset.download_bytes for asset in assets) / 1e9:.1f} GB".replace(
            "0.0 GB", "0 GB"
        )

    (few, download), (all_of_them, whole) = (
        needs([plan.artefacts["comparison_table2"]]),
        needs(plan.artefacts.values()),
    )
    _, through, *sizes = ROWS[scale]
    first, _, more = through.partition("; for all also ")
    assert (
        set(first.split(", ")) == (few or {"nothing"})
        and (set(more.split(", ")) if more else set()) == all_of_them - few
    )
    assert sizes == [download, whole]


def test_the_version_is_the_one_that_the_changelog_begins_with():
    version, state = re.search(
        r"^## (\S+?)(, not released)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    ).groups()
    assert relinear.__version__ == version + (".dev0" if state else "")


def test_no_message_advises_a_package_that_no_index_has():
    texts = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "pyproject.toml",
    ]
    assert not [path for path in texts if re.search(r"pip install ['\"]?relinear", path.read_text())]
