"""Exported models in vLLM, which has an environment of its own: the same tokens as `relinear generate`."""

import json
from pathlib import Path

import pytest
import releases
import test_wheel
import torch
from conftest import made
from test_laws import FIRST, WINDOW, linearized, name, teacher

import relinear
from relinear.plan.plan import Plan
from relinear.share.export import export
from relinear.share.generate import generate
from relinear.share.tensors import load_folder

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]
sources, wheel = test_wheel.sources, test_wheel.wheel

# vLLM's attention on a CPU has no heads of fewer dimensions
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
NEW = 40
# one token, less than a window, several pieces of a prompt
PROMPTS = [[(7 * i + 3 + n) % 97 for i in range(n)] for n in (1, 5, 100, 300)]
TEXT = "Some text to go on from"
LIZARD = name(next(case for case in FIRST if case[0] == "lizard"))
FAMILIES = ("qwen2", "qwen3", "gemma3")
MODELS = {
    **{name(case): ("llama", *case) for case in FIRST if case[0] != "softmax"},
    **{f"{family}, lizard": (family, "lizard", {"window": WINDOW}) for family in FAMILIES},
    "gpt2, hedgehog": ("gpt2", "hedgehog", {}),
    "unequal windows": ("llama", "window", {"window": (4, 40)}),
    "softmax layers beside states": ("llama", "lizard", {"window": 4, "keep_softmax_layers": (0,)}),
    "softmax layers, of Gemma": ("gemma3", "window", {"window": 6, "keep_softmax_layers": (0, 1)}),
}
PLAIN = ("llama", "qwen2", "qwen3")
ROUNDED = ("delta", "kept", "lizard", "lolcats")
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

def tokens_of(folder, prompts, new, dtype="float32"):
    llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype=dtype, max_model_len=512, max_num_batched_tokens=128, max_num_seqs=3)
    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    first, again = (llm.generate(asked, greedy) for _ in range(2))
    return {"first": [list(out.outputs[0].token_ids) for out in first], "again": [list(out.outputs[0].token_ids) for out in again],
            "read_before": [out.num_cached_tokens for out in again]}

def refusal_of(folder):
    try:
        LLM(folder, skip_tokenizer_init=True, enforce_eager=True, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    except Exception as error:
        return repr(error)

def text_of(folder, prompt, new):
    llm = LLM(folder, enforce_eager=True, dtype="float32", max_model_len=512)
    return llm.generate([prompt], SamplingParams(temperature=0, max_tokens=new))[0].outputs[0].text

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for folder in given["folders"]:
        try:
            print(json.dumps({"folder": folder, **tokens_of(folder, given["prompts"], given["new"])}), flush=True)
        except Exception as error:
            print(json.dumps({"folder": folder, "error": repr(error)[:2000]}), flush=True)
    for folder in given["rounded"]:
        print(json.dumps({"rounded": folder, **tokens_of(folder, given["prompts"], given["new"], "bfloat16")}), flush=True)
    print(json.dumps({"text": text_of(given["run"], given["text"], given["new"])}), flush=True)
    # last: it leaves kernels behind that an engine after it cannot use
    print(json.dumps({"refusal": refusal_of(given["folders"][0])}), flush=True)
"""  # noqa: E501


@pytest.fixture(scope="module")
def vllm(wheel, tmp_path_factory):
    """Run a script where vLLM is, and relinear as its wheel has it."""
    folder = releases.or_skip(releases.vllm)
    place = tmp_path_factory.mktemp("script") / "serve.py"
    place.write_text(SERVE)

    def run(given: dict) -> list[dict]:
        done = releases.python(
            folder,
            str(place),
            json.dumps(given),
            paths=(wheel,),
            seconds=6000,
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


def built(family: str, method: str, options: dict):
    """A tiny linearized model, whose heads are as wide as vLLM's attention has them."""
    sizes = {} if family == "gpt2" else SIZES
    return linearized(method, tuple(options.items()), family=family, dtype=torch.float32, **sizes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """What is served, by its name: models as saved, plain folders, and two that are refused."""
    root = tmp_path_factory.mktemp("served")
    names = (*MODELS, *PLAIN, "a teacher", "not whole", "no state")
    made = {case: root / f"model{i}" for i, case in enumerate(names)}
    for case, given in MODELS.items():
        built(*given).save_pretrained(made[case])
    for family in PLAIN:
        model = built(family, "window", {"window": WINDOW, "sinks": 0})
        relinear.export(model, made[family], plain=True)
    teacher("llama", torch.float32, **SIZES).save_pretrained(made["a teacher"])
    model = built("llama", "hedgehog", {})
    state = {k: v for k, v in model.state_dict().items() if not k.endswith("layers.1.mlp.up_proj.weight")}
    model.save_pretrained(made["not whole"], state_dict=state)
    built("llama", "softmax", {}).save_pretrained(made["no state"])
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of the DAG at smoke scale."""
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    made(plan, "finetune hedgehog")
    return plan.root / "runs" / "hedgehog"


@pytest.fixture(scope="module")
def served(vllm, folders, run, tmp_path_factory) -> dict:
    """What vLLM says of each folder, by its name; and the text of the run, exported."""
    exported = export(run, tmp_path_factory.mktemp("exported") / "run")
    given = {"folders": [str(path) for path in folders.values()], "prompts": PROMPTS, "new": NEW}
    rounded = [str(folders[name(case)]) for case in FIRST if case[0] in ROUNDED]
    said = vllm({**given, "rounded": rounded, "run": str(exported), "text": TEXT})
    names = {str(path): case for case, path in folders.items()}
    answers = {names[line["folder"]]: line for line in said if "folder" in line}
    return {**answers, "rounded": [x for x in said if "rounded" in x], **said[-2], **said[-1]}


@pytest.mark.parametrize("case", [*MODELS, *PLAIN, "a teacher"])
def test_vllm_generates_what_relinear_does(served, folders, case):
    answer, model = served[case], load_folder(folders[case], torch.float32).eval()
    assert "error" not in answer, answer
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :]
        assert answer["first"][i] == expected.tolist(), f"a prompt of {len(prompt)}"
        assert answer["again"][i] == expected.tolist(), f"a prompt of {len(prompt)} that was read before"
    if case == LIZARD:
        assert answer["read_before"][-1] > 100, "the last prompt was read anew"


def test_vllm_goes_on_with_the_text_of_a_run_as_relinear_does(served, run, capsys):
    generate(run, TEXT, max_new_tokens=NEW, dtype="float32")
    assert served["text"].strip() and served["text"].strip() == capsys.readouterr().out.strip()


def test_models_are_served_in_bfloat16(served):
    assert len(served["rounded"]) == len(ROUNDED) and all(
        len(tokens) == NEW for line in served["rounded"] for tokens in line["first"]
    )


def test_what_states_do_not_allow_is_refused(served):
    assert "is served without speculative_config" in served["refusal"]
    assert "each layer of this model is softmax over all positions" in served["no state"]["error"]


def test_a_folder_that_is_not_whole_is_not_served(served):
    assert "lacks tensors of its model: model.layers.1.mlp.up_proj.weight" in served["not whole"]["error"]
