"""The cost of generating at 7-8B shapes, on one GPU: `relinear benchmark`, or `python -m
relinear.benchmarks.generation --out FOLDER`.

Weights do not matter for speed, so they are random, in bfloat16. The softmax teacher (FlashAttention-2
through torch, with a key-value cache in fixed memory, which is read as far as it is filled) and the
linearized models are measured by the same code, one after the other:

    batch   LoLCATs Figure 2a: a prompt of 2048 tokens, 128 generated, batches of 1, 2, 4, .. as memory allows
    length  LoLCATs Figure 2b, c and SUPRA Figure 1: batch 1, a prompt of 128, 512 to 131,072 generated
    input   Lizard Figure 5: batch 16, inputs of 1024 to 32,768 tokens, 128 generated

A decode step, the choice of its token included, is one CUDA graph. Nobody waits for 131,072 tokens: a step is
timed where the last token stands (in the middle of the generated ones, where those are 128), with a cache of
the whole length, filled; `decode_seconds` is the integral over positions, by trapezoids between the sampled
ones. The prompt goes through in parts of at most `PREFILL_TOKENS` tokens, as a server would feed it; one part
is timed, and `prefill_seconds` is that times the number of parts. Times are medians after a warm-up. Memory
is torch's peak, weights included, from before the prompt to after the last step.

`teacher_dynamic` is the teacher as transformers runs it, and as papers measured it: a cache that is copied as
it grows, Python between kernels. Before a run is measured, tokens that its graph generates are compared with
those of plain calls; where they differ its rows say `wrong`. Rows are written as they come to efficiency.csv,
each with the commit that it was measured at; called again, it goes on with those that are missing.
"""

import datetime
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, CacheLayerMixin

from relinear.benchmarks import command
from relinear.benchmarks.campaign import Campaign, session
from relinear.errors import UserError
from relinear.linearize.faster import UNMASKED, fuse_norms
from relinear.linearize.graph import Decoder, capture
from relinear.linearize.model import linearize
from relinear.linearize.state import nbytes
from relinear.machine.gpus import claim
from relinear.plan.plan import Plan

# Positions only bound a warning: the sequences here are longer than those that the models were trained on.
WIDTHS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def shaped(kind: type[PreTrainedConfig], *widths: int, **more: Any) -> PreTrainedConfig:
    """The config of a model with these `WIDTHS`."""
    return kind(**dict(zip(WIDTHS, widths, strict=True)), **more)


SHAPES: dict[str, PreTrainedConfig] = {
    "mistral-7b": shaped(MistralConfig, 32000, 4096, 14336, 32, 32, 8, 128, 2**18, sliding_window=None),
    "llama-3-8b": shaped(LlamaConfig, 128256, 4096, 14336, 32, 32, 8, 128, 2**18),
}

TEACHERS = ("teacher", "teacher_dynamic")
KEY_HEAD_STATES = ("lolcats_linear_shared", "lizard_shared")  # states of key heads
# names in workflow/papers/*/runs.yaml, but for the last
RUNS = (
    "teacher",
    "lolcats_window",
    "lolcats_linear",
    "lizard",
    "supra",
    "hedgehog",
    *KEY_HEAD_STATES,
    "teacher_dynamic",
)
# the lengths that are sampled; from the first token on, so that their sum can be integrated
GENERATED = (1, *(2**i for i in range(9, 18)))
INPUTS = tuple(2**i for i in range(10, 16))
# the longest input; so a part, and the memory that it needs, is as large at every length
PREFILL_TOKENS = 32768
# timed repeats, untimed ones before them, and the seconds after which fewer repeats suffice
STEPS, WARM_UP, PATIENCE = 32, 3, 1.5
MEMORY_SHARE = 0.98  # of the GPU's memory; the rest is the driver's, for graphs and kernels
CHECKED = 12  # tokens that a graph and plain calls must agree on

COLUMNS = (
    *(
        "model",
        "sweep",
        "run",
        "batch",
        "prompt",
        "generated",
        "position",
        "status",
        "prefill_rows",
        "prefill_seconds",
        "ms_per_token",
        "steps",
    ),
    *(
        "decode_seconds",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "tokens_per_second",
        "peak_bytes",
        "cache_bytes",
    ),
    *("weight_bytes", "commit"),
)


class Setting(NamedTuple):
    """One row to measure: the run, the batch, the prompt and the number of generated tokens."""

    model: str
    sweep: str
    run: str
    batch: int
    prompt: int
    generated: int

    @property
    def position(self) -> int:
        """The position at which a step is timed. Cost is linear in it or constant: the middle of a short
        stretch is its mean."""
        return self.prompt + (self.generated if self.sweep == "length" else self.generated // 2)


# --- softmax attention as a fair peer ---


class FixedLayer(CacheLayerMixin):
    """Keys and values ``[B, Hkv, T, D]`` in fixed memory; a piece is written from `start` on and sees what is
    before it."""

    def __init__(
        self, batch: int, length: int, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        shape = batch, config.num_key_value_heads, length, config.head_dim
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(2))
        self.start, self.is_initialized = 0, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write a piece of keys and values from `start` on; return all up to its end, `[B, Hkv, T, D]`
        each."""
        rows, end = key_states.shape[0], self.start + key_states.shape[2]
        self.keys[:rows, :, self.start : end] = key_states
        self.values[:rows, :, self.start : end] = value_states
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Do nothing: the memory is there from the beginning."""
        ...

    def get_seq_length(self) -> int:
        """The tokens before the piece."""
        return self.start

    def get_max_length(self) -> int:
        """The number of tokens that it has memory for."""
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # transformers < 5.20

    def get_mask_sizes(self, query_length, *args) -> tuple[int, int]:
        """The number of keys that a mask covers, and the first of them."""
        return self.start + query_length, 0


# --- what generates ---


class Teacher:
    """The softmax teacher, its cache allocated for the whole sequence and filled with random numbers beyond
    the prompt."""

    dynamic = False

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def prefill(self, ids: Tensor, batch: int, length: int) -> Callable[[], None]:
        """A function that runs the prompt ``[rows, T]`` of a part of the batch; it fills a cache for `batch`
        sequences of `length` tokens."""
        of = self.model.config, self.model.dtype, ids.device
        self.cache = Cache(
            layers=[FixedLayer(batch, length, *of) for _ in range(self.model.config.num_hidden_layers)]
        )
        self.ids = ids[:1, :1]
        self.batch = batch

        def run() -> None:
            self.call(ids, 0)

        return run

    def call(self, ids: Tensor, start: int) -> Tensor:
        """Logits ``[rows, V]`` after a piece that begins at position `start`."""
        for layer in self.cache.layers:
            layer.start = start
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        return self.model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def decoder(self, position: int) -> Callable[[], None]:
        """A function that repeats the step of the token at `position`."""
        ids = self.ids.expand(self.batch, 1).clone()

        def step() -> None:
            ids.copy_(self.call(ids, position - 1).argmax(-1, keepdim=True))

        step()
        return capture(step, ids.device)

    def state_bytes(self) -> int:
        """Bytes of the cache after the run."""
        return sum(nbytes((layer.keys, layer.values)) for layer in self.cache.layers)

    def generate(self, ids: Tensor, tokens: int) -> Tensor:
        """`tokens` greedy tokens ``[B, tokens]`` after a prompt, each by a graph of its own."""
        batch, length = ids.shape
        self.prefill(ids, batch, length + tokens)
        token, made = self.call(ids, 0).argmax(-1, keepdim=True), []
        for position in range(length, length + tokens):
            made.append(token.clone())

            def step(token=token, position=position) -> None:
                token.copy_(self.call(token, position).argmax(-1, keepdim=True))

            self.call(token, position)  # once without the graph, whose step writes the same key again
            capture(step, ids.device)()
        return torch.cat(made, 1)


class DynamicTeacher(Teacher):
    """The teacher with transformers' own cache, which grows by copying, called from Python for each token."""

    def decoder(self, position):
        """A step that decodes one token from the filled cache."""
        filled, self.cache = self.cache.layers, DynamicCache(config=self.model.config)
        for i in range(len(filled)):  # layer by layer, so that memory never holds both caches
            layer, filled[i] = filled[i], None
            self.cache.update(layer.keys[:, :, : position - 1], layer.values[:, :, : position - 1], i)
            del layer
        ids = self.ids.expand(self.batch, 1).clone()

        def step() -> None:
            ids.copy_(
                self.model(input_ids=ids, past_key_values=self.cache, use_cache=True)
                .logits[:, -1]
                .argmax(-1, keepdim=True)
            )

        return step

    def generate(self, ids, tokens):
        """Tokens that greedy decoding gives, `[B, tokens]`."""
        return plain(self.model, ids, tokens)


class Linearized:
    """A linearized model: one part of the batch reads the prompt, and its state stands for the others'."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def prefill(self, ids, batch, length):
        """A function that reads a prompt and fills the cache."""
        self.repeats = batch // ids.shape[0]

        def run() -> None:
            self.cache = None  # before the next cache is made
            cache = self.model.make_cache()
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            self.cache, self.ids = cache, logits[:, -1].argmax(-1, keepdim=True)

        return run

    def decoder(self, position):
        """A step that decodes one token from the filled cache."""
        if self.repeats > 1:
            self.cache.batch_repeat_interleave(self.repeats)
        self.cache.lengths.fill_(position - 1)
        step = Decoder(self.model, self.cache, self.ids.repeat_interleave(self.repeats, 0))
        step()
        return step

    def state_bytes(self):
        """Bytes of the cache after the run."""
        return self.cache.state_bytes()

    def generate(self, ids, tokens):
        """Tokens that greedy decoding gives, `[B, tokens]`."""
        self.prefill(ids, *ids.shape)()
        step, made = Decoder(self.model, self.cache, self.ids), [self.ids]
        while len(made) < tokens:
            made.append(step().clone())
        return torch.cat(made, 1)


Subject = Teacher | Linearized


def build(config: PreTrainedConfig, run: str, device: torch.device, dtype: torch.dtype) -> Subject:
    """A run of the catalogue at a shape, its weights random and made where they are used."""
    torch.manual_seed(0)
    with torch.device(device):
        model = (
            AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=UNMASKED)
            .eval()
            .requires_grad_(False)
        )
        if run == "teacher_dynamic":
            return DynamicTeacher(model)
        fuse_norms(model)  # of teacher and method alike
        if run == "teacher":
            return Teacher(model)
        of = Plan().run(run).run
        return Linearized(linearize(model, of.method, **of.options).requires_grad_(False))


def plain(model: PreTrainedModel, ids: Tensor, tokens: int) -> Tensor:
    """`tokens` greedy tokens ``[B, tokens]`` by plain calls of the model, with the cache that it makes
    itself."""
    cache, made = None, []
    for _ in range(tokens):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        made.append(ids)
    return torch.cat(made, 1)


@torch.inference_mode()
def agrees(subject: Subject, device: torch.device) -> bool:
    """Whether recorded steps generate the tokens of plain calls. The prompt is longer than every window."""
    torch.manual_seed(1)
    ids = torch.randint(0, subject.model.config.vocab_size, (2, 208), device=device)
    return bool((subject.generate(ids, CHECKED) == plain(subject.model, ids, CHECKED)).all())


# --- measuring ---


def median_seconds(
    step: Callable[[], object], device: torch.device, repeats: int, warm_up: int
) -> tuple[float, int]:
    """Return the median time of a step and the number of repeats: as many as `PATIENCE` allows, between 3 and
    `repeats`.

    On a GPU the time runs from the end of one step to the end of the next. Steps are queued without waiting,
    as in a loop that generates.
    """
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    now = lambda: torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter()  # noqa: E731
    for _ in range(warm_up):
        step()
    wait()
    began = time.perf_counter()
    step()
    wait()
    repeats = max(3, min(repeats, int(PATIENCE / (time.perf_counter() - began))))
    marks = []
    for i in range(repeats + 1):
        if i:
            step()
        marks.append(now())
        if cuda:
            marks[-1].record()
    wait()
    times = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in itertools.pairwise(marks)]
    return statistics.median(times), repeats


@torch.inference_mode()
def measure(
    subject: Subject, setting: Setting, device: torch.device, known: dict[tuple[int, int], float]
) -> dict:
    """The costs of one setting; `known` keeps the seconds of a prompt's part by its shape (tokens, rows)."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    limit = max(1, PREFILL_TOKENS // setting.prompt)
    rows = max(n for n in range(1, min(limit, setting.batch) + 1) if setting.batch % n == 0)
    ids = torch.randint(0, subject.model.config.vocab_size, (rows, setting.prompt), device=device)
    prefill = subject.prefill(ids, setting.batch, setting.prompt + setting.generated)
    prefill()
    shape = setting.prompt, rows
    if shape not in known:
        known[shape], _ = median_seconds(prefill, device, repeats=5, warm_up=0)
    step = subject.decoder(setting.position)
    seconds, steps = median_seconds(step, device, STEPS, WARM_UP)
    return {
        "position": setting.position,
        "status": "ok",
        "prefill_rows": rows,
        "prefill_seconds": known[shape] * setting.batch / rows,
        "ms_per_token": seconds * 1e3,
        "steps": steps,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "cache_bytes": subject.state_bytes(),
        "weight_bytes": sum(p.nbytes for p in subject.model.parameters()),
    }


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that memory ended. If it ends while a graph is recorded, the end of the
    recording fails too."""
    while error is not None:
        if (
            isinstance(error, torch.OutOfMemoryError)
            or "out of memory" in str(error)
            or "ALLOC_FAILED" in str(error)
        ):
            return True
        error = error.__context__
    return False


def attempt(subject: Subject, setting: Setting, device: torch.device, known: dict) -> dict:
    """The row of `measure`, or a row that says that memory ended."""
    try:
        row = measure(subject, setting, device, known)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        row = {"position": setting.position, "status": "out of memory"}
    subject.cache = subject.ids = None
    gc.collect()
    return row


def rates(setting: Setting, row: dict, before: dict | None) -> dict:
    """The numbers that follow from a measured row. `before` is the row sampled before it in the sweep over
    lengths."""
    if row["status"] == "out of memory":
        return row
    if setting.sweep != "length" or before is None:
        seconds = setting.generated * row["ms_per_token"] / 1e3
    else:
        mean = (float(before["ms_per_token"]) + row["ms_per_token"]) / 2e3
        seconds = float(before["decode_seconds"]) + (setting.generated - int(before["generated"])) * mean
    made = setting.batch * setting.generated
    return row | {
        "decode_seconds": seconds,
        "prefill_tokens_per_second": setting.batch * setting.prompt / row["prefill_seconds"],
        "decode_tokens_per_second": made / seconds,
        "tokens_per_second": made / (row["prefill_seconds"] + seconds),
    }


# --- what to measure ---


def next_batch(done: dict[int, bool], wanted: list[int]) -> int | None:
    """The next batch to try, or None when the search is over. `done` says of each earlier batch whether it
    fitted in memory.

    First come the `wanted` batches, at which other runs were measured. Then the batch doubles until memory
    ends. Then the interval between the largest that fits and the smallest that does not is halved, until it
    is an eighth of the former.
    """
    fits, fails = [b for b, ok in done.items() if ok], [b for b, ok in done.items() if not ok]
    low, high = max(fits, default=0), min(fails, default=None)
    if missing := [b for b in wanted if b not in done and (high is None or b < high)]:
        return missing[0]
    if high is None:
        return 2 * low or 1
    return (low + high) // 2 if high - low > max(low // 8, 1) and low else None


class Log(Campaign):
    """The campaign of efficiency.csv. All its rows are of one GPU, and its provenance has a session for each
    call that measured."""

    def __init__(self, folder: Path, gpu: str, command: str):
        super().__init__(folder / "efficiency.csv", COLUMNS)
        if self.about.get("gpu", gpu) != gpu:
            raise UserError(
                f"{self.path} was measured on {self.about['gpu']!r}, and this is {gpu!r}; possible: another"
                " --out"
            )
        own = session(command)
        self.commit = own["commit"] and own["commit"][:7]
        self.describe(
            gpu=gpu,
            sessions=[*self.about.get("sessions", []), own],
            dtype="bfloat16",
            shapes={name: shape.to_diff_dict() for name, shape in SHAPES.items()},
            timing=(
                f"median of {STEPS} steps, fewer after {PATIENCE} s, {WARM_UP} to warm up; {CHECKED} tokens"
                " checked a run"
            ),
        )
        self.replace(self.rows)  # writes the names of the columns where there are no rows yet

    def of(self, model: str, sweep: str, run: str) -> list[dict]:
        """The rows of a run in a sweep."""
        return [r for r in self.rows if (r["model"], r["sweep"], r["run"]) == (model, sweep, run)]

    def add_costs(self, setting: Setting, row: dict) -> None:
        """Add the costs of a setting."""
        self.add(setting._asdict() | row | {"commit": self.commit})


class Sweeps(NamedTuple):
    """The values that each sweep goes over, and the values that it keeps fixed."""

    prompt: int = 2048
    answer: int = 128
    largest: int = 4096  # the largest batch, however much memory there is
    short_prompt: int = 128
    generated: tuple[int, ...] = GENERATED
    input_batch: int = 16
    inputs: tuple[int, ...] = INPUTS


SWEEPS = Sweeps()


def settings(log: Log, model: str, sweep: str, run: str, sweeps: Sweeps) -> Iterator[Setting]:
    """Yield the settings that a sweep still lacks. Each is chosen when the rows before it are there."""
    if sweep == "batch":
        wanted = [int(r["batch"]) for r in log.of(model, sweep, "teacher") if r["status"] != "out of memory"]
        while True:
            done = {int(r["batch"]): r["status"] != "out of memory" for r in log.of(model, sweep, run)}
            batch = next_batch(done, wanted if run not in TEACHERS else [])
            if batch is None or batch > sweeps.largest:
                return
            yield Setting(model, sweep, run, batch, sweeps.prompt, sweeps.answer)
    if sweep == "length":
        points = [(1, sweeps.short_prompt, n) for n in sweeps.generated]
    else:
        points = [(sweeps.input_batch, n, sweeps.answer) for n in sweeps.inputs]
    done = {(int(r["batch"]), int(r["prompt"]), int(r["generated"])) for r in log.of(model, sweep, run)}
    yield from (Setting(model, sweep, run, *point) for point in points if point not in done)


# The most telling rows first, since the time may not suffice for all.
ORDER = (
    *(("mistral-7b", run, ("batch", "length")) for run in RUNS[:5]),
    *(("llama-3-8b", run, ("input",)) for run in ("teacher", "lizard", "lolcats_window")),
    *(("mistral-7b", run, ("batch",)) for run in KEY_HEAD_STATES),
    ("mistral-7b", "teacher_dynamic", ("batch",)),
    ("mistral-7b", "hedgehog", ("batch", "length")),
)


def measure_all(
    log: Log,
    device: torch.device,
    dtype: torch.dtype,
    deadline: float,
    order=ORDER,
    shapes=SHAPES,
    sweeps=SWEEPS,
) -> bool:
    """Measure the missing rows until `deadline` (time.monotonic()). Return whether none is left."""
    for model, run, names in order:
        if all(next(settings(log, model, name, run, sweeps), None) is None for name in names):
            continue
        began = time.monotonic()
        if began > deadline:
            return False
        subject, known = build(shapes[model], run, device, dtype), {}
        right = agrees(subject, device)
        subject.cache = subject.ids = None
        say(
            f"{model} {run}: made in {time.monotonic() - began:.1f} s; recorded tokens"
            f" {'equal' if right else 'DIFFER FROM'} those of plain calls"
        )
        for name in names:
            for setting in settings(log, model, name, run, sweeps):
                if time.monotonic() > deadline:
                    say(f"time is up before {setting}")
                    return False
                began, before = time.monotonic(), (log.of(model, name, run) or [None])[-1]
                row = rates(setting, attempt(subject, setting, device, known), before)
                if not right and row["status"] == "ok":
                    row["status"] = "wrong"
                log.add_costs(setting, row)
                say(report(setting, row, time.monotonic() - began))
        del subject
        gc.collect()
    return True


def say(line: str) -> None:
    """Print a line of progress, with the time."""
    print(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {line}", flush=True)


def report(setting: Setting, row: dict, seconds: float) -> str:
    """One line of progress."""
    what = (
        f"{setting.model} {setting.run} {setting.sweep}: batch {setting.batch}, {setting.prompt} +"
        f" {setting.generated}"
    )
    if row["status"] == "out of memory":
        return f"{what}: out of memory ({seconds:.1f} s)"
    gib = (row["peak_bytes"] or 0) / 2**30
    return (
        f"{what}: {row['ms_per_token']:.2f} ms a step, {row['decode_tokens_per_second']:.0f} tokens/s,"
        f" prefill {row['prefill_tokens_per_second']:.0f} tokens/s, {gib:.1f} GiB ({seconds:.1f} s)"
    )


def benchmark(out: Path, seconds: float = float("inf"), runs: Sequence[str] = RUNS) -> None:
    """Measure the rows that `out` lacks, beginning none after `seconds`.

    Raises UserError for an unknown run, without a GPU, and where `out` has rows of another one.
    """
    if unknown := set(runs) - set(RUNS):
        raise UserError(f"no runs {', '.join(sorted(unknown))} to generate with; have {', '.join(RUNS)}")
    deadline = time.monotonic() + seconds
    claim()
    if not torch.cuda.is_available():
        raise UserError(
            "the cost of generating at 7-8B shapes is measured on a GPU with 40 GB or more; torch finds none"
            " here"
        )
    device, dtype = torch.device("cuda"), torch.bfloat16
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        log = Log(
            out,
            torch.cuda.get_device_name(),
            f"python -m relinear.benchmarks.generation --runs {' '.join(runs)}",
        )
        whole = measure_all(log, device, dtype, deadline, [entry for entry in ORDER if entry[1] in runs])
    say(f"{len(log.rows)} rows in {log.path}; {'complete' if whole else 'the same command goes on'}")


def main(
    out: Annotated[Path, typer.Option(help="folder of efficiency.csv; what it has is not measured again")],
    seconds: Annotated[float, typer.Option(help="begin no row after that many")] = float("inf"),
    runs: Annotated[
        list[str] | None, typer.Option(help=f"only these; all by default: {', '.join(RUNS)}")
    ] = None,
) -> None:
    """Measure the rows that the folder lacks."""
    benchmark(out, seconds, runs or RUNS)


if __name__ == "__main__":
    command.run(main)
