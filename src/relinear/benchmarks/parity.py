"""The laws on a real model: `python -m relinear.benchmarks.parity TEACHER --text FILE --out
results/reference/parity`.

Each method is put into the teacher at TEACHER, in float32, its parameters moved away from their initial
values but not trained. Measured is how far pieces, single tokens, prefixes and padded rows are from the
parallel form, and whether tokens generated with the cache are those of full forward passes, one pass a token.
Writes parity.csv and parity.provenance.json. A mismatch comes with the margin between the two likeliest
tokens there: at a tie, rounding decides.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.benchmarks import command
from relinear.benchmarks.campaign import METHODS, Campaign, session
from relinear.draw.render import markdown
from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import linearize
from relinear.machine.hardware import set_threads
from relinear.measure.gate import distance

RUNS: dict[str, tuple[str, dict]] = {"softmax": ("softmax", {}), **METHODS}
NOISE = 0.05  # added to a method's start, an identity, at which some mistakes do not show
LAWS = ("pieces", "prefix", "padded")
COLUMNS = ("run", *LAWS, "new_tokens", "equal", "least_margin", "margin_at_mismatch")
PROMPT = 32


def build(teacher: Path, run: str) -> PreTrainedModel:
    """The teacher in float32 with a run's method in every layer."""
    method, options = RUNS[run]
    model = linearize(load_teacher(teacher, torch.float32), method, **options).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for p in model.method_parameters().values():
        p.add_(NOISE * torch.randn(p.shape, generator=generator))
    return model


@torch.inference_mode()
def laws(model: PreTrainedModel, ids: Tensor) -> dict[str, float]:
    """Relative RMS from the parallel form's logits on ``[1, T]``: the largest over the cuts and lengths
    tried."""
    length = ids.shape[1]
    whole = model(ids, use_cache=False).logits

    def pieces(*sizes: int) -> float:
        cache = model.make_cache()
        return distance(
            torch.cat([model(x, past_key_values=cache).logits for x in ids.split(sizes, 1)], 1), whole
        )

    def prefix(n: int) -> float:
        other = torch.cat([ids[:, :n], ids[:, n:].flip(1)], 1)
        return max(
            distance(model(x, use_cache=False).logits[:, :n], whole[:, :n]) for x in (other, ids[:, :n])
        )

    def padded(pad: int) -> float:
        batch = torch.cat(
            [torch.cat([ids.new_zeros(1, pad), ids], 1), ids.flip(1).repeat(1, 2)[:, : pad + length]]
        )
        mask = torch.ones_like(batch)
        mask[0, :pad] = 0
        return distance(model(batch, attention_mask=mask, use_cache=False).logits[:1, pad:], whole)

    third = length // 3
    cuts = [(length - 8, *(1,) * 8), (third, 1, 63, length - third - 64)]
    tried = {"pieces": [pieces(*sizes) for sizes in cuts], "prefix": [prefix(n) for n in (third, length - 1)],
             "padded": [padded(37)]}  # fmt: skip
    return {law: max(values) for law, values in tried.items()}


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompt: Tensor, new_tokens: int, *, passes: bool
) -> dict[str, float | int | None]:
    """Tokens generated with the cache against those of full forward passes over the same past.

    passes: one for each token, of the tokens before it. Else a single one over them all, which says the same
    as long as a prefix does not depend on what follows. least_margin: the smallest gap between the logits of
    the two likeliest tokens, in any pass.
    """
    mask = torch.ones_like(prompt)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = model.generate(prompt, attention_mask=mask, **settings)
    start = prompt.shape[1]
    if passes:
        logits = torch.cat(
            [
                model(ids[:, :n], use_cache=False, logits_to_keep=1).logits[0]
                for n in range(start, ids.shape[1])
            ]
        )
    else:
        logits = model(ids[:, :-1], use_cache=False).logits[0, start - 1 :]
    top = logits.topk(2).values
    margins, equal = top[:, 0] - top[:, 1], logits.argmax(-1) == ids[0, start:]
    wrong = margins[~equal].tolist()
    return {
        "new_tokens": new_tokens,
        "equal": int(equal.sum()),
        "least_margin": margins.min().item(),
        "margin_at_mismatch": wrong[0] if wrong else None,
    }


def main(
    teacher: Annotated[
        Path,
        typer.Argument(
            help="a transformers folder with a tokenizer, such as results/mini/models/smollm2-135m-instruct"
        ),
    ],
    text: Annotated[Path, typer.Option(help="a text file; its first tokens are the input")],
    out: Annotated[Path, typer.Option(help="folder of parity.csv, which is measured anew")] = Path(
        "results/reference/parity"
    ),
    length: Annotated[int, typer.Option(help="tokens that the laws are tried on")] = 400,
    new_tokens: Annotated[int, typer.Option(help="tokens to generate")] = 200,
    threads: Annotated[int | None, typer.Option(help="all cores if not given")] = None,
) -> None:
    """Measure every run, and print the rows as a table."""
    threads = set_threads(threads)
    ids = tokenizer_of(teacher)(text.read_text(), return_tensors="pt")["input_ids"][:, :length]
    if ids.shape[1] < length:
        raise UserError(f"{text} has {ids.shape[1]} tokens; --length {length} needs more text")
    campaign = Campaign(out / "parity.csv", COLUMNS, anew=True)
    campaign.describe(
        **session("python -m relinear.benchmarks.parity"),
        dtype="float32",
        threads=threads,
        length=length,
        text=text.name,
        noise=NOISE,
        runs=RUNS,
        laws="relative RMS of logits from the parallel form, the largest over cuts, lengths and pads",
    )
    for run in tqdm(RUNS, unit="run"):
        model = build(teacher, run)
        campaign.add(
            {"run": run, **laws(model, ids), **greedy(model, ids[:, :PROMPT], new_tokens, passes=True)}
        )
    cells = [
        [f"{row[c]:.1e}" if isinstance(row[c], float) else str(row[c]) for c in COLUMNS]
        for row in campaign.rows
    ]
    print(markdown(COLUMNS, cells))


if __name__ == "__main__":
    command.run(main)
