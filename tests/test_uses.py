"""The matrix of uses: what people do with an exported folder, for every family of teachers, under three
releases of transformers (`uses`)."""

import json
from pathlib import Path

import pytest
import releases
import torch
from test_laws import TEACHERS, teacher
from test_releases import ENDS, release_of
from uses import RIGHT, USES

from relinear import linearize
from relinear.families.tiny import byte_tokenizer
from relinear.share.selfcontained import write_code

# One for each family, and each of the suite's trained methods once.
METHODS = {
    "llama": ("lolcats", {"window": 4}),
    "mistral": ("t2r", {}),
    "qwen2": ("delta", {"window": 4}),
    "qwen3": ("supra", {}),
    "gemma3": ("lizard", {"window": 4}),
    "gpt2": ("hedgehog", {"keep_softmax_layers": [0]}),
}
# what the locked environment has: these may not be left untried there
REQUIRED = {use for use in USES if use != "sft_trainer"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    """A folder with its own code for each family."""
    found = {}
    for family in TEACHERS:
        method, options = METHODS[family]
        model, folder = (
            linearize(teacher(family, torch.float32, vocab_size=512), method, **options),
            tmp_path_factory.mktemp("uses") / family,
        )
        write_code(model, folder)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        found[family] = folder
    return found


@pytest.fixture(scope="module", params=["locked", *ENDS])
def matrix(request, exported, tmp_path_factory) -> tuple[str, dict[tuple[str, str], str]]:
    """The release, and the outcome of each use of each family's folder under it."""
    scratch, end = tmp_path_factory.mktemp(request.param), request.param
    folders = [] if end == "locked" else [releases.or_skip(releases.installed, ENDS[end])]
    try:
        trl = [releases.installed(releases.TRL)]
    except RuntimeError:
        trl = []  # test_uses_that_could_not_be_tried_are_said
    run = releases.python(
        (folders or [scratch])[0],
        str(Path(__file__).parent / "uses.py"),
        release_of(ENDS[end]) if folders else "",
        str(scratch),
        *map(str, exported.values()),
        paths=(Path(__file__).parent, *trl),
        HF_MODULES_CACHE=str(scratch / "modules"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    lines = [json.loads(line) for line in (scratch / "outcomes.jsonl").read_text().splitlines()]
    return end, {(family, use): said for family, use, said in lines}


def test_no_use_of_any_family_is_wrong(matrix):
    end, found = matrix
    assert found.keys() == {(family, use) for family in TEACHERS for use in USES}
    wrong = {cell: said for cell, said in found.items() if said != RIGHT and not said.startswith("untried: ")}
    assert not wrong, f"{end}: {json.dumps({' '.join(cell): said for cell, said in wrong.items()}, indent=1)}"


def test_uses_that_could_not_be_tried_are_said(matrix):
    end, found = matrix
    untried = {use: said for (_, use), said in found.items() if said.startswith("untried: ")}
    if end == "locked":
        assert not untried.keys() & REQUIRED, untried
    if untried:
        pytest.skip(f"NOT TESTED under {end}: {untried}")


@pytest.mark.parametrize("use", ["generate", "peft_merge", "lm_eval", "compiled", "checkpointing"])
def test_a_wrong_outcome_is_seen(use, exported, tmp_path, monkeypatch):
    """A model whose second of two equal passes says something else, as one whose cache, adapter or
    recomputation is wrong."""
    import uses

    real, passes = uses.load, []

    def disturbed(folder, **how):
        model = real(folder, **how)
        model.lm_head.register_forward_hook(
            lambda module, given, out: passes.append(1) or out + 9.0 * len(passes) * torch.randn_like(out)
        )
        return model

    monkeypatch.setattr(uses, "load", disturbed)
    assert uses.tried(USES[use], exported["llama"], tmp_path) != RIGHT
