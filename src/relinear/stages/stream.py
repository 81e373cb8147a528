"""Corpora as token streams for one model's vocabulary: one to train on, one held out."""

from typing import Annotated

from pydantic import Field

from relinear.plan.entries import one_of
from relinear.plan.names import Node
from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage
from relinear.stages._work import Work


class Options(Strict):
    """An entry of data.yaml with `make: stream`."""

    sources: Annotated[tuple[str, ...], Field(min_length=1)]  # data with make: corpus
    # the package whose held-out documents are the held-out text; None: of all
    heldout_source: str | None = None
    train_tokens: Positive | None = None  # unique ones at dose and budget 1; the scale's where not given
    epochs: Positive = 4  # a training may read so many times as many tokens as the sources hold


class Stage(_stage.Tokens):
    """The stage `stream`, which tokenises and splits corpora for a model."""

    help = "Tokenise and split corpora for a model."
    work = "relinear.get.stream"

    def resolve(self, entry, scale):
        """The corpora and the tokens of the dose."""
        text, options = entry.text, scale.data[entry.text.data].options
        have = [name for name, data in scale.data.items() if data.make == "corpus"]
        corpora = {
            name: Node("corpus", one_of(f"corpus of data {text.data!r},", name, have))
            for name in options["sources"]
        }
        settings = {
            "sources": options["sources"], "heldout_source": options["heldout_source"],
            "train_tokens": scale.train_tokens(text.dose, options["train_tokens"]),
            "heldout_tokens": scale.config.text.heldout_tokens, "seed": scale.seed,
        }  # fmt: skip
        held = _stage.unless_held(entry, scale, settings["train_tokens"])
        return Work(settings, self.work, parents=self.parents(entry) | corpora, refused=_stage.first(held))
