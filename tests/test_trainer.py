"""transformers' Trainer, as users call it: it reads the signature of forward."""

import inspect
from pathlib import Path

import pytest
import releases
import torch
from test_laws import FIRST, TEACHERS, close, name, of, teacher, tokens
from training import train
from transformers.utils.generic import find_labels

from relinear import linearize
from relinear.families.tiny import byte_tokenizer
from relinear.share.selfcontained import write_code

EXPORTED = """
import sys, torch
from pathlib import Path
from training import train
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder / "model", trust_remote_code=True)
before, after = train(model, AutoTokenizer.from_pretrained(folder / "model"), folder / "out")
assert 0 < after < before, (before, after)
shapes = []
model.lm_head.register_forward_hook(lambda module, given, logits: shapes.append(tuple(logits.shape)))
model.generate(torch.ones(1, 30, dtype=torch.long), max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
assert shapes == [(1, 1, model.config.vocab_size)] * 2, shapes
assert not any(name.partition(".")[0] == "relinear" for name in sys.modules)
"""  # noqa: E501


@pytest.mark.parametrize("family", TEACHERS)
def test_forward_has_the_teacher_s_signature(family):
    base, model = teacher(family), linearize(teacher(family), "hedgehog")
    assert inspect.signature(type(model).forward) == inspect.signature(type(base).forward)
    assert find_labels(type(model)) == find_labels(type(base)) == ["labels"]
    ids = tokens(9)
    with pytest.raises(TypeError, match="each once; got 1 by position and input_ids by name"):
        model(ids, input_ids=ids)
    names = list(inspect.signature(base.forward).parameters)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    by_position = [given.get(n) for n in names[: 1 + names.index("attention_mask")]]
    close(model(*by_position, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_a_trainer_trains_and_evaluates(case, tmp_path):
    model = linearize(teacher(dtype=torch.float32), case[0], **case[1])
    before, after = train(model, byte_tokenizer(), tmp_path)
    assert 0 < after < before


def test_a_trainer_s_loss_is_the_teacher_s_where_the_method_is_the_teacher_s(tmp_path):
    losses = [
        train(m, byte_tokenizer(), tmp_path)
        for m in (teacher(dtype=torch.float32), linearize(teacher(dtype=torch.float32), "softmax"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_trainer_trains_an_exported_folder_without_relinear(tmp_path):
    model = of(("lolcats", {"window": 16}), dtype=torch.float32)
    write_code(model, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    run = releases.python(
        tmp_path,
        "-c",
        EXPORTED,
        str(tmp_path),
        paths=(Path(__file__).parent,),
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
