"""The site opens with the Quickstart, and its search answers where its pages are read from files, as `make
docs` intends."""

import re
import subprocess
import sys

import pytest
import yaml
from browser import open_page
from conftest import ROOT


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
