"""What stages share: the class that a stage's file overrides, and reasons why a node's work cannot be
done."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import Field, computed_field

from relinear import attention
from relinear.errors import UserError
from relinear.get import readers
from relinear.plan.assets import Own
from relinear.plan.code import METHODS
from relinear.plan.names import Node as Node
from relinear.plan.options import causal_only, definitions, option_defaults, schema
from relinear.plan.options import method_file as method_file
from relinear.plan.strict import Positive, Strict
from relinear.stages._work import Entry, Scaled, Work


class Classes(Strict):
    """The part that examples of one class each have in data.yaml, where a split of its own is the test."""

    validation: Positive  # examples of the training split kept aside, to stop by
    train: Positive | None = None  # so many of the others; None: all that a source has
    test: Annotated[int, Field(ge=2)] | None = None

    @computed_field
    @property
    def scores(self) -> tuple[str, ...]:
        """The scores that are taken."""
        return ("accuracy",)


# --- reasons why a node's work cannot be done, each as a sentence ---


def first(reasons: Iterable[str]) -> str | None:
    """The first reason; None where there is none."""
    try:
        return next(iter(reasons), None)
    except UserError as error:
        return str(error)


def unless_causal(entry: Entry, scale: Scaled, why: str) -> Iterator[str]:
    """A reason where a run's model is an encoder."""
    if not scale.models[entry.model].causal:
        able = ", ".join(name for name, model in scale.models.items() if model.causal)
        yield f"{entry.node}: {why}, and {entry.model!r} is an encoder; possible: runs of {able}"


def unless_pictures(entry: Entry, scale: Scaled, why: str, otherwise: str = "") -> Iterator[str]:
    """A reason where a run's model does not read pictures. `otherwise`: what is possible beside runs of
    models that do."""
    if not scale.sees(entry.model):
        able = ", ".join(filter(scale.sees, scale.models))
        yield f"{entry.node}: {why}, and {entry.model!r} reads none; possible: {otherwise}runs of {able}"


def unless_fitting(entry: Entry, scale: Scaled) -> Iterator[str]:
    """A reason where a run's method cannot have its model, or has options that exclude each other."""
    run = entry.run.run
    file = method_file(run.method)
    if not scale.models[entry.model].causal and causal_only(file, run.own):  # an encoder's keys have no order
        able = ", ".join(
            method for method in attention.available() if not causal_only(method_file(method), {})
        )
        said = f"method {run.method!r}{f' with {run.own}' if run.own else ''}"
        yield (
            f"{entry.node}: {said} reads keys in their order, and {entry.model!r} is an encoder; possible:"
            f" {able}, without a window"
        )
    if (method := run.options.get("bytes_of")) is not None:
        # How many positions the bytes hold depends on the model's heads: at any heads, as many as the
        # method's layer keeps.
        (least, _), _ = definitions(file).BYTES[method]
        if (sinks := run.options.get("sinks", option_defaults(file)["sinks"])) >= least:
            yield (
                f"{entry.node}: {sinks} sinks asked for in the bytes of {method!r}, which hold {least}"
                f" positions or, by a model's heads, more; possible: up to {least - 1} sinks"
            )


# kinds of data whose sequences hold several documents one after another, and do not say where one begins
PACKED = ("text", "stream")


def unless_apart(entry: Entry, scale: Scaled, data: str) -> Iterator[str]:
    """A reason where a run's method sums neighbouring tokens, and sequences of the data run from one document
    into the next."""
    run = entry.run.run
    chosen = schema(method_file(run.method)).model_validate(dict(run.own))
    if getattr(chosen, "conv", False) and scale.data[data].make in PACKED:
        able = ", ".join(name for name, found in scale.data.items() if found.make == "pieces")
        yield (
            f"{entry.node}: the convolution of method {run.method!r} would sum over two documents: a sequence"
            f" of {data!r} holds several and does not say where they begin; possible: conv: false, or data"
            f" whose sequences are of one document each, {able}"
        )


def held(model: str, data: str, scale: Scaled, written: int = 0) -> dict[str, int] | None:
    """Source of a text -> the tokens to train on that it holds in a model's vocabulary; None where one was
    not counted.

    `written`: tokens that the model writes beside them.
    """
    unique, sources = scale.models[model].unique, scale.data[data].options["sources"]
    found = {source: written if source == "written" else unique.get(source) for source in sources}
    return None if None in found.values() else found


def unless_held(entry: Entry, scale: Scaled, wanted: int, written: int = 0) -> Iterator[str]:
    """A reason where the sources of a text hold fewer tokens to train on than wanted (`held`)."""
    found = held(entry.model, entry.text.data, scale, written)
    if found is None or (most := sum(found.values())) >= wanted:
        return
    parts = ", ".join(f"{source} {tokens:,}" for source, tokens in found.items())
    yield (
        f"{entry.node}: {wanted:,} unique tokens to train on asked for; its sources hold {most:,}: {parts}. "
        "Possible: a smaller dose or budget, more epochs over fewer tokens, or another source in data.yaml"
    )


def unless_repeated(entry: Entry, scale: Scaled, data: str, wanted: int) -> Iterator[str]:
    """A reason where a training reads more tokens than its data's sources hold, times the `epochs` that the
    data allow."""
    epochs = scale.data[data].options.get("epochs")
    if (
        epochs
        and (found := held(entry.model, data, scale))
        and (most := sum(found.values()) * epochs) < wanted
    ):
        yield (
            f"{entry.node}: a training of {wanted:,} tokens asked for; data {data!r} hold {most // epochs:,}"
            f" unique ones, and allow {epochs} epochs of these, {most:,} tokens. Possible: a smaller dose or"
            " budget, fewer epochs, or another source in data.yaml"
        )


# --- stages ---


def family_of(entry: Entry, scale: Scaled) -> str:
    """The module that says where a model's attention lies."""
    model = scale.models[entry.model]
    return f"relinear.families.{model.layout or model.family}"


def built_of(entry: Entry, scale: Scaled) -> tuple[str, ...]:
    """The modules that are found by name when a run's model is built: its family and its methods."""
    methods = dict.fromkeys(f"{METHODS}{link.method}" for link in entry.chain)
    return (family_of(entry, scale), *methods)


class Stage:
    """The facts of a stage, and the one question that the plan asks it."""

    help: str = ""  # the help text of its verb
    work: str = ""  # the module with `work(job) -> metrics`, imported by name when the stage runs
    device = False  # True: computes on the scale's device; False: on the CPU
    spread = False  # can be the work of several processes, each with a GPU
    trains = False  # is a step of a run
    tokens = False  # what it makes is in a model's tokens, and its nodes are named `<data>@<model>`
    labelled = False  # the data that it makes have labels (relinear.get.labels)
    pictures = False  # the data that it makes are pictures, as pixels
    torch = True  # its work needs torch
    obtains = False  # its work obtains its assets itself; others are given their folders

    def folder(self, node: Node) -> str:
        """The folder of its results, below the scale's."""
        return f"{node.stage}/{node.name}"

    def resolve(self, entry: Entry, scale: Scaled) -> Work:
        """The work of one node. Raises ConfigError for settings of which no work can be made."""
        raise NotImplementedError

    def sequence(self, options: dict[str, Any]) -> int | None:
        """The tokens of each sequence of a kind of data; None for a stream that is cut into sequences of any
        length."""
        return None


class Tokens(Stage):
    """A stage of data in a model's tokens; its nodes are named `<data>@<model>`."""

    tokens = True

    def parents(self, entry: Entry) -> dict[str, Node]:
        """The model, which has the tokenizer."""
        return {"model": Node("model", entry.model)}


class Sourced(Tokens):
    """A stage that makes such data of `source`, or of `sources`, in data.yaml."""

    made_here: tuple[str, ...] = ("smoke",)  # sources that are made here and are no assets

    def of_sources(
        self,
        entry: Entry,
        scale: Scaled,
        settings: dict[str, Any],
        parents: Mapping[str, Node] | None = None,
        reasons: Iterable[str] = (),
    ) -> Work:
        """The work with the assets of its sources and their readers; some kinds of data have readers of their
        own, in the work."""
        found: dict[str, None] = {}
        for source in self.sources(entry, scale):
            with suppress(UserError):
                found[f"{readers.__name__}.{self.reader(entry, scale, source)}"] = None
        return Work(
            settings,
            self.work,
            reaches=tuple(found),
            parents=self.parents(entry) | dict(parents or {}),
            assets=tuple(source for source in self.sources(entry, scale) if source not in self.made_here),
            refused=first(reasons),
        )

    def sources(self, entry: Entry, scale: Scaled) -> list[str]:
        """Its sources, the held-out one included."""
        options = scale.data[entry.text.data].options
        named = options["sources"] if "sources" in options else [options["source"]]
        return [
            source for source in dict.fromkeys((*named, options.get("heldout_source"))) if source is not None
        ]

    def reader(self, entry: Entry, scale: Scaled, source: str) -> str:
        """The file of get/readers that reads a source as a text. Raises UserError where there is none."""
        asset = scale.assets.get(source)
        files = asset.files if isinstance(asset, Own) else map(PurePath, asset.holds if asset else ())
        return readers.chosen(source, files, scale.data[entry.text.data].options.get("reader"))
