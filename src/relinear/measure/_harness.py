"""Zero-shot and few-shot tasks, scored by lm-evaluation-harness inside this process, over local data.

A task is a YAML file in workflow/tasks. It includes the task that lm-eval ships (prompt, choices, metrics and
filters are the harness's own, unchanged) and says where its documents lie: `data` in the folder of evaluation
items, `smoke` in workflow/smoke.
"""

import copy
import functools
import gzip
import hashlib
import json
import logging
import os
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import datasets
import lm_eval.tasks
import lm_eval.utils
import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import has_bos_prefix
from lm_eval.tasks._yaml_loader import load_yaml
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from relinear.machine.distributed import agreed, gathered, rank, share
from relinear.measure._logits import credit, firsts, float32_head, shared
from relinear.plan.sane import read_yaml
from relinear.plan.strict import WORKFLOW

TASKS = WORKFLOW / "tasks"
SMOKE = TASKS.parent / "smoke" / "tasks"
BUNDLED = Path(lm_eval.tasks.__file__).parent
METRICS = ("acc", "acc_norm")
CHUNK = 4096  # texts cut into tokens in one call
# tokens that inputs must have in common at their beginning to be read once there, as MMLU's five examples a
# subject
SHOTS = 128
ALIKE = 8  # the fewest inputs that are read so


def available() -> list[str]:
    """The tasks that can be scored: the names of the files in workflow/tasks."""
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def check_tasks(names: Iterable[str]) -> None:
    """Raise ValueError for a task that has no file in workflow/tasks."""
    unknown = sorted(set(names) - set(available()))
    if unknown:
        raise ValueError(f"no task {', '.join(map(repr, unknown))}; have {', '.join(available())}")


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: dict[str, int | None],
    data: Path | None,
    *,
    batch_size: int,
    max_length: int,
    seed: int,
    smoke: bool = False,
    work: Path | None = None,
) -> tuple[dict[str, dict[str, float]], list[dict]]:
    """Score a causal language model on lm-eval tasks.

    Args:
        tasks: task -> how many of its items to use (at least 2), None for all. They are a sample, see `draw`;
        for MMLU the
            number is a total, spread evenly over its subjects.
        data: the folder of evaluation items, where the tasks' `data` paths start; not used with `smoke`.
        batch_size: sequences in one forward pass.
        max_length: longest input, in tokens. A longer prompt is a ValueError: cutting it would cut its shots.
        seed: draws the sample; nothing else is random.
        smoke: use the few hand-written items of workflow/smoke instead.
        work: a folder that outlives an interruption, of this model alone. The answers to each batch are kept
        there as it is done; called
            again, also with another number of processes, `score` returns the same as if it had never stopped.
            None: keep nothing.

    Returns:
        metrics: task -> {acc, acc_stderr, acc_norm, acc_norm_stderr, tied, tied_stderr, n, num_fewshot}, as
        fractions; acc_norm
            (log-likelihood per character of the choice) where the harness's own task reports it; tied, the
            share of items in which several choices come first. Each is a mean over items, so MMLU's is the
            micro average; the standard error is lm-eval's for a mean, the sample standard deviation over
            sqrt(n).
        items: a row for each item, {task, doc_id, target, scores, acc, acc_norm, tied}. `doc_id` is its place
        in the data file,
            `scores` the log-likelihood of each choice, `target` the right one's index (LAMBADA: the right
            word), `tied` how many choices come first by `scores` (LAMBADA: over how many likeliest tokens the
            credit is shared). MMLU's rows have their `subject` too.

    Logits are float32, whatever the model's dtype. Where k choices come first, the right one among them
    counts 1/k: what the harness's argmax, which takes the first of them, would give on average if the choices
    were shuffled.
    """
    check_tasks(tasks)
    for name, limit in tasks.items():
        if limit is not None and limit < 2:
            raise ValueError(f"{name}: got a limit of {limit} items; a standard error needs at least 2")
    if data is None and not smoke:
        raise ValueError(
            "got no folder of evaluation items; pass one as data, or smoke=True for the hand-written ones"
        )

    datasets.disable_progress_bars()  # one bar, of the choices scored, says it all
    loaded = {name: load(name, limit, None if smoke else data, seed) for name, limit in tasks.items()}
    wide = torch.promote_types(model.dtype, torch.float32)
    lm = LocalLM(
        model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=max_length,
        softmax_dtype=wide,
        work=work,
    )
    # The first spares a bar for each task, 57 of them MMLU's; the second, minutes: the harness compiles a
    # template at every use of it.
    templates = patch.object(lm_eval.utils.env, "from_string", functools.cache(lm_eval.utils.env.from_string))
    with patch("lm_eval.api.task.tqdm", lambda docs, **_: docs), templates:
        parts = {part.task_name: part for parts in loaded.values() for part in parts}
        # bootstrap_iters=0: the means and errors below come from the samples, so that MMLU's subjects count
        # as one task
        samples = evaluate(lm, {"tasks": parts}, bootstrap_iters=0)["samples"]
        scored = {
            name: [_row(name, part, sample) for part in parts for sample in samples[part.task_name]]
            for name, parts in loaded.items()
        }

    metrics, items = {}, []
    for name, parts in loaded.items():
        rows, metrics[name] = scored[name], {}
        for metric in (metric for metric in METRICS if metric in rows[0]):
            values = [row[metric] for row in rows]
            metrics[name] |= {metric: mean(values), f"{metric}_stderr": mean_stderr(values)}
        several = [float(row["tied"] > 1) for row in rows]
        metrics[name] |= {"tied": mean(several), "tied_stderr": mean_stderr(several)}
        metrics[name] |= {"n": len(rows), "num_fewshot": parts[0].config.num_fewshot}
        items += rows
    return metrics, items


def draw(sizes: dict[str, int], limit: int | None, seed: int | str) -> dict[str, list[int]]:
    """Choose `limit` items (None: all) of a task made of parts (subjects) of the given sizes.

    The parts, in shuffled order, take turns to give the next item of their own shuffled order. So their
    counts differ by at most one until a part is used up, a larger limit adds to the items of a smaller one,
    and a file sorted by topic is sampled evenly (HellaSwag's first 3243 items are all ActivityNet captions).

    Returns:
        part -> its items' indices, increasing. Parts that give none are left out.
    """
    rng = random.Random(seed)
    parts = rng.sample(sorted(sizes), len(sizes))
    orders = {part: rng.sample(range(sizes[part]), sizes[part]) for part in parts}
    turns = (
        (part, orders[part][turn])
        for turn in range(max(sizes.values()))
        for part in parts
        if turn < sizes[part]
    )
    drawn = defaultdict(list)
    for part, index in islice(turns, limit):
        drawn[part].append(index)
    return {part: sorted(drawn[part]) for part in sorted(drawn)}


def batched(starts: dict[tuple[int, ...], int], batch_size: int) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Batches of inputs as pairs (prefix length, inputs): inputs are grouped by a common prefix, then each
    group is cut into batches.

    A prefix counts if at least `ALIKE` inputs share at least `SHOTS` tokens, all of them before the first
    scored token (`starts`). The length is 0 without a prefix. The longest inputs of a group come first:
    little padding, and memory peaks early.
    """
    inputs, at, families = sorted(starts), 0, defaultdict(list)
    while at < len(inputs):
        shared = starts[inputs[at]]
        end = at + 1
        # In this order the number of tokens that an input shares with the first can only fall.
        while (
            end < len(inputs)
            and (common := min(shared, starts[inputs[end]], _alike(inputs[at], inputs[end]))) >= SHOTS
        ):
            shared, end = common, end + 1
        if end - at < ALIKE:
            shared, end = 0, at + 1
        families[inputs[at][:shared]] += inputs[at:end]
        at = end
    batches = []
    for beginning, family in families.items():
        family.sort(key=lambda tokens: (-len(tokens), tokens))
        batches += [(len(beginning), family[i : i + batch_size]) for i in range(0, len(family), batch_size)]
    return batches


def _alike(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The number of tokens in the common prefix of two inputs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def load(name: str, limit: int | None, data: Path | None, seed: int) -> list[ConfigurableTask]:
    """Build the harness tasks behind one file of workflow/tasks, over the drawn items in memory, each with
    its index as `doc_id`.

    It is one task, or one a subject where the file's `include` has a {subject}. Without `data` the smoke
    items are used.
    """
    # it warns that the documents and the model are given as objects, not by name
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    settings = read_yaml(TASKS / f"{name}.yaml")
    include, convert = settings.pop("include"), settings.pop("convert", None)
    files = {"data": settings.pop("data"), "smoke": settings.pop("smoke")}[
        "smoke" if data is None else "data"
    ]
    folder = SMOKE if data is None else data

    subjects = [""]
    if "{subject}" in include:
        before, after = (BUNDLED / include).name.split("{subject}")
        found = (BUNDLED / include).parent.glob(f"{before}*{after}")
        subjects = [path.name.removeprefix(before).removesuffix(after) for path in found]
        if data is None:  # hand-written items exist for a few subjects only
            subjects = [
                s for s in subjects if all((folder / f.format(subject=s)).exists() for f in files.values())
            ]

    configs = {s: load_yaml(BUNDLED / include.format(subject=s)) | settings for s in subjects}
    documents = {
        s: DatasetDict({split: read(folder / f.format(subject=s), convert) for split, f in files.items()})
        for s in subjects
    }
    scored = next(split for split in ("test", "validation") if split in files)
    tasks = []
    for s, indices in draw({s: len(documents[s][scored]) for s in subjects}, limit, f"{seed} {name}").items():
        documents[s][scored] = documents[s][scored].select(indices).add_column("doc_id", indices)
        tasks.append(
            ConfigurableTask(
                config=configs[s] | {"custom_dataset": lambda documents=documents[s], **_: documents}
            )
        )
    return tasks


def read(path: Path, convert: str | None) -> Dataset:
    """Read one split: an Arrow file, or JSON lines (perhaps gzipped), in memory so that nothing is cached
    beside the file.

    With `convert`, the lines are requests of OLMES (the format of oe_eval_tasks), one for each choice of each
    document; the document is taken from the first, and the named function gives it the fields of the hub's
    data set. Requests with numbers from a million on are OLMES's unconditioned choices and repeat the
    documents.
    """
    if path.suffix == ".arrow":
        return Dataset.from_file(str(path), in_memory=True)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    if convert is not None:
        docs = {row["doc_id"]: row["doc"] for row in rows if row["doc_id"] < 1_000_000}
        rows = [CONVERT[convert](docs[doc_id]) for doc_id in sorted(docs)]
    return Dataset.from_list(rows)


def from_arc(doc: dict) -> dict:
    """OLMES's ARC -> allenai/ai2_arc. Choices labelled 1 to 4 there are lettered here; no prompt shows the
    labels."""
    labels = list("ABCDE"[: len(doc["choices"])])
    return {
        "id": doc["id"],
        "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": doc["choices"], "label": labels},
        "answerKey": labels[doc["gold"]],
    }


def from_boolq(doc: dict) -> dict:
    """OLMES's BoolQ -> aps/super_glue boolq, whose passages open with their title (those of google/boolq do
    not)."""
    passage, question = doc["query"].removesuffix("?\nAnswer:").rsplit("\nQuestion: ", 1)
    return {"passage": passage, "question": question, "label": int(doc["choices"][doc["gold"]] == "yes")}


def from_lambada(doc: dict) -> dict:
    """OLMES's LAMBADA -> EleutherAI/lambada_openai: the passage with its last word."""
    return {"text": f"{doc['query']} {doc['choices'][0]}"}


CONVERT = {"arc": from_arc, "boolq": from_boolq, "lambada": from_lambada}


class LocalLM(HFLM):
    """The harness's transformers adapter with logits in float32 and two savings: the output head is applied
    only where a choice is scored, and a shared prefix is read once. Each input then goes on from the state,
    or the keys and values, after the prefix.

    HFLM takes the logits and their log-softmax at every position of the padded batch: with a vocabulary of
    49152 that is more arithmetic and far more memory than the rest of a small model. Of all tasks' tokens
    half are MMLU's examples. Same inputs, and of a model in float32 the same numbers to rounding. HFLM rounds
    the logits of a model in bfloat16 to 8 bits, and choices tie. Several processes share the batches that one
    would make, and all get all answers. What was answered before an interruption is read from `work`.
    """

    _tokens: Mapping[str, np.ndarray] = {}  # tokens of the texts that are being scored
    # the prefix read last, and the model's cache after it
    _read: tuple[tuple[int, ...], Cache | None] = ((), None)

    def __init__(self, *args, work: Path | None = None, **kwargs):
        self.work = work
        super().__init__(*args, **kwargs)

    def tok_encode(self, string: str, *args, **kwargs) -> list[int]:
        """As in HFLM, where the string is not one that was cut already."""
        known = None if args or kwargs else self._tokens.get(string)
        return super().tok_encode(string, *args, **kwargs) if known is None else known.tolist()

    def _encode(self, strings: Iterable[str]) -> dict[str, np.ndarray]:
        """Cut strings into tokens many at a time, on all cores: one by one, MMLU's prompts take longer than
        the model. As arrays: lists of as many numbers would fill gigabytes."""
        special = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        prefix = self.tokenizer.decode(self.prefix_token_id)
        # HFLM cuts others differently
        plain = [string for string in dict.fromkeys(strings) if string and not has_bos_prefix(string, prefix)]
        cut = {}
        for at in range(0, len(plain), CHUNK):
            chunk = plain[at : at + CHUNK]
            encoded = self.tokenizer(chunk, **special, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]
            cut.update(zip(chunk, (np.array(tokens, np.int32) for tokens in encoded), strict=True))
        return cut

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As in HFLM, without its progress bar for the tokenizer."""
        texts = (
            text
            for context, choice in (request.args for request in requests)
            for text in (context.rstrip(), context + choice)
        )
        self._tokens = self._encode(texts)
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._tokens = {}

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int = 0,
    ) -> list[tuple[float, float]]:
        """For each (strings, context tokens, choice tokens): (log-likelihood of the choice, is it the greedy
        one).

        The second is 1 or 0, and in between where tokens tie: the chance of the choice, were each of its
        tokens drawn among the likeliest.
        """
        # input -> the requests it answers: choices of one token share their input, as in HFLM
        groups = defaultdict(list)
        for number, (_, context, choice) in enumerate(requests):
            groups[tuple((context + choice)[:-1])].append(number)
        longest = max(map(len, groups))
        if longest > self.max_length:
            raise ValueError(
                f"got a prompt of {longest} tokens; the longest possible is max_length={self.max_length}"
            )
        # from this place on logits are needed
        starts = {
            tokens: len(tokens) - max(len(requests[number][2]) for number in numbers)
            for tokens, numbers in groups.items()
        }
        batches = batched(starts, self.batch_size)
        call = repr((self.batch_size, list(groups.items()), [choice for _, _, choice in requests]))
        # another call's batches have another name
        name = f"answers.{hashlib.sha256(call.encode()).hexdigest()}"
        answers = agreed(self._kept(name))
        known = {number for number, _, _ in answers}
        # a batch is kept whole
        batches = share([(shared, batch) for shared, batch in batches if groups[batch[0]][0] not in known])
        bar = tqdm(
            total=len(known) + sum(len(groups[tokens]) for _, batch in batches for tokens in batch),
            initial=len(known),
            desc="lm-eval",
            unit="choice",
            disable=rank() > 0,
        )
        new = []
        path = Path(os.devnull) if self.work is None else self.work / f"{name}.{rank()}"
        with torch.inference_mode(), float32_head(self.model), bar, path.open("ab", buffering=0) as file:
            for shared, batch in batches:
                padded = pad_sequence(
                    [torch.tensor(tokens[shared:]) for tokens in batch], batch_first=True
                ).to(self.device)
                # The places at which any row is scored, without those between: prompts of a batch differ in
                # length by more than a choice has tokens.
                places = sorted(
                    {at - shared for tokens in batch for at in range(starts[tokens], len(tokens))}
                )
                keep = torch.tensor(places, device=self.device)
                past = self._after(batch[0][:shared], len(batch))
                # [row, place, vocabulary]
                logits = self.model(
                    padded, past_key_values=past, logits_to_keep=keep, use_cache=past is not None
                ).logits
                # The scored tokens of a row lie side by side in `places`, up to its last.
                ends = [bisect_right(places, len(tokens) - shared - 1) for tokens in batch]
                asked = [
                    (number, row, ends[row]) for row, tokens in enumerate(batch) for number in groups[tokens]
                ]
                scored = self._scored(logits, [requests[number][2] for number, _, _ in asked], asked)
                # the break comes first: the last line may have been cut short
                file.write(f"\n{json.dumps(scored)}".encode())
                new += scored
                bar.update(len(asked))
        found = {number: (total, greedy) for number, total, greedy in answers + gathered(new)}
        return [found[number] for number in range(len(requests))]

    def _after(self, shared: tuple[int, ...], rows: int) -> Cache | None:
        """The cache after a prefix, repeated for the inputs that go on from it; None without a prefix.
        Batches of one prefix follow each other."""
        if not shared:
            return None
        if self._read[0] != shared:
            tokens = torch.tensor([shared], device=self.device)
            self._read = shared, self.model(tokens, use_cache=True, logits_to_keep=1).past_key_values
        past = copy.deepcopy(self._read[1])
        past.batch_repeat_interleave(rows)
        return past

    def _kept(self, name: str) -> list[tuple[int, float, float]]:
        """The answers of earlier attempts at a call, with any number of processes. Each line of their files
        is a batch."""
        answers = []
        for path in [] if self.work is None else sorted(self.work.glob(f"{name}.*")):
            for line in path.read_text().splitlines():
                with suppress(json.JSONDecodeError):  # cut short: the process was killed as it wrote
                    answers += json.loads(line)
        return answers

    def _scored(
        self, logits: Tensor, choices: list[list[int]], asked: list[tuple[int, int, int]]
    ) -> list[tuple[int, float, float]]:
        """(number, log-likelihood, greedy) of each choice; `asked`: its number, its row of `logits`, and
        where in the row it ends.

        The whole batch is read at once, since reading a number waits for all work of the GPU.
        """
        lengths = [len(choice) for choice in choices]
        rows = torch.tensor([row for (_, row, _), n in zip(asked, lengths, strict=True) for _ in range(n)])
        places = torch.tensor(
            [at for (_, _, end), n in zip(asked, lengths, strict=True) for at in range(end - n, end)]
        )
        tokens = torch.tensor([token for choice in choices for token in choice], device=logits.device)
        scored = logits[rows.to(logits.device), places.to(logits.device)]
        greedy = credit(scored.gather(1, tokens[:, None])[:, 0], *shared(scored)).cpu()
        chosen = (
            F.log_softmax(scored, dim=-1, dtype=self.softmax_dtype).gather(1, tokens[:, None])[:, 0].cpu()
        )
        parts = zip(asked, chosen.split(lengths), greedy.split(lengths), strict=True)
        return [(number, values.sum().item(), best.prod().item()) for (number, _, _), values, best in parts]


def _row(name: str, part: ConfigurableTask, sample: dict) -> dict:
    """One row of the per-item results, from the harness's record of a document."""
    doc, prompt = sample["doc"], sample["arguments"][0][0]
    shots = part.config.num_fewshot
    examples = [part.doc_to_text(example) for example in part.fewshot_docs()] if shots else []
    found = sum(example in prompt for example in examples)
    if found != shots:
        raise RuntimeError(
            f"{part.task_name}: got {found} examples in the prompt, not {shots}: {prompt[:200]!r}"
        )
    fair, tied = _fair(part, doc, sample)
    return {
        "task": name,
        **({"subject": doc["subject"]} if "subject" in doc else {}),
        "doc_id": doc["doc_id"],
        # WinoGrande puts its options into the prompt, and the right option's index where others have the
        # prompt
        "target": part.doc_to_text(doc) if part.multiple_input else sample["target"],
        "scores": [response[0][0] for response in sample["resps"]],
        **{metric: fair[metric] for metric in METRICS if metric in sample},
        "tied": tied,
    }


def _fair(part: ConfigurableTask, doc: dict, sample: dict) -> tuple[dict[str, float], int]:
    """An item's accuracies as the harness has them, with 1/k for a right choice that is one of k that come
    first; and how many come first."""
    answers = [response[0] for response in sample["resps"]]
    if part.OUTPUT_TYPE != "multiple_choice":  # is the one answer the greedy continuation?
        [(_, greedy)] = answers
        return {"acc": greedy}, round(1 / greedy) if greedy else 1
    found = part.doc_to_text(doc) if part.multiple_input else part.doc_to_target(doc)
    choices, scores = part.doc_to_choice(doc), [score for score, _ in answers]
    right = {
        choices.index(x) if isinstance(x, str) else x for x in (found if isinstance(found, list) else [found])
    }
    by = {
        "acc": firsts(scores),
        "acc_norm": firsts([score / len(text) for score, text in zip(scores, choices, strict=True)]),
    }
    fair = {
        metric: sum(i in right for i in first) / len(first) if len(first) > 1 else sample.get(metric)
        for metric, first in by.items()
    }
    return fair, len(by["acc"])
