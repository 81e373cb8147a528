"""Token files larger than memory: what reads and writes them may allocate a fraction of their size."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import environment

ROOT = Path(__file__).parents[1]
MOST = 64 << 20  # bytes that a process may allocate beyond what it has; files that are mapped do not count
TOKENS = 64 << 20  # in a file of four times as many bytes
LENGTH, VOCABULARY = 1024, 1000

LIMIT = f"""
import resource, sys
from pathlib import Path
import numpy as np

def limit():
    pages = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
    most = int(pages) * 1024 + {MOST}
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        np.ones(2 * {MOST}, np.uint8)
    except MemoryError:
        return
    raise AssertionError("there is no limit")
"""

READS = """
import torch
from relinear.get.packed import Packed, chance_loss
from relinear.train.next_token import batches_of
folder, length, vocabulary = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.arange(3.0).double().mean()
limit()
text = Packed(folder, "train", length)
of = {"steps": 3, "batch_size": 4, "accumulate": 2, "seed": 0, "name": "many"}
batches = batches_of(text, len(text), "cpu", **of)
for step in (0, 1, len(text) // 8 - 1):
    for tokens, labels, labelled in batches(step):
        assert tokens.shape == (4, length) and labelled == 8 * (length - 1)
print(chance_loss(folder, vocabulary))
"""

WRITES = """
from relinear.families.tiny import byte_tokenizer
from relinear.get import stream
stream.BATCH = 1 << 16  # characters
out, work, corpus = map(Path, sys.argv[1:4])
tokens = int(sys.argv[4])
tokenizer = byte_tokenizer()
tokenizer(["a"], add_special_tokens=False)
limit()
of = {"train_tokens": tokens, "heldout_tokens": 1000, "heldout_source": None, "seed": 0}
facts = stream.build(out, work, tokenizer, {"manuals": corpus}, **of)
print(facts["train"]["unique"])
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").is_file() or not hasattr(resource, "RLIMIT_DATA"), reason="needs Linux"
)


def limited(code: str, *words: object) -> str:
    """What a Python prints whose memory is limited once it has imported its libraries."""
    env = environment() | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMIT + code, *map(str, words)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_training_reads_a_file_of_four_times_the_memory_that_it_may_have(tmp_path):
    for kind in ("tokens", "labels"):  # sparse: zeros take no room on the disk
        train = np.lib.format.open_memmap(tmp_path / f"train_{kind}.npy", "w+", np.int32, (TOKENS,))
        train[: 10 * LENGTH] = np.arange(10 * LENGTH) % VOCABULARY
        train.flush()
        np.save(tmp_path / f"heldout_{kind}.npy", np.arange(50, dtype=np.int32))
    assert (tmp_path / "train_tokens.npy").stat().st_size > 4 * MOST - 1
    got = float(limited(READS, tmp_path, LENGTH, VOCABULARY))
    counts = np.bincount(np.arange(10 * LENGTH) % VOCABULARY, minlength=VOCABULARY) + 1.0
    counts[0] += TOKENS - 10 * LENGTH
    assert got == pytest.approx(-np.log(counts[:50] / counts.sum()).mean(), rel=1e-12)


def test_a_stream_is_made_that_is_larger_than_the_memory_that_it_may_have(tmp_path):
    corpus, characters = tmp_path / "corpus", 24 << 20
    corpus.mkdir()
    (tmp_path / "work").mkdir()
    end, draw = 0, np.random.default_rng(0)
    with (corpus / "text.bin").open("wb") as text, (corpus / "documents.jsonl").open("w") as about:
        while end < characters:
            end += text.write(draw.integers(97, 123, 1 << 16, np.uint8).tobytes())
            line = {"source": "manuals", "path": f"{end}", "sha256": draw.bytes(32).hex(), "end": end}
            about.write(json.dumps(line) + "\n")
    tokens = 18 << 20
    assert 4 * characters > 1.4 * MOST and 2 * 4 * tokens > 2 * MOST
    assert int(limited(WRITES, tmp_path / "out", tmp_path / "work", corpus, tokens)) > tokens
    made = np.load(tmp_path / "out/train_tokens.npy", mmap_mode="r")
    assert len(made) == tokens and not (tmp_path / "work/tokens.bin").exists()


LOADS = """
import peft
from relinear.linearize.assemble import to_train
from relinear.plan.job import Link
import torch

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

folder = Path(sys.argv[1])
links = [Link("lizard", {"window": 8, "meta": 2})]
before = anonymous()
model = to_train(folder, links, torch.bfloat16)
print(sum(p.nbytes for p in model.parameters()), anonymous() - before)
"""


def test_weights_are_mapped_and_not_loaded_where_their_dtype_stays(tmp_path):
    """So processes of one machine share them, and none has a whole model of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes))
    model.to(torch.bfloat16).to_empty(device="cpu").save_pretrained(tmp_path)
    size, taken = map(int, limited(LOADS, tmp_path).split())
    assert size > 90 << 20 and taken < 0.3 * size, f"{taken} bytes of its own for weights of {size}"
