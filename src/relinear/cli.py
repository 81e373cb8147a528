"""`relinear`: one verb per stage, plus tables, figures, exports and the MLflow mirror. `relinear VERB --help`
lists a verb's options."""

from relinear.machine.interrupt import patient

patient()  # the imports below take a second or more

import functools
import gc
import importlib
import inspect
import os
import shlex
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

# Threads that wait for each other sleep soon. OpenMP (GNU's, in torch for Linux) reads this once, when torch
# is imported. By default they keep their cores: beside other work two threads took four times the processor
# time of one. Where a user chose a policy, this changes nothing.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import typer

import relinear
from relinear import stages
from relinear.errors import UserError
from relinear.files import MANIFEST
from relinear.machine.disk import in_the_way, make_writable, refusal
from relinear.machine.torchrun import torchrun
from relinear.machine.warm import INTERRUPTED, signalled
from relinear.plan import code
from relinear.plan.job import DTYPES, PRECISIONS, Job
from relinear.plan.near import possible
from relinear.plan.plan import Plan
from relinear.plan.strict import WORKFLOW, ConfigError
from relinear.stages._stage import Node
from relinear.tracking import benchmarks, mirror
from relinear.tracking import live as tracking
from relinear.tracking.store import StoreError

# The packages of the extra `suite` in pyproject.toml, by the names that are imported.
SUITE = (
    "PIL",
    "accelerate",
    "datasets",
    "lm_eval",
    "matplotlib",
    "mlflow",
    "pandas",
    "pyarrow",
    "rocrate",
    "rouge_score",
    "scipy",
    "sklearn",
    "snakemake",
    "sqlalchemy",
)
# module -> the extras that bring it
EXTRAS = {**dict.fromkeys(SUITE, "suite"), **dict.fromkeys(("rensa", "resiliparse"), "suite,corpus")}
prepared: Plan | None = None  # a plan that is checked, in the forks of the verb `warm`

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
track = typer.Typer()


def _version(asked: bool) -> None:
    if asked:
        print(f"relinear {relinear.__version__}")
        raise typer.Exit


def _require_verb(context: typer.Context, command: str) -> None:
    """Print the help text, and raise UserError, where a command was given without a verb."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise UserError(f"`{command}` needs a verb; `{command} --help` lists the verbs")


@app.callback(help=__doc__, invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Take the options that stand before a verb."""
    _require_verb(context, "relinear")


@track.callback(help="The MLflow mirror of the result files.", invoke_without_command=True)
def _track(context: typer.Context) -> None:
    _require_verb(context, "relinear track")


app.add_typer(track, name="track")


@contextmanager
def warned_of_the_store() -> Iterator[None]:
    """A store that fails meanwhile is warned of, and no error."""
    try:
        yield
    except StoreError as error:
        print(
            f"WARNING: {error}\nWARNING: `relinear track rebuild` fills it later; results do not need it.",
            file=sys.stderr,
        )


def _folder(path: Path) -> Path:
    """A folder that is there or can be made."""
    try:
        said = in_the_way(path.absolute())
    except OSError as error:
        said = f"{error.strerror}: {str(path)[:60]!r}"
    if said:
        raise typer.BadParameter(said)
    return path


def _new_folder(path: Path) -> Path:
    """As `_folder`, for one that will be written: a file can be made where it is, or in the nearest folder
    above it."""
    there = next(p for p in (_folder(path).absolute(), *path.absolute().parents) if p.exists())
    try:
        TemporaryFile(dir=there).close()
    except OSError as error:
        raise typer.BadParameter(
            f"no folder can be made at {path}: {error.strerror}; possible: a place that this user can"
            " write to"
        ) from None
    return path


def _folder_or_none(path: Path | None) -> Path | None:
    return None if path is None else _new_folder(path)


SPREAD = ", ".join(name for name in stages.available() if stages.stage(name).spread)
PLAN = {
    "scale": (Annotated[str, typer.Option(help="A file of workflow/scales.")], "mini"),
    "budget": (
        Annotated[
            float,
            typer.Option(
                help="Multiplies every amount of the scale: training tokens, items, held-out tokens."
            ),
        ],
        1.0,
    ),
    "seed": (Annotated[int, typer.Option(help="Seed of data order, initialisation and drawn items.")], 0),
    "seeds": (
        Annotated[int, typer.Option(help="Trainings of each row of tables that show a mean over seeds.")],
        1,
    ),
    "results": (
        Annotated[Path, typer.Option(callback=_folder, help="Folder that all scales write under.")],
        Path("results"),
    ),
    "teacher": (
        Annotated[str | None, typer.Option(help="A model of models.yaml in place of every run's.")],
        None,
    ),
    "device": (Annotated[str | None, typer.Option(help="cpu or cuda instead of the scale's.")], None),
}
Seed = Annotated[
    int | None, typer.Option(help="Seed of what is sampled, 0 if not given; the likeliest text needs none.")
]
Results = Annotated[Path, typer.Option(callback=_folder, help="Folder that all scales write under.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=os.cpu_count(), help="Cores to compute with. Default: OMP_NUM_THREADS, else all."
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=0, help=f"GPUs to spread {SPREAD} over, by torchrun; the scale's if not given."),
]


def require_clone() -> None:
    """Raises UserError where there is no workflow/: relinear was installed, and this is no clone."""
    if not WORKFLOW.is_dir():
        raise UserError(
            "this verb reads workflow/, which is in a clone of the repository and not in an installed"
            f" package: {WORKFLOW} is not there. Possible, in a clone: `make setup`, or"
            " `pip install --editable '.[suite]'`, which leaves the package beside its workflow/; `relinear"
            " generate` and relinear.linearize need none"
        )


def planned(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose first parameter is a plan, as one that takes the plan's options instead."""
    own = list(inspect.signature(verb).parameters.values())[1:]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in PLAN.items()
    ]

    @functools.wraps(verb)
    def with_options(**given) -> None:
        require_clone()
        # imported objects stay, and collecting among them again and again takes seconds; the work of a stage
        # has it on
        gc.disable()
        try:
            plan = Plan(**{name: given.pop(name) for name in PLAN})
            if plan == prepared:
                plan = prepared
            elif not given.get("finished"):  # the rules' draw, of a plan that Snakemake has checked
                plan.check_choices()
            verb(plan, **given)
        finally:
            gc.enable()

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
    with_options.__signature__ = inspect.Signature(parameters)
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def granted() -> int | None:
    """The cores that OMP_NUM_THREADS grants this process; None where it says nothing, as in a process of
    torchrun, which sets it to 1 by itself."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and "LOCAL_WORLD_SIZE" not in os.environ else None


def run(plan: Plan, node: Node, threads: int | None, gpus: int | None) -> None:
    """Run one node in this process, or in as many as it is spread over."""
    plan.check_node(node)
    stage = stages.stage(node.stage)
    wanted = (plan.device or plan.config.hardware.device) if stage.device else "cpu"
    launched = os.environ.get("WORLD_SIZE")  # by torchrun
    processes = int(launched) if launched else plan.gpus(node.stage) if gpus is None else gpus
    plan.check_processes(node, max(processes, 1))
    run_stage, stands = (
        getattr(importlib.import_module("relinear.stage"), name) for name in ("run_stage", "stands")
    )
    if not launched and stands(plan, node):
        print(f"{node}: {plan.folder(node)}")
        return
    if wanted == "cuda":
        importlib.import_module("relinear.machine.gpus").claim(max(processes, 1))
    if processes > 1 and not launched:
        sys.stdout.flush()
        os.execv(sys.executable, torchrun(processes, "-m", "relinear.cli", *sys.argv[1:]))
    work = collecting(importlib.import_module(plan.work(node).module).work)
    if not stage.torch:
        print(f"{node}: {run_stage(plan, node, work)}")
        return
    hardware, distributed = (
        importlib.import_module(f"relinear.machine.{name}") for name in ("hardware", "distributed")
    )
    hardware.set_threads(threads or granted())
    if wanted == "cpu":
        importlib.import_module("relinear.machine.memory").keep_freed()
    with distributed.joined(hardware.device_of(wanted)):
        folder = run_stage(plan, node, work)
        if distributed.rank() == 0:
            print(f"{node}: {folder}")


def collecting(work: Callable[[Job], dict[str, Any]]) -> Callable[[Job], dict[str, Any]]:
    """The work with the garbage collector on; objects that exist when it begins are left out."""

    def begun(job: Job) -> dict[str, Any]:
        gc.freeze()
        gc.enable()
        return work(job)

    return begun


def _verb(stage: str) -> Callable[..., None]:
    """The verb of a stage: its node's name, for measure also the measure, then a plan's options."""

    def run_named(
        plan,
        name: Annotated[str, typer.Argument(help="An asset, a model, a text (<data>@<model>) or a run.")],
        threads: Threads = None,
        gpus: Gpus = None,
    ) -> None:
        run(plan, plan.node(stage, plan.name(name) if stages.stage(stage).trains else name), threads, gpus)

    def run_measurement(
        plan,
        name: Annotated[str, typer.Argument(help="A run.")],
        measure: Annotated[str, typer.Argument(help="A measure.")],
        threads: Threads = None,
        gpus: Gpus = None,
    ) -> None:
        run(plan, plan.node(stage, plan.name(name), measure), threads, gpus)

    return planned(run_measurement if stage == "measure" else run_named)


for _name in stages.available():
    app.command(name=_name, help=stages.stage(_name).help)(_verb(_name))


def prepare(plan: Plan, modules: list[str]) -> None:
    """Do what each job of a plan does beside its work, and what is the same for all, so that this process's
    forks find it done."""
    global prepared
    with suppress(Exception):  # its patterns for all models are compiled when the first is loaded
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    importlib.import_module("relinear.stage")
    code.kernel_hashes([name.removesuffix(".__init__") for name in modules])
    importlib.import_module("relinear.tracking.rows").columns()
    with suppress(UserError):  # reads every spec: a record names those that show its run
        plan.artefacts_of("")
    prepared = plan


@app.command("warm", hidden=True)
@planned
def serve_jobs(plan, owner: Annotated[int, typer.Argument(help="The process that it ends with.")]) -> None:
    """Import what jobs import and check the plan, then fork for each job that asks at the socket on stdin,
    while no file is edited."""
    warm = importlib.import_module("relinear.machine.warm")
    folders = [*code.PACKAGES.values(), WORKFLOW]
    before = warm.stamps(folders)
    ours = [
        ".".join(path.relative_to(code.PACKAGES["relinear"].parent).with_suffix("").parts)
        for path in code.PACKAGES["relinear"].rglob("*.py")
    ]
    for name in (
        *warm.LIBRARIES,
        *(
            name
            for name in ours
            if name.startswith(("relinear.measure.", "relinear.train.", "relinear.draw."))
        ),
    ):
        if not Path(f"/proc/{owner}").exists():
            break
        with suppress(Exception):  # whatever a library raises: a job that needs it will say so
            importlib.import_module(name)
    prepare(plan, ours)
    gc.collect()
    gc.freeze()  # otherwise the collector writes into the memory that forks share

    def work(request: dict[str, Any]) -> None:
        sys.argv = [__file__, *request["argv"][2:]]  # after `-m relinear.cli`
        main()

    edited = "code or workflow/ was edited meanwhile"
    listener = socket.socket(fileno=os.dup(0))  # forks have another stdin
    warm.serve(listener, owner, work, lambda: "" if warm.stamps(folders) == before else edited)


@app.command()
@planned
def draw(
    plan,
    paper: Annotated[str, typer.Argument(help="A folder of workflow/papers.")],
    artefact: Annotated[str, typer.Argument(help="Its table or figure, such as table1.")],
    committed: Annotated[
        Path | None,
        typer.Option(
            help="Draw from the results in this folder, such as results/reference/smollm2, and into it."
        ),
    ] = None,
    finished: Annotated[
        bool,
        typer.Option(
            "--finished", help="An error where a measurement is not finished, in place of `not run`."
        ),
    ] = False,
    claims: Annotated[
        bool,
        typer.Option(
            "--claims",
            help=(
                "With --committed, the verdicts alone, also of a figure whose attention weights are not"
                " committed."
            ),
        ),
    ] = False,
) -> None:
    """Draw a paper's table or figure from finished measurements; those that were not run say so."""
    if paper not in (papers := sorted({a.paper for a in plan.artefacts.values()})):
        raise ConfigError(f"no paper {paper!r} with tables or figures; {possible(paper, papers)}")
    if f"{paper}_{artefact}" not in plan.artefacts:
        raise ConfigError(
            f"{paper} has no {artefact!r};"
            f" {possible(artefact, [a.stem for a in plan.artefacts.values() if a.paper == paper])}"
        )
    from relinear.draw.planned import draw_committed, draw_planned

    found = plan.artefacts[f"{paper}_{artefact}"]
    if claims and committed is None:
        raise ConfigError(
            "--claims judges committed results; name their folder with --committed, such as"
            " results/reference/smollm2"
        )
    if not finished and committed is None:
        plan.check_artefact(found)
    else:
        plan.check_places(found)
    for path in (
        draw_planned(plan, found, finished) if committed is None else draw_committed(committed, found, claims)
    ):
        print(path)


@app.command("claims")
def list_claims(
    paper: Annotated[
        str | None, typer.Option(help="The claims of this folder of workflow/papers alone, a line each.")
    ] = None,
    verdict: Annotated[
        str | None,
        typer.Option(help="Those with this verdict alone: reproduced, contradicted or 'not tested'."),
    ] = None,
) -> None:
    """Print what became of the papers' claims in results/reference: totals by paper and by reason, or
    claims."""
    from relinear.draw.stated import listed

    for line in listed(paper, verdict):
        print(line)


@app.command()
@planned
def check(plan) -> None:
    """Check every run, measurement, table and figure of a scale, in seconds."""
    plan.check()
    print(f"scale {plan.scale}: {len(plan.artefacts)} tables and figures and {len(plan.runs)} runs fit")


@app.command()
@planned
def status(plan) -> None:
    """List the finished results of a scale that would be made anew, or whose kernels, lock or assets have
    changed since."""
    from relinear.status import lines

    for line in lines(plan):
        print(line)


@app.command()
def show(
    node: Annotated[
        str,
        typer.Argument(
            help=(
                "A finished node: <folder>/<run>/<measure>, such as smollm2/lizard/mmlu, or as provenance"
                " names it."
            )
        ),
    ],
    results: Results = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print its run.json instead.")] = False,
) -> None:
    """Print the record behind a cell, of one's own results or of committed ones: parents, commit, hardware,
    seeds, data, readings."""
    from relinear.core import store
    from relinear.show import lines, node_of

    if as_json:
        print(store.read(node_of(node, results) / store.RECORD).decode())
        return
    for line in lines(node, results):
        print(line)


@app.command("table2")
def make_table2(
    choices: Annotated[
        list[str] | None,
        typer.Argument(help="As Snakemake's --config takes them, such as scale=smoke budget=0.5."),
    ] = None,
    cores: Annotated[str, typer.Option(help="Jobs at a time; all: as many as there are cores.")] = "all",
) -> None:
    """Make results/table2.csv by Snakemake: says what it will take, shows each job, and compares with the
    committed table."""
    require_clone()
    if not cores.isdigit() and cores != "all":
        raise UserError(f"--cores is a number or all; got {cores!r}")
    given = [choice.partition("=") for choice in choices or ()]
    if wrong := [name for name, equals, _ in given if not equals]:
        raise UserError(f"a choice is name=value, such as scale=smoke; got {wrong[0]!r}")
    watched, catalogue = (importlib.import_module(f"relinear.{name}") for name in ("watched", "plan.plan"))
    plan = catalogue.from_cli({name: value for name, _, value in given})
    plan.check_choices()
    raise typer.Exit(watched.table2(plan, choices or (), cores))


@app.command("campaign")
@planned
def run_campaign(
    plan,
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Tables and figures, papers, or measurements (run/measure), the most important first."
        ),
    ],
    minutes: Annotated[float, typer.Option(min=0.01, help="The time that it has.")],
    trainings: Annotated[
        int, typer.Option(min=1, help="Trainings at a time on a GPU. Several gain for small models alone.")
    ] = 1,
    measurements: Annotated[
        int, typer.Option(min=1, help="Measurements beside them on a GPU, or on the CPU.")
    ] = 4,
    copy_to: Annotated[
        Path | None,
        typer.Option(callback=_folder_or_none, help="Copy each finished node's files to this folder."),
    ] = None,
    largest: Annotated[int, typer.Option(min=0, help="Files of more MiB are not copied.")] = 16,
) -> None:
    """Make as much of a list of targets as a given time allows, on all GPUs; given again, it goes on. Prints
    what has to be downloaded, and what is left."""
    campaign = importlib.import_module("relinear.campaign")
    nodes = campaign.nodes_of(plan, targets)
    downloads = campaign.downloads_of(plan, (node for node in nodes if not plan.finished(node)))
    for line in campaign.lacking(plan, downloads, targets):
        print(line, flush=True)
    devices = campaign.devices_of(plan)
    places = campaign.places_of(devices, trainings, measurements, os.cpu_count() or 1)
    if campaign.warm.possible():
        campaign.warm.start(
            shlex.split(plan.node_options()),
            os.pathsep.join(str(path.parent) for path in code.PACKAGES.values()),
        )
    done = campaign.Campaign(
        plan, nodes, places, minutes, out=copy_to, largest=largest << 20, downloads=downloads
    )
    outcome = done.run()
    for line in campaign.summary(outcome, targets, plan):
        print(line)
    if outcome.failed:
        raise typer.Exit(1)


@app.command("bundle")
@planned
def bundle_assets(
    plan,
    file: Annotated[Path, typer.Argument(help="The file to make; with --unpack, the file to read.")],
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Tables, figures, papers or run/measure. Default: all of the scale."),
    ] = None,
    unpack: Annotated[
        bool, typer.Option("--unpack", help="Put what the file has into the cache of this machine.")
    ] = False,
) -> None:
    """Put what targets need of package registries into one file, for a machine without the network, apt-get
    or npm; or unpack such a file there."""
    bundles = importlib.import_module("relinear.get.bundle")
    if unpack:
        found = bundles.unpack(file, plan.catalogue)
    else:
        _new_folder(file.parent)
        nodes = importlib.import_module("relinear.campaign").nodes_of(plan, targets or list(plan.artefacts))
        found = bundles.pack(
            [name for node in nodes for name in plan.settings(node)["assets"]], plan.catalogue, file
        )
    print(f"{file}: {', '.join(found) or 'no assets'}")


@app.command("benchmark")
def run_benchmark(results: Results = Path("results")) -> None:
    """Measure the cost of generating at 7-8B shapes on one GPU, into <results>/efficiency; interrupted, it
    goes on where it was."""
    from relinear.benchmarks.generation import benchmark

    out = results / "efficiency"
    benchmark(out / ".work")
    for path in (out / ".work").iterdir():
        print(path.replace(out / path.name))
    with warned_of_the_store():
        benchmarks.write(Plan(results=results).store, results, but=results / "reference")


@app.command("export")
def export_run(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, <results>/<scale>/runs/<run>, or a linearized model's, by save_pretrained."
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            callback=_new_folder, help="The folder to make; one that an earlier export made is replaced."
        ),
    ],
    merge: Annotated[
        bool,
        typer.Option(
            "--merge/--adapter",
            help=(
                "Add the adapter to the weights, or leave it beside them for peft, without the model's code."
            ),
        ),
    ] = True,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Of the weights: {', '.join(DTYPES)}. Default: float32 of a run, else as saved."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help=(
                "As an architecture of transformers, without code of ours, for servers such as vLLM: softmax"
                " attention, or a window without sinks."
            ),
        ),
    ] = False,
) -> None:
    """Write a run, or a linearized model of your own, as a folder that transformers, peft and lm-eval
    load."""
    sharing = importlib.import_module("relinear.share.export")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"no dtype {dtype!r}; have {', '.join(DTYPES)}")
    if sharing.is_saved_model(run):
        print(sharing.export_folder(run, out, dtype, plain=plain))
        return
    require_clone()  # the card names data and licences
    print(sharing.export(run, out, merge=merge, dtype=dtype or "float32", plain=plain))


@app.command("crate")
def write_crate(
    run: Annotated[Path, typer.Argument(help="A run's folder, <results>/<scale>/runs/<run>.")],
    out: Annotated[Path, typer.Argument(callback=_new_folder, help="The folder to make.")],
) -> None:
    """Write a run's records as an RO-Crate: what was made of what, at which commit and when. It needs no
    weights."""
    require_clone()  # the crate names data and licences
    from relinear.share.crate import write

    print(write(run, out))


@app.command("linearize")
def linearize_own(
    model: Annotated[
        str,
        typer.Argument(help="A folder with config.json, safetensors and a tokenizer, or a name on the hub."),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="A file or a folder (.jsonl, .json, .parquet, .txt, .md), or a data set on the hub."
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="lolcats, lizard, hedgehog, supra, t2r, or a run of runs.yaml, whose recipe is taken."
        ),
    ],
    out: Annotated[
        Path, typer.Option(callback=_new_folder, help="The folder to make, which transformers loads.")
    ],
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Unique training tokens of each step. Default: all, at most 10M."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often each step reads them.")] = 2,
    seq_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence. Default: 1024, or as many as the model reads."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in one pass.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Passes in one step.")] = 8,
    heldout_tokens: Annotated[
        int, typer.Option(min=4, help="Held-out tokens to measure on, at most.")
    ] = 32768,
    column: Annotated[
        str | None,
        typer.Option(help="The column that holds the text. Default: text, or instruction and output."),
    ] = None,
    reader: Annotated[
        str | None, typer.Option(help="A file of get/readers. Default: by the file's ending.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    dtype: Annotated[str, typer.Option(help=f"What it computes in: {', '.join(PRECISIONS)}.")] = "auto",
    seed: Seed = None,
    results: Results = Path("results"),
    threads: Threads = None,
) -> None:
    """Linearize a model of your own on a text of your own by a paper's recipe: transfer, finetuning,
    perplexity beside the teacher's, export.

    The same command goes on where an interrupted one stopped. Its work lies in <results>/own-<name of the out
    folder>.
    """
    require_clone()  # the recipes are in workflow/
    own = importlib.import_module("relinear.own")
    amounts = own.Amounts(tokens, epochs, seq_len, batch_size, accumulate, heldout_tokens)

    def run_node(plan: Plan, node: Node) -> None:
        run(plan, node, threads, None)

    if device is not None:
        importlib.import_module("relinear.machine.hardware").device_of(device)
    name, plan = own.planned(
        model,
        data,
        method,
        out,
        results=results,
        amounts=amounts,
        reader=reader,
        column=column,
        device=device,
        dtype=dtype,
        seed=seed or 0,
    )
    print(own.run(name, plan, out, run_node))


@app.command("tasks")
@planned
def write_tasks(
    plan, out: Annotated[Path, typer.Argument(callback=_new_folder, help="The folder to make.")]
) -> None:
    """Write the items that a scale scores as tasks for lm_eval --include_path."""
    from relinear.share.tasks import write

    print(" ".join(write(plan, out)))


@app.command()
def generate(
    folder: Annotated[
        Path,
        typer.Argument(help="A run (results/<scale>/runs/<run>), or any folder that transformers loads."),
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads it from stdin.")],
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens at most.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature; greedy if not given.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this total probability.")
    ] = None,
    seed: Seed = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the tokenizer's chat template.")
    ] = False,
    dtype: Annotated[str, typer.Option(help=f"What it computes in: {', '.join(PRECISIONS)}.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Threads = None,
) -> None:
    """Continue a prompt, as the text comes; then tokens/s of prefill and of decoding, and the bytes of the
    model's state."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with importlib.import_module("relinear.machine.memory").uncollected():
        # torch; not needed to print a help text
        generation = importlib.import_module("relinear.share.generate")
    importlib.import_module("relinear.machine.hardware").set_threads(threads or granted())
    speed = generation.generate(
        folder,
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        chat=chat,
        dtype=dtype,
        device=device,
    )
    print(speed, file=sys.stderr)


@track.command("init")
@planned
def track_init(
    plan,
    rows: Annotated[str | None, typer.Option(help="Runs whose rows are made, with spaces between.")] = None,
) -> None:
    """Create the store and the runs of rows, before anything writes to it in parallel. A store that fails is
    warned of, and no error."""
    from relinear.tracking.rows import plan_rows

    make_writable([plan.results])
    with warned_of_the_store():
        mirror.init(plan.store, plan.root.name, () if rows is None else plan_rows(plan, rows.split()))


@track.command("tables")
@planned
def track_tables(plan) -> None:
    """Copy the scale's tables, figures and claims into the store, as artifacts of one run. A store that fails
    is warned of, and no error."""
    with warned_of_the_store():
        mirror.tables(plan.store, plan.results, plan.root.name)


@track.command("rebuild")
def track_rebuild(results: Results = Path("results")) -> None:
    """Restore the store from the result files."""
    if not results.is_dir():
        raise UserError(f"no folder {results}; possible: --results with the one that all scales write under")
    make_writable([results])
    store = Plan(results=results).store
    restored = mirror.rebuild(store, results)
    print(f"{restored + benchmarks.write(store, results, but=results / 'reference')} runs restored")


@track.command("export")
def track_export(
    scale_results: Annotated[Path, typer.Argument(help="A scale's folder, such as results/smollm2.")],
    out: Annotated[
        Path,
        typer.Argument(
            callback=_new_folder,
            help="The folder to make, such as results/reference/smollm2; an earlier export is replaced.",
        ),
    ],
    weights: Annotated[
        bool,
        typer.Option(
            help="Adapters and methods' parameters of table2.csv's rows too: up to 11 MB each of SmolLM2."
        ),
    ] = True,
    add: Annotated[
        bool,
        typer.Option(
            "--add", help="Keep what an earlier export of this scale has; what is in both is the new."
        ),
    ] = False,
) -> None:
    """Pack what is worth committing of a scale's results: tables, figures, records, curves, items' outcomes,
    adapters, methods' parameters.

    Records, readings, curves, items and attention lie in parquet files. Curves are thinned, figures have 256
    colours, adapters of runs that computed in bfloat16 are rounded to it, as they are when loaded in it;
    reference.json says so of each file, and has the originals' sha256.
    """
    from relinear.tracking.committed import export

    sizes = export(scale_results, out, weights=weights, add=add)
    for part, size in sizes.items():
        print(f"{size:>12,} bytes  {part}")
    print(f"{sum(sizes.values()):>12,} bytes  {out}")


@track.command("repack")
def track_repack(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Committed results, such as results/reference/smollm2, or the folder of several."
        ),
    ],
    without: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A node (runs/lizard/mmlu), a run (runs/lizard) or a drawing (lizard/table4) to leave out;"
                " may be given several times."
            )
        ),
    ] = None,
) -> None:
    """Write committed results anew as this version writes them; or leave some out."""
    from relinear.tracking.committed import folders, repack

    for part in folders(folder):
        sizes = repack(part, without or ())
        print(f"{sum(sizes.values()):>12,} bytes  {part}")


@track.command("import")
def track_import(
    folder: Annotated[
        Path,
        typer.Argument(
            help=(
                "Results that were committed or copied, such as results/reference/smollm2, or the folder of"
                " several such."
            )
        ),
    ],
    results: Results = Path("results"),
    label: Annotated[
        str, typer.Option(help="Ends the experiment's name, which keeps them apart from your own runs.")
    ] = "reference",
) -> None:
    """Mirror other results into experiments relinear-<scale>-<label>, to compare with one's own; of several,
    each into <label>-<folder>."""
    from relinear.core.store import nodes
    from relinear.tracking.committed import folders, verify

    labels = {part: label if part == folder else f"{label}-{part.name}" for part in folders(folder)}
    for part in labels:
        if (part / MANIFEST).is_file():
            verify(part)
    make_writable([results])
    store = Plan(results=results).store
    only_benchmarks = any(benchmarks.campaigns(folder)) and not any(nodes(part) for part in labels)
    imported = (
        0 if only_benchmarks else sum(mirror.import_folder(store, part, of) for part, of in labels.items())
    )
    print(f"{imported + benchmarks.write(store, folder, f'-{label}')} runs imported")


@track.command("ui")
def track_ui(
    results: Results = Path("results"), port: Annotated[int, typer.Option(min=1, max=65535)] = 5000
) -> None:
    """Open MLflow's UI on 127.0.0.1; a server that MLFLOW_TRACKING_URI names has its own."""
    from relinear.tracking.ui import comparisons, links, open_later, require_port, serve

    store = Plan(results=results).store
    if not store.startswith("sqlite:"):
        print(f"MLFLOW_TRACKING_URI is set: the runs are at {store}")
        return
    require_port(port)
    make_writable([results])
    mirror.init(store)
    mirror.tables(store, results)
    address = f"http://127.0.0.1:{port}"
    compared = comparisons(store, address)
    listed = links(store, address)
    for name, link in listed.items():
        print(
            (
                f"{name}: {compared[name]}\n  all its runs, as a list: {link}"
                if name in compared
                else f"{name}: {link}"
            ),
            flush=True,
        )
    if listed:
        open_later(address, next(iter((compared or listed).values())))
    else:
        print("no runs are in the store yet: any target of Snakemake brings some", flush=True)
    try:
        raise SystemExit(serve(store, port))
    except KeyboardInterrupt:
        print("relinear: MLflow has ended", file=sys.stderr)


def main() -> None:
    """Entry point. An error that a user can mend is one line on stderr; any other is a traceback."""
    tracking.install_signal_handlers()
    # peft asks transformers so, and nobody here can mend it
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    try:
        app()
    except (UserError, FloatingPointError) as error:  # the second: a model's numbers, not finite any more
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # before a verb has begun: Ctrl-C in one is typer's
        print(INTERRUPTED, file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except ModuleNotFoundError as error:
        if (lacking := str(error.name).partition(".")[0]) not in EXTRAS:
            raise
        brings = f"pip install --editable '.[{EXTRAS[lacking]}]'"
        print(
            f"error: this verb needs {lacking}, which is not installed; in a clone, `{brings}` brings it",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    except Exception as error:
        if status := signalled(error):
            print(INTERRUPTED, file=sys.stderr)
            raise SystemExit(status) from None
        if not (said := refusal(error)):
            raise
        print(f"error: {said}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
