"""Texts as token streams for one model's vocabulary: one to train on, one held out."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage
from relinear.stages._stage import Node


class Written(Strict):
    """The tokens of instructions and answers that the model writes itself, and its sampling."""

    tokens: Positive
    batch_size: Positive
    instruction_tokens: Positive  # the longest; one that does not end is left out
    response_tokens: Positive
    temperature: Annotated[float, Field(gt=0)] = 1.0
    response_temperature: Annotated[float, Field(gt=0)] = 0.7  # answers ramble at 1, questions repeat themselves below
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95


class Options(Strict):
    """An entry of data.yaml with `make: text`."""

    sources: tuple[str, ...]  # assets, `written` for the model's own instructions, `smoke`
    heldout_source: str
    written: Written | None = None
    train_tokens: Positive | None = None  # unique ones at dose and budget 1; the scale's where not given
    reader: str | None = None  # a file of get/readers, of all its sources; None: the one of a source's name, else by the endings of its files
    column: str | None = None  # of rows, the one that holds the text; None: `text`, or `instruction` and `output`

    @model_validator(mode="after")
    def _written_with_its_budget(self) -> Self:
        if ("written" in (*self.sources, self.heldout_source)) != (self.written is not None):
            raise ValueError("the source `written` and `written: {tokens: ...}`, which says how much, go together")
        return self


class Stage(_stage.Sourced):
    """The stage `text`, which tokenises and splits the texts of a data set for a model."""

    help = "Tokenise and split the texts of a data set for a model."
    work = "relinear.get.text"
    made_here = ("smoke", "written")

    def folder(self, node):
        """The folder of its results, below the scale's."""
        return f"text/{node.name}"

    def settings(self, plan, node):
        """The settings of the work as plain data; part of the key."""
        text = plan.text_of(node)
        options = plan.data[text.data].options
        return {
            "sources": options["sources"], "heldout_source": options["heldout_source"],
            "train_tokens": plan.train_tokens(text.dose, options["train_tokens"]), "heldout_tokens": plan.config.text.heldout_tokens,
            "seed": plan.seed, **{name: options[name] for name in ("reader", "column") if options[name] is not None},
        }  # fmt: skip

    def check(self, plan, node, processes):
        """Raises UserError for a source that nothing reads, and for more tokens to train on than the sources hold."""
        for source in self.sources(plan, node):
            self.reader(plan, node, source)
        written = self.written(plan, plan.text_of(node))
        tokens = plan.settings(written)["written"]["tokens"] if written else 0
        _stage.require_tokens(plan, node, self.settings(plan, node)["train_tokens"], tokens)

    def parents(self, plan, node):
        """The model, and a text that a model wrote where it is a source."""
        written = self.written(plan, plan.text_of(node))
        return super().parents(plan, node) | ({"written": written} if written else {})

    def written(self, plan, text):
        """The node in which the model writes its part of a text; None where it writes none. Data that ask for the same words share the first's."""
        wanted = plan.data[text.data].options["written"]
        if wanted is None:
            return None
        first = next(name for name, data in plan.data.items() if data.options.get("written") == wanted)
        return Node("written", str(text._replace(data=first)))
