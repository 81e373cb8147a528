"""A step's loss and gradient do not depend on how the step is split, into micro-batches and over processes:
for each training, in float64."""

import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn
from transformers import LlamaConfig, LlamaForCausalLM

from relinear import linearize
from relinear.errors import UserError
from relinear.families import load as family
from relinear.get.labels import Labelled
from relinear.get.packed import IGNORED, Packed
from relinear.get.padded import Padded
from relinear.linearize.head import Classifier, Head
from relinear.plan.job import Job
from relinear.train import classify, distill, finetune, next_token, pretrain
from relinear.train.recognise import Recogniser

VOCABULARY, LENGTH, STEP = 64, 16, 8
# that sequences of the text have, at their ends; 0: a prompt longer than the sequence
LABELS = (16, 2, 4, 8, 0, 1, 16, 3)
LENGTHS = (16, 3, 5, 9, 16, 2, 7, 4)  # of the texts
SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # batch_size, accumulate
NEXT = {"kl": 0.0, "kl_beyond": 0, "kl_within": 0.1}
LORA = {
    "kind": "lora",
    "train_method": True,
    "method_lr": None,
    **NEXT,
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_targets": ["q_proj", "v_proj"],
}
KINDS = {
    "lora": (finetune, LORA),
    "full": (finetune, {"kind": "full", "train_embeddings": True, **NEXT}),
    "pretrain": (pretrain, {}),
    "transfer": (distill, {"loss": "cross_entropy", "loss_scale": 1.0, "calibrate": None}),
    "transfer of texts": (distill, {"loss": "cross_entropy", "loss_scale": 1.0, "calibrate": None}),
    "classes": (classify, {"pool": "mean"}),
    "pictures": (classify, {"pool": "first"}),
}
# that several processes can share
SHARED = [kind for kind, (module, _) in KINDS.items() if module is not classify]


class Taken(Exception):  # noqa: N818, an end and no error
    """The step's loss and gradient are taken."""


def write(folder: Path, split: str = "train", labels=LABELS) -> Path:
    """Sequences of random tokens, of which the last few have labels."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(len(labels), LENGTH)).astype(np.int32)
    masked = np.where(np.arange(LENGTH) < LENGTH - np.array(labels)[:, None], IGNORED, tokens)
    for of in (split, "heldout"):
        np.save(folder / f"{of}_tokens.npy", tokens.ravel())
        np.save(folder / f"{of}_labels.npy", masked.astype(np.int32).ravel())
    return folder


def write_texts(folder: Path, lengths=LENGTHS, values=VOCABULARY) -> Path:
    """Texts of random tokens and of these lengths, with a class each."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(values, size=sum(lengths))
    of = {
        "tokens": tokens,
        "types": np.zeros_like(tokens),
        "ends": np.cumsum(lengths),
        "labels": np.arange(len(lengths)) % 2,
    }
    for name, array in of.items():
        np.save(folder / f"train_{name}.npy", array)
    (folder / "metrics.json").write_text(json.dumps({"classes": 2, "scores": ["accuracy"], "validation": 0}))
    return folder


def without_dropout(model: nn.Module) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


def teacher(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "pictures":
        shape = {
            "classes": 2,
            "image_size": 4,
            "patch_size": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "initializer_range": 0.2,
        }
        return Recogniser(linearize(family("vit").random(shape, 0, torch.float64)[0], "hedgehog")).double()
    if kind in ("classes", "transfer of texts"):
        encoder = without_dropout(linearize(family("bert").random({}, 0, torch.float64)[0], "hedgehog"))
        return (
            Classifier(encoder, Head(encoder.config.hidden_size, 2, "mean")) if kind == "classes" else encoder
        ).double()
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    return linearize(LlamaForCausalLM(LlamaConfig(**shape)), "hedgehog").double()


def job(kind: str, folder: Path, batch_size: int, accumulate: int) -> Job:
    recipe = {"lr": 1e-3, "patience": None, "learn": "all", **KINDS[kind][1]}
    budget = {
        "epochs": 2,
        "seq_len": LENGTH,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "lr_floor": 0.0,
        "validation": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = (
        write_texts(folder / "texts") if kind in ("classes", "transfer of texts") else write(folder / "text")
    )
    if kind == "pictures":
        text = write_texts(folder / "pictures", [16] * len(LENGTHS), 256)
    return Job(kind, {"recipe": recipe, "budget": budget}, {"text": text}, folder, folder)


def step_of(kind: str, folder: Path, batch_size: int, accumulate: int) -> tuple[float, Tensor]:
    """The loss and the gradient of the second step, this process's part of them."""
    module, asked, model = KINDS[kind][0], job(kind, folder, batch_size, accumulate), teacher(kind)
    found = {}

    def train(loss, groups, *, batches, **_):
        total = 0.0
        for batch in batches(1):
            for _, value in loss(*batch):
                value.backward()
                total += value.item()
        parameters = [p for ps, _ in groups for p in ps]
        found["loss"] = total
        found["gradient"] = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
        )
        raise Taken

    more = {
        classify: lambda: (Labelled(asked.parents["text"], "train", LENGTH), "cpu"),
        distill: lambda: ("cpu",),
    }
    with patch.object(module, "train", train), pytest.raises(Taken):
        module.fit(asked, model, *more.get(module, lambda: ("cpu", torch.float32))())
    assert found["gradient"].dtype == torch.float64 and found["gradient"].norm() > 0
    return found["loss"], found["gradient"]


def assert_same(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=2e-7)  # a transfer's weights of its pieces are float32
    assert (found[1] - expected[1]).norm() < 2e-7 * expected[1].norm()


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_of_any_size_are_the_step(tmp_path, kind):
    """Some of the smallest micro-batches have no label: they count nothing."""
    expected = step_of(kind, tmp_path, *SPLITS[0])
    for split in SPLITS[1:]:
        assert_same(step_of(kind, tmp_path, *split), expected)


def part(rank: int, folder: Path) -> None:
    """What one of two processes computes of each training and split, added up over both, into `folder`."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    for kind in SHARED:
        for split in SPLITS:
            loss, gradient = step_of(kind, folder / str(rank), *split)
            both = torch.cat([torch.tensor([loss], dtype=torch.float64), gradient])
            dist.all_reduce(both)
            if rank == 0:
                np.save(folder / f"{kind} {split}.npy", both.numpy())
    dist.destroy_process_group()


def test_two_processes_add_up_to_the_step(tmp_path):
    (tmp_path / "both").mkdir()
    spawn(part, (tmp_path / "both",), nprocs=2)
    for kind in SHARED:
        expected = step_of(kind, tmp_path / "one", *SPLITS[0])
        for split in SPLITS:
            both = torch.from_numpy(np.load(tmp_path / f"both/{kind} {split}.npy"))
            assert_same((both[0].item(), both[1:]), expected)


def test_a_step_s_loss_is_the_mean_over_its_labels(tmp_path):
    """As transformers has it: all sequences in one batch."""
    loss, _ = step_of("pretrain", tmp_path, 1, STEP)
    text, model = Packed(tmp_path / "text", "train", LENGTH), teacher("pretrain").train()
    tokens, labels = (torch.stack(x) for x in zip(*(text.sequence(i) for i in range(STEP)), strict=True))
    with torch.no_grad():
        assert loss == pytest.approx(model(tokens, labels=labels, use_cache=False).loss.item(), rel=1e-6)
    assert text.labelled.tolist() == [min(n, LENGTH - 1) for n in LABELS]


def test_where_micro_batches_have_as_many_labels_each_the_loss_is_the_mean_of_theirs_to_the_bit(tmp_path):
    """What trainings had until then: committed numbers of such texts stand."""
    text = Packed(write(tmp_path, labels=(8,) * STEP), "train", LENGTH)
    model = teacher("full").float()
    for batch_size, accumulate in SPLITS:
        asked = {"steps": 1, "batch_size": batch_size, "accumulate": accumulate, "seed": 0, "name": "x"}
        found, before = [], []
        for tokens, labels, labelled in next_token.batches_of(text, STEP, "cpu", **asked)(0):
            for values, divided in (
                (found, lambda x, n=labelled: x / n),
                (before, lambda x, a=accumulate, b=batch_size: x / (8.0 * b) / a),
            ):
                loss = divided(next_token.summed_loss(model, tokens, labels))
                values += [loss, *torch.autograd.grad(loss, model.method_parameters().values())]
        assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


# --- what has no label ---


def test_a_step_without_a_label_is_refused_before_it_trains_and_the_text_is_named(tmp_path):
    asked, model = job("full", tmp_path, 1, 1), teacher("full").float()
    with pytest.raises(
        UserError,
        match=(
            r"full: step \d+ of 16 would have no label.*number 4 of .*text\).*1 of 8 sequences are\."
            r" Possible: more"
        ),
    ):
        finetune.fit(asked, model, "cpu", torch.float32)
    assert not asked.history.exists()


def test_validation_without_a_label_is_refused(tmp_path):
    asked = job("pretrain", tmp_path, 1, 1)
    write(tmp_path / "text", labels=(3, 0, 0))
    asked.settings["budget"]["validation"] = 2
    with pytest.raises(
        UserError, match="the 2 sequences of .*text that are kept aside for validation have no label"
    ):
        pretrain.fit(asked, teacher("pretrain").float(), "cpu")


def test_a_validation_loss_is_the_mean_over_all_labels_kept_aside(tmp_path):
    asked, model = job("pretrain", tmp_path, 1, 1), teacher("pretrain")
    text = Packed(tmp_path / "text", "train", LENGTH)
    tokens, labels = (torch.stack(x) for x in zip(*(text.sequence(i) for i in range(STEP)), strict=True))
    with torch.no_grad():
        expected = model.eval()(tokens, labels=labels, use_cache=False).loss.item()
    for batch_size in (1, 3, 8):
        asked.settings["budget"]["batch_size"] = batch_size
        assert pretrain.Validation(asked, model, text, 0, torch.float32).loss() == pytest.approx(
            expected, rel=1e-6
        )


def test_a_text_without_a_token_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"text 1 of train of .* has no token; possible: texts of 1 token or more"
    ):
        Padded(write_texts(tmp_path, (3, 0, 2)), "train", LENGTH)
