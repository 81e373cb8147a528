"""LoLCATs in text: trained parameters at the paper's shape, shares of tokens, the rank correlation of
approximation and perplexity over the rows of Table 1, and how much less is lost than T2R loses."""

import copy
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from scipy.stats import spearmanr

from relinear.draw.claims import SAME_DOSE
from relinear.draw.render import NOT_RUN, count, markdown, write_csv, write_text

LEVEL = 0.05  # the p-value below which a rank correlation is told from none
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Table 1 as the paper prints it: PPL@2, MSE, KL of the six rows, in the order of the spec's runs.
PUBLISHED = {
    "ppl": (555.99, 1420.72, 6.78, 3.38, 3.52, 3.11),
    "mse": (17.13, 17.25, 11.88, 1.89, 1.76, 0.98),
    "kl": (3.20, 3.31, 1.76, 0.28, 0.21, 0.12),
}
# Table 2's five tasks, of which the paper's means are 74.38 (Mistral-7B), 37.10 (T2R) and 72.82 (LoLCATs);
# and T2R's tokens.
TASKS = {
    "piqa": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
}
SAVED, DOSE = 0.958, 40_000_000
COLUMNS = ("says", "paper", "ours", "holds")


class Counts(NamedTuple):
    """Parameters of a model with LoLCATs' maps and LoRA: all of the teacher's, LoRA's, the maps', and the
    maps' were keys' shared by a group."""

    teacher: int
    lora: int
    maps: int
    shared: int


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write intext.csv and intext.md."""
    rows = [
        *_parameters(counts(spec.options["shape"], spec.options["lora_rank"])),
        *_tokens(),
        *_indicators(spec, measured),
        _saved(measured, about),
    ]
    files = [out / f"intext.{suffix}" for suffix in spec.makes]
    write_csv(files[0], COLUMNS, [dict(zip(COLUMNS, row, strict=True)) for row in rows])
    shown = markdown(["The paper says", "Its number", f"Ours, `{about.scale}`", "Holds"], rows, align="left")
    notes = [f"- {note.where}: {note.text}." for note in spec.misprints]
    given = f"LoRA of rank {spec.options['lora_rank']} on {', '.join(TARGETS)}"
    legend = (
        f"Parameters: counted at the shape of {spec.options['shape']}, with {given}, and a map of 128 x 128"
        " for each query head's queries and keys.\nRank correlations are Spearman's, over the six rows of"
        f" Table 1: told from none below p = {LEVEL}."
    )
    demonstration = [about.demonstration, ""] if about.demonstration else []
    write_text(
        files[1], "\n".join([f"**{spec.label}.**", "", *demonstration, shown, "", legend, "", *notes]) + "\n"
    )
    return files


def counts(shape: str, rank: int) -> Counts:
    """The numbers of parameters, counted on the meta device, so that nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    from relinear.benchmarks.generation import SHAPES
    from relinear.linearize.model import linearize

    def model(**options):
        with torch.device("meta"):
            return linearize(
                AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape])),
                "lolcats",
                variant="paper",
                feature="exp",
                **options,
            )

    def added(model) -> int:
        return sum(p.numel() for p in model.method_parameters().values())

    own, shared = model(), model(state_per="key_head")
    projections = [module for name, module in own.named_modules() if name.rpartition(".")[2] in TARGETS]
    # A of rank x in, B of out x rank
    lora = sum(rank * (p.in_features + p.out_features) for p in projections)
    return Counts(sum(p.numel() for p in own.parameters()) - added(own), lora, added(own), added(shared))


def _parameters(found: Counts) -> list[list[str]]:
    lora, maps, shared, both = (
        100 * n / found.teacher for n in (found.lora, found.maps, found.shared, found.lora + found.maps)
    )
    return [
        [
            "LoRA updates less than 0.09 % of the parameters",
            "< 0.09 %",
            f"{found.lora:,}, {lora:.4f} %",
            _yes(lora < 0.09),
        ],
        [
            "Maps of each query head are 0.4 % of the parameters",
            "0.4 %",
            f"{found.maps:,}, {maps:.3f} %",
            _yes(round(maps, 1) == 0.4),
        ],
        ["Maps, were those of keys one of each key head", "", f"{found.shared:,}, {shared:.3f} %", ""],
        [
            "All that is trained is less than 0.5 % of the parameters",
            "< 0.5 %",
            f"{found.lora + found.maps:,}, {both:.3f} %",
            _yes(both < 0.5),
        ],
        [
            "All that is trained is 0.1 % of the parameters",
            "0.1 %",
            f"{found.lora + found.maps:,}, {both:.3f} %",
            _yes(round(both, 1) == 0.1),
        ],
    ]


def _indicators(spec, measured) -> list[list[str]]:
    """Rank correlations of the distance from softmax attention with the perplexity after finetuning, the
    paper's from its own table."""
    runs = [run for run, measure in spec.reads() if measure == "fidelity"]
    found = {run: (measured[run, "perplexity"], measured[run, "fidelity"]) for run in runs}
    rows = []
    for metric, name in (("kl", "KL"), ("mse", "MSE")):
        theirs, ours, holds = spearmanr(PUBLISHED[metric], PUBLISHED["ppl"]), NOT_RUN, ""
        if all(ppl and fidelity for ppl, fidelity in found.values()):
            distances, perplexities = zip(
                *((f.find(metric, "attention").value, p.find("perplexity").value) for p, f in found.values()),
                strict=True,
            )
            rho = spearmanr(distances, perplexities)
            ours, holds = (
                _rho(rho),
                ("yes" if rho.statistic > 0 else "no") if rho.pvalue < LEVEL else "not told",
            )
        rows.append(
            [
                f"Approximation is a key quality indicator: rank correlation of {name} and PPL@2",
                _rho(theirs),
                ours,
                holds,
            ]
        )
    return rows


def _tokens() -> list[list[str]]:
    """The text's shares of others' tokens, recomputed."""
    given = (
        ("the 1.5T that others are trained on", 1.5e12, 0.003),
        ("SUPRA's 100B", 1e11, 0.04),
        ("SUPRA's 20B", 2e10, 0.2),
    )
    shares = [(name, 100 * DOSE / tokens, said) for name, tokens, said in given]
    return [
        [f"Tokens, of {name}", f"{said:g} %", f"{share:.2g} %", _yes(float(f"{share:.1g}") == said)]
        for name, share, said in shares
    ]


def _saved(measured, about) -> list[str]:
    """The points by which LoLCATs with its window of 16 loses less against the teacher than T2R does, on
    average over Table 2's tasks."""
    found = {run: measured[run, "commonsense"] for run in ("teacher", "t2r_epochs4", "lolcats_exp_window")}
    ours, holds = NOT_RUN, ""
    if all(found.values()):
        teacher, t2r, lolcats = (
            100 * fmean(m.find(metric, task).value for task, metric in TASKS.items()) for m in found.values()
        )
        tokens = sum(found["t2r_epochs4"].facts["tokens"].values())
        ours, holds = (
            f"{teacher - t2r:.1f} and {teacher - lolcats:.1f} points",
            _yes(teacher - lolcats <= (1 - SAVED) * (teacher - t2r)),
        )
        if about.nothing_to_judge or tokens < SAME_DOSE * DOSE:
            holds = (
                f"not told: {about.nothing_to_judge or f'T2R had {count(tokens)} of {count(DOSE)} tokens'}"
            )
    return ["T2R's loss against the teacher is reduced by 95.8 %", "37.3 and 1.6 points", ours, holds]


def _rho(found) -> str:
    return f"{found.statistic:.2f} (p = {found.pvalue:.3f})"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
