"""Hedgehog in text: points and shares of the abstract and the introduction, from the paper's tables."""

from pathlib import Path
from statistics import fmean

from relinear.draw.intext import Said, ours, printed, values, write

TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
LEAST = 0.5  # points of perplexity that make a gap
SCRATCH = ("softmax", "elu", "performer", "hedgehog")


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write intext.csv and intext.md."""
    return write(spec, about, out, [*_scratch(measured), *_glue(), *_both(measured), *_rouge(measured)])


def gap(softmax: float, prior: float, hedgehog: float) -> float:
    """How much of the distance of a prior map from softmax attention Hedgehog closes, in percent."""
    return 100 * (prior - hedgehog) / (prior - softmax)


def _scratch(measured) -> list[Said]:
    """Table 7."""
    theirs = printed(__file__, "table7", "ppl")
    softmax, elu, performer, hedgehog = (theirs[f"wt103_scratch_{name}"] for name in SCRATCH)
    prior = {
        row: ppl
        for row, ppl in theirs.items()
        if row not in ("wt103_scratch_softmax", "wt103_scratch_hedgehog")
    }
    got = values(measured, {f"wt103_scratch_{name}": "ppl_wikitext" for name in SCRATCH}, "perplexity")
    return [
        Said(
            "Hedgehog is up to 6 points of perplexity better than earlier linear attention on WikiText-103",
            "up to 6",
            f"{performer - hedgehog:.1f} than Performer, {min(prior.values()) - hedgehog:.1f} than the best",
            round(performer - hedgehog, 1) >= 6,
            ours(got, lambda s, e, p, h: f"{p - h:.1f} than Performer, {e - h:.1f} than 1 + ELU"),
        ),
        Said(
            "It closes 68.6 % of the gap between linear and softmax attention there",
            "68.6 %",
            f"{gap(softmax, elu, hedgehog):.1f} % of 1 + ELU's",
            round(gap(softmax, elu, hedgehog), 1) == 68.6,
            ours(got, lambda s, e, p, h: f"{gap(s, e, h):.1f} %" if e - s >= LEAST else "no gap to close"),
        ),
    ]


def _glue() -> list[Said]:
    """Table 8."""
    means = {
        row: fmean(printed(__file__, "table8", task)[row] for task in TASKS)
        for row in ("softmax", "t2r", "hedgehog")
    }
    better = means["hedgehog"] - means["t2r"]
    return [
        Said(
            "It is up to 8.7 points of GLUE better than earlier linear attention on BERT",
            "up to 8.7",
            f"{better:.1f} on average over the eight tasks",
        )
    ]


def _both(measured) -> list[Said]:
    """Tables 8, 9 and 10."""
    bert = printed(__file__, "table8", "recovered")["hedgehog"]
    ten, nine = printed(__file__, "table10", "ppl"), printed(__file__, "table9", "top1")
    gpt2 = 100 * ten["wt103_finetuned"] / ten["wt103_hedgehog"]
    vit = 100 * nine["vit_hedgehog"] / nine["vit_softmax"]
    lm = values(measured, dict.fromkeys(("wt103_finetuned", "wt103_hedgehog"), "ppl_wikitext"), "perplexity")
    pictures = values(measured, dict.fromkeys(("vit_softmax", "vit_hedgehog"), "imagenet"), "accuracy")
    return [
        Said(
            "It recovers more than 99 % on average of BERT on GLUE and GPT-2 on WikiText-103",
            "> 99 %",
            f"{bert:.1f} % and {gpt2:.1f} %, {(bert + gpt2) / 2:.1f} % on average",
            (bert + gpt2) / 2 > 99,
            ours(lm, lambda finetuned, hedgehog: f"{100 * finetuned / hedgehog:.1f} % of the language model"),
        ),
        Said(
            "It has 99 % of a ViT's accuracy",
            "99 %",
            f"{vit:.1f} %",
            round(vit) >= 99,
            ours(pictures, lambda softmax, hedgehog: f"{100 * hedgehog / softmax:.1f} %"),
        ),
    ]


def _rouge(measured) -> list[Said]:
    """Table 11."""
    theirs = printed(__file__, "table11", "r1")
    runs = ("samsum_zero_shot", "samsum_t2r", "samsum_hedgehog")
    base, t2r, hedgehog = (theirs[run] for run in runs)
    got = values(measured, dict.fromkeys(runs, "rouge"), "rouge1")
    return [
        Said(
            "With LoRA it has 28.1 points of ROUGE-1 more than the model as it is",
            "28.1",
            f"{hedgehog - base:.1f}",
            round(hedgehog - base, 1) == 28.1,
            ours(got, lambda b, t, h: f"{100 * (h - b):.1f}"),
        ),
        Said(
            "Earlier linear attention has 16.5 points less than it",
            "16.5",
            f"{base - t2r:.1f}",
            round(base - t2r, 1) == 16.5,
            ours(got, lambda b, t, h: f"{100 * (b - t):.1f}"),
        ),
    ]
