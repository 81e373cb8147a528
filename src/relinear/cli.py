"""`relinear`: one verb per stage, plus tables, figures, exports and the MLflow mirror. `relinear VERB --help` says what each takes."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from relinear.errors import UserError
from relinear.files import MANIFEST
from relinear.machine.gpus import claim
from relinear.plan.config import ConfigError
from relinear.plan.plan import ON_DEVICE, PER_RUN, SHARED, SPREAD, Plan
from relinear.stage import run_stage
from relinear.tracking import live as tracking

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
track = typer.Typer(help="The MLflow mirror of the result files.", no_args_is_help=True)
app.add_typer(track, name="track")

Scale = Annotated[str, typer.Option(help="A file of workflow/scales.")]
Budget = Annotated[float, typer.Option(help="Multiplies every budget of the scale: training tokens, items, held-out tokens.")]
Seed = Annotated[int, typer.Option(help="Seed of data order, initialisation and drawn items.")]
Seeds = Annotated[int, typer.Option(help="Trainings of each row of the headline table, which shows their mean.")]
Results = Annotated[Path, typer.Option(help="Folder that all scales write under.")]
Teacher = Annotated[str | None, typer.Option(help="Another teacher that the scale names.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda instead of the scale's.")]
Threads = Annotated[int | None, typer.Option(help="Cores to compute with; all if not given.")]
Gpus = Annotated[int | None, typer.Option(min=0, help=f"GPUs to spread {', '.join(SPREAD)} over, by torchrun; the scale's if not given.")]


def _stage_verb(stage: str):
    per_run = stage in PER_RUN

    def work(run: str | None, scale: str, budget: float, seed: int, seeds: int, results: Path, teacher: str | None, device: str | None,
             threads: int | None, gpus: int | None) -> None:  # fmt: skip
        plan = Plan(scale=scale, budget=budget, seed=seed, seeds=seeds, teacher=teacher, device=device, results=results)
        plan.check()
        step = plan.step(stage, run)
        wanted = (device or plan.config.hardware.device) if stage in ON_DEVICE else "cpu"
        launched = os.environ.get("WORLD_SIZE")  # by torchrun
        processes = int(launched) if launched else plan.gpus(stage) if gpus is None else gpus
        plan.check_processes(stage, max(processes, 1))
        if wanted == "cuda":
            claim(max(processes, 1))
        if processes > 1 and not launched:
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, *TORCHRUN, str(processes), "-m", "relinear.cli", *sys.argv[1:]])
        module = importlib.import_module(plan.modules(step)[0])
        # torch; not needed to print a help text
        hardware, distributed = (importlib.import_module(f"relinear.{name}") for name in ("hardware", "distributed"))
        plan.check_options()
        hardware.set_threads(threads)
        with distributed.joined(hardware.device_of(wanted)):
            folder = run_stage(plan, step, module.run)
            if distributed.rank() == 0:
                print(f"{step}: {folder}")

    if per_run:

        def verb(run: Annotated[str, typer.Argument(help="A run of workflow/runs.yaml.")], scale: Scale = "mini", budget: Budget = 1.0,
                 seed: Seed = 0, seeds: Seeds = 1, results: Results = Path("results"), teacher: Teacher = None, device: Device = None,
                 threads: Threads = None, gpus: Gpus = None) -> None:  # fmt: skip
            work(run, scale, budget, seed, seeds, results, teacher, device, threads, gpus)
    else:

        def verb(scale: Scale = "mini", budget: Budget = 1.0, seed: Seed = 0, seeds: Seeds = 1, results: Results = Path("results"),
                 teacher: Teacher = None, device: Device = None, threads: Threads = None) -> None:  # fmt: skip
            work(None, scale, budget, seed, seeds, results, teacher, device, threads, None)

    return verb


HELP = {
    "assets": "Obtain and verify the scale's models, texts and items.",
    "teacher": "Save the teacher once as a plain transformers folder.",
    "instructions": "Let the teacher write instructions and answers to train on.",
    "corpus": "Tokenise and split the texts.",
    "activations": "Run the teacher once over the transfer data.",
    "distill": "Stage 1: train a method's own parameters to mimic softmax attention.",
    "finetune": "Stage 2: train the linearized model on text, by LoRA or in full.",
    "fidelity": "Measure a method against softmax attention, before finetuning.",
    "evaluate": "The gate, perplexity and lm-eval's tasks.",
}
for _stage in (*SHARED, *PER_RUN):
    app.command(name=_stage, help=HELP[_stage])(_stage_verb(_stage))


@app.command()
def render(
    paper: Annotated[str, typer.Argument(help="A file of workflow/papers.")],
    artefact: Annotated[str, typer.Argument(help="Its table or figure, such as table1.")],
    scale: Scale = "mini", budget: Budget = 1.0, seed: Seed = 0, seeds: Seeds = 1, results: Results = Path("results"), teacher: Teacher = None,
    device: Device = None,
) -> None:  # fmt: skip
    """Make a paper's table or figure from finished runs; rows that were not run say so."""
    from relinear import draw as papers

    plan = Plan(scale=scale, budget=budget, seed=seed, seeds=seeds, teacher=teacher, device=device, results=results)
    if paper not in papers.available():
        raise ConfigError(f"no paper {paper!r}; have {', '.join(papers.available())}")
    module = papers.load(paper)
    if artefact not in module.ARTEFACTS:
        raise ConfigError(f"{paper} has no {artefact!r}; have {', '.join(module.ARTEFACTS)}")
    for path in module.ARTEFACTS[artefact](plan):
        print(path)


@app.command("benchmark")
def run_benchmark(results: Results = Path("results")) -> None:
    """Measure the cost of generating at 7-8B shapes on one GPU, into <results>/efficiency; interrupted, it goes on where it was."""
    from relinear.benchmarks.generation import benchmark

    out = results / "efficiency"
    benchmark(out / ".work")
    for path in (out / ".work").iterdir():
        print(path.replace(out / path.name))


@app.command("export")
def export_run(
    run: Annotated[Path, typer.Argument(help="A run's folder, <results>/<scale>/runs/<run>.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; one that an earlier export made is replaced.")],
    merge: Annotated[bool, typer.Option("--merge", help="Add the adapter to the weights; without, it lies beside them.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    self_contained: Annotated[bool, typer.Option("--self-contained", help="Add the code, to load without relinear by trust_remote_code.")] = False,
) -> None:
    """Write a run as a folder that transformers, peft and lm-eval load."""
    from relinear.share.export import export

    print(export(run, out, merge=merge, dtype=dtype, self_contained=self_contained))


@app.command("tasks")
def write_tasks(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    scale: Scale = "mini", budget: Budget = 1.0, seed: Seed = 0,
) -> None:  # fmt: skip
    """Write the items that a scale's evaluate stage scores as tasks for lm_eval --include_path."""
    plan = Plan(scale=scale, budget=budget, seed=seed)
    plan.check()
    from relinear.share.tasks import write

    print(" ".join(write(plan, out)))


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="A run (results/<scale>/runs/<run>), or any folder that transformers loads.")],
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads it from stdin.")],
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens at most.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; greedy if not given.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = None,
    seed: Seed = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the tokenizer's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu", threads: Threads = None,
) -> None:  # fmt: skip
    """Continue a prompt, as the text comes; then tokens/s of prefill and of decoding, and the bytes of the model's state."""
    text = sys.stdin.read() if prompt == "-" else prompt
    generation = importlib.import_module("relinear.share.generate")  # torch; not needed to print a help text
    importlib.import_module("relinear.machine.hardware").set_threads(threads)
    speed = generation.generate(
        folder, text, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, chat=chat, dtype=dtype, device=device
    )  # fmt: skip
    print(speed, file=sys.stderr)


@track.command("init")
def track_init(scale: Scale = "mini", budget: Budget = 1.0, seed: Seed = 0, seeds: Seeds = 1, results: Results = Path("results"),
               teacher: Teacher = None, device: Device = None) -> None:  # fmt: skip
    """Create the store, before anything writes to it in parallel."""
    results.mkdir(parents=True, exist_ok=True)
    tracking.init(Plan(scale=scale, results=results).store, scale)


@track.command("rebuild")
def track_rebuild(results: Results = Path("results")) -> None:
    """Restore the store from the result files."""
    results.mkdir(parents=True, exist_ok=True)
    print(f"{tracking.rebuild(Plan(results=results).store, results)} runs restored")


@track.command("export")
def track_export(
    scale_results: Annotated[Path, typer.Argument(help="A scale's folder, such as results/smollm2.")],
    out: Annotated[Path, typer.Argument(help="The folder to make, such as results/reference/smollm2; an earlier export is replaced.")],
    weights: Annotated[bool, typer.Option(help="Adapters and methods' parameters of table2.csv's rows too: up to 11 MB each of SmolLM2.")] = True,
) -> None:
    """Copy what is worth committing of a scale's results: tables, figures, records, curves, items' outcomes, adapters, methods' parameters.

    Curves are thinned, figures have 256 colours, adapters of runs that computed in bfloat16 are rounded to it, as they are when loaded in it;
    reference.json says so of each, and has the originals' sha256.
    """
    from relinear.tracking.committed import export

    sizes = export(scale_results, out, weights=weights)
    for part, size in sizes.items():
        print(f"{size:>12,} bytes  {part}")
    print(f"{sum(sizes.values()):>12,} bytes  {out}")


@track.command("import")
def track_import(
    folder: Annotated[Path, typer.Argument(help="Results that were committed or copied, such as results/reference/smollm2.")],
    results: Results = Path("results"),
    label: Annotated[str, typer.Option(help="Ends the experiment's name, which keeps them apart from your own runs.")] = "reference",
) -> None:
    """Mirror other results into experiments relinear-<scale>-<label>, to compare with one's own."""
    from relinear.tracking.committed import verify

    if (folder / MANIFEST).is_file():
        verify(folder)
    results.mkdir(parents=True, exist_ok=True)
    print(f"{tracking.import_folder(Plan(results=results).store, folder, label)} runs imported")


@track.command("ui")
def track_ui(results: Results = Path("results"), port: int = 5000) -> None:
    """Open MLflow's UI on 127.0.0.1; a server that MLFLOW_TRACKING_URI names has its own."""
    store = Plan(results=results).store
    if not store.startswith("sqlite:"):
        print(f"MLFLOW_TRACKING_URI is set: the runs are at {store}")
        return
    results.mkdir(parents=True, exist_ok=True)
    tracking.init(store)
    ui = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, "--host", "127.0.0.1", "--port", str(port)]
    os.execvp(sys.executable, ui)


def main() -> None:
    """Entry point. What a user can mend is one line on stderr; anything else is a traceback."""
    tracking.install_signal_handlers()
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
