"""README.md and docs/: the site builds, links lead somewhere, tables and numbers are those of committed files, and the files named are there."""

import datetime
import html
import importlib.util
import json
import math
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from browser import open_page
from properdocs.exceptions import PluginError

from relinear.benchmarks import hours
from relinear.core import store
from relinear.draw import pages, report, stated
from relinear.draw.costs import read_costs
from relinear.draw.drawn import counted, measured_in, rows_of
from relinear.draw.kernels import read as read_kernels
from relinear.draw.render import count
from relinear.errors import UserError
from relinear.plan.items import read_items
from relinear.plan.plan import Plan
from relinear.plan.specs import Finding, available, papers

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results/reference"
TEXTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- relinear\S* ?\w* -->.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def prose(page: str) -> str:
    """A page without code blocks and without the tables that are written into it, its white space made single blanks."""
    text = BLOCK.sub("", CODE.sub("", (ROOT / page).read_text()))
    return " ".join(text.split())


def committed(path: str, by: str = "run") -> dict[str, dict[str, str]]:
    """The rows of a committed table, by run or by another column."""
    return {row[by]: row for row in rows_of(REFERENCE / path)}


# --- the site ---


def build(folder: Path, out: Path) -> subprocess.CompletedProcess:
    """`properdocs build`, as `make docs` gives it."""
    command = [sys.executable, "-m", "properdocs", "build", "--site-dir", str(out)]  # `--quiet` would be deaf to warnings, too
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
    assert (site / "repository/workflow/papers/index.html").is_file(), "the index of all tables and figures is a page"
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
})</script>"""


@pytest.mark.parametrize("name", ["comparison", "lizard"])
def test_a_browser_shows_the_report_of_a_paper(site, name):
    """Its text as it is laid out, and its pictures."""
    page = site / f"papers/{name}.html"
    asks = page.with_name(f"{name}.seen.html")
    asks.write_text(page.read_text().replace("</body>", f"{SEEN}</body>"))
    try:
        shown = json.loads(html.unescape(re.search(r"<body[^>]*>(.*)</body>", open_page(asks, seconds=5), re.DOTALL)[1]))
    finally:
        asks.unlink()
    assert shown["images"] and not shown["blank"]
    for artefact in available(ROOT / "workflow/papers").values():
        if artefact.paper == name:
            assert artefact.label in shown["text"] and f"snakemake {artefact.name}" in shown["text"]
    for path in (path for path in report.report(ROOT)[name][1] if path.endswith("claims.csv")):
        for claim in (claim for claim in rows_of(ROOT / path) if claim["paper"] == name):
            assert re.search(rf"\t{claim['verdict']}\t.*{re.escape(' '.join(claim['reason'].split())[:30])}", shown["text"]), claim


@pytest.mark.parametrize(("link", "said"), [("index.md", ""), ("nowhere.md", "nowhere.md"), ("index.md#nowhere", "nowhere"), ("../no.csv", "no.csv")])
def test_a_link_that_leads_nowhere_stops_the_build(tmp_path, link, said):
    settings = yaml.safe_load((ROOT / "properdocs.yml").read_text())
    del settings["nav"]
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
    with pytest.raises(PluginError, match="log/README.md links to ../../nowhere, which is no file of the repository"):
        hook.outside(page)


@pytest.mark.parametrize("page", ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))])
def test_links_lead_to_files_of_the_repository_too(page):
    for link in re.findall(r"\]\(([^)#\s]+)", CODE.sub("", (ROOT / page).read_text())):
        assert "://" in link or (ROOT / page).parent.joinpath(link).is_file(), link


# --- the report ---


def test_the_report_has_every_table_figure_and_claim_that_is_committed():
    found = report.report(ROOT)
    text = "".join(page for page, _ in found.values())
    for artefact in available(ROOT / "workflow/papers").values():
        assert f"\n## {artefact.label}\n" in found[artefact.paper][0] and f"`snakemake {artefact.name}`" in text
    links = set().union(*(paths for _, paths in found.values()))
    assert not [path for path in links if not (ROOT / path).is_file()]
    for suffix in ("png", "claims.csv", "provenance.json"):
        committed = {path.relative_to(ROOT).as_posix() for path in REFERENCE.rglob(f"*{suffix}")}
        alone = {path for path in committed - links if path.split("/")[2] not in ("decoding", "efficiency", "kernels", "parity")}
        assert not alone, "results that no page of a paper shows"
    for path in (path for path in links if path.endswith("claims.csv")):
        for row in rows_of(ROOT / path):
            own = found[row["paper"]][0].split("\n## Claims\n")[1].split("\n## ")[0]
            where = re.escape(f"[`{path.split('/')[2]}`](../repository/{path})")
            line = rf"^\| {re.escape(row['claim'].replace('|', chr(92) + '|'))} .*{where}.*\| {row['verdict']} "
            assert re.search(line, own, re.MULTILINE), row["claim"]


def test_a_paper_has_three_findings_with_numbers_of_committed_tables():
    found = report.report(ROOT)
    for name in ("lolcats", "supra", "lizard"):
        page, links = found[name]
        own = page.split("## To take home\n\n")[1].split("\n\n")[0].splitlines()
        assert len(own) == 3 and all(re.search(r"\d", line) and "{" not in line for line in own)
        assert {f"results/reference/{finding.of}" for finding in papers(ROOT / "workflow/papers")[name].findings} <= links
    ends = {run: row["ppl_at_2"] for run, row in committed("smollm2/lolcats/table1.csv").items()}
    assert f"perplexity of {float(ends['lolcats_exp']):.1f} with it and of {float(ends['lolcats_exp_notransfer']):.1f} without" in found["lolcats"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ascending": [[["b", "ppl"], ["a", "ppl"]]]}, "table1.csv says: b ppl 3, a ppl 2.5 do not rise: at {rows[a][ppl]:.1f}"),
        ({"ascending": [[["a", "ppl"], ["c", "ppl"]]]}, "reads here/table1.csv: KeyError('c')"),
        ({"says": "{rows[a][no]}"}, "reads here/table1.csv: KeyError('no')"),
        ({"says": "{rows[a][kl]:.1f}"}, "reads here/table1.csv: ValueError"),
        ({"of": "here/table2.csv"}, "reads here/table2.csv: FileNotFoundError"),
    ],
)
def test_a_finding_that_its_table_does_not_bear_out_is_refused(tmp_path, change, said):
    (tmp_path / "results/reference/here").mkdir(parents=True)
    (tmp_path / "results/reference/here/table1.csv").write_text("run,ppl,kl\na,2.5,not run\nb,3,0.1\n")
    right = {"says": "at {rows[a][ppl]:.1f}", "of": "here/table1.csv", "ascending": [[["a", "ppl"], ["b", "ppl"]]]}
    words = report.said(Finding(**right), tmp_path, lambda words, path: words)
    assert words == "at 2.5 (table1, `here`)"
    with pytest.raises(UserError) as refused:
        report.said(Finding(**right | change), tmp_path, lambda words, path: words)
    assert said in str(refused.value)


def test_a_table_that_was_not_run_has_its_claims_on_the_page():
    found = report.report(ROOT)
    for artefact in available(ROOT / "workflow/papers").values():
        if not list(report.places_of(artefact, REFERENCE)):
            own, claims = (found[artefact.paper][0].split(f"\n## {title}\n")[1].split("\n## ")[0] for title in (artefact.label, "Claims"))
            assert "Not run yet." in own
            assert len(re.findall(rf"{artefact.path}\) *\| (?:paper|ours)[^|]*\| not run ", claims)) == len(artefact.spec.claims)


def test_each_cell_of_the_report_links_to_its_record():
    page, _ = report.report(ROOT)["lolcats"]
    for cell, measure in (("101.6 ± 1.53", "perplexity_before"), ("29.58 ± 0.43", "perplexity")):
        assert f" [{cell}](../repository/results/reference/smollm2/runs/lolcats_exp/{measure}/run.json) " in page
    page, _ = report.report(ROOT)["comparison"]
    own = [f"../repository/results/reference/smollm2/runs/lizard{seed}/lambada/run.json" for seed in ("", "-seed1", "-seed2")]
    assert f" [33.8 ± 0.7]({own[0]}) [2]({own[1]}) [3]({own[2]}) " in page, "LAMBADA, a mean over seeds"


def test_a_result_is_counted_once_wherever_verdicts_are_counted(tmp_path):
    """Hedgehog prints Table 6 twice."""
    (tmp_path / "verdicts.md").write_text(f"{pages.verdicts(REFERENCE)}\n")
    [table] = pages.drawn(tmp_path / "verdicts.md")
    counts = {row["Claims in `results/reference`"].strip("`"): [int(cell) for cell in list(row.values())[1:]] for row in table}
    paths = sorted(REFERENCE.rglob("*claims.csv"))
    rows = [tuple(row.values()) for path in paths for row in rows_of(path)]
    assert sum(map(sum, counts.values())) == len(counted(paths)) < len(set(rows)) < len(rows)
    near = [
        row
        for path in paths
        for row in rows_of(path)
        if row["compared"] == "lizard avg_no_mmlu > teacher avg_no_mmlu by -1.00" and "smollm2" in str(path)
    ]
    assert len({row["claim"] for row in near}) > 1 == len({measured_in(row) for row in near if "qwen" not in row["figures"]} - {""}), near
    claims = report.report(ROOT)["hedgehog"][0].split("\n## Claims\n")[1].split("\n## ")[0]
    assert claims.count("| Hedgehog is above Performer, ListOps ") == 1 and "| Hedgehog Table 6, Hedgehog Table 13 " in claims


# --- tables ---


def test_the_page_of_claims_is_what_the_specs_and_the_committed_verdicts_say():
    assert (ROOT / stated.PAGE).read_text() == stated.page(), "run `python -m relinear.draw.stated`"


def test_every_claim_of_a_paper_s_own_tables_stands_on_the_page_once_with_its_verdict():
    claims = stated.stated()
    every = {(a.paper, c.claim) for a in available(ROOT / "workflow/papers").values() if a.paper != "comparison" for c in a.spec.claims if not c.ours}
    every |= {(name, claim.claim) for name, paper in papers(ROOT / "workflow/papers").items() for claim in paper.untested}
    places = [(claim.paper, claim.compared or claim.claim) for claim in claims]
    assert len(places) == len(set(places)) and {(claim.paper, claim.claim) for claim in claims} <= every
    told = {claim.claim for claim in claims} | {row["claim"] for claim in claims for _, row in claim.rows}
    same = {stated.compared(c, a.spec) for a in available(ROOT / "workflow/papers").values() for c in a.spec.claims if c.claim in told}
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
    counts = [[claim.verdict for claim in own].count(verdict) for verdict in ("reproduced", "contradicted", "not tested")]
    assert re.search(rf"\| of lolcats +\| +{counts[0]} \| +{counts[1]} \| +{counts[2]} \| +0 \| +{n} \| +{chance:.1f} \|", lines[0])
    contradicted = list(stated.listed(verdict="contradicted"))
    assert len(contradicted) == sum(claim.verdict == "contradicted" for claim in claims) and all("| contradicted |" in line for line in contradicted)
    with pytest.raises(UserError, match="no paper 'gla' makes claims; have hedgehog, lizard, lolcats, supra"):
        stated.named("gla", None)
    with pytest.raises(UserError, match="no verdict 'true'; have reproduced, contradicted, not tested"):
        stated.named(None, "true")


@pytest.mark.parametrize("page", pages.PAGES)
def test_tables_are_what_the_committed_results_say(page):
    text = (ROOT / page).read_text()
    assert pages.written(page, text, REFERENCE) == text, "run `python -m relinear.draw.pages`"


def test_what_results_were_made_with_is_of_two_environments_and_the_newer_is_locked(tmp_path):
    (tmp_path / "table.md").write_text(pages.made_with(REFERENCE))
    [rows] = pages.drawn(tmp_path / "table.md")
    assert {row["In `results/reference`"].strip("`") for row in rows} == {path.name for path in REFERENCE.iterdir() if path.is_dir()} - {"locks"}, (
        "every folder"
    )
    older, newer = sorted({(row["torch"].removesuffix("+cpu"), row["triton"]) for row in rows})
    lock = (ROOT / "requirements.lock").read_text()
    assert f"\ntorch=={newer[0]}" in lock and f"\ntriton=={newer[1]}" in lock and f"\ntorch=={older[0]}" not in lock


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(UserError, match="needs the lines <!-- relinear.draw.pages parity -->"):
        pages.written("docs/models.md", "a page", REFERENCE)


# --- numbers in the text ---


def minutes(folder: str, commit: str) -> str:
    """The minutes from the first start to the last end of a campaign's stages on GPUs."""
    records = [json.loads(path.read_text()) for path in (REFERENCE / folder).rglob("run.json")]
    spans = [
        (datetime.datetime.fromisoformat(record["started"]).timestamp(), record["wall_seconds"])
        for record in records
        if record["git"]["commit"].startswith(commit) and record["hardware"].get("gpu")
    ]
    return f"{(max(start + wall for start, wall in spans) - min(start for start, _ in spans)) / 60:.0f} minutes"


def readme() -> list[str]:
    row = committed("table2_mini/comparison/table2.csv")["lizard"]
    items = [int(value) for column, value in row.items() if column.endswith("_acc_n") and value.isdecimal()]
    least = least_rates()
    return [f"{min(items)} to {max(items)} items a task", f"at least {least['distill']} (transfer) and {least['finetune']} (finetuning)"]


def least_rates() -> dict[str, float]:
    """Training stage -> the least learning rate of scale mini."""
    return {stage: budget["lr_floor"] for stage, budget in Plan(scale="mini").config.train.items()}


def results() -> list[str]:
    controls, headline = committed("smollm2/comparison/controls.csv"), committed("smollm2/comparison/table2.csv")
    novels = {run: f"{float(row['ppl_long']):.1f}" for run, row in controls.items()}
    averages = {run: f"{float(row['avg_no_mmlu']):.1f}" for run, row in controls.items()}
    seeds = {name: [float(row[f"{name}_seed_sd"]) for row in headline.values() if row[f"{name}_seed_sd"]] for name in ("avg_no_mmlu", "ppl")}
    theirs = [row["verdict"] for row in rows_of(REFERENCE / "smollm2/comparison/table2.claims.csv") if row["whose"] == "paper"]
    assert set(theirs) == {"not tested"}
    figures = {
        row["claim"].split()[0]: row["figures"]
        for row in rows_of(REFERENCE / "smollm2/comparison/controls.claims.csv")
        if "on average" in row["claim"]
    }
    paired = re.compile(r"difference -?(\S+ ± \S+) \(paired\)")
    apart = {run: re.search(r"difference (\S+ ± \S+) \(paired\)", said)[1] for run, said in figures.items()}
    behind: dict[str, dict[str, str]] = {"Lizard": {}, "LoLCATs": {}}  # hybrid -> column -> how far behind the window of its bytes
    for table in ("second", "recall"):
        judged = [
            row
            for row in rows_of(REFERENCE / f"smollm2/comparison/{table}.claims.csv")
            if "equal bytes" in row["claim"] and "needle" not in row["figures"]
        ]
        assert {row["verdict"] for row in judged} == {"contradicted"}
        for row in judged:
            behind[row["claim"].split()[0]][row["figures"].split(":")[0]] = paired.search(row["figures"])[1]
    (text, answers, pairs), lolcats = ([behind[run][column] for column in ("ratio_beyond", "f1_beyond", "kv_16_far")] for run in behind)
    shares = share_of_parts()
    teacher = yaml.safe_load((ROOT / "workflow/assets.yaml").read_text())["qwen2.5-coder-1.5b-instruct"]
    assert all(words in teacher["attribution"] for words in ("Qwen team, Alibaba Cloud", "quantised to Q4_K_M; repackaged by a third party"))
    assert {row["verdict"] for row in rows_of(REFERENCE / "hedgehog_smollm2/hedgehog/table2.claims.csv")} == {"not tested"}
    tokens = re.search(r"perplexity on (\S+) held-out tokens", (REFERENCE / "smollm2/comparison/table2.md").read_text())[1]
    speeds = decoding()
    _, *recipes = [paired.search(row["figures"])[1] for row in rows_of(REFERENCE / "smollm2/comparison/recipes.claims.csv")]
    unique = yaml.safe_load((ROOT / "workflow/models.yaml").read_text())["smollm2-135m-instruct"]["unique"]
    return [
        f"Hedgehog's own recipe, all weights at 6e-4, ends above LoRA by {recipes[2]}, and further above it on text of other kinds.",
        f"all sources together hold {count(sum(unique.values()))} of this teacher's.",
        f"Beyond 1024 tokens Lizard's perplexity is {novels['lizard']}, and {float(controls['lizard']['ppl_long_no_linear']):.1f} with",
        f"Lizard's perplexity, over the teacher's, is {text} above that of the window, it recalls {pairs} points fewer of 16 pairs,",
        f"its answers have {answers} points less F1.** LoLCATs is behind its window by {lolcats[0]}, by {lolcats[2]} points and by {lolcats[1]}.",
        f"{teacher['attribution'].split()[0]} of Alibaba Cloud's Qwen team, under {teacher['licence']}, as a file that is quantised to Q4_K_M",
        f"at Lizard's rate, {float(controls['teacher_lora_5e-4']['ppl']):.2f} ± {float(controls['teacher_lora_5e-4']['ppl_stderr']):.2f}.",
        f"part brings {shares['linear']} % of the output's norm, the window {shares['window']} % and meta tokens {shares['meta']} %.",
        f"has {novels['window_128_lora']} there, and the teacher with LoRA {novels['teacher_lora']}.",
        f"nothing trained has an average of {averages['window_128']}, the teacher {averages['teacher']}.",
        f"in {minutes('smollm2', '688bf86')} (commit `688bf86`)",
        f"Perplexity is that of {tokens} held-out tokens of Wikipedia's introductions",
        f"a standard deviation of {min(seeds['avg_no_mmlu']):.2f} to {max(seeds['avg_no_mmlu']):.2f} points",
        f"the perplexity one of {min(seeds['ppl']):.3f} to {max(seeds['ppl']):.2f}.",
        f"Of {len(theirs)} claims of the papers none is judged by this table",
        f"by {apart['Lizard']} points, the average of LoLCATs by {apart['LoLCATs']}",
        f"The first runs of both tables come from two H100s in {minutes('lizard_smollm2', 'fe9bd6e')}. Their records name commit `fe9bd6e`",
        f"LoLCATs without a window decodes {speeds['lolcats_linear'][0]:.1f} times as fast.",
    ]


def share_of_parts() -> dict[str, str]:
    """The percent of the output's norm that each part of Lizard brings, over all heads."""
    found = json.loads((REFERENCE / "smollm2/runs/lizard/gate_stats/metrics.json").read_text())["readings"]
    [median] = [r["value"] for r in found if (r["metric"], r["of"], r["at"]) == ("memory", "p50", {})]
    assert 200 < median < 1000
    return {r["of"]: f"{100 * r['value']:.0f}" for r in found if r["metric"] == "share" and not r["at"]}


def decoding() -> dict[str, tuple[float, float]]:
    """Each run's speed of decoding over the teacher's at its largest batch, at Mistral-7B's shape: at that batch, and at the run's own largest."""
    rows = [row for row in read_costs(REFERENCE / "efficiency/efficiency.csv") if (row.model, row.sweep) == ("mistral-7b", "batch") and row.ok]
    best = {run: max((row for row in rows if row.run == run), key=lambda row: row.batch) for run in {row.run for row in rows}}
    teacher = best["teacher"]
    same = {row.run: row.decode_tokens_per_second for row in rows if row.batch == teacher.batch}
    speed = teacher.decode_tokens_per_second
    return {run: (same[run] / speed, row.decode_tokens_per_second / speed) for run, row in best.items()}


def efficiency() -> list[str]:
    speeds = decoding()
    figures = {row["claim"]: row["figures"] for row in rows_of(REFERENCE / "efficiency/lolcats/figure2.claims.csv")}
    published = {words.split("published ")[1] for words in figures.values() if "times" in words and " to " in words.split("published ")[1]}
    assert "ratio 1.00;" in figures["Memory grows no more than 1.1 times from 512 to 131k generated tokens"]
    assert "ratio 1.00;" in figures["Throughput stays nearly constant up to 131k generated tokens"]
    growing = re.search(
        r"at 128: .* ratio ([\d.]+)",
        figures["Linear attention has 2.5 times the throughput of FlashAttention as transformers generates with it, at a batch of 128"],
    )[1]
    inputs = {(row.run, row.prompt): row for row in read_costs(REFERENCE / "efficiency/efficiency.csv") if row.sweep == "input"}
    teacher = {prompt: row.decode_tokens_per_second for (run, prompt), row in inputs.items() if run == "teacher"}
    ahead = {run: [p for p in sorted(teacher) if inputs[run, p].decode_tokens_per_second > teacher[p]] for run in ("lizard", "lolcats_window")}
    assert ahead == {"lizard": [4096, 8192, 16384, 32768], "lolcats_window": sorted(teacher)}
    longest = [inputs[run, 32768].decode_tokens_per_second / teacher[32768] for run in ("lizard", "lolcats_window")]
    assert all(inputs[run, 32768].peak_bytes < 0.25 * inputs["teacher", 32768].peak_bytes for run in ahead)
    (same, own), (windowed, own_windowed), (shared, _) = (speeds[run] for run in ("lolcats_linear", "lolcats_window", "lolcats_linear_shared"))
    rows = {row["Detail"]: row for row in pages.drawn(REFERENCE / "smollm2_quarter/comparison/details.md")[0]}
    each, group = rows["Lizard: our defaults"], rows["one map and state for the query heads of a key head"]
    for column in ("Perplexity", "Novels, 512-1024"):
        (one, error), (other, _) = (map(float, row[column].split(" ± ")) for row in (each, group))
        assert abs(one - other) < error
    return [
        f"a perplexity of {group['Perplexity']} for {each['Perplexity']}, and",
        f"of {group['Novels, 512-1024']} for {each['Novels, 512-1024']} at positions",
        f"is {float(group['State, MiB']):.1f} MiB for {each['State, MiB']} (",
        f"The paper has {published.pop()}." if len(published) == 1 else "one published range",
        f"without a window is {same:.1f} times as fast, with its window {windowed:.1f} times; at",
        f"their own largest batches {own:.1f} and {own_windowed:.1f} times.",
        f"decodes {float(growing):.1f} times as fast at a batch of 128",
        f"a quarter of the state, and {shared:.1f} times softmax attention's throughput",
        f"At 32k tokens they are {longest[0]:.1f} and {longest[1]:.1f} times as fast, in a quarter of the memory.",
    ]


def kernels() -> list[str]:
    later, earlier, h100 = (
        json.loads((REFERENCE / f"kernels/{folder}bench.provenance.json").read_text())["runs"] for folder in ("peers/", "", "peers_h100/")
    )
    assert {run["gpu"] for run in (*later, *earlier)} == {"NVIDIA H200"}, "one card, so that rows stand in one table"
    assert {run["gpu"] for run in h100} == {"NVIDIA H100 80GB HBM3"}
    ours = [row for row in read_kernels(REFERENCE / "kernels/peers/bench.csv") if row["provider"] == "relinear" and row["first_call_s"]]
    first = {mode: max(float(row["first_call_s"]) for row in ours if row["mode"] == mode) for mode in ("forward", "forward+backward")}
    lengths = [
        row
        for row in rows_of(REFERENCE / "kernels/peers_h100/bench.csv")
        if row["provider"] in ("relinear", "SDPA causal") and row["mode"] == "forward"
    ]
    forward = {(row["op"], row["H"], int(row["T"])): float(row["ms"]) for row in lengths if (row["H"], row["B"]) in (("32", "16"), ("12", "1"))}
    assert "Triton >= 3.4.0 and < 3.7.1" in (REFERENCE / "kernels/peers/bench.csv").read_text()
    ahead = {}
    for op, heads in {key[:2] for key in forward}:
        softmax = {at: ms for (name, h, at), ms in forward.items() if (name, h) == ("softmax attention", heads)}
        won = [at for at in sorted(softmax) if forward.get((op, heads, at), math.inf) < softmax[at]]
        ahead[op, heads] = won[:1] if won == [at for at in sorted(softmax) if won and at >= won[0]] else []
    hybrids = "hybrid_attention w=64", "lizard hybrid"
    assert [ahead["linear_attention", heads] for heads in ("32", "12")] == [[2048], [4096]]
    assert [ahead[op, heads] for op in hybrids for heads in ("32", "12")] == [[4096], [8192]] * 2
    costs = [row for row in read_costs(REFERENCE / "efficiency/efficiency.csv") if row.sweep == "input"]
    read = {(row.run, row.prompt): row.prefill_tokens_per_second for row in costs}
    faster = {run: [p for own, p in sorted(read) if own == run and read[run, p] > read["teacher", p]] for run in ("lizard", "lolcats_window")}
    assert faster["lizard"] == faster["lolcats_window"][1:], "and from there on at every length"
    return [
        f"at {later[0]['bandwidth_bytes_per_s'] / 1e12:.2f} TB/s",
        "it refuses Triton 3.4 to 3.7.0",
        f"takes {first['forward']} s at most forward and {first['forward+backward']} s with the backward",
        "from 2,048 tokens on at a batch of 16, and from 4,096 on at a batch of one.",
        "Both hybrids are ahead from 4,096 tokens on at a batch of 16, and from 8,192 on at a batch of one.",
        "at 2,048 tokens of `1036455`",
        f"softmax attention from {faster['lizard'][0]:,} tokens on, LoLCATs' from {faster['lolcats_window'][0]:,} on, the shortest input",
    ]


STAGES = ("distill", "finetune")


def plan() -> list[str]:
    _, _, speeds, curves, memory = pages.drawn(ROOT / "docs/plan.md")
    measured = {(row["shape"], row["run"], row["stage"], row["scaling"], row["engine"], row["GPUs"]): row for row in speeds}
    small, large = ("smollm2-135m", "lolcats_window"), ("llama-3-8b", "lolcats_window")

    def gain(model, stage, scaling, engine="ddp"):
        return measured[*model, stage, scaling, engine, "2"]["against 1 GPU"].rstrip("x")

    def gib(stage, engine, gpus, run=large):
        return f"{float(measured[*run, stage, 'weak, 4 a GPU', engine, gpus]['peak GiB/GPU']):.0f}"

    def step(row):
        sequences = int(re.search(r"(\d+) a GPU", row["scaling"])[1])
        return 1000 * sequences * 1024 / int(row["tokens/s/GPU"].replace(",", ""))

    weak = [row for row in speeds if row["scaling"].startswith("weak") and row["engine"] == "ddp" and row["GPUs"] == "2"]
    alone = [measured[row["shape"], row["run"], row["stage"], row["scaling"], "ddp", "1"] for row in weak]
    longer = [step(two) - step(one) for two, one in zip(weak, alone, strict=True)]
    gains = sorted(row["against 1 GPU"].rstrip("x") for row in weak)
    scaling = json.loads((REFERENCE / "scaling/scaling.json").read_text())["rows"]
    trained = [row["trainable_params"] / 1e6 for row in scaling if row.get("scaling") == "weak" and row["run"] != "supra"]
    apart = {(row["run"], row["GPUs"], row["piece"]): [float(row[f"{of} apart"]) for of in ("loss", "gradient norm")] for row in curves[::-1]}
    sharded = [float(row["gradient norm apart"]) for row in curves if row["run"] == "supra" and row["GPUs"] == "2"]
    assert max(sharded) < 0.05
    size = {row[""]: row["llama-3-70b"] for row in memory}
    shard, whole = (f"{float(size[name]):.0f}" for name in ("weights, bfloat16", "full finetuning (SUPRA): weights, gradients, moments"))
    assert max(float(value) for name, value in size.items() if "with gradient and AdamW" in name) < 4
    eight, sixty_four = ([gain(small, stage, f"strong, {n} a step") for stage in STAGES] for n in (8, 64))
    eight_large = [gain(large, stage, "strong, 8 a step") for stage in STAGES]
    shards = [gain(large, stage, "weak, 4 a GPU", "fsdp") for stage in STAGES]
    room = [gib(stage, engine, gpus) for stage in STAGES for engine, gpus in (("fsdp", "2"), ("ddp", "1"))]
    pieces = apart["supra", "1", "2"]
    return [
        f"replicas on two GPUs run {gains[0]} to {gains[-1]} times as fast.",
        f"A step takes {min(longer):.0f} to {max(longer):.0f} ms longer than one GPU's {min(map(step, alone)):.0f} to {max(map(step, alone)):.0f}.",
        f"{min(trained):.1f}M parameters at SmolLM2's shape, {max(trained):.0f}M at the 8B shape",
        f"It gives {eight[0]} and {eight[1]} on two GPUs",
        f"64 sequences a step give {sixty_four[0]} and {sixty_four[1]}.",
        f"8 are enough: {eight_large[0]} and {eight_large[1]}.",
        f"they run {shards[0]} (transfer) and {shards[1]} times (finetuning)",
        f"A GPU needs {room[0]} instead of {room[1]} GiB, and {room[2]} instead of {room[3]}.",
        f"SUPRA runs at all: {gib('finetune', 'fsdp', '2', ('llama-3-8b', 'supra'))} GiB",
        f"SUPRA's loss is within {apart['supra', '2', '16'][0]:.0e} and its gradient norm within 5 %;".replace("e-0", "e-"),
        f"in smaller pieces {pieces[0]:.0e}, and {100 * pieces[1]:.0f} % at its worst step.".replace("e-0", "e-"),
        f"{shard} GiB each, {8 * float(size['weights, bfloat16']):.0f} GiB for eight on a machine",
        f"Of an H200's {hours.GPU_GIB} GiB {shard} are weights",
        f"AdamW's moments are {whole} GiB, {float(whole) / 8:.0f} a GPU on eight",
        "less than 4 GiB on each GPU",
    ]


def second_teacher() -> list[str]:
    rows = committed("qwen/comparison/second.csv")

    def at(run, column):
        return float(rows[run][column])

    apart = committed("qwen/lizard/table1.claims.csv", by="claim")
    row = apart["Lizard beats LoLCATs by 8 points on MMLU"]
    assert "is within error of 8.00" in row["reason"]
    mmlu = re.search(r"difference (\S+ ± \S+)", row["figures"])[1]
    return [
        f"Here it is ahead by {mmlu} points, which is within error of the paper's 8.",
        f"finetuning alone raises MMLU from {at('teacher', 'mmlu_acc'):.1f} to {at('teacher_lora', 'mmlu_acc'):.1f}, and the windows keep that,"
        f" at {at('window_bytes_of_lolcats', 'mmlu_acc'):.1f} and {at('window_bytes_of_lizard', 'mmlu_acc'):.1f}.",
        f"Lizard's perplexity goes from {at('lizard', 'ppl'):.2f} to {at('lizard', 'ppl_no_linear'):.2f}",
        f"({at('lolcats_window', 'ppl_no_linear'):.2f} without it), and with it is behind a window of its bytes,"
        f" at {at('lolcats_window', 'ppl'):.2f} against {at('window_bytes_of_lolcats', 'ppl'):.2f}.",
        f"with an F1 of {at('window_bytes_of_lizard', 'f1_beyond'):.1f}, the teacher with {at('teacher', 'f1_beyond'):.1f},"
        f" Lizard with {at('lizard', 'f1_beyond'):.1f} and LoLCATs with {at('lolcats_window', 'f1_beyond'):.1f}.",
    ]


def parts() -> list[str]:
    def paired(table, claim, folder="smollm2"):
        row = committed(f"{folder}/lizard/{table}.claims.csv", by="claim")[claim]
        return re.search(r"difference -?(\S+ ± \S+) \(paired\)", row["figures"])[1], row["verdict"]

    said = [
        paired("table3", "A learned gate has a lower perplexity than the pooling"),
        paired("table5", "The window adds to the gated part on average"),
        paired("table5", "The gated part adds to the window on average"),
        paired("table5", "The transfer lowers perplexity"),
        paired("table5", "The gate lowers perplexity"),
        paired("table5", "LoRA is as good as full finetuning on average"),
        paired("table4", "A window of 128 has a lower perplexity than one of 256", "lizard_smollm2"),
        paired("table2", "With half of its layers softmax Lizard is above its teacher on average", "hybrids_smollm2"),
    ]
    untold = "not tested"
    assert [verdict for _, verdict in said] == ["contradicted", untold, untold, "contradicted", "reproduced", untold, "contradicted", untold]
    assert not [row for row in rows_of(REFERENCE / "smollm2/lizard/table5.claims.csv") if row["whose"] == "paper" and row["verdict"] != untold]
    pooled, window, gated, transfer, gate, full, longer, layers = (difference for difference, _ in said)
    rank, _ = paired("table6", "Rank 8 has no higher perplexity than rank 64", "lizard_smollm2")
    ranks = committed("lizard_smollm2/lizard/table6.csv")
    assert float(ranks["lizard_r8"]["ppl"]) > float(ranks["lizard_r64"]["ppl"])
    return [
        f"rank 8 is above rank 64 by {rank}.",
        f"The gate lowers the perplexity by {gate}.",
        f"raises it on novels, and raises the average by {full} points.",
        f"perplexity here is lower by {pooled}. On novels it is higher, as it is without the linear part.",
        f"Without it the average falls by {window} points.",
        f"adds to the window is within error with three seeds too, {gated} points.",
        f"on half of the tokens, the perplexity is lower by {transfer}.",
        f"a window of 256 has a lower perplexity than one of 128, by {longer}. The paper's number there is MMLU,",
        f"is above its teacher on average is within error with three seeds too, {layers} points.",
    ]


def contexts() -> list[str]:
    ruler, rows = committed("smollm2/comparison/ruler.csv"), committed("smollm2/supra/table2.csv", by="row")
    dose = {run: reading(f"smollm2/runs/{run}/perplexity", "perplexity")[""] for run in ("supra", "supra_epochs4", "t2r_epochs4")}
    factors = {run: float(row["ppl"]) for run, row in committed("smollm2/supra/decayfactors.csv").items()}
    number = {run: float(ruler[run]["niah_2048"]) for run in ruler if run}
    assert number["teacher"] == 100 and number["lolcats_window"] == 0 and number["window_128"] == number["lizard"]

    def f1(row, context):
        return f"{float(rows[row][f'squad_{context}']):.1f}"

    return [
        f"the window of Lizard's bytes {number['window_bytes_of_lizard']:.1f} %, Lizard {number['lizard']:.1f} %, as many as a window of 128,",
        f"for this teacher, {float(ruler['teacher']['mmlu_text_acc']):.1f} %,"
        f" and by the letter it is not, {float(ruler['teacher']['mmlu_acc']):.1f} %.",
        f"falls from {f1('teacher', 8192)} to {f1('teacher, unscaled', 16384)}. With YaRN it is {f1('teacher, YaRN', 16384)}."
        f" That is no more than the {f1('teacher', 0)} of the teacher without any passage,",
        f"answers without the passage, {f1('lizard', 0)} and {f1('window_bytes_of_lizard', 0)}.",
        f"SUPRA from {dose['supra']:.1f} to {dose['supra_epochs4']:.1f}. There SUPRA is ahead of T2R, which has {dose['t2r_epochs4']:.1f}.",
        f"the perplexity is {factors['supra_denominator']:.2f} with it, and {factors['t2r_uptrained']:.2f} with random weights.",
    ]


def rates_and_doses() -> list[str]:
    form = reading("smollm2/runs/lolcats_exp_window/perplexity", "perplexity")[""]
    both, with_decay = (reading(f"smollm2/runs/supra_lr0.001_decay{decay}_epochs4/perplexity", "perplexity")[""] for decay in ("0.0", "0.1"))
    sources = committed("smollm2/comparison/sources.csv")
    mixed = ("supra_lr0.001_decay0.0_epochs4", "supra_lr0.001", "supra_epochs4")
    twice, once, slower = ({c: float(sources[run][f"ppl_{c}"]) for c in ("kernel", "brown", "novels", "papers")} for run in mixed)
    assert twice["kernel"] < min(once["kernel"], slower["kernel"])
    assert all(twice[c] > max(once[c], slower[c]) for c in ("brown", "novels", "papers"))
    gains = {
        row["claim"]: re.findall(r"difference -(\S+ ± \S+)", row["figures"])
        for row in rows_of(REFERENCE / "smollm2/comparison/notransfer.claims.csv")
    }
    [elu], [relu], [exp] = (
        gains[f"Transfer lowers the perplexity of {feature}, maps at 1e-2 and tokens alike"] for feature in ("1 + ELU", "ReLU", "exp")
    )
    slow, fast = (float(committed("smollm2/comparison/notransfer.csv")[f"lolcats_elu_notransfer{rate}"]["ppl"]) for rate in ("", "_lr0.01"))
    return [
        f"nor on the papers' tokens, where its perplexity is {form:.2f}",
        f"at 1e-3 and on twice the tokens SUPRA ends at {both:.1f}, with weight decay at {with_decay:.1f}.",
        f"On held-out kernel documentation they do, at {twice['kernel']:.1f}, where the larger rate alone has {once['kernel']:.1f}"
        f" and twice the tokens alone {slower['kernel']:.1f}.",
        f"both together are worse than the larger rate alone: {twice['brown']:.1f} against {once['brown']:.1f},"
        f" {twice['novels']:.1f} against {once['novels']:.1f}, and {twice['papers']:.1f} against {once['papers']:.1f}",
        f"at 1e-2 by {elu} for 1 + ELU, by {relu} for ReLU and by {exp} for exp.",
        f"1 + ELU falls from {slow:.1f} at LoRA's rate on half of the tokens to {fast:.1f} at the maps' own.",
    ]


def softmax_layers() -> list[str]:
    rows = committed("hybrids_smollm2/lizard/table2.csv")
    runs = ("lizard", "lizard_softmax_0.25", "lizard_softmax_0.5", "lizard_softmax_0.75", "teacher_lora_5e-4")
    rows["teacher_lora_5e-4"] = committed("smollm2/lizard/table5.csv")["teacher_lora_5e-4"]
    none, few, half, most, adapted = (f"{float(rows[run]['kv_16_far']):.1f}" for run in runs)
    last, every = (f"{float(rows[f'lizard_softmax_{which}']['kv_16_far']):.1f}" for which in ("last", "0.5"))
    turned, plain = (reading(f"smollm2_quarter/runs/{run}/ppl_novels", "perplexity")["1024-2048"] for run in ("lizard_linear_rope", "lizard"))
    return [
        f"Lizard finds {none} % of the pairs 256 tokens back,"
        f" with a quarter, half and three quarters of its layers softmax {few}, {half} and {most} %, and the teacher with LoRA {adapted} %.",
        f"the last half finds {last} of 100, every second layer {every}, the first half none.",
        f"the perplexity is {turned:.2f} where the default has {plain:.2f}",
    ]


NOVELS = "Novels are the six of Jane Austen, whole: one author, n = 6. No run here trained on them"


def test_the_novels_are_six_of_one_author_and_in_no_text_that_was_trained_on():
    assert NOVELS in prose("docs/results.md")
    for file in REFERENCE.glob("*/documents/novels@*/run.json"):
        assert [source["name"] for source in json.loads(file.read_text())["datasets"]] == ["austen"]
        assert json.loads(file.with_name("metrics.json").read_text())["documents"] == 6
    trained = [json.loads(file.read_text()) for file in REFERENCE.glob("*/runs/*/*/run.json")]
    read = {source["name"] for record in trained for source in record["datasets"] if source["role"] == "train"}
    assert "wikipedia-intros" in read and "austen" not in read


def test_what_equal_bytes_are_is_said_before_anything_is_concluded(tmp_path):
    """The windows' keys by four accountings: the first is what was measured, and what is said of the others follows from the shapes."""
    (tmp_path / "table.md").write_text(pages.accountings(REFERENCE) + "\n")
    [table] = pages.drawn(tmp_path / "table.md")
    keys = {row.pop("MiB: keys of a window"): [int(cell.split(": ")[1].replace(",", "")) for cell in row.values()] for row in table}
    for scale, words in pages.ACCOUNTED.items():
        for run, window in (("LoLCATs, window", "window_bytes_of_lolcats"), ("Lizard", "window_bytes_of_lizard")):
            assert keys[f"{run}, {words}"][0] == pages.held(window, REFERENCE / scale)
    lolcats, lizard = keys["LoLCATs, window, SmolLM2-135M"], keys["Lizard, SmolLM2-135M"]
    text, readme = prose("docs/results.md"), prose("README.md")
    assert (
        f"holds {lizard[0]} keys beside Lizard and {lolcats[0]} beside LoLCATs. States of key heads at 2 bytes leave it {lizard[3]} and {lolcats[3]}"
        in text
    )
    assert (
        f"the window beside Lizard has {lizard[0]} keys here, and would have {lizard[3]} by the" in readme
        and "No such window is trained yet" in readme
    )
    pairs = [row for row in read_items(REFERENCE / "smollm2/runs/lizard/kv_recall_far") if row["pairs"] == 16]
    near, far = (of(row["distance"] for row in pairs) for of in (min, max))
    assert f"The pairs lie {near} to {far} tokens back" in text and lizard[3] < lizard[2] < near <= far < lolcats[0] < lizard[0]
    step = json.loads((REFERENCE / "qwen/runs/window_bytes_of_lizard/finetune/run.json").read_text())
    second = [keys[f"{run}, Qwen2.5-Coder-1.5B"][0] for run in ("Lizard", "LoLCATs, window")]
    assert second[0] > step["config"]["budget"]["seq_len"] > second[1]
    assert (
        f"leaves Lizard's control {second[0]:,} keys, more than a training sequence has, which is full attention" in text
        and f"of {second[1]}, is" in text
    )
    assert "full attention (window of 1,692 keys, Lizard's bytes + LoRA; it was trained on sequences of 1,024)" in pages.second_teacher(REFERENCE)


def test_what_others_found_is_cited():
    told = prose("docs/results.md")
    assert all(f"https://{place}" in told for place in ("arxiv.org/abs/2510.05901", "arxiv.org/abs/2608.28444", "huggingface.co/blog/sirluk/"))
    assert not any("Nobody has asked" in prose(page) for page in TEXTS)


def test_what_was_trained_again_is_not_called_the_same_to_the_last_digit():
    """Two trainings of one seed, with the same settings, code and card, ended at other weights; measures of these mix both."""
    assert "to the last digit" not in prose("docs/results.md")
    for seed in (1, 2):
        files = REFERENCE.glob(f"smollm2/runs/teacher_lora-seed{seed}/*/run.json")
        parents = [json.loads(file.read_text())["parents"].get("finetune", {}) for file in files]
        assert len({parent["contents"] for parent in parents if parent}) > 1, seed


def span(record: dict) -> tuple[datetime.datetime, datetime.datetime, str]:
    """When a stage began and ended, and its commit."""
    began = datetime.datetime.fromisoformat(record["started"])
    return began, began + datetime.timedelta(seconds=record["wall_seconds"]), record["git"]["commit"]


def hours_of_three_papers() -> float:
    """Of the committed steps at the whole dose behind LoLCATs, SUPRA and Lizard, with one seed, each step once."""
    plan = Plan(scale="smollm2")
    artefacts = (a for a in plan.artefacts.values() if a.paper in ("lolcats", "supra", "lizard"))
    nodes = {node for artefact in artefacts for node in plan.behind(list(plan.reads(artefact).values()))}
    folders = [REFERENCE / name for name in ("smollm2", "hybrids_smollm2", "lizard_smollm2", "passkeys_smollm2")]
    places = ([folder / plan.folder(node).relative_to(plan.root) / "run.json" for folder in folders] for node in nodes)
    records = [json.loads(store.read(found[0])) for place in places if (found := [path for path in place if store.exists(path)])]
    assert len(records) > 0.95 * len(nodes)
    return sum(record["wall_seconds"] for record in records) / 3600


def running() -> list[str]:
    made = [folder for folder in store.nodes(REFERENCE / "smollm2") if folder.parent.name == "documents"]
    kept = [next(folder for folder in made if folder.name.startswith(f"{kind}@")) for kind in ("novels", "papers")]
    novels, papers = (json.loads(store.read(folder / "metrics.json"))["documents"] for folder in kept)
    assert novels == 6
    gains = re.search(r"run (\S+ to \S+) times as fast", prose("docs/plan.md"))[1]  # held there
    whole = json.loads((REFERENCE / "whole/whole.json").read_text())
    three, headline = whole["rows"]
    assert not whole["dirty"] and [row["targets"] for row in whole["rows"]] == ["lolcats supra lizard", "results/table2.csv"]
    assert {(row["scale"], row["cores"]) for row in whole["rows"]} == {("smoke", 2)}
    parts = store.parts(REFERENCE / "smollm2/runs/lizard")
    spans = {folder.name: span(json.loads(store.read(folder / "run.json"))) for folder in parts}
    spans = {name: (begun, ended) for name, (begun, ended, commit) in spans.items() if commit.startswith("fd27f8e")}
    began, ended = min(begun for begun, _ in spans.values()), sorted((ended, name) for name, (_, ended) in spans.items())
    assert len(spans) == 28 and ended[-1][1] == "mmlu_continuation"
    together, ours = (f"{(end - began).total_seconds():.0f} s" for end in (ended[-1][0], ended[-2][0]))
    runs = [folder for folder in store.nodes(REFERENCE / "table2_mini") if folder.parents[1].name == "runs"]
    peak = max(json.loads(store.read(folder / "run.json"))["peak_rss_bytes"] for folder in runs)
    needs = re.search(r"<!-- requirements -->(.*?)<!-- end -->", (ROOT / "docs/running.md").read_text(), re.DOTALL)[1]  # test_requirements.py
    least = least_rates()
    return [
        " ".join(needs.split()),
        f"Its largest job took {peak / 2**30:.1f} GiB of memory",
        f"the least rate is {least['distill']} for `distill` and {least['finetune']} for `finetune`",
        f"28 of Lizard's measurements at `smollm2` took {together}, six at a time on one H200 of a machine whose other cards were training."
        f" The 27 that are not lm-eval's took {ours} of these;",
        f"both stages run {gains} times as fast as on one",
        f"the committed steps behind them took {hours_of_three_papers():.1f} hours in all.",
        f"six novels (from Debian) and {papers} papers",
        f"take {three['seconds']:.0f} s for {three['jobs']} jobs. These use a core for {three['core_seconds']:.0f} s in all;",
        f"used one for {three['core_seconds_of_others']:.0f} s meanwhile. The headline table takes {headline['seconds']:.0f} s.",
    ]


SAID = {
    "README.md": readme,
    "docs/results.md": lambda: [*results(), *second_teacher(), *rates_and_doses(), *softmax_layers(), *parts(), *contexts()],
    "docs/efficiency.md": efficiency,
    "docs/kernels.md": kernels,
    "docs/plan.md": plan,
    "docs/running.md": running,
}
STATED = {  # settings, versions and licences, which nobody measured
    "README.md": ["needs Python 3.11 or 3.12", "Apache-2.0.", "Qwen2.5-Coder-1.5B"],
    "docs/claims.md": ["at least 95 % of it"],
    "docs/models.md": ["a share such as 0.5", "5.17", "5.24"],  # releases
    "docs/results.md": [
        *("2510.05901", "2608.28444", "within 1.6 points of its teacher"),
        "best with LoRA at 5e-4",
        "want a transfer at 1e-2",
        "A rate of 1e-3 gains SUPRA",
        "at a rate of 1e-3, where the paper's code has 1e-4",
    ],
    "docs/running.md": [
        *("opens the runs in MLflow on 127.0.0.1", "| 2 CPU cores, 8 GB |", "one GPU of 80 GB", "CC BY-SA 4.0", "CC BY 4.0", "above 1 MiB the size"),
        *("| Python | 3.11 or 3.12,", "| 3 GB on disk", "| a clone | 0.3 GB |", "leaves 1.3 GB in"),  # sizes on disk, as du says
    ],
}
UNITS = "times|ms|GiB|MiB|MB|GB|minutes|points|seconds|s|TB/s|tokens/s|hours"
MEASURED = re.compile(rf"\d[\d,]*\.\d+|\b\d+e-\d+|\b\d[\d,]*(?= (?:{UNITS})\b|k tokens/s| ?%)")


@pytest.mark.parametrize("page", TEXTS)
def test_every_number_in_the_text_is_read_from_a_committed_file(page):
    """Decimals, and numbers with a unit. What the log of docs/log says stands in no committed file, and it says so."""
    text = prose(page)
    for words in [*SAID.get(page, list)(), *STATED.get(page, ())]:
        assert words in text
        text = text.replace(words, "")
    assert MEASURED.findall(re.sub(r"`[^`]*`", "", text)) == []


@pytest.mark.parametrize("page", ["docs/efficiency.md", "docs/running.md", "docs/kernels.md"])
def test_a_commit_whose_tree_had_uncommitted_changes_is_marked_where_it_is_quoted(page):
    records = [json.loads(path.read_text()) for path in (*REFERENCE.glob("efficiency/*.json"), *REFERENCE.glob("scaling/*.json"))]
    changed = {session["commit"][:7] for record in records for session in record.get("sessions", [record]) if session.get("dirty")}
    quoted = re.findall(r"`([0-9a-f]{7})`(\+?)", (ROOT / page).read_text())
    assert quoted and all(bool(plus) == (commit in changed) for commit, plus in quoted), quoted


def reading(stage: str, metric: str) -> dict[str | int, float]:
    """The values of a metric of a committed measurement, by where they lie; under "" the one of all."""
    found = json.loads(store.read(REFERENCE / stage / "metrics.json"))["readings"]
    return {next(iter(r["at"].values()), ""): r["value"] for r in found if r["metric"] == metric}


def test_a_number_that_nothing_holds_is_found():
    found = MEASURED.findall("takes 3.4 of 1,024 tokens, 12 times, 3 % or 8e-5, in 20M + 20M tokens of `mini`: 440k tokens/s, 10 MiB")
    assert found == ["3.4", "12", "3", "8e-5", "440", "10"]


def test_what_is_said_of_the_second_teacher_is_so():
    rows = committed("qwen/comparison/second.csv")

    def at(run, column):
        return float(rows[run][column])

    lower, higher = ("ppl", "ratio_beyond"), ("kv_16_far", "needle_2048", "f1_beyond", "avg_no_mmlu", "mmlu_acc", "mmlu_text_acc_norm")
    for hybrid, window in (("lizard", "window_bytes_of_lizard"), ("lolcats_window", "window_bytes_of_lolcats")):
        assert all(at(window, c) < at(hybrid, c) for c in lower) and all(at(window, c) > at(hybrid, c) for c in higher)
    verdicts = [(row["paper"], row["verdict"]) for row in rows_of(REFERENCE / "qwen/comparison/second.claims.csv")]
    assert sorted(verdicts) == [("comparison", "contradicted")] * 6 + [("lizard", "not tested"), ("lizard", "reproduced")]
    assert abs(at("lizard", "mmlu_acc") - at("teacher", "mmlu_acc")) < at("teacher", "mmlu_acc_stderr")


def test_what_is_said_of_softmax_layers_and_of_details_is_so():
    halves = committed("hybrids_smollm2/lizard/table2.csv")
    assert float(halves["lizard_softmax_first"]["kv_16_far"]) == 0
    detail = {run: reading(f"smollm2_quarter/runs/{run}/ppl_novels", "perplexity") for run in ("lizard", "lizard_linear_rope")}
    assert detail["lizard_linear_rope"]["2048-4096"] > 1e5
    ppl = {run: reading(f"smollm2_quarter/runs/{run}/perplexity", "perplexity")[""] for run in ("lizard_full", "lizard_full_but_embeddings")}
    assert ppl["lizard_full_but_embeddings"] < ppl["lizard_full"]


def test_what_is_said_of_pass_keys_is_so():
    def found(run, measure="needle_plane"):
        """Share of keys found, and how many there are, by length and distance. Without a distance, those beyond 256 tokens."""
        plane = json.loads((REFERENCE / f"passkeys_smollm2/runs/needle_{run}/{measure}/metrics.json").read_text())["readings"]
        own = [r for r in plane if r["metric"] == "exact_match" and ("distance" in r["at"] or r["at"].get("beyond") == 256)]
        return {(r["at"]["length"], r["at"].get("distance")): (r["value"], r["n"]) for r in own}

    hybrid, alone = found("lizard_softmax_0.25"), found("lizard")
    assert (hybrid[2048, None], alone[2048, None], found("lizard_w128_m0")[2048, None]) == ((1, 56), (0, 56), (0, 56))
    assert found("lizard_gate_none")[2048, None] == (pytest.approx(1 / 56), 56)
    assert min(value for (length, distance), (value, _) in hybrid.items() if length <= 5120 and distance and distance <= 4096) > 0.9
    within = 512  # the first distances, in which the window of 128 lies
    for run in ("lizard", "lizard_gate_none", "lizard_w128_m0", "lizard_whole"):
        keys = [(value * n, n) for (_, distance), (value, n) in found(run).items() if distance and distance > within]
        assert sum(hits for hits, _ in keys) <= 0.02 * sum(n for _, n in keys), run
    assert {value for value, _ in found("supra").values()} == {0}
    for run in ("lizard", "lolcats_window", "window_bytes_of_lizard"):
        far = found(run, "needle_plane_far")
        assert {value for value, _ in far.values()} == {0} and {length for length, _ in far} == {16384, 32768}
    teachers = [[value for value, _ in found(run).values()] for run in ("teacher_lora_whole", "teacher_lora")]
    whole, answers = (sum(values) / len(values) for values in teachers)
    assert whole < answers / 1.4


def test_what_is_said_of_transfer_at_the_maps_own_rate_is_so():
    rows = committed("notransfer_smollm2_quarter/comparison/notransfer.csv")
    for name in ("elu", "relu"):
        assert float(rows[f"lolcats_{name}_notransfer_lr0.01"]["ppl"]) < float(rows[f"lolcats_{name}"]["ppl"])
    assert float(rows["lolcats_exp_notransfer_lr0.01"]["ppl"]) > float(rows["lolcats_exp"]["ppl"])
    verdicts = [(row["whose"], row["verdict"], row["trainings"]) for row in rows_of(REFERENCE / "smollm2/comparison/notransfer.claims.csv")]
    assert verdicts == [("ours", "reproduced", "1 and 1")] * 6


def test_what_is_said_of_rates_recipes_and_doses_is_so():
    found = {
        row["method"]: {(t, r): float(row[f"transfer_{t}_lora_{r}"]) for t in ("0.001", "0.01") for r in ("0.0001", "0.0005")}
        for row in rows_of(REFERENCE / "search_smollm2/comparison/search.csv")
    }
    best = {method: min(cells, key=cells.get) for method, cells in found.items()}
    assert {lora for _, lora in best.values()} == {"0.0005"} and best["hedgehog"][0] == best["lolcats"][0] == "0.01"
    assert abs(found["lizard"]["0.001", "0.0005"] - found["lizard"]["0.01", "0.0005"]) < 0.2, "an error"
    assert all(found["lizard"][at] < found["lizard-normalized"][at] for at in found["lizard"])
    assert min(found["lizard"].values()) + 2 * 0.3 < min(found["lolcats"].values())
    judged = {"smollm2": ["reproduced", "not tested", "not tested", "contradicted"]}
    judged["long_smollm2_quarter"] = ["reproduced", "not tested", "not tested", "reproduced"]
    for folder, verdicts in judged.items():
        assert [row["verdict"] for row in rows_of(REFERENCE / folder / "comparison/recipes.claims.csv")] == verdicts
        ends = {run: float(row["ppl"]) for run, row in committed(f"{folder}/comparison/recipes.csv").items()}
        assert ends["supra_lr0.001"] < ends["supra"] / 1.5
    assert ends["hedgehog_domain_full"] < ends["hedgehog_domain_lora"] - 15, "at a quarter"
    full, lora = (committed("smollm2/comparison/recipes.csv")[f"hedgehog_domain_{kind}"] for kind in ("full", "lora"))
    assert all(float(full[column]) / float(lora[column]) > 1.5 * float(full["ppl"]) / float(lora["ppl"]) for column in ("ppl_mix", "ppl_novels"))
    for run in ("t2r", "supra", "hedgehog", "lolcats_linear"):
        fewer, own, more = (reading(f"smollm2/runs/{run}{dose}/perplexity", "perplexity")[""] for dose in ("_dose0.25", "", "_epochs4"))
        assert fewer > 1.2 * own > 1.2 * 1.1 * more
    ends = {run: reading(f"smollm2/runs/{run}/perplexity", "perplexity")[""] for run in ("supra_lr0.001", "supra_epochs4", "t2r", "t2r_epochs4")}
    assert ends["supra_lr0.001"] < 1.1 * ends["supra_epochs4"] and ends["supra_lr0.001"] < ends["t2r"]
    for run in ("hedgehog", "lolcats_linear"):
        own, more = (reading(f"smollm2/runs/{run}{dose}/ppl_novels", "perplexity")["1024-2048"] for dose in ("", "_epochs4"))
        assert more > own


def test_what_is_said_of_training_on_long_documents_is_so():
    folder = "long_smollm2_quarter/runs"
    ratios = {
        run: reading(f"{folder}/{run}/agreement_novels", "perplexity_ratio")
        for run in ("lolcats_window_long1024", "lolcats_window_long2048", "lizard_long1024", "lizard_long2048")
    }
    assert [ratios[f"lolcats_window_long{n}"]["1024-2048"] < 1.2 for n in (1024, 2048)] == [False, True]
    assert all(ratios[f"lolcats_window_long{n}"]["2048-4096"] > 2 for n in (1024, 2048))
    assert all(abs(ratios["lizard_long1024"][at] - ratios["lizard_long2048"][at]) < 0.02 for at in ratios["lizard_long1024"])
    for n in (1024, 2048):
        for hybrid in ("lizard", "lolcats_window"):
            assert set(reading(f"{folder}/{hybrid}_long{n}/kv_recall_far", "exact_match").values()) == {0.0}
        for hybrid in ("lizard", "lolcats"):
            assert reading(f"{folder}/window_bytes_of_{hybrid}_long{n}/kv_recall_far", "exact_match")[4] > 0.8


def test_what_is_said_of_the_linear_part_is_so():
    controls, recall = (committed(f"smollm2/comparison/{name}.csv") for name in ("controls", "recall"))
    better = [(controls, "ppl", -1), (controls, "ratio_long", -1), (controls, "ratio_beyond", -1), (controls, "avg_no_mmlu", 1)]
    better += [(controls, "lambada_openai_acc", 1)]
    better += [(recall, column, 1) for column in ("needle_1024", "needle_2048", "kv_16", "kv_64", "kv_16_far", "kv_64_far", "f1_inside", "f1_beyond")]
    for rows, column, sign in better:
        for hybrid, window in (("lizard", "window_bytes_of_lizard"), ("lolcats_window", "window_bytes_of_lolcats")):
            assert sign * float(rows[window][column]) >= sign * float(rows[hybrid][column]), (hybrid, column)
    for hybrid, window in (("lizard", "window_bytes_of_lizard"), ("lolcats_window", "window_bytes_of_lolcats")):
        for run in (hybrid, window):
            found = json.loads((REFERENCE / f"smollm2/runs/{run}/needle_2048/metrics.json").read_text())["readings"]
            far = [r for r in found if r["metric"] == "choice" and r["at"].get("distance", 0) > 512]
            assert len(far) == 3 and all(r["value"] < 0.2 + 2 * r["stderr"] for r in far), run
            assert float(recall[run]["needle_2048_none"]) > 85
    assert all(
        "items 0.0 % better" in row["figures"] and row["verdict"] == "contradicted"
        for row in rows_of(REFERENCE / "smollm2/comparison/sources.claims.csv")
    )
    for page in ("README.md", "docs/results.md"):
        assert re.search(r"equal bytes.*as good( as its hybrid)? or better", prose(page))
    assert prose("docs/results.md").startswith("# Results **At 20M + 20M tokens on SmolLM2-135M, the linear parts")


def test_what_is_said_of_meta_tokens_is_so():
    ppl = {row["meta"]: [float(row[f"ppl_w{w}"]) for w in (32, 64, 128, 256)] for row in rows_of(REFERENCE / "lizard_smollm2/lizard/table4.csv")}
    gains = [none - two for none, two in zip(ppl["0"], ppl["2"], strict=True)]
    assert min(gains) > 0.5 and max(gains) == gains[0]
    assert all(abs(two - six) < 0.1 for two, six in zip(ppl["2"], ppl["6"], strict=True))


def test_what_is_said_of_hedgehogs_language_models_and_of_recall_at_mini_is_so():
    domain, scratch = (committed(f"wt103_smollm2/hedgehog/{table}.csv") for table in ("table10", "table7"))
    assert all(float(domain[f"wt103_{method}"]["ppl"]) > float(domain["wt103_zero_shot"]["ppl"]) for method in ("t2r", "hedgehog"))
    assert float(scratch["wt103_scratch_hedgehog"]["ppl"]) > float(scratch["wt103_scratch_elu"]["ppl"])
    maps = committed("hedgehog_recall_mini/hedgehog/table2.csv") | committed("hedgehog_recall_mini/hedgehog/table3.csv")
    right = {name.removeprefix("recall_"): float(row["ar"]) for name, row in maps.items() if row["ar"] != "not run"}
    order = [{"softmax", "taylor"}, {"exp2", "hedgehog", "cosformer"}, {"elu", "relu", "exp1", "performer_paper", "performer_code"}]
    assert set.union(*order) == set(right) and max(right.values()) < 90
    assert all(min(map(right.get, above)) > max(map(right.get, below)) + 10 for above, below in zip(order, order[1:], strict=False))
    assert max(map(right.get, order[-1])) - float(maps["recall_elu"]["floor"]) < 10


def test_what_is_said_of_the_transfer_is_so():
    after = {row["run"]: float(row["ppl_at_2"]) for row in rows_of(REFERENCE / "smollm2/lolcats/table1.csv")}
    ratios = [after[f"lolcats_{feature}_notransfer"] / after[f"lolcats_{feature}"] for feature in ("elu", "relu", "exp")]
    assert round(min(ratios)) == 2 and round(max(ratios)) == 7
    assert "finetuning ends at two to seven times the perplexity, on half of the tokens" in prose("docs/results.md")
    judged = rows_of(REFERENCE / "smollm2/lolcats/table1.claims.csv")
    assert [row["verdict"] for row in judged] == ["reproduced"] * 12
    assert [row["claim"] for row in judged if " kl " in row["compared"]] == [
        f"Transfer recovers the attention weights of {m}" for m in ("1 + ELU", "ReLU", "exp")
    ]
    assert "All twelve claims of this table are reproduced, three of them on the weights of attention" in prose("docs/results.md")


def test_what_is_said_of_lizards_ablations_is_so():
    rows = list(committed("lizard_smollm2/lizard/table6.csv").values())
    perplexities = [float(row["ppl"]) for row in rows]
    assert max(perplexities) - min(perplexities) < min(float(row["ppl_stderr"]) for row in rows)


def test_what_is_said_of_lizards_parts_is_so():
    gates, parts = (committed(f"smollm2/lizard/{table}.csv") for table in ("table3", "table5"))
    for column in ("ppl", "ratio_long", "avg_no_mmlu"):
        learned = [float(gates[f"lizard{gate}"][column]) for gate in ("", "_gate_mamba2", "_gate_low_rank", "_gate_none")]
        assert max(learned) - min(learned) < float(gates["lizard"][f"{column}_stderr"])
    on_novels = {run: float(row["ratio_long"]) - float(parts["lizard"]["ratio_long"]) for run, row in {**parts, **gates}.items()}
    for run in ("lizard_gate_pool", "window_128_lora", "lizard_no_transfer", "lizard_full"):
        assert on_novels[run] > 2 * float(parts["lizard"]["ratio_long_stderr"])
    assert float(parts["lizard_full"]["ppl"]) < float(parts["lizard"]["ppl"]) - 1
    ratios = {run.removeprefix("lizard_gate_"): float(row["ratio_long"]) for run, row in gates.items() if "pool" in run or run == "lizard"}
    assert ratios.pop("pool_max") < ratios.pop("lizard") + 0.01 < min(ratios.values()) - 0.01 and len(ratios) == 4
    ruler = committed("smollm2/comparison/ruler.csv")
    for hybrid, window in (("lizard", "window_bytes_of_lizard"), ("lolcats_window", "window_bytes_of_lolcats")):
        assert float(ruler[window]["mmlu_text_acc"]) >= float(ruler[hybrid]["mmlu_text_acc"]) > 25 + 3 * float(ruler[hybrid]["mmlu_text_acc_stderr"])


def test_what_is_said_of_contexts_and_of_the_decay_study_is_so():
    rows = committed("smollm2/supra/table2.csv", by="row")
    values = {name: {column: float(row[column]) for column in row if row[column].replace(".", "", 1).isdecimal()} for name, row in rows.items()}
    lengths = (2048, 4096, 8192, 16384)
    for run in ("lizard", "window_bytes_of_lizard"):
        assert values[run]["squad_2048"] < values[run]["squad_0"] + 3 * float(rows[run]["squad_2048_stderr"])
    for data in ("squad", "books"):
        for column in (f"{data}_{length}" for length in lengths):
            error = float(rows["window_bytes_of_lizard"][f"{column}_stderr"])
            assert values["lizard"][column] <= values["window_bytes_of_lizard"][column] + 2 * error
            assert all(values[run][column] < 3 for run in ("supra", "t2r", "lolcats_window"))
    factors = committed("smollm2/supra/decayfactors.csv")
    ppl = {run: float(row["ppl"]) for run, row in factors.items()}
    assert ppl["supra_rope_before"] > 3 * ppl["supra_denominator"]
    scratch = {run: float(row["ppl"]) for run, row in committed("smollm2/supra/table3.csv").items() if row["ppl"] != "not run"}
    assert scratch["t2r_uptrained"] < scratch["scratch_t2r"] / 2 and scratch["scratch_supra"] < scratch["supra_uptrained"]
    grown = {run: float(row["ppl_8192"]) / float(row["ppl_256"]) for run, row in factors.items()}
    assert grown["supra_decay_none"] > 3 and grown["supra_rope_before"] > 2 and max(grown["supra_uptrained"], grown["supra_decay_retnet"]) < 1.3


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
    rooms = {path for path in (ROOT / "src/relinear").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= named, "a room without a line"
