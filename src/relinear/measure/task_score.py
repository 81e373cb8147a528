"""How well a classifier, or a regression, does on the test texts of its task, by the scores that the data
name."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.get.labels import Labelled
from relinear.linearize.head import Classifier, last_head
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("labels",)
YIELDS = ("score", "accuracy", "f1", "correlation", "matthews", "floor")


class Options(Strict):
    """Read texts of at most `seq_len` tokens, `batch_size` at a time."""

    seq_len: Positive
    batch_size: Positive


def correlation(labels: np.ndarray, answers: np.ndarray) -> float:
    """The mean of Pearson's and Spearman's correlation, as STS-B is scored; 0 where all answers are alike."""
    if np.ptp(answers) == 0 or np.ptp(labels) == 0:
        return 0.0
    return float(pearsonr(labels, answers).statistic + spearmanr(labels, answers).statistic) / 2


SCORES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda labels, answers: float(accuracy_score(labels, answers)),
    "f1": lambda labels, answers: float(f1_score(labels, answers, zero_division=0)),
    "matthews": lambda labels, answers: float(matthews_corrcoef(labels, answers)),
    "correlation": correlation,
}


@torch.inference_mode()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """Each score of the data's, as a share; the first also as `score`, and as `floor` that of the best answer
    that is the same to every text.

    Writes `items.jsonl`, the label and the answer of each text. Raises UserError for a run without a head of
    these classes.
    """
    text = Labelled(data, "heldout", options.seq_len)
    head = last_head([folder for link in job.links for folder in link.steps])
    outputs = max(text.classes, 1)
    if head is None or head.out.out_features != outputs:
        got = "none" if head is None else f"one of {head.out.out_features} outputs"
        raise UserError(
            f"{job.name}: the task needs a head of {outputs} outputs; got {got}. Possible: runs with a"
            " classify step on the same data"
        )
    classifier = Classifier(model, head.to(model.device)).eval()
    found, whole = [], text.seq_len if head.pool == "pair" else None  # each text of a pair has half of it
    for at in range(0, len(text), options.batch_size):
        tokens, mask, types = (
            x.to(model.device)
            for x in text.batch(range(at, min(at + options.batch_size, len(text))), width=whole)
        )
        found.append(classifier(tokens, mask, types).float().cpu())
    logits, labels = torch.cat(found), text.labels
    answers = (logits.argmax(-1) if text.classes else logits.squeeze(-1)).numpy()
    right = labels == answers if text.classes else -abs(labels - answers)
    taken = {"score": text.scores[0], **{score: score for score in text.scores}}
    moved = {name: pulls(score, labels, answers) for name, score in taken.items()}
    job.items(
        {
            "item": i,
            "label": float(labels[i]),
            "answer": float(answers[i]),
            "outcome": float(right[i]),
            "pulls": {s: moved[s][i] for s in moved},
        }
        for i in range(len(labels))
    )
    of, n = job.settings["data"], len(labels)
    for name, score in taken.items():
        yield Reading(
            name, of, {}, SCORES[score](labels, answers), float(np.sqrt((moved[name] ** 2).sum())), n
        )
    yield Reading("floor", of, {}, floor(text.scores[0], labels, text.classes), 0.0, n)


def floor(score: str, labels: np.ndarray, classes: int) -> float:
    """The best score of an answer that is the same to every text."""
    return max(SCORES[score](labels, np.full_like(labels, k)) for k in range(max(classes, 1)))


def pulls(score: str, labels: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """How far each text moves a score, by leaving it out (the jackknife): the sum of their squares is that of
    the score's standard error."""
    n, known = len(labels), {}
    without = np.empty(n)
    for i, which in enumerate(zip(labels.tolist(), answers.tolist(), strict=True)):
        if which not in known:  # texts of one label and one answer move it alike
            others = np.arange(n) != i
            known[which] = SCORES[score](labels[others], answers[others])
        without[i] = known[which]
    return ((n - 1) / n) ** 0.5 * (without.mean() - without)
