"""What people do with an exported folder, each use a function that raises where the outcome is wrong. Imports
nothing of relinear.

`python uses.py RELEASE SCRATCH FOLDER...` tries every use on every folder under that release of transformers,
and writes a line of JSON for each into `SCRATCH/outcomes.jsonl`: the folder's name, the use, and `right`, or
what was wrong, or why the use cannot be tried here.
"""

import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

RIGHT = "right"
# The graphs of autograd that "aot_eager" makes behind Dynamo's are torch's, the same under every release.
BACKEND = "aot_eager"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


class Untried(Exception):
    """A library that the use needs is not here, or does not import under this release of transformers."""


def load(folder: Path, **how) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **how).eval()


def prompt(rows: int = 2, length: int = 11) -> Tensor:
    return torch.arange(rows * length).view(rows, length) * 7 % 97


def written(model: PreTrainedModel, ids: Tensor, **more) -> Tensor:
    settings = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return model.generate(ids, **{**settings, **more})


def by_passes(model: PreTrainedModel, ids: Tensor, steps: int = 12) -> Tensor:
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **TOLERANCE)


def labelled(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients of a loss, by parameter."""
    torch.manual_seed(0)  # of GPT-2's dropout
    model.zero_grad()
    model(prompt(), labels=prompt(), use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- uses ---


def generate(folder: Path, scratch: Path) -> None:
    """Greedy, with the cache, is what full passes say; beams and samples come in their numbers."""
    model, ids = load(folder), prompt()
    assert torch.equal(written(model, ids), by_passes(model, ids))
    assert written(model, ids, num_beams=3).shape == (2, 23)
    assert written(model, ids, do_sample=True, num_return_sequences=2).shape == (4, 23)


def left_padding(folder: Path, scratch: Path) -> None:
    model, ids = load(folder), prompt(1)
    padded, mask = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
    assert torch.equal(written(model, padded, attention_mask=mask)[:, 15:], written(model, ids)[:, 11:])


def packed(folder: Path, scratch: Path) -> None:
    """Each of two documents in a row, told apart by their positions, is what it is alone."""
    model, ids = load(folder), prompt(1)
    positions = torch.cat([torch.arange(5), torch.arange(6)])[None]
    alone = [model(part).logits for part in ids.split([5, 6], 1)]
    equal(model(ids, position_ids=positions).logits, torch.cat(alone, 1))


def chat(folder: Path, scratch: Path) -> None:
    """A second turn goes on from the cache of the first."""
    model, ids = load(folder), prompt(1)
    first = written(model, ids, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, prompt(1, 5)], 1)
    more = written(model, longer, past_key_values=first.past_key_values)
    assert torch.equal(more, by_passes(model, longer))


def save_and_copy(folder: Path, scratch: Path) -> None:
    model = load(folder)
    logits = model(prompt()).logits
    assert torch.equal(copy.deepcopy(model)(prompt()).logits, logits)
    model.save_pretrained(scratch / "saved")
    equal(load(scratch / "saved")(prompt()).logits, logits)


def bfloat16(folder: Path, scratch: Path) -> None:
    model = load(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and model(prompt()).logits.isfinite().all()


def checkpointing(folder: Path, scratch: Path) -> None:
    """Gradients are the same where activations are computed again."""
    model = load(folder).train()
    plain = labelled(model)
    model.gradient_checkpointing_enable()
    for name, gradient in labelled(model).items():
        equal(gradient, plain[name])
    assert plain


def compiled(folder: Path, scratch: Path) -> None:
    """One graph without a break, with the same logits. Graphs of gradients take as long again; those are
    `test_compiled.py`'s."""
    model = load(folder).requires_grad_(False)
    logits = model(prompt(), use_cache=False).logits
    torch._dynamo.reset()
    equal(torch.compile(model, backend=BACKEND, fullgraph=True)(prompt(), use_cache=False).logits, logits)


def device_map(folder: Path, scratch: Path) -> None:
    needs("accelerate")
    equal(load(folder, device_map="auto")(prompt()).logits.cpu(), load(folder)(prompt()).logits)


def peft_merge(folder: Path, scratch: Path) -> None:
    """A LoRA that was trained a step says the same beside the weights, saved and loaded, and merged."""
    peft = needs("peft")
    names = ["c_attn"] if "gpt2" in load(folder).config.model_type else ["q_proj", "v_proj"]
    model = peft.get_peft_model(
        load(folder), peft.LoraConfig(target_modules=names, r=4, fan_in_fan_out="c_attn" in names)
    )
    before = model(prompt()).logits
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(prompt(), labels=prompt(), use_cache=False).loss.backward()
    optimizer.step()
    beside = model.eval()(prompt()).logits
    assert (beside - before).abs().max() > 1e-4
    model.save_pretrained(scratch / "adapter")
    equal(peft.PeftModel.from_pretrained(load(folder), scratch / "adapter").eval()(prompt()).logits, beside)
    equal(model.merge_and_unload()(prompt()).logits, beside)


def trainer(folder: Path, scratch: Path) -> None:
    from training import train

    before, after = train(load(folder), AutoTokenizer.from_pretrained(folder), scratch / "trained")
    assert 0 < after < before, (before, after)


def sft_trainer(folder: Path, scratch: Path) -> None:
    """TRL's, of rows of text: the loss falls, and evaluation has one."""
    trl, datasets = needs("trl"), needs("datasets")
    rows = datasets.Dataset.from_dict(
        {
            "text": [
                "the cat sat on the mat",
                "the dog ran to the door",
                "a bird flew",
                "the cat ran to the dog",
            ]
        }
    )
    settings = trl.SFTConfig(
        str(scratch / "sft"),
        max_length=32,
        per_device_train_batch_size=2,
        num_train_epochs=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataset_num_proc=1,
        bf16=False,
    )
    made = trl.SFTTrainer(
        load(folder),
        settings,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    before = made.evaluate()["eval_loss"]
    made.train()
    after = made.evaluate()["eval_loss"]
    assert 0 < after < before, (before, after)


def lm_eval(folder: Path, scratch: Path) -> None:
    """lm-eval's own adapter, batched, scores a continuation as a full pass does."""
    needs("lm_eval")
    adapter, instance = needs("lm_eval.models.huggingface"), needs("lm_eval.api.instance")
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    pairs = [("The cat sat", " on the mat"), ("A dog", " ran"), ("One two three four five six", " seven")]
    asked = [instance.Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    scores = adapter.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, device="cpu").loglikelihood(
        asked, disable_tqdm=True
    )
    for (before, after), (score, _) in zip(pairs, scores, strict=True):
        whole, read = (
            torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
            for text in (before + after, before)
        )
        logs = (
            model(whole[:, :-1], use_cache=False)
            .logits.float()
            .log_softmax(-1)
            .gather(-1, whole[:, 1:, None])[..., 0]
        )
        assert abs(logs[0, read.shape[1] - 1 :].sum().item() - score) < 1e-3, (before, after)


USES: dict[str, Callable[[Path, Path], None]] = {
    use.__name__: use
    for use in (
        generate,
        left_padding,
        packed,
        chat,
        save_and_copy,
        bfloat16,
        checkpointing,
        compiled,
        device_map,
        peft_merge,
        trainer,
        sft_trainer,
        lm_eval,
    )
}


def needs(name: str):
    try:
        return __import__(name, fromlist=["_"])
    except Exception as error:  # a release of transformers may break a library that is not ours in any way
        raise Untried(f"{name} does not import: {type(error).__name__}: {error}") from None


def tried(use: Callable[[Path, Path], None], folder: Path, scratch: Path) -> str:
    try:
        use(folder, scratch)
    except Untried as reason:
        return f"untried: {reason}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
    return RIGHT


def main(release: str, scratch: str, *folders: str) -> None:
    global BACKEND
    assert transformers.__version__.startswith(release), transformers.__version__
    BACKEND = "eager" if release else BACKEND  # none is given where it is the locked one
    warnings.simplefilter("ignore")
    for folder in map(Path, folders):
        for name, use in USES.items():
            torch.manual_seed(0)
            outcome = tried(use, folder, Path(scratch) / folder.name / name)
            with (Path(scratch) / "outcomes.jsonl").open("a") as file:
                file.write(json.dumps([folder.name, name, outcome]) + "\n")
    assert not any(name.partition(".")[0] == "relinear" for name in sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
