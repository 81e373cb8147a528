"""Perplexity by position and agreement with the teacher: whole documents read in pieces, their sums,
refusals, and readings that are not defined."""

import json
import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import made
from synthetic import measurement, paper, reading
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from relinear.draw import About
from relinear.draw.curves import place, points_of
from relinear.draw.drawing import make
from relinear.draw.frame import frame_of
from relinear.errors import UserError
from relinear.families import load
from relinear.families.tiny import byte_tokenizer
from relinear.get.documents import build, character_vector, documents
from relinear.get.text import Document, _digest, _is_heldout
from relinear.get.whole import ABOUT, ENDS, TOKENS, Whole
from relinear.linearize.model import linearize
from relinear.measure import _documents, agreement, perplexity_by_position
from relinear.measure._limit import limit_of
from relinear.measure.perplexity import perplexity
from relinear.plan.assets import catalogue
from relinear.plan.job import Job
from relinear.plan.options import option_names
from relinear.plan.plan import Plan
from relinear.plan.readings import Reading, plain
from relinear.plan.sane import read_yaml
from relinear.plan.specs import read
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node

ROOT = Path(__file__).parents[1]
BANDS = ("0-64", "64-128", "128-256")
METHODS = {"lizard": {}, "lolcats": {"window": 16}, "supra": {}, "t2r": {}}


# --- documents ---


def test_documents_are_whole_apart_and_in_the_order_of_their_hash(tmp_path):
    facts = build(tmp_path, byte_tokenizer(), {"smoke": None}, shortest=512, part="all")
    texts = sorted(documents("smoke", None), key=lambda text: _digest(Document(text)))
    found, tokenizer = Whole(tmp_path), byte_tokenizer()
    assert facts["documents"] == len(found) == 8 and facts["tokens"] == sum(map(found.length, range(8)))
    for i, text in enumerate(texts):
        [excerpt] = found.excerpts(i, found.length(i), 1)
        assert excerpt.tokens[0] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
        assert (
            tokenizer.decode(excerpt.tokens[1:]) == text and found.digests[i] == _digest(Document(text)).hex()
        )


def test_of_sources_that_are_trained_on_only_what_texts_hold_out_is_read(tmp_path, monkeypatch):
    texts = [f"document {i} " * 20 for i in range(60)]
    monkeypatch.setitem(documents.__globals__["READERS"], "smoke", lambda _: iter(texts))
    build(tmp_path, byte_tokenizer(), {"smoke": None}, shortest=8, part="heldout")
    kept = {digest for text in texts if _is_heldout(digest := _digest(Document(text)))}
    assert 0 < len(kept) < 60 and set(Whole(tmp_path).digests) == {digest.hex() for digest in kept}


def test_a_source_without_a_document_so_long_says_how_long_its_longest_is(tmp_path):
    longest = max(map(len, documents("smoke", None)))
    with pytest.raises(
        UserError,
        match=(
            rf"smoke: documents of 100000 tokens asked for; of 8 documents \(all\) the longest has {longest}"
        ),
    ):
        build(tmp_path, byte_tokenizer(), {"smoke": None}, shortest=100000, part="all")


def test_stretches_of_a_document_do_not_overlap_and_cover_its_beginning_and_its_end(tmp_path):
    np.save(tmp_path / TOKENS, np.arange(30, dtype=np.int32))
    np.save(tmp_path / ENDS, np.array([23, 30]))
    about = [{"source": "a", "sha256": ""}, {"source": "b", "sha256": ""}]
    (tmp_path / ABOUT).write_text(json.dumps({"separator": [99], "documents": about}))
    found = Whole(tmp_path)
    assert [e.start for e in found.excerpts(0, 5, 9)] == [0, 6, 12, 18] and [
        e.start for e in found.excerpts(0, 5, 2)
    ] == [0, 18]
    assert found.excerpts(1, 7, 3)[0].tokens.tolist() == [99, *range(23, 30)]
    with pytest.raises(
        UserError, match=r"document 1 \(b\) has 7 tokens; positions up to 8 asked for. Possible: up to 7"
    ):
        found.excerpts(1, 8, 1)
    with pytest.raises(UserError, match="2 documents of each source asked for; got 1 of a, 1 of b"):
        found.first(2)


def serialised(lines, version=3) -> bytes:
    number = lambda n: n.to_bytes(4)  # noqa: E731
    head = (
        b"X\n"
        + number(version)
        + number(0x040201)
        + number(0x030500)
        + (number(5) + b"UTF-8" if version == 3 else b"")
    )
    strings = b"".join(number(0x00040009) + number(len(line.encode())) + line.encode() for line in lines)
    return head + number(16) + number(len(lines)) + strings


@pytest.mark.parametrize("version", [2, 3])
def test_novels_are_read_out_of_the_database_of_an_r_package(tmp_path, version):
    novels = [
        ["EMMA", "", "Emma Woodhouse, hand\u00adsome,", "clever, and rich", " ", "FINIS"],
        ["PERSUASION", "", "Sir Walter Elliot"],
    ]
    entries = [serialised(novel, version) for novel in novels]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/Rdata.rdb").write_bytes(
        b"".join(len(e).to_bytes(4) + zlib.compress(e) for e in entries)
    )
    assert list(documents("austen", tmp_path)) == [
        "EMMA\n\nEmma Woodhouse, hand\u00adsome, clever, and rich\n\nFINIS",
        "PERSUASION\n\nSir Walter Elliot",
    ]
    (tmp_path / "data/Rdata.rdb").write_bytes((len(entries[0]) + 1).to_bytes(4) + zlib.compress(entries[0]))
    with pytest.raises(UserError, match="were announced"):
        list(documents("austen", tmp_path))


def test_novels_of_other_hands_are_files_whose_lines_are_joined(tmp_path):
    (tmp_path / "b.txt").write_bytes(
        b"  CHAPTER I\r\n\r\nIt was\r\n  a dark night. \r\n \r\n\r\nShe\x92d gone.\r\n"
    )
    (tmp_path / "a.txt").write_text("“One”\nline", encoding="utf-8")
    (tmp_path / "METADATA").write_text("a licence")
    assert list(documents("other-novels", tmp_path)) == [
        "“One” line",
        "CHAPTER I\n\nIt was a dark night.\n\nShe’d gone.",
    ]


def test_the_catalogue_names_twenty_novels_of_other_hands_and_nothing_trains_on_them():
    workflow = ROOT / "workflow"
    members = catalogue(workflow / "assets.yaml")["other-novels"].members
    files = [Path(member) for member in members if member.endswith(".txt")]
    assert len(set(files)) == len(files) == 20
    assert {file.parent.name for file in files} == {"problemC", "problemG", "brontes"}
    data = read_yaml(workflow / "data.yaml")
    assert [name for name, entry in data.items() if "other-novels" in entry.get("sources", ())] == [
        "other-novels"
    ]


def test_what_is_no_vector_of_lines_is_refused():
    with pytest.raises(UserError, match="no serialisation of R"):
        character_vector(b"A\n" + bytes(40))
    with pytest.raises(UserError, match="type and flags are 13, expected 16"):
        character_vector(serialised([], 2)[:14] + (13).to_bytes(4) + bytes(4))


# --- what is measured ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("documents")
    build(out, byte_tokenizer(), {"smoke": None}, shortest=512, part="all")
    return out


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("teacher")
    model, tokenizer = load("tiny").random({"max_position_embeddings": 256}, 0, torch.float32)
    model.save_pretrained(out), tokenizer.save_pretrained(out)
    return out


def opened(teacher, method="softmax"):
    from relinear.linearize.loading import load_teacher

    torch.manual_seed(0)
    model = load_teacher(teacher, torch.float32)
    return (model if method == "softmax" else linearize(model, method, **METHODS[method])).eval()


def measured(metric, model, folder, out, teacher=None, **options):
    out.mkdir(exist_ok=True)
    given = {"positions": (0, 64, 128, 256), "documents": 3, "piece": 100} | options
    job = Job("a run", {"data": "stories"}, {"model": teacher}, out=out, work=out)
    return list(metric.measure(model, folder, metric.Options(**given), job))


def at(readings, metric="perplexity"):
    return {r.at.get("position", "all"): r for r in readings if r.metric == metric}


def losses(model, folder, length=256, documents=3):
    """Nats of each token of the first documents, by one plain pass over each, [D, T]."""
    found = Whole(folder)
    rows = torch.stack([found.excerpts(i, length, 1)[0].tokens for i in range(documents)])
    with torch.no_grad():
        logits = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").double(), logits


@pytest.mark.parametrize("method", ["softmax", *METHODS])
def test_bands_read_in_pieces_are_those_of_one_pass(method, teacher, folder, tmp_path):
    model = opened(teacher, method)
    found, (expected, _) = (
        at(measured(perplexity_by_position, model, folder, tmp_path)),
        losses(model, folder),
    )
    for band, cut in zip(
        (*BANDS, "all"), (slice(0, 64), slice(64, 128), slice(128, 256), slice(0, 256)), strict=True
    ):
        means = expected[:, cut].mean(1)  # of documents of equal length: the textbook's error of a mean
        assert found[band].value == pytest.approx(means.mean().exp().item(), rel=1e-4) and found[band].n == 3
        assert found[band].stderr == pytest.approx(
            (means.mean().exp() * means.std() / math.sqrt(3)).item(), rel=1e-3
        )
    rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert [row["document"] for row in rows] == [0, 1, 2] and all(
        row["positions"]["128-256"]["tokens"] == 128 for row in rows
    )
    assert rows[1]["positions"]["64-128"]["loss"] == pytest.approx(expected[1, 64:128].sum().item(), rel=1e-4)


def test_neither_pieces_nor_batches_change_what_is_found(teacher, folder, tmp_path):
    model = opened(teacher, "lizard")
    one, other = (
        at(measured(perplexity_by_position, model, folder, tmp_path, piece=p, batch_size=b))
        for p, b in ((256, 1), (33, 2))
    )
    assert {band: r.value for band, r in one.items()} == pytest.approx(
        {band: r.value for band, r in other.items()}, rel=1e-4
    )


def test_separators_of_several_tokens_are_read_and_not_predicted(teacher, folder, tmp_path):
    for name in (TOKENS, ENDS):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    about = json.loads((folder / ABOUT).read_text())
    (tmp_path / ABOUT).write_text(json.dumps(about | {"separator": [5, 0, 7]}))
    model = opened(teacher)
    found = Whole(tmp_path)
    rows = torch.stack([found.excerpts(i, 128, 1)[0].tokens for i in range(3)])
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits[:, 2:]
    expected = F.cross_entropy(logits.transpose(1, 2), rows[:, 3:]).exp().item()
    assert at(measured(perplexity_by_position, model, tmp_path, tmp_path, positions=(0, 64, 128)))[
        "all"
    ].value == pytest.approx(expected, rel=1e-4)
    # 256 positions, two of them taken
    beyond = at(measured(perplexity_by_position, model, tmp_path, tmp_path))["128-256"]
    assert beyond.value is None and beyond.why


def test_each_source_of_several_has_readings_of_its_own(teacher, folder, tmp_path):
    for name in (TOKENS, ENDS):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    about = json.loads((folder / ABOUT).read_text())
    for i, document in enumerate(about["documents"]):
        document["source"] = "ab"[i % 2]
    (tmp_path / ABOUT).write_text(json.dumps(about))
    readings = measured(perplexity_by_position, opened(teacher), tmp_path, tmp_path, documents=2)
    found = {(r.of, r.at.get("position")): r for r in readings}
    assert (
        {of for of, _ in found} == {"stories", "a", "b"}
        and found["stories", None].n == 4
        and found["a", None].n == 2
    )
    both = (math.log(found["a", "64-128"].value) + math.log(found["b", "64-128"].value)) / 2
    assert math.log(found["stories", "64-128"].value) == pytest.approx(both)


def test_the_error_is_that_of_documents_and_not_of_stretches():
    sums = {0: [10.0, 12.0], 1: [20.0, 22.0], 2: [15.0, 18.0]}
    rows = [
        _documents.Read((d, "s", i), {"0-4": {"loss": x, "tokens": 4}})
        for d, values in sums.items()
        for i, x in enumerate(values)
    ]
    means = np.array([sum(values) / 8 for values in sums.values()])
    found = _documents.mean(rows, ["0-4"], lambda s: s["loss"])
    assert (
        found.documents == 3
        and found.value == pytest.approx(means.mean())
        and found.stderr == pytest.approx(means.std(ddof=1) / 3**0.5)
    )


# --- agreement ---


def test_a_teacher_agrees_with_itself_and_a_method_by_the_textbook_s_divergence(teacher, folder, tmp_path):
    same = measured(agreement, opened(teacher), folder, tmp_path, teacher)
    assert {(r.metric, r.value) for r in same} == {
        ("kl", 0.0),
        ("top1", 1.0),
        ("perplexity_ratio", 1.0),
        ("tied", 0.0),
    }
    model = opened(teacher, "lolcats")
    readings = measured(agreement, model, folder, tmp_path, teacher)
    (theirs, p), (ours, q) = losses(opened(teacher), folder), losses(model, folder)
    for band, cut in zip(BANDS, (slice(0, 64), slice(64, 128), slice(128, 256)), strict=True):
        divergence = F.kl_div(
            q[:, cut].log_softmax(-1), p[:, cut].log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        assert (
            at(readings, "kl")[band].value == pytest.approx(divergence.mean().item(), rel=1e-3)
            and divergence.mean() > 1e-3
        )
        top1 = (p[:, cut].argmax(-1) == q[:, cut].argmax(-1)).double().mean(1)
        assert at(readings, "top1")[band].value == pytest.approx(top1.mean().item(), abs=0.006)
        paired = (ours - theirs)[:, cut].mean(1)
        ratio = at(readings, "perplexity_ratio")[band]
        assert ratio.value == pytest.approx(paired.mean().exp().item(), rel=1e-4)
        assert ratio.stderr == pytest.approx(
            (paired.mean().exp() * paired.std() / math.sqrt(3)).item(), rel=1e-2
        )


# --- what is not defined, and what is refused ---


def test_softmax_ends_with_its_positions_and_a_state_of_fixed_size_reads_on(teacher, folder, tmp_path):
    edges = (0, 128, 256, 512)
    softmax = at(measured(perplexity_by_position, opened(teacher), folder, tmp_path, positions=edges))
    assert softmax["128-256"].value and softmax["256-512"].value is None and softmax["all"].value is None
    assert softmax["256-512"].why == "softmax attention, made for 256 positions"
    with pytest.warns(UserWarning, match="are more than the 256"):
        lolcats = at(
            measured(perplexity_by_position, opened(teacher, "lolcats"), folder, tmp_path, positions=edges)
        )
    assert all(r.value and not r.why for r in lolcats.values())
    beside = at(
        measured(agreement, opened(teacher, "lizard"), folder, tmp_path, teacher, positions=edges), "kl"
    )
    assert beside["128-256"].value and beside["256-512"].why == softmax["256-512"].why


def test_the_limit_of_a_model_is_that_of_its_softmax_layers_and_learnt_positions(teacher):
    from relinear.linearize.loading import load_teacher

    assert limit_of(opened(teacher, "lizard")).tokens is None
    hybrid = linearize(load_teacher(teacher, torch.float32), "lizard", keep_softmax_layers=[1])
    assert limit_of(hybrid) == (256, "layers of softmax attention, made for 256 positions")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=32, n_embd=12, n_layer=1, n_head=2))
    assert limit_of(linearize(gpt2, "hedgehog")) == (32, "the model learned 32 positions")


def test_nothing_is_read_where_nothing_is_defined(teacher, folder, tmp_path):
    readings = measured(perplexity_by_position, opened(teacher), folder, tmp_path, positions=(0, 512))
    assert [r.value for r in readings] == [None, None] and (tmp_path / "items.jsonl").read_text() == ""


def test_documents_shorter_than_the_positions_are_refused_before_the_model_is_asked(folder, tmp_path):
    class Unasked(torch.nn.Module):
        config = GPT2Config(n_positions=10**6)
        base_model = None

    with pytest.raises(
        UserError, match=r"document \d \(smoke\) has \d+ tokens; positions up to 100000 asked for"
    ):
        measured(perplexity_by_position, Unasked(), folder, tmp_path, positions=(0, 100000))
    with pytest.raises(
        UserError, match="holds no whole documents; possible: data of data.yaml with make: documents"
    ):
        measured(perplexity_by_position, Unasked(), tmp_path, tmp_path)


@pytest.mark.parametrize("positions", [(0,), (1, 64), (0, 64, 64), (0, 128, 64)])
def test_edges_that_are_no_bands_are_refused(positions):
    with pytest.raises(ValueError, match="positions are the edges of bands"):
        agreement.Options(positions=positions)


def test_an_error_over_documents_needs_two(folder, teacher, tmp_path):
    with pytest.raises(ValueError, match="needs at least 2"):
        perplexity_by_position.Options(documents=1)


def test_a_loss_that_is_not_finite_is_located(teacher, folder, tmp_path):
    model = opened(teacher)
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(
        FloatingPointError,
        match=r"got loss nan at positions 0 to 63 of document 0 \(smoke\), from its token 0 on",
    ):
        measured(perplexity_by_position, model, folder, tmp_path)


def changed(tmp_path, file, old, new) -> Plan:
    import shutil

    workflow = shutil.copytree(ROOT / "workflow", tmp_path / "workflow")
    text = (workflow / file).read_text()
    assert old in text
    (workflow / file).write_text(text.replace(old, new))
    return Plan(scale="smoke", workflow=workflow)


def test_positions_beyond_the_documents_are_refused_by_the_plan(tmp_path):
    plan = changed(tmp_path, "scales/smoke.yaml", "[0, 64, 128, 256, 512, 1024]", "[0, 64, 4096]")
    with pytest.raises(
        ConfigError,
        match=(
            "positions up to 4096 asked for; documents of 'story-documents' have at least 2048 tokens."
            " Possible"
        ),
    ):
        plan.check()


@pytest.mark.parametrize(
    ("run", "metric", "options", "named"),
    [
        (
            "teacher",
            "needle",
            "lengths: [4096, 8192]",
            ["lengths 4096, 8192", "'tiny' reads 2048 positions", "up to 2048, or `without: [far]`"],
        ),
        ("teacher_lora", "passkey_example", "length: 4096", ["length 4096", "2048 positions"]),
        ("teacher", "ppl", "positions: [0, 4096]", ["positions 4096", "2048 positions"]),
        (
            "teacher",
            "haystack",
            "contexts: [4096]",
            ["contexts 4096", "2048 positions", "rope_scaling: default, linear:<factor> or yarn:<factor>"],
        ),
        (
            "teacher",
            "haystack",
            'contexts: [2048, 8192], rope_scaling: "yarn:2"',
            ["contexts 2048, 8192", "2048 positions, which yarn:2 makes 4096"],
        ),
        (
            "lizard",
            "haystack",
            "rope_scaling: default",
            ["'default' is for softmax attention", "'lizard' is 'lizard'", "a measure without it"],
        ),
        ("teacher", "haystack", "contexts: [4096], rope_scaling: default", []),
        ("teacher", "haystack", "contexts: [2048, 4096]", []),
        ("lizard", "needle", "lengths: [4096, 8192]", []),
    ],
)
def test_lengths_that_softmax_attention_cannot_read_are_refused_where_they_are_asked_for(
    tmp_path, run, metric, options, named
):
    data = {"ppl": "novels", "haystack": "haystack"}.get(metric, "alpaca")
    entry = (
        f"far: {{metric: {metric.replace('ppl', 'perplexity_by_position')}, data: {data}, options:"
        f" {{{options}}}}}"
    )
    plan = changed(tmp_path, "measures.yaml", "kv_recall: {", f"{entry}\nkv_recall: {{")
    plan.node("measure", run, "perplexity")
    if not named:
        plan.node("measure", run, "far")
        return
    with pytest.raises(ConfigError) as error:
        plan.node("measure", run, "far")
    assert all(part in str(error.value) for part in [f"measure {run} far: ", *named]), error.value


def test_data_that_are_no_documents_are_refused_by_the_plan(tmp_path):
    entry = "ppl_novels: {metric: perplexity_by_position, data: "
    plan = changed(tmp_path, "measures.yaml", f"{entry}novels", f"{entry}alpaca")
    with pytest.raises(
        ConfigError,
        match="reads whole documents, and its data, 'stories', are none; possible: novels, other-novels,",
    ):
        plan.check()
    smoke = Plan(scale="smoke")
    with pytest.raises(ConfigError, match="'recall-smoke', are none"):
        smoke.check_processes(Node("measure", "recall_softmax", "ppl_novels"), 1)


def test_names_of_options_are_found_in_the_file_that_both_metrics_share():
    for metric in ("agreement", "perplexity_by_position"):
        assert option_names(ROOT / f"src/relinear/measure/{metric}.py") == (
            "positions",
            "documents",
            "excerpts",
            "piece",
            "batch_size",
        )


# --- in the suite ---


def test_both_are_measured_at_smoke_of_the_teacher_and_of_a_method(tmp_path):
    plan = Plan(scale="smoke", results=tmp_path)
    for run in ("teacher", "lolcats_window"):
        for measure in ("ppl_novels", "agreement_novels"):
            folder = made(plan, f"measure {run} {measure}")
            found = json.loads((folder / "metrics.json").read_text())["readings"]
            bands = {"0-64", "64-128", "128-256", "256-512", "512-1024"}
            assert {r["at"]["position"] for r in found if r["at"]} == bands and not any(
                "why" in r for r in found
            )
            assert len((folder / "items.jsonl").read_text().splitlines()) == 2


def test_what_is_not_defined_says_why_on_disk_in_a_cell_and_under_a_curve(tmp_path):
    undefined = Reading(
        "perplexity",
        "text",
        {"position": "256-512"},
        None,
        None,
        0,
        "softmax attention, made for 256 positions",
    )
    assert (
        plain([undefined, reading("perplexity", 2.0)])[0]["why"]
        and "why" not in plain([reading("perplexity", 2.0)])[0]
    )
    ours = [
        reading("perplexity", value, position=band)
        for band, value in (("64-128", 5.0), ("256-512", 6.0), ("0-64", 9.0))
    ]
    found = {
        ("lizard", "ppl"): measurement("lizard", "ppl", *ours),
        ("teacher", "ppl"): measurement("teacher", "ppl", *ours[:1], undefined),
    }
    panels = [{"measure": "ppl", "metric": "perplexity", "x": "position", "marks": {"window": 128}}]
    series = [{"title": "Lizard", "run": "lizard"}, {"title": "teacher", "run": "teacher"}]
    claims = [
        {
            "claim": "c",
            "source": "s",
            "column": "perplexity",
            "op": "<",
            "left": {"row": "lizard", "at": {"position": "256-512"}},
            "right": {"row": "teacher", "at": {"position": "256-512"}},
        }
    ]
    figure = read(paper(tmp_path, stem="figure1", draw="curves", panels=panels, series=series, claims=claims))
    assert list(points_of(frame_of(found), figure.spec.series[0], figure.spec.panels[0], found)["x"]) == [
        "0-64",
        "64-128",
        "256-512",
    ]
    assert [place(x) for x in ("0-64", "64-128", "64-", "a", 7)] == [32, 96, "64-", "a", 7]
    make(figure, found, About("mini", "SmolLM2"), tmp_path / "figure")
    column = {"name": "far", "measure": "ppl", "metric": "perplexity", "at": {"position": "256-512"}}
    claim = {"claim": "c", "source": "s", "left": "lizard", "right": "teacher", "column": "far", "op": "<"}
    table = read(
        paper(
            tmp_path,
            stem="table1",
            columns=[column],
            rows=[{"run": "lizard"}, {"run": "teacher"}],
            claims=[claim],
        )
    )
    make(table, found, About("mini", "SmolLM2"), tmp_path / "table")
    csv, claims = ((tmp_path / f"table/table1.{suffix}").read_text() for suffix in ("csv", "claims.csv"))
    assert (
        "not defined: softmax attention, made for 256 positions" in csv
        and "not defined: softmax" in (tmp_path / "table/table1.md").read_text()
    )
    assert "teacher: far is not defined: softmax attention, made for 256 positions" in claims


# --- perplexity over windows: its value, its error and its refusals ---

VOCAB, SEQ = 50, 16


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (5 * SEQ + 7,), generator=torch.Generator().manual_seed(1))


def window_losses(model, tokens) -> torch.Tensor:
    rows = tokens[: len(tokens) // SEQ * SEQ].view(-1, 1, SEQ)
    return torch.stack([model(row, labels=row).loss for row in rows]).double().detach()


def test_a_model_that_knows_nothing_scores_the_vocabulary(model, tokens):
    model.lm_head.weight.data.zero_()
    result = perplexity(model, tokens, tokens, seq_len=SEQ, batch_size=2)
    assert result["value"] == pytest.approx(VOCAB) and result["chunk_mean_exp"] == pytest.approx(VOCAB)
    assert result["stderr"] == pytest.approx(0, abs=1e-4)


def test_windows_of_equal_length_have_the_textbook_mean_and_error(model, tokens):
    losses = window_losses(model, tokens)
    result = perplexity(model, tokens, tokens, seq_len=SEQ, batch_size=2)
    assert result["tokens"] == 5 * (SEQ - 1)
    assert result["value"] == pytest.approx(losses.mean().exp().item(), rel=1e-5)
    assert result["stderr"] == pytest.approx(
        (losses.mean().exp() * losses.std() / math.sqrt(5)).item(), rel=1e-4
    )
    assert result["chunk_mean_exp"] == pytest.approx(losses.exp().mean().item(), rel=1e-5)
    assert result["chunk_mean_exp"] > result["value"]


def test_every_token_counts_the_same_when_windows_differ(model, tokens):
    labels = tokens.clone()
    labels[: SEQ - 2] = labels[2 * SEQ : 3 * SEQ] = -100  # window 0 keeps two labels, window 2 none
    result = perplexity(model, tokens, labels, seq_len=SEQ, batch_size=3)
    rows, targets = tokens[: 5 * SEQ].view(5, SEQ), labels[: 5 * SEQ].view(5, SEQ)
    loss = torch.nn.functional.cross_entropy(
        model(rows).logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
    )
    assert result["tokens"] == 2 + 3 * (SEQ - 1)
    assert result["value"] == pytest.approx(loss.exp().item(), rel=1e-5)


def test_the_error_covers_the_spread_of_repeated_texts(model):
    draws = torch.randint(VOCAB, (150, 12 * SEQ), generator=torch.Generator().manual_seed(2))
    results = [perplexity(model, draw, draw, seq_len=SEQ, batch_size=12) for draw in draws]
    spread = torch.tensor([result["value"] for result in results]).std().item()
    assert torch.tensor([result["stderr"] for result in results]).mean().item() == pytest.approx(
        spread, rel=0.25
    )


def test_the_batch_size_changes_nothing(model, tokens):
    one, many = (perplexity(model, tokens, tokens, seq_len=SEQ, batch_size=size) for size in (1, 4))
    assert one == pytest.approx(many, rel=1e-6)


def test_a_nan_is_located(model, tokens):
    model.model.embed_tokens.weight.data[7] = float("nan")
    tokens[tokens == 7] = 8
    tokens[3 * SEQ + 2] = 7
    with pytest.raises(FloatingPointError, match=r"window 3 of 5 \(tokens 48 to 63\)"):
        perplexity(model, tokens, tokens, seq_len=SEQ, batch_size=2)


@pytest.mark.parametrize("length, seq_len", [(2 * SEQ - 1, SEQ), (SEQ, 1)])
def test_too_little_text_is_refused(model, length, seq_len):
    tokens = torch.zeros(length, dtype=torch.long)
    with pytest.raises(ValueError, match=f"got {length} tokens for windows of seq_len={seq_len}"):
        perplexity(model, tokens, tokens, seq_len=seq_len, batch_size=1)


def test_text_without_labels_is_refused(model, tokens):
    with pytest.raises(ValueError, match="all 80 labels are -100"):
        perplexity(model, tokens, torch.full_like(tokens, -100), seq_len=SEQ, batch_size=1)
