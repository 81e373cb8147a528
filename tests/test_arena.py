"""Long Range Arena's tasks: expressions and their values, contours and their ends, images and bytes; the
splits; the encoder from scratch."""

import gzip
import random
from itertools import islice

import numpy as np
import pytest
import torch
from scipy.ndimage import label as components

from relinear import families
from relinear.draw.planned import draw_planned
from relinear.errors import UserError
from relinear.get import arena, bytewise, listops, matching, pathfinder, pixels
from relinear.get.arena import Example
from relinear.linearize.head import Classifier, Head, apart, last_head
from relinear.linearize.model import linearize
from relinear.plan.job import Job
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError, parse
from relinear.stages._stage import Node
from relinear.stages.arena import Options

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
DEFAULTS = {
    "source": None,
    "shortest": None,
    "side": None,
    "train": 12,
    "test": 6,
    "validation": 2,
    "classes": 10,
    "scores": ["accuracy"],
}


def of_task(task, folder=None, split="train", n=100, seed="0", **settings):
    module = {
        "listops": listops,
        "pathfinder": pathfinder,
        "pixels": pixels,
        "bytewise": bytewise,
        "matching": matching,
    }[task]
    return list(islice(module.examples(DEFAULTS | settings, folder, split, random.Random(seed)), n))


def value_of(words: list[str]) -> int:
    """An expression's value by a stack of its open operators: another way than the one it is drawn by."""
    stack: list[list] = [["whole"]]
    for word in words:
        if word.startswith("["):
            stack.append([word])
        elif word == "]":
            operator, *given = stack.pop()
            middle = sorted(given)
            n = len(middle)
            stack[-1].append({
                "[MIN": middle[0], "[MAX": middle[-1], "[SM": sum(given) % 10,
                "[MED": middle[n // 2] if n % 2 else (middle[n // 2 - 1] + middle[n // 2]) // 2,
            }[operator])  # fmt: skip
        else:
            stack[-1].append(int(word))
    [[_, value]] = stack
    return value


def test_the_value_of_an_expression_is_its_class():
    drawn = of_task("listops", shortest=30, longest=200, n=300)
    for example in drawn:
        words = [listops.WORDS[token - 1] for token in example.tokens]
        assert 30 < len(words) < 200 and words[0].startswith("[") and words[-1] == "]"
        assert value_of(words) == example.label
    assert {example.label for example in drawn} == set(range(10))
    assert {token for example in drawn for token in example.tokens} == set(range(1, 1 + listops.VOCABULARY))


def test_operators_have_two_to_ten_arguments_and_nest_to_depth_ten():
    """Depths and numbers of arguments over many expressions reach their bounds and never pass them."""
    arguments, depths = set(), set()
    for example in of_task("listops", shortest=500, longest=2000, n=40):
        counts = [0]
        for word in (listops.WORDS[token - 1] for token in example.tokens):
            if word == "]":
                arguments.add(counts.pop())
                continue
            counts[-1] += 1
            depths.add(len(counts))
            if word.startswith("["):
                counts.append(0)
    assert arguments == set(range(2, 11)) and max(depths) == 10


def bridged(contours):
    """The contours as unbroken curves, at four times the resolution, and the number of the curve that each
    pixel belongs to (0: none)."""
    image = np.zeros((4 * pathfinder.SIDE, 4 * pathfinder.SIDE), bool)
    for dashes in contours:
        corners = dashes.reshape(-1, 2)
        for start, end in zip(corners[:-1], corners[1:], strict=True):
            points = start + np.linspace(0, 1, 40)[:, None] * (end - start)
            row, column = np.rint(4 * points).astype(int).T
            image[np.clip(row, 0, len(image) - 1), np.clip(column, 0, len(image) - 1)] = True
    return components(image, np.ones((3, 3)))[0]


def test_two_discs_are_joined_exactly_where_the_class_says_so():
    """The discs lie on one curve of the drawn image, its gaps bridged, or on two that do not touch."""
    rng, touching = np.random.default_rng(0), 0
    for n in range(60):
        picture = pathfinder.draw(rng, n % 2)
        assert [len(dashes) for dashes in picture.contours[:2]] == [pathfinder.DASHES] * 2
        curves = bridged(picture.contours[:2])
        # two dashes so near each other that they touch at four times the resolution
        touching += curves.max() == 1
        first, second = (
            curves[tuple(np.clip(np.rint(4 * disc).astype(int), 0, curves.shape[0] - 1))]
            for disc in picture.discs
        )
        assert first and second
        if curves.max() == 2:
            assert (first == second) == bool(picture.connected)
        assert all(
            picture.image[tuple(np.clip(np.rint(disc).astype(int), 0, 31))] == 255 for disc in picture.discs
        )
    assert touching <= 3


def test_dashes_lie_in_the_image_and_turn_by_less_than_a_right_angle():
    picture = pathfinder.draw(np.random.default_rng(1), 1)
    for dashes in picture.contours:
        way = dashes[:, 1] - dashes[:, 0]
        assert np.allclose(np.linalg.norm(way, axis=1), pathfinder.DASH)
        assert (np.sum(way[:-1] * way[1:], 1) > 1e-9).all(), "the cosine of each turn is positive"
        assert -0.5 <= dashes.min() and dashes.max() <= pathfinder.SIDE - 0.5
    assert len(picture.contours) <= 2 + pathfinder.DISTRACTORS


def test_a_drawn_image_shows_its_dashes_and_nothing_else():
    dash = np.array([[[8.0, 4.0], [8.0, 6.0]]])
    image = pathfinder.rendered([dash], np.array([[20.0, 20.0], [28.0, 4.0]]))
    assert image[8, 4:7].min() == 255 and image[8, 2] == image[11].max() == 0
    assert image[20, 20] == image[20, 21] == 255 and image[20, 23] == 0 and 0 < image[21, 21] < 255


# --- sources ---


def idx(folder, name, header, values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(bytes(header) + values.astype(np.uint8).tobytes()))


def test_images_are_read_row_by_row_and_averaged_over_squares(tmp_path):
    images = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 251
    idx(tmp_path, "train-images-idx3-ubyte.gz", 16, images)
    idx(tmp_path, "train-labels-idx1-ubyte.gz", 8, np.array([4, 0, 9]))
    whole = of_task("pixels", tmp_path, source="fashion-mnist")
    assert sorted(example.label for example in whole) == [0, 4, 9]
    assert all(np.array_equal(e.tokens, 1 + images[[4, 0, 9].index(e.label)].ravel()) for e in whole)
    for example in of_task("pixels", tmp_path, source="fashion-mnist", side=14):
        image = images[[4, 0, 9].index(example.label)]
        assert example.tokens[15] == 1 + round(image[2:4, 2:4].mean()), "the second square of the second row"
    with pytest.raises(
        UserError, match="28 pixels a row: side 10 does not divide them; possible: 1, 2, 4, 7, 14, 28"
    ):
        of_task("pixels", tmp_path, source="fashion-mnist", side=10)
    with pytest.raises(UserError, match="must hold one t10k-images"):
        of_task("pixels", tmp_path, split="heldout", source="fashion-mnist")


@pytest.fixture
def mails(tmp_path):
    for kind in ("easy-ham-1", "spam-2"):
        for i in range(60):
            path = tmp_path / f"data/{kind}/{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(f"From: {kind}@x\r\nX: y\r\n\r\nmail {i} of {kind}\r\n\r\nbye".encode("latin-1"))
    return tmp_path


def test_a_mail_is_its_body_in_bytes_and_is_held_out_by_its_hash(mails):
    given = {"source": "spam-assassin", "longest": 14}
    train, heldout = (
        of_task("bytewise", mails, split=split, n=500, **given) for split in ("train", "heldout")
    )
    assert len(train) + len(heldout) == 120 and 2 < len(heldout) < 30
    for example in train + heldout:
        text = bytes(token - 1 for token in example.tokens).decode()
        assert text.startswith("mail ") and len(text) <= 14 and "@" not in text, "no header tells the class"
        assert ("spam"[: 14 - text.index("of") - 3] in text) == (example.label == 1)
    with pytest.raises(UserError, match="must hold mails in folders easy-ham"):
        of_task("bytewise", mails / "data/spam-2", **given)


def test_windows_are_apart_in_one_document_or_of_two_that_lie_together(tmp_path):
    """Each document repeats one character of its own, so that a window says where it is from, but for its
    place."""
    texts = {}
    for i in range(120):
        letter = chr(0x100 + i)
        document = "".join(f"{letter}{n:03d}" for n in range(60)).encode("utf-8")  # 5 bytes each
        path = tmp_path / f"dir{i % 4}/{i}.rst.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(document))
        texts[letter] = (document, i % 4)
    seen = {}
    for split in ("train", "heldout"):
        found = of_task("matching", tmp_path, split=split, n=200, source="linux-doc", longest=240)
        owners = [[_owner(bytes(t - 1 for t in part), texts) for part in (e.tokens, e.second)] for e in found]
        for example, (first, second) in zip(found, owners, strict=True):
            assert len(example.tokens) == len(example.second) == 120
            assert (first[0] == second[0]) == (example.label == 1) and texts[first[0]][1] == texts[second[0]][
                1
            ]
            assert first[0] != second[0] or abs(first[1] - second[1]) >= 120, (
                "windows of one document do not overlap"
            )
        assert 60 < sum(e.label for e in found) < 140
        seen[split] = {letter for pair in owners for letter, _ in pair}
    assert seen["train"] and seen["heldout"] and not seen["train"] & seen["heldout"]
    with pytest.raises(UserError, match="two documents of 2000 bytes that are train; lower `longest`"):
        of_task("matching", tmp_path, source="linux-doc", longest=2000)


def _owner(window, texts):
    letter = next(c for c in window.decode("utf-8", "ignore") if ord(c) >= 0x100)
    return letter, texts[letter][0].index(window)


# --- the stage ---


def made(folder, task="listops", seed=0, assets=None, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    given = (
        DEFAULTS
        | {"task": task, "longest": 64, "seed": seed}
        | ({"shortest": 10} if task == "listops" else {})
        | settings
    )
    facts = arena.work(
        Job(name=task, settings=given, parents={}, out=folder, work=folder, seed=seed, assets=assets or {})
    )
    files = {
        name: np.load(folder / f"{name}.npy")
        for split in ("train", "heldout")
        for name in (f"{split}_tokens", f"{split}_ends", f"{split}_labels")
    }
    rows = {
        s: [row.tobytes() for row in np.split(files[f"{s}_tokens"], files[f"{s}_ends"][:-1])]
        for s in ("train", "heldout")
    }
    return facts, files, rows


@pytest.mark.parametrize(("task", "longest"), [("listops", 20), ("pathfinder", 1024)])
def test_splits_share_no_sequence_and_the_test_is_one_for_all_seeds(tmp_path, task, longest):
    given = {
        "task": task,
        "longest": longest,
        **({"shortest": 1, "train": 300, "test": 100} if task == "listops" else {}),
    }
    (facts, files, rows), (again, *_), (_, other, _) = (
        made(tmp_path / name, seed=seed, **given) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert facts["train"]["texts"] == given.get("train", 12) + 2, "the last two are kept aside"
    assert facts == again, "the same seed, the same files"
    assert len(set(rows["train"] + rows["heldout"])) == facts["train"]["texts"] + facts["heldout"]["texts"]
    assert np.array_equal(files["heldout_tokens"], other["heldout_tokens"]) and not np.array_equal(
        files["train_tokens"], other["train_tokens"]
    )
    assert files["train_tokens"].min() >= 1 and files["train_tokens"].max() <= facts["vocabulary"]


def test_sequences_that_come_again_are_left_out():
    twice = [Example([1, 2], 0), Example([1, 2], 1), Example([1], 0, [2]), Example([1, 2], 0)]
    assert len(list(arena.distinct(twice, set()))) == 2, "two texts are not one of both"
    assert not list(arena.distinct(twice, {e.digest for e in twice}))


def test_fewer_sequences_than_asked_for_are_an_error(tmp_path, mails):
    with pytest.raises(
        UserError, match=r"202 sequences of train asked for, \d+ got; lower their number in data.yaml"
    ):
        made(
            tmp_path / "out",
            "bytewise",
            source="spam-assassin",
            train=200,
            test=2,
            assets={"spam-assassin": mails},
        )


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (
            {"task": "listops", "longest": 64, "shortest": 10, "source": "imdb"},
            "takes the source none: it is drawn; got 'imdb'",
        ),
        ({"task": "bytewise", "longest": 64}, "takes the source spam-assassin or imdb; got None"),
        ({"task": "listops", "longest": 64}, "`shortest` goes with task listops"),
        ({"task": "listops", "longest": 11, "shortest": 10}, "more than `shortest` and fewer than `longest`"),
        ({"task": "pathfinder", "longest": 100}, "have 1024 pixels; got `longest` 100"),
        ({"task": "pixels", "source": "fashion-mnist", "side": 14, "longest": 100}, "have 196 pixels"),
        ({"task": "matching", "source": "linux-doc", "longest": 5}, "must be even; got 5"),
        (
            {"task": "pathfinder", "longest": 1024, "train": None},
            "say how many sequences of pathfinder are drawn",
        ),
    ],
)
def test_data_that_cannot_be_made_are_refused_before_any_work(entry, error):
    with pytest.raises(ConfigError, match=error):
        parse(Options, {"train": 4, "test": 2, "validation": 1} | entry, "data.yaml: x")


def test_every_model_reads_its_task():
    plan = Plan("smoke")
    for name, model in plan.models.items():
        if name.startswith("lra-"):
            data = plan.data[model.data].options
            own = __import__(f"relinear.get.{data['task']}", fromlist=["VOCABULARY"])
            assert model.options["vocabulary"] == own.VOCABULARY + 1 and data["classes"] >= 2
            assert model.positions == model.options["positions"] == data["longest"]
    node = Node("arena", "mails")
    assert (
        plan.settings(node)["train"] is None
        and plan.node(*node) == node
        and list(plan.settings(node)["assets"]) == ["spam-assassin"]
    )


# --- the encoder ---


def test_the_encoder_has_the_sizes_of_nystromformers_and_normalises_first():
    model, _ = families.load("prenorm").random({"vocabulary": 16, "positions": 50}, 0, torch.float32)
    assert families.load("prenorm").positions(model) == 50
    config = model.config
    sizes = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
    )
    assert sizes == (2, 64, 2, 128)
    with torch.no_grad():
        for module in model.encoder.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.zero_()
                module.bias.zero_()
        tokens = torch.arange(1, 9)[None]
        assert torch.allclose(model(tokens)[0], model.LayerNorm(model.embeddings(tokens))), (
            "nothing but what is added stands between"
        )


# --- two texts apart ---


def pair_of(first, second, width):
    """A pair as `Padded.batch` gives it: tokens, mask and types ``[1, width]``."""
    tokens, types = (torch.zeros(1, width, dtype=torch.long) for _ in range(2))
    tokens[0, : len(first) + len(second)] = torch.tensor([*first, *second])
    types[0, len(first) : len(first) + len(second)] = 1
    return tokens, tokens > 0, types


def test_the_texts_of_a_pair_become_rows_of_their_own():
    pairs = [pair_of([1, 2, 3], [4], 8), pair_of([5], [6, 7, 8, 9], 8)]
    tokens, mask = apart(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))
    assert tokens.tolist() == [[1, 2, 3, 0], [5, 0, 0, 0], [4, 0, 0, 0], [6, 7, 8, 9]]
    assert torch.equal(mask, tokens > 0)


def test_what_is_said_of_a_pair_is_of_both_means_and_padding_leaves_no_trace(tmp_path):
    model, _ = families.load("prenorm").random(
        {"vocabulary": 16, "positions": 50, "initializer_range": 0.3}, 0, torch.float32
    )
    torch.manual_seed(0)
    head = Head(64, 2, "pair").eval()
    head.save(tmp_path)
    classifier = Classifier(linearize(model, "hedgehog"), last_head([tmp_path])).eval()
    with torch.no_grad():
        answer = classifier(*pair_of([3, 4, 5], [6, 7], 8))
        means = [classifier.encoder(torch.tensor([text]))[0].mean(1) for text in ([3, 4, 5], [6, 7])]
        seen = torch.cat([*means, means[0] * means[1], means[0] - means[1]], -1)
        assert torch.allclose(answer, head.out(torch.tanh(head.dense(seen))), atol=1e-5)
        assert torch.allclose(answer, classifier(*pair_of([3, 4, 5], [6, 7], 40)), atol=1e-5)
        assert not torch.allclose(answer, classifier(*pair_of([6, 7], [3, 4, 5], 8)), atol=1e-5)


# --- the tables ---


def test_a_column_names_the_data_that_its_own_model_reads_and_all_published_rows_stand_there(tmp_path):
    plan = Plan("smollm2", results=tmp_path)
    artefact = plan.artefacts["hedgehog_table6"]
    page = next(path for path in draw_planned(plan, artefact) if path.suffix == ".md").read_text()
    for title in (
        "ListOps (listops)",
        "Text (mails)",
        "Retrieval (kernel-pairs)",
        "Image (fashion-mnist)",
        "Pathfinder (pathfinder-few)",
    ):
        assert title in page
    published = [
        entry.values for line in artefact.spec.lines if (entry := artefact.spec.published(line.name))
    ]
    assert len(published) == 15 and all(len(values) == 6 for values in published)
    off = [
        values["average"]
        for values in published
        if abs(np.mean([values[task] for task in TASKS]) - values["average"]) > 0.006
    ]
    assert off == [51.29], "the one that the table says is misprinted"


def test_a_scale_gives_a_task_its_own_amounts_and_a_run_s_own_come_first():
    plan = Plan("smollm2")
    given = plan.settings(plan.node("classify", "lra_image_elu"))["budget"]
    assert (given["epochs"], given["batch_size"], given["seq_len"], given["lr_floor"]) == (15, 256, 784, 1e-3)
    listops = plan.settings(plan.node("classify", "lra_listops_elu"))
    assert (listops["budget"]["lr_floor"], listops["recipe"]["lr"]) == (0.0, 1e-4), (
        "ListOps has the paper's own rate"
    )
    assert plan.settings(plan.node("classify", "cola_softmax"))["budget"].keys() == given.keys(), (
        "no other training's key has the amounts of these"
    )
