"""Tasks with labels: their data, the head, the training, and the scores."""

import csv
import io
import json
import math

import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import made
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.metrics import matthews_corrcoef
from synthetic import measurement, reading
from test_stage import Mirror
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from relinear import load_run
from relinear.draw.paired import minus, pulls_of
from relinear.draw.planned import draw_planned
from relinear.errors import UserError
from relinear.families import load as family
from relinear.families.bert import byte_tokenizer
from relinear.get import acceptability, images
from relinear.get.labelled import Example, _neighbours, build, examples
from relinear.get.labels import Labelled
from relinear.get.text import Document
from relinear.linearize.head import Classifier, Head, last_head
from relinear.linearize.model import linearize
from relinear.measure import task_score
from relinear.plan.job import Job, Link
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError, parse
from relinear.stages._stage import Node
from relinear.stages.labelled import Options
from relinear.tracking import live as tracking
from relinear.train import classify

TOKENIZER = byte_tokenizer()
TOKENIZER.model_max_length = 256
SMOKE = {
    "source": "smoke",
    "form": "smoke",
    "classes": 2,
    "scores": ["accuracy", "matthews"],
    "validation": 16,
    "train": 64,
    "test": 32,
}


def settings(**given):
    return Options(**{**SMOKE, **given}).model_dump(mode="json")


def built(out, given=None, **more):
    chosen = settings(**more)
    facts = build(out, TOKENIZER, examples(chosen, None) if given is None else given, chosen)
    (out / "metrics.json").write_text(json.dumps(facts))
    return out


def texts(n, split="heldout", label=lambda i: i % 2):
    return [Example(split, float(label(i)), f"text number {i}.") for i in range(n)]


# --- data ---


def test_no_text_is_in_two_splits_and_validation_ends_the_training_split(tmp_path):
    folder = built(tmp_path)
    train, test = Labelled(folder, "train", 256), Labelled(folder, "heldout", 256)
    assert (len(train), len(test), train.validation) == (80, 32, 16)
    rows = [
        tuple(tokens[mask].tolist())
        for text in (train, test)
        for tokens, mask, _ in [(x[0] for x in text.batch([i])) for i in range(len(text))]
    ]
    assert len(set(rows)) == 112
    assert set(train.labels_of(range(80)).tolist()) == {0, 1}


def test_a_source_with_a_validation_split_alone_is_cut_by_hash(tmp_path):
    folder = built(tmp_path, texts(50), train=None, test=20, validation=5)
    assert (len(Labelled(folder, "train", 99)), len(Labelled(folder, "heldout", 99))) == (30, 20)
    other = built(tmp_path / "other", reversed(texts(50)), train=None, test=20, validation=5)
    assert np.array_equal(np.load(folder / "heldout_tokens.npy"), np.load(other / "heldout_tokens.npy")), (
        "whatever the order in which they come"
    )


def test_pairs_of_neighbours_use_no_sentence_twice():
    found = list(_neighbours([Document(f"First {i}. Second {i}. Third.") for i in range(10)], numbers=False))
    assert [(e.label, e.first, e.second) for e in found[:2]] == [
        (1.0, "First 0.", "Second 0."),
        (0.0, "First 1.", "Second 2."),
    ]
    assert len(found) == 6 and len({text for e in found for text in e[2:]}) == 12
    numbers = list(_neighbours([Document("One two three. Two three four. Five.")] * 3, numbers=True))
    assert numbers[0].label == pytest.approx(5 * 2 / 4), "words in common, as a share of all"


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        (texts(50, label=lambda i: i % 3), {}, r"label 2.0 of 'text.*possible: 0 to 1"),
        (texts(50, label=lambda i: -1), {}, r"label -1.0"),  # as GLUE's test sets have it
        (
            texts(50, label=lambda i: math.nan),
            {"classes": 0, "scores": ["correlation"]},
            "label nan.*possible: finite numbers",
        ),
        (
            texts(50, label=lambda i: 1),
            {"train": None, "test": 20, "validation": 5},
            "train: all 30 labels are 1.0",
        ),
        (texts(90, "train"), {"test": None}, "heldout: 1 labelled texts asked for, 0 got"),
        (texts(50), {}, "train: 80 labelled texts asked for, 18 got"),
    ],
)
def test_labels_and_splits_that_are_no_task(tmp_path, given, more, said):
    with pytest.raises(UserError, match=said):
        built(tmp_path, given, **more)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"classes": 3, "scores": ["f1"]}, "no score 'f1' of labels of 3 classes; possible: accuracy"),
        ({"classes": 0}, "no score 'accuracy' of labels of no classes; possible: correlation"),
        (
            {"classes": 2, "scores": ["correlation"]},
            "no score 'correlation'.*possible: accuracy, f1, matthews",
        ),
        ({"classes": 1}, "two classes or more"),
        ({"form": "glue"}, "give a `task`"),
    ],
)
def test_scores_that_do_not_fit_their_labels(given, said):
    with pytest.raises(ConfigError, match=said):
        parse(Options, {**SMOKE, **given}, "data.yaml: x")


def test_sentences_with_an_error_differ_from_those_without_in_the_error_alone(tmp_path):
    line = "\tHe/pps sees/vbz the/at old/jj house/nn in/in the/at town/nn ./.\n"
    (tmp_path / "ca01").write_text("".join(line.replace("house", f"h{'o' * i}use") for i in range(60)))
    found = list(acceptability.sentences(tmp_path, 5, 20))
    right, wrong = ([text for _, label, text in found if label is kind] for kind in (1, 0))
    assert len(found) == 60 and 5 < len(wrong) < 35
    assert all(text.startswith("he sees the old h") and text.endswith("use in the town.") for text in right)
    assert all(text.endswith(".") and text == text.lower() and text not in right for text in wrong)
    assert len({len(text.split()) for text in wrong}) > 1, "words are lost, swapped and changed"
    assert found == list(acceptability.sentences(tmp_path, 5, 20))


# --- head ---


def encoder(method=None):
    torch.manual_seed(0)
    model, _ = family("bert").random({}, 0, torch.float32)
    return model if method is None else linearize(model, method)


@pytest.mark.parametrize("pool", ["first", "mean"])
@pytest.mark.parametrize("method", [None, "hedgehog"])
def test_padding_leaves_no_trace(tmp_path, method, pool):
    text = Labelled(built(tmp_path), "heldout", 256)
    model = Classifier(encoder(method), Head(48, 2, pool)).eval()
    with torch.no_grad():
        alone = torch.cat([model(*text.batch([i])) for i in range(6)])
        padded = model(*text.batch(range(6), width=200))
    assert torch.allclose(alone, padded, atol=1e-6)
    assert alone.std(0).min() > 1e-4, "texts are told apart"


def test_a_head_comes_back_as_it_was(tmp_path):
    for name, pool in (("a", "first"), ("b", "mean")):
        (tmp_path / name).mkdir()
        torch.manual_seed(len(pool))
        Head(8, 3, pool).save(tmp_path / name)
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    found = last_head([tmp_path / "a", tmp_path / "b", tmp_path])
    torch.manual_seed(len("mean"))
    assert torch.equal(found(x, mask), Head(8, 3, "mean")(x, mask))
    assert last_head([tmp_path]) is None


# --- training ---


def job(tmp_path, data, **recipe):
    for name in ("out", "work"):
        (tmp_path / name).mkdir(exist_ok=True)
    full = {
        "data": "x",
        "lr": 2e-3,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "warmup_ratio": 0.1,
        "min_lr_ratio": 0.0,
        "clip": 1.0,
        "pool": "first",
        "patience": None,
        **recipe,
    }
    budget = {"epochs": 6, "seq_len": 128, "batch_size": 8, "accumulate": 1, "lr_floor": 0.0}
    return Job(
        "job",
        {"recipe": full, "budget": budget, "data": "labels"},
        {"text": data},
        tmp_path / "out",
        tmp_path / "work",
        checkpoint_seconds=1e9,
    )


def easy(classes):
    """Texts whose first letters say their label."""
    words = ("aaaa", "zzzz")
    label = (lambda i: float(i % 2)) if classes else (lambda i: 2.0 * (i % 2) - 1.0)
    return [Example("heldout", label(i), f"{words[i % 2]} {i}") for i in range(120)]


@pytest.mark.parametrize("classes", [2, 0])
def test_a_task_is_learned_and_scored(tmp_path, classes):
    more = {
        "classes": classes,
        "scores": ["accuracy" if classes else "correlation"],
        "train": 64,
        "validation": 16,
        "test": 40,
    }
    data = built(tmp_path, easy(classes), **more)
    torch.manual_seed(0)
    given, text, model = job(tmp_path, data), Labelled(data, "train", 128), encoder()
    classifier = Classifier(model, classify.head_of(given, model, text))
    metrics = classify.fit(given, classifier, text, "cpu")
    assert metrics["last_loss"] < 0.4 * metrics["first_loss"] and metrics["validation_loss"] < 0.4
    classifier.head.save(tmp_path / "out")
    given.links = (Link("softmax", {}, (tmp_path / "out",)),)
    readings = {
        r.metric: r
        for r in task_score.measure(model, data, task_score.Options(seq_len=128, batch_size=16), given)
    }
    score = more["scores"][0]
    assert readings[score].value > 0.9 and readings[score].n == 40
    assert readings["score"]._replace(metric=score) == readings[score] and readings["floor"].value < 0.7
    item = json.loads((tmp_path / "out/items.jsonl").read_text().splitlines()[0])
    assert item["pulls"].keys() == {"score", score}


def test_the_weights_of_the_lowest_validation_loss_are_kept(tmp_path):
    noise = [Example("heldout", float(i * 7919 % 13 < 6), f"{i * 104729 % 997}") for i in range(120)]
    data = built(tmp_path, noise, train=64, validation=16, test=40)
    given, text, model = job(tmp_path, data, patience=1, lr=5e-3), Labelled(data, "train", 128), encoder()
    classifier = Classifier(model, classify.head_of(given, model, text))
    metrics = classify.fit(given, classifier, text, "cpu")
    assert metrics["epoch"] < 6 and metrics["steps"] == 8 * (metrics["epoch"] + 1), (
        "noise is learned by heart, and the training ends one epoch later"
    )
    assert (given.work / "best.safetensors").is_file()


def test_a_head_of_other_classes_is_refused(tmp_path):
    data = built(tmp_path)
    Head(48, 3).save(tmp_path)
    given = job(tmp_path, data)
    given.links = (Link("softmax", {}, (tmp_path,)),)
    with pytest.raises(UserError, match="head has 3 outputs.*the task has 2"):
        classify.head_of(given, encoder(), Labelled(data, "train", 128))
    with pytest.raises(UserError, match="needs a head of 2 outputs; got one of 3"):
        list(task_score.measure(encoder(), data, task_score.Options(seq_len=128, batch_size=16), given))


# --- scores ---


def test_scores_and_their_errors():
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=400)
    answers = np.where(rng.random(400) < 0.8, labels, 1 - labels)
    error = {
        score: float(np.sqrt((task_score.pulls(score, labels, answers) ** 2).sum()))
        for score in ("accuracy", "matthews", "f1")
    }
    right = labels == answers
    assert error["accuracy"] == pytest.approx(right.std(ddof=1) / 20)
    drawn = [rng.integers(400, size=400) for _ in range(400)]
    assert error["matthews"] == pytest.approx(
        np.std([matthews_corrcoef(labels[d], answers[d]) for d in drawn]), rel=0.2
    )
    assert task_score.floor("matthews", labels, 2) == 0 and task_score.floor("accuracy", labels, 2) == max(
        labels.mean(), 1 - labels.mean()
    )
    assert task_score.floor("f1", labels, 2) == pytest.approx(2 * labels.mean() / (1 + labels.mean()))


def test_the_score_of_numbers():
    labels = np.array([0.0, 1.0, 2.0, 3.0, 5.0])
    assert task_score.correlation(labels, 2 * labels + 1) == pytest.approx(1)
    assert task_score.correlation(labels, np.exp(labels)) == pytest.approx(
        (np.corrcoef(labels, np.exp(labels))[0, 1] + 1) / 2
    )
    assert task_score.correlation(labels, np.ones(5)) == 0


# --- pictures ---

COLOURS = {
    "source": "imagenet-1k",
    "side": 8,
    "channels": 3,
    "validation": 1,
    "train": None,
    "test": None,
    "classes": 1000,
    "scores": ["accuracy"],
}
DIGITS = COLOURS | {
    "source": "digits",
    "channels": 1,
    "classes": 10,
    "validation": 16,
    "train": 64,
    "test": 32,
}


def of_pictures(out, given, folder=None):
    """The rows of each split, with their classes, and the facts."""
    out.mkdir()
    facts = images.work(
        Job("pictures", given, {}, out, out, assets={given["source"]: folder} if folder else {})
    )
    (out / "metrics.json").write_text(json.dumps(facts))
    read = {
        split: Labelled(out, split, given["side"] ** 2 * given["channels"]) for split in ("train", "heldout")
    }
    return {
        split: (text.batch(range(len(text)))[0].numpy(), text.labels) for split, text in read.items()
    }, facts


def hub_table(folder, split, pictures):
    """A table of pictures as the hub keeps ImageNet-1k."""
    rows = []
    for label, (picture, form) in enumerate(pictures):
        picture.save(data := io.BytesIO(), form)
        rows.append({"image": {"bytes": data.getvalue(), "path": f"{label}.{form}"}, "label": label})
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet"
    )


def test_pictures_of_a_source_are_each_in_one_split_with_their_class(tmp_path):
    found, facts = of_pictures(tmp_path / "a", DIGITS)
    assert {split: len(labels) for split, (_, labels) in found.items()} == {"train": 64 + 16, "heldout": 32}
    assert (facts["classes"], facts["validation"], facts["train"]["tokens"]) == (10, 16, 80 * 64)
    known = {
        image.astype(np.uint8).tobytes(): label
        for image, label in zip(*load_digits(return_X_y=True), strict=True)
    }
    rows = [
        (np.rint(row * 16 / 255).astype(np.uint8).tobytes(), label)
        for split in found.values()
        for row, label in zip(*split, strict=True)
    ]
    assert len(dict(rows)) == 112 and all(known[row] == label for row, label in rows)
    again, same = of_pictures(tmp_path / "b", DIGITS)
    assert facts == same and all(np.array_equal(again[s][0], found[s][0]) for s in found)
    with pytest.raises(UserError, match=r"2016 pictures of train asked for, 1437 got"):
        of_pictures(tmp_path / "c", DIGITS | {"train": 2000})


def test_pictures_of_the_hub_are_stretched_to_a_square_their_channels_side_by_side(tmp_path):
    rng = np.random.default_rng(0)
    square, wide, gray = (
        Image.fromarray(rng.integers(256, size=size, dtype=np.uint8))
        for size in ((8, 8, 3), (20, 30, 3), (9, 5))
    )
    hub_table(tmp_path / "hub", "train", [(square, "png"), (wide, "png")])
    hub_table(tmp_path / "hub", "validation", [(gray, "png"), (wide, "jpeg")])
    found, _ = of_pictures(tmp_path / "a", COLOURS, tmp_path / "hub")
    train, heldout = (
        dict(zip(found[split][1].tolist(), found[split][0], strict=True)) for split in ("train", "heldout")
    )
    assert np.array_equal(train[0].reshape(8, 8, 3), np.asarray(square)), (
        "a picture of the right size is as it was"
    )
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, do_normalize=False, do_rescale=False)
    theirs = processor(wide, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    assert np.array_equal(train[1].reshape(8, 8, 3), theirs), "as the checkpoint's own processor"
    assert (np.ptp(heldout[0].reshape(64, 3), axis=1) == 0).all() and abs(
        heldout[1] - train[1]
    ).mean() < 40, "gray has three equal channels"
    with pytest.raises(UserError, match="must hold validation-"):
        of_pictures(tmp_path / "b", COLOURS, tmp_path / "a")
    with pytest.raises(UserError, match="a picture of class 1; possible: 0 to 0"):
        of_pictures(tmp_path / "c", COLOURS | {"classes": 1}, tmp_path / "hub")


def test_every_model_of_pictures_reads_its_own():
    plan = Plan(scale="smoke")
    for model in filter(plan.scaled.sees, plan.models):
        entry = plan.models[model]
        assert entry.positions == plan.scaled.sequence(entry.data)
        sizes = entry.options and [entry.options[name] for name in ("image_size", "classes")]
        assert sizes == {} or sizes == [plan.data[entry.data].options[name] for name in ("side", "classes")]


def test_a_model_from_scratch_learns_its_pictures_first_and_a_checkpoint_does_not(tmp_path):
    plans = {scale: Plan(scale=scale, results=tmp_path) for scale in ("paper", "mini")}
    steps = {
        scale: [str(s) for link in plan.chain("vit_hedgehog") for s in link.steps]
        for scale, plan in plans.items()
    }
    own = ["distill vit_hedgehog", "classify vit_hedgehog"]
    assert steps == {"paper": own, "mini": ["classify vit_softmax", *own]}
    with pytest.raises(ConfigError, match="'vit_softmax' has no step 'classify'"):
        plans["paper"].node("classify", "vit_softmax")
    given = plans["paper"].settings(Node("distill", "vit_hedgehog"))
    assert (given["recipe"]["lr"], given["recipe"]["loss"]) == (1e-2, "cross_entropy")
    assert [given["budget"][name] for name in ("epochs", "seq_len", "batch_size", "accumulate")] == [
        2,
        224 * 224 * 3,
        32,
        1,
    ]
    given = plans["paper"].settings(Node("classify", "vit_hedgehog"))
    assert (given["recipe"]["lr"], given["budget"]["epochs"], given["links"][0]["method"]) == (
        1e-3,
        10,
        "hedgehog",
    )


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("measure vit_hedgehog fidelity", "fidelity reads texts, and 'vit-digits' is a model of pictures"),
        (
            "measure cola_softmax imagenet",
            "recognition reads pictures, and 'tiny-bert' reads none; possible: runs of vit-base",
        ),
    ],
)
def test_what_reads_no_pictures_is_not_asked_of_them(node, said):
    plan = Plan(scale="smoke")
    with pytest.raises(ConfigError, match=said):
        plan.check_processes(plan.node(*node.split()), 1)


def test_a_converted_vit_goes_on_from_its_teacher_and_stands_in_the_table(tmp_path, monkeypatch):
    plan = Plan(scale="smoke", results=tmp_path)
    monkeypatch.setattr(tracking, "Tracker", Mirror)
    scored = made(plan, "measure vit_softmax imagenet", "measure vit_hedgehog imagenet")
    taught, converted = (
        load_file(plan.folder(plan.node("classify", run)) / "model.safetensors")
        for run in ("vit_softmax", "vit_hedgehog")
    )
    begun = load_file(plan.folder(plan.node("model", "vit-digits")) / "model.safetensors")
    moved = (
        [(converted[n] - taught[n]).abs().mean() for n in taught],
        [(converted[n] - begun[n]).abs().mean() for n in taught],
    )
    assert 0 < sum(moved[0]) < sum(moved[1]) and any(
        ".method." in name for name in converted.keys() - taught.keys()
    )
    rows = [json.loads(line) for line in (scored / "items.jsonl").read_text().splitlines()]
    readings = {
        r["metric"]: r["value"] for r in json.loads((scored / "metrics.json").read_text())["readings"]
    }
    labels = [row["label"] for row in rows]
    assert (
        readings["accuracy"] == np.mean([row["label"] == row["answer"] for row in rows]) and len(rows) == 32
    )
    assert readings["floor"] == max(labels.count(k) for k in labels) / 32
    learned = json.loads((plan.folder(plan.node("classify", "vit_softmax")) / "metrics.json").read_text())
    assert learned["last_loss"] < 0.8 * learned["first_loss"]
    assert (
        load_run(plan.root / "runs/vit_hedgehog").method_parameters().keys()
        == converted.keys() - taught.keys()
    )
    cells = {
        row["row"]: row
        for row in csv.DictReader(
            draw_planned(plan, plan.artefacts["hedgehog_table9"])[0].read_text().splitlines()
        )
    }
    assert (
        cells["vit_hedgehog"]["top1_data"] == "digit-pictures" and cells["vit_hedgehog"]["gate"] == "passed"
    )
    assert [
        cells[run]["top1"] == "not run" for run in ("vit_softmax", "vit_t2r_hedgehog", "vit_hedgehog")
    ] == [False, True, False]


# --- from labelled texts to a table ---


def test_a_converted_encoder_goes_on_with_its_head_and_stands_in_the_table(tmp_path, monkeypatch):
    plan = Plan(scale="smoke", results=tmp_path)
    monkeypatch.setattr(tracking, "Tracker", Mirror)
    scored = made(plan, "measure cola_hedgehog gate", "measure cola_hedgehog task_cola")
    taught, converted = (
        load_file(plan.folder(plan.node("classify", run)) / "head.safetensors")
        for run in ("cola_softmax", "cola_hedgehog")
    )
    torch.manual_seed(0)
    fresh = Head(48, 2).state_dict()
    moved = {
        name: ((converted[name] - taught[name]).abs().mean(), (converted[name] - fresh[name]).abs().mean())
        for name in fresh
    }
    assert 0 < moved["dense.weight"][0] < moved["dense.weight"][1], (
        "from the teacher's head on, not from one drawn anew by the same seed"
    )
    rows = [json.loads(line) for line in (scored / "items.jsonl").read_text().splitlines()]
    [reading] = [
        r for r in json.loads((scored / "metrics.json").read_text())["readings"] if r["metric"] == "accuracy"
    ]
    assert reading["value"] == np.mean([row["label"] == row["answer"] for row in rows]) and len(rows) == 32
    table = draw_planned(plan, plan.artefacts["hedgehog_table1"])[0].read_text().splitlines()
    cells = {row["run"]: row for row in csv.DictReader(table)}
    assert (cells["cola_hedgehog"]["mc"] != "not run", cells["cola_elu"]["mc"]) == (True, "not run")
    assert cells["cola_hedgehog"]["mc_data"] == "story-labels" and cells["cola_hedgehog"]["gate"] == "passed"


def test_scores_of_the_same_texts_are_compared_text_by_text(tmp_path):
    rng = np.random.default_rng(1)
    labels = rng.integers(2, size=200)
    left = np.where(rng.random(200) < 0.9, labels, 1 - labels)
    right = np.where(rng.random(200) < 0.05, 1 - left, left)  # nearly the same answers
    found = []
    for name, answers in (("left", left), ("right", right)):
        pulls, folder = task_score.pulls("matthews", labels, answers), tmp_path / name
        folder.mkdir()
        rows = [
            {"item": i, "outcome": float(labels[i] == answers[i]), "pulls": {"score": pulls[i]}}
            for i in range(200)
        ]
        (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        read = reading(
            "score", matthews_corrcoef(labels, answers), float(np.sqrt((pulls**2).sum())), 200, of="cola"
        )
        found.append(pulls_of(measurement(name, "task_cola", read, folder=folder), read))
    difference = minus(*found)
    assert found[0].items[:2] == (("cola", 0), ("cola", 1)), "of another task they are other items"
    drawn = [rng.integers(200, size=200) for _ in range(300)]
    spread = np.std(
        [matthews_corrcoef(labels[d], left[d]) - matthews_corrcoef(labels[d], right[d]) for d in drawn]
    )
    assert difference.stderr == pytest.approx(spread, rel=0.2)
    assert difference.stderr < 0.7 * math.hypot(found[0].stderr, found[1].stderr)
