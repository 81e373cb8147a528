"""Texts as token streams for one model's vocabulary: one to train on, one held out."""

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from relinear.plan.names import Node
from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage
from relinear.stages._work import Entry, Scaled


class Written(Strict):
    """The tokens of instructions and answers that the model writes itself, and its sampling."""

    tokens: Positive
    batch_size: Positive
    instruction_tokens: Positive  # the longest; one that does not end is left out
    response_tokens: Positive
    temperature: Annotated[float, Field(gt=0)] = 1.0
    # answers ramble at 1, questions repeat themselves below
    response_temperature: Annotated[float, Field(gt=0)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95


class Options(Strict):
    """An entry of data.yaml with `make: text`."""

    sources: tuple[str, ...]  # assets, `written` for the model's own instructions, `smoke`
    heldout_source: str
    written: Written | None = None
    train_tokens: Positive | None = None  # unique ones at dose and budget 1; the scale's where not given
    # a file of get/readers, of all its sources; None: the one of a source's name, else by the endings of its
    # files
    reader: str | None = None
    # of rows, the one that holds the text; None: `text`, or `instruction` and `output`
    column: str | None = None

    @model_validator(mode="after")
    def _written_with_its_budget(self) -> Self:
        if ("written" in (*self.sources, self.heldout_source)) != (self.written is not None):
            raise ValueError(
                "the source `written` and `written: {tokens: ...}`, which says how much, go together"
            )
        return self


class Stage(_stage.Sourced):
    """The stage `text`, which tokenises and splits the texts of a data set for a model."""

    help = "Tokenise and split the texts of a data set for a model."
    work = "relinear.get.text"
    made_here = ("smoke", "written")

    def folder(self, node):
        """The folder of its results, below the scale's."""
        return f"text/{node.name}"

    def resolve(self, entry, scale):
        """The sources and the tokens of the dose; a text that a model wrote is a parent."""
        text, options = entry.text, scale.data[entry.text.data].options
        settings = {
            "sources": options["sources"], "heldout_source": options["heldout_source"],
            "train_tokens": scale.train_tokens(text.dose, options["train_tokens"]),
            "heldout_tokens": scale.config.text.heldout_tokens, "seed": scale.seed,
            **{name: options[name] for name in ("reader", "column") if options[name] is not None},
        }  # fmt: skip
        parents = {}
        if (wanted := options["written"]) is not None:  # data that ask for the same words share the first's
            writer = next(name for name, data in scale.data.items() if data.options.get("written") == wanted)
            parents = {"written": Node("written", str(text._replace(data=writer)))}
        return self.of_sources(
            entry, scale, settings, parents, self._reasons(entry, scale, settings["train_tokens"])
        )

    def _reasons(self, entry: Entry, scale: Scaled, tokens: int) -> Iterator[str]:
        """A source that nothing reads, and more tokens to train on than the sources hold."""
        for source in self.sources(entry, scale):
            self.reader(entry, scale, source)
        wanted = scale.data[entry.text.data].options["written"]
        yield from _stage.unless_held(
            entry, scale, tokens, written_tokens(wanted, entry, scale) if wanted else 0
        )


def written_tokens(wanted: dict[str, Any], entry: Entry, scale: Scaled) -> int:
    """The tokens that a model writes at the dose of a text."""
    return max(round(wanted["tokens"] * scale.budget * entry.text.dose), 1)
