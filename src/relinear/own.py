"""A model and a text of one's own, linearized by a paper's recipe: `relinear linearize`.

Nothing here trains. The model, the text and the runs become entries of a catalogue in memory, beside those of
`workflow/`, and the stages that the papers' runs go through do the rest: records, checkpoints, MLflow,
measurements.
"""

import fnmatch
import functools
import gc
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from relinear import attention, families, folders
from relinear.draw.render import markdown
from relinear.errors import UserError
from relinear.get import assets, readers, text
from relinear.linearize.model import linearize
from relinear.opening import configuring, reading
from relinear.plan.assets import Asset, Own
from relinear.plan.catalogue import NAME
from relinear.plan.entries import Data, Hardware, Jobs, Model, Run, Scale, StandIns, TextBudget, one_of
from relinear.plan.job import DTYPES, PRECISIONS
from relinear.plan.measured import load
from relinear.plan.plan import Plan
from relinear.share.export import export, require_ours
from relinear.stages import _training
from relinear.stages import text as text_stage
from relinear.stages._stage import Node
from relinear.train.finetune import require_targets
from relinear.weights import files_of, require_finite

SCALE = "own"  # the scale's name in records
# method -> the run of runs.yaml with its recipe, where that has another name
RECIPES = {"lolcats": "lolcats_window"}
MOST = 10_000_000  # unique training tokens of a step, as the papers have
PAPERS = "alpaca"  # the text that recipes name, for which one's own stands in
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# names of pages that lie beside the data in a folder, without their endings
ABOUT = ("readme", "license", "licence")
# of a data set on the hub, the first kind that it has
TEXT_FILES = ("*.parquet", "*.jsonl", "*.json", "*.txt")
GATE_TOKENS = 256


class Amounts(NamedTuple):
    """The amounts of training and measuring: unique `tokens` a step, read `epochs` times in sequences of
    `seq_len`, batch x accumulate a step."""

    tokens: int | None = None  # None: all that there are, and no more than the papers have
    epochs: int = 2
    seq_len: int | None = None  # None: 1024, or the model's positions where they are fewer
    batch_size: int = 1
    accumulate: int = 8
    heldout_tokens: int = 32768  # at most

    @property
    def sequences(self) -> int:
        """The sequences of a training step."""
        return self.batch_size * self.accumulate


USUAL = Amounts()


class Entries(NamedTuple):
    """What a plan has beside `workflow/`: the name of its folder, its scale, and the entries of the
    catalogue."""

    name: str
    scale: Scale
    assets: dict[str, Asset | Own]
    models: dict[str, Model]
    data: dict[str, Data]
    runs: dict[str, Run]


@dataclass(frozen=True)
class OwnPlan(Plan):
    """A plan of one's own model and text. Its results lie in `<results>/own-<name>`."""

    entries: Entries | None = field(default=None, compare=False)

    @functools.cached_property
    def config(self) -> Scale:
        """The amounts and the hardware."""
        return self.entries.scale

    @functools.cached_property
    def models(self) -> dict[str, Model]:
        """The models of models.yaml, and the own one."""
        return {**super().models, **self.entries.models}

    @functools.cached_property
    def data(self) -> dict[str, Data]:
        """The data of data.yaml, and the own text."""
        return {**super().data, **self.entries.data}

    @functools.cached_property
    def catalogue(self) -> dict[str, Asset | Own]:
        """The assets of assets.yaml, and the own ones."""
        return {**super().catalogue, **self.entries.assets}

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """The own runs alone."""
        return self.entries.runs

    @functools.cached_property
    def artefacts(self) -> dict:
        """No paper's table shows them."""
        return {}

    @property
    def root(self) -> Path:
        """The folder of all its results."""
        return self.results / f"{SCALE}-{self.entries.name}"

    def check_nodes(self, nodes: list[Node]) -> list[Node]:
        """These nodes and all behind them, parents first. Raises UserError for settings that cannot work."""
        found = self.behind(nodes)
        for node in found:
            self.settings(node)
            self.check_processes(node, 1)
        return found


def run(name: str, plan: OwnPlan, out: Path, run_node: Callable[[OwnPlan, Node], None]) -> str:
    """Linearize what `planned` gave, measure it beside its teacher, and export it to the folder `out`.

    `run_node` runs one node of the plan; a node that is finished stays as it is, and one that was interrupted
    goes on. Returns the perplexities as a table.
    """
    rows = measured(plan, name)
    nodes = plan.check_nodes([*(plan.node("measure", *address) for address in rows.values())])
    for number, node in enumerate(nodes, 1):
        print(f"[{number}/{len(nodes)}] {node}", flush=True)
        run_node(plan, node)
        gc.collect()  # a node's model, before the next one is made
    entry = plan.models[plan.run(name).model]
    print(export(plan.root / "runs" / name, out, dtype=entry.dtype))
    return report(plan, rows)


def planned(
    model: str,
    data: str,
    method: str,
    out: Path,
    *,
    results: Path = Path("results"),
    amounts: Amounts = USUAL,
    reader: str | None = None,
    column: str | None = None,
    device: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
) -> tuple[str, OwnPlan]:
    """The run's name, and a plan that has it, its teacher and itself untrained. Raises UserError for whatever
    cannot work.

    Args:
        model: a folder with config.json and safetensors, or a name on the hub.
        data: a file or a folder of JSON lines, JSON, parquet or text, or the name of a data set on the hub.
        method: an attention method, or a run of runs.yaml whose method, options and steps are taken.
        out: the folder that `run` will make, which must be free or of an earlier export.
    """
    require_ours(out.resolve())
    base = Plan(results=results, seed=seed, device=device)
    base.check_choices()
    one_of("dtype", dtype, PRECISIONS)
    recipe = recipe_of(base, method)
    model_asset = found(model, "model", base.catalogue)
    folder = assets.obtain(model_asset.name, verify=True, assets={model_asset.name: model_asset})
    entry, config = model_entry(model_asset.name, folder)
    check_recipe(recipe, config, method, folder)
    tokenizer = tokenizer_of(folder, config)
    data_asset = found(data, "dataset", base.catalogue)
    source = assets.obtain(data_asset.name, verify=True, assets={data_asset.name: data_asset})
    files = (
        data_asset.files
        if isinstance(data_asset, Own)
        else [PurePath(member) for member in data_asset.members]
    )
    reader = readers.chosen(data_asset.name, files, reader or by_ending(data, files))
    documents = text.documents(data_asset.name, source, reader=reader, column=column)
    with reading(data, reader):
        there = counted(documents, tokenizer, amounts)
    amounts = fitting(amounts, entry.positions, there, data)
    options = text_stage.Options(
        sources=(data_asset.name,), heldout_source=data_asset.name, reader=reader, column=column
    )
    begins = {"model": model_asset.name}
    own = Run(**begins, method=recipe.method, options=recipe.options, steps=recipe.steps)
    label = slug(method)
    entries = Entries(
        name=slug(out.resolve().name),
        scale=scale_of(amounts, data_asset.name, device, dtype),
        assets={asset.name: asset for asset in (model_asset, data_asset)},
        models={model_asset.name: entry},
        data={data_asset.name: Data(make="text", options=options.model_dump(mode="json"))},
        runs={
            "teacher": Run(**begins),
            f"{label}_untrained": own.model_copy(update={"steps": ()}),
            label: own,
        },
    )
    plan = OwnPlan(scale=SCALE, results=results, seed=seed, entries=entries)
    say(plan, label, amounts)
    return label, plan


def recipe_of(plan: Plan, method: str) -> Run:
    """The run of runs.yaml whose method, options and steps are taken. Raises UserError for one that begins
    with another run, or of an encoder."""
    name = RECIPES.get(method, method)
    if name not in plan.runs:
        able = ", ".join(m for m in attention.available() if RECIPES.get(m, m) in plan.runs)
        raise UserError(
            f"no recipe for the method {method!r}; possible: {able}, or a run of workflow/papers/*/runs.yaml,"
            " such as lolcats_linear"
        )
    recipe = plan.runs[name]
    unfit = "begins where another run ends" if recipe.after else "trains nothing" if not recipe.steps else ""
    if not (unfit or (plan.models[recipe.model].causal and {"distill", "finetune"} >= recipe.recipes.keys())):
        unfit = "is of an encoder, or of a model from scratch"
    if unfit or recipe.method == "softmax":
        raise UserError(
            f"the run {name!r} {unfit or 'has softmax attention'}; possible: a run that linearizes a"
            " pretrained decoder, such as lolcats_window"
        )
    # those of one's own training are given, or the defaults of one's own scale
    amounts = {"dose", *_training.OF_BUDGET}
    steps = tuple(
        {stage: {**_without(settings, amounts), "data": PAPERS} for stage, settings in step.items()}
        for step in recipe.steps
    )
    return recipe.model_copy(update={"steps": steps})


def _without(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def found(given: str, kind: str, known: Mapping[str, Any]) -> Asset | Own:
    """A file or a folder of this machine, else the files of a repository on the hub, as an asset. Raises
    UserError where it is neither."""
    path = Path(given).expanduser()
    name = slug(path.name if kind == "model" else path.stem)
    name = f"{name}_own" if name in known else name
    if given and path.exists():
        if kind == "model" and path.is_file():
            raise UserError(
                f"{given} is a file; possible: a folder with config.json, safetensors and a tokenizer, such"
                f" as {path.absolute().parent}"
            )
        if kind == "model" and not (path / "config.json").is_file():
            raise UserError(
                f"{given} holds no model: no config.json is in it; possible: a folder with config.json,"
                " safetensors and a tokenizer"
            )
        return Own(
            name=name,
            source="path",
            path=path.resolve(),
            members=MODEL_FILES if kind == "model" else tuple(f"*{e}" for e in readers.ENDINGS),
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        possible = (
            "a folder with config.json and safetensors"
            if kind == "model"
            else f"a file or a folder of {', '.join(readers.ENDINGS)}"
        )
        raise UserError(
            f"no file or folder at {given}; possible: {possible}, or a name on the hub, as owner/name"
        )
    return of_hub(given, name, kind)


def of_hub(repository: str, name: str, kind: str) -> Asset:
    """A repository of the hub at its newest commit, or at the one in the hub client's cache where no hub is
    reached."""
    from huggingface_hub import HfApi, snapshot_download

    about = {"repo_id": repository, "repo_type": kind}
    licence = ""
    try:
        info = HfApi().repo_info(**about, files_metadata=True, timeout=10)
        commit, sizes = info.sha, {file.rfilename: file.size or 0 for file in info.siblings}
        licence = str(getattr(info.card_data, "license", "") or "")
    except Exception as error:  # the transport's own errors differ between releases of the client
        try:
            folder = Path(snapshot_download(**about, local_files_only=True))
        except Exception:
            raise UserError(
                f"{repository} is no file or folder here, and the hub did not give it:"
                f" {type(error).__name__}: {error}. Possible: a path; a gated repository wants its licence"
                " accepted on its page, then `hf auth login`"
            ) from None
        commit = folder.name
        sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    members = wanted(list(sizes), kind)
    if not members:
        raise UserError(
            f"{repository} has no files of the kinds"
            f" {', '.join(MODEL_FILES if kind == 'model' else TEXT_FILES)}; it has {', '.join(sizes)[:300]}"
        )
    size = max(sum(sizes[member] for member in members), 1)
    return Asset(
        name=name,
        source="hub",
        repo_type=kind,
        package=repository,
        version=commit,
        members=tuple(members),
        licence=licence or "not stated",
        attribution=f"{repository} on the hub",
        download_bytes=size,
        bytes=size,
    )


def wanted(names: list[str], kind: str) -> list[str]:
    """The files that are read: a model's own, at the top; of a data set those of one kind, of its training
    split where the names tell."""
    if kind == "model":
        return sorted(
            n for n in names if "/" not in n and any(fnmatch.fnmatch(n, pattern) for pattern in MODEL_FILES)
        )
    for pattern in TEXT_FILES:
        if fits := sorted(n for n in names if fnmatch.fnmatch(n, pattern)):
            return [n for n in fits if "train" in n] or fits
    return []


def by_ending(given: str, files: list[Path] | list[PurePath]) -> str:
    """The reader of files, by their endings alone; a page about the data is none of them. Raises UserError
    where they are of several kinds, or of none."""
    read = [file for file in files if file.suffix in readers.ENDINGS]
    data = [file for file in read if file.stem.lower() not in ABOUT] or read
    found = sorted({readers.ENDINGS[file.suffix] for file in data})
    if len(found) != 1:
        endings = ", ".join(sorted({file.suffix or file.name for file in files})) or "nothing"
        raise UserError(
            f"{given} ends in {endings}; possible: files of one kind ({', '.join(readers.ENDINGS)}), or"
            f" --reader with one of {', '.join(readers.available())}"
        )
    return found[0]


def model_entry(name: str, folder: Path) -> tuple[Model, PreTrainedConfig]:
    """The entry of models.yaml of a folder's model. Raises UserError for one without finite safetensors, and
    one whose attention no family knows."""
    for file in files_of(folder):
        require_finite(file)
    with configuring(folder):
        config = folders.config_of(folder)
    if config.model_type.startswith(folders.OURS):
        raise UserError(f"{folder} holds a model that is linearized already; possible: its teacher")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{folder} holds a {config.model_type!r}, which predicts no next token; possible: a decoder, such"
            " as Llama or Qwen3"
        )
    family = families.of(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UserError(f"{folder} has weights of {dtype}; possible: {', '.join(DTYPES)}")
    if (positions := config.max_position_embeddings) < 1:
        raise UserError(
            f"{folder / 'config.json'}: max_position_embeddings is {positions}; possible: the tokens that the"
            " model reads, 1 or more"
        )
    return Model(family=family.name, assets=(name,), positions=positions, dtype=dtype), config


def check_recipe(recipe: Run, config: PreTrainedConfig, method: str, folder: Path) -> None:
    """Raises UserError where a folder's configuration makes no model, and where a recipe does not fit it: a
    method that cannot have its heads, an adapter's target that it does not have."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        with configuring(folder):
            teacher = AutoModelForCausalLM.from_config(config)
        try:
            built = linearize(teacher, recipe.method, **recipe.options)
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(f"{method} does not fit this model: {error}") from None
    for settings in recipe.recipes.values():
        if settings.get("kind") == "lora":
            targets = settings.get("lora_targets", ("q_proj", "k_proj", "v_proj", "o_proj"))
            try:
                require_targets(method, built, targets)
            except UserError as error:  # it lists what no recipe puts an adapter on
                lacking = str(error).partition(";")[0]
                raise UserError(
                    f"{lacking}, which is of type {config.model_type!r}; possible: a recipe that trains all"
                    " weights, such as supra"
                ) from None


def tokenizer_of(folder: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """A folder's tokenizer. Raises UserError where there is none, where it has no end of text, and where it
    has tokens that the model has not."""
    tokenizer = folders.tokenizer_of(folder)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {folder} has no end of text (eos_token is None); possible: set"
            f" tokenizer.eos_token to one of its tokens, then tokenizer.save_pretrained({str(folder)!r})"
        )
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer):,} tokens, and its model {config.vocab_size:,};"
            " possible: the model's own tokenizer"
        )
    return tokenizer


def counted(
    documents: Iterator[text.Document], tokenizer: PreTrainedTokenizerBase, amounts: Amounts
) -> dict[str, int]:
    """The tokens to train on and the held-out ones, as the text stage will have them; counting ends where
    there are enough of both."""
    enough = {"train": amounts.tokens or MOST, "heldout": amounts.heldout_tokens}
    found, seen, separator = dict.fromkeys(enough, 0), set(), len(text.document_separator(tokenizer))
    for document in documents:
        digest = text._digest(document)
        if digest in seen:
            continue
        seen.add(digest)
        split = "heldout" if text._is_heldout(digest) else "train"
        if found[split] < enough[split]:
            parts = tokenizer([document.prompt, document.text], add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            found[split] += separator + sum(map(len, parts)) + bool(document.prompt)
        if all(found[name] >= many for name, many in enough.items()):
            break
    return found


def fitting(amounts: Amounts, positions: int, there: Mapping[str, int], data: str) -> Amounts:
    """The amounts as they will be. Raises UserError for too few tokens, and for sequences that the model
    cannot read."""
    seq_len = amounts.seq_len or min(1024, positions)
    if not 2 <= seq_len <= positions:
        raise UserError(
            f"--seq-len must be at least 2 and at most the model's {positions} positions; got {seq_len}"
        )
    if amounts.tokens and amounts.tokens > there["train"]:
        raise UserError(
            f"--tokens {amounts.tokens:,} asked for; {data} has {there['train']:,} to train on, a tenth of"
            " its documents held out"
        )
    tokens = (amounts.tokens or min(MOST, there["train"])) // seq_len * seq_len
    if tokens * amounts.epochs < (step := amounts.sequences * seq_len):
        raise UserError(
            f"{data} gives {tokens:,} training tokens in sequences of {seq_len}, read {amounts.epochs} times"
            f" (equal documents count once); one step takes {step:,} (--batch-size {amounts.batch_size} x"
            f" --accumulate {amounts.accumulate} x --seq-len {seq_len}). Possible: more text or smaller steps"
        )
    heldout = min(amounts.heldout_tokens, there["heldout"]) // seq_len * seq_len
    if heldout < 2 * seq_len:
        raise UserError(
            f"{data} gives {there['heldout']:,} held-out tokens, a tenth of its documents by their hash"
            f" (equal ones count once); a perplexity needs two sequences of {seq_len}. Possible: more"
            " documents, or a smaller --seq-len"
        )
    return amounts._replace(tokens=tokens, seq_len=seq_len, heldout_tokens=heldout)


def scale_of(amounts: Amounts, data: str, device: str | None, dtype: str) -> Scale:
    """The amounts and the hardware as a scale has them."""
    budget = {
        "epochs": amounts.epochs,
        "seq_len": amounts.seq_len,
        "batch_size": amounts.batch_size,
        "accumulate": amounts.accumulate,
    }
    checked = _training.Budget(**budget).model_dump()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    windows = {"tokens": amounts.heldout_tokens, "seq_len": amounts.seq_len, "batch_size": amounts.batch_size}
    return Scale(
        stand_ins=StandIns(data={PAPERS: data}),
        text=TextBudget(train_tokens=amounts.tokens, heldout_tokens=amounts.heldout_tokens),
        train={"distill": checked | {"activations": False}, "finetune": checked},
        measures={
            "gate": dict.fromkeys(("tokens", "seq_len"), min(GATE_TOKENS, amounts.seq_len)),
            "perplexity": windows,
        },
        hardware=Hardware(device=device, dtype=dtype, checkpoint_seconds=60),
        jobs=Jobs(memory_mb=16000, minutes={"default": 1440}),
    )


def measured(plan: OwnPlan, name: str) -> dict[str, tuple[str, str]]:
    """The rows of the report: words -> run and measure."""
    rows = {
        "the teacher": ("teacher", "perplexity"),
        "linearized, not trained": (f"{name}_untrained", "perplexity"),
    }
    if len(plan.run(name).run.recipes) > 1:
        rows["after the transfer"] = (name, "perplexity_before")
    return rows | {"at its end": (name, "perplexity")}


def say(plan: OwnPlan, name: str, amounts: Amounts) -> None:
    """One line on what will be done."""
    resolved = plan.run(name)
    steps = amounts.tokens * amounts.epochs // (amounts.sequences * amounts.seq_len)
    each = ", ".join(
        f"{stage} {plan.settings(Node(stage, name))['budget']['epochs'] * amounts.tokens:,} tokens"
        for stage in resolved.run.recipes
    )
    print(
        f"{resolved.model} by {resolved.run.method} ({resolved.run.variant}): {each}, some {steps:,} steps"
        f" each; work in {plan.root}",
        flush=True,
    )


def report(plan: OwnPlan, rows: Mapping[str, tuple[str, str]]) -> str:
    """The perplexities of held-out text as a table."""
    cells = []
    for words, address in rows.items():
        reading = load(plan.folder(plan.node("measure", *address))).find("perplexity")
        cells.append([words, f"{reading.value:,.2f}", f"{reading.stderr:,.2f}", f"{reading.n:,}"])
    return markdown(["Perplexity of held-out text", "value", "±", "tokens"], cells, align="left")


def slug(words: str) -> str:
    """Words as a name of the catalogue."""
    name = re.sub(r"[^\w.+-]", "_", words, flags=re.ASCII).strip("._+-") or SCALE
    name = re.sub(r"-(seed|x)(?=[\d.e+-]+$)", r"_\1", name)  # such ends have a meaning
    one_of("name", name, [name] if NAME.fullmatch(name) else [])
    return name
