"""Long documents cut into sequences of one length, none of which spans two of them: to train on, for one
model's vocabulary."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage


class Options(Strict):
    """An entry of data.yaml with `make: pieces`: of its `sources` the documents of `piece` tokens and more,
    in whole pieces.

    A training sequence has `length` tokens, which divide a piece: with another length the same tokens are
    trained on, in the same order.
    """

    # assets, or `smoke`; get/pieces.py has the reader of each
    sources: Annotated[tuple[str, ...], Field(min_length=1)]
    piece: Positive
    length: Positive

    @model_validator(mode="after")
    def _whole_sequences(self) -> Self:
        if self.piece % self.length:
            raise ValueError(
                f"a piece is a whole number of sequences; got piece {self.piece}, length {self.length}"
            )
        return self


class Stage(_stage.Sourced):
    """The stage `pieces`, which cuts long documents into sequences to train on."""

    help = "Cut long documents into sequences to train on."
    work = "relinear.get.pieces"

    def resolve(self, entry, scale):
        """The scale's amounts in whole pieces."""
        options = scale.data[entry.text.data].options
        piece = options["piece"]
        amounts = {
            "train_tokens": scale.train_tokens(entry.text.dose),
            "heldout_tokens": scale.config.text.heldout_tokens,
        }
        whole = {name: max(round(tokens / piece), 1) * piece for name, tokens in amounts.items()}
        settings = {"sources": options["sources"], "piece": piece, "seed": scale.seed, **whole}
        held = _stage.unless_held(entry, scale, whole["train_tokens"])
        return self.of_sources(entry, scale, settings, reasons=held)

    def sequence(self, options):
        """Tokens of each sequence of this kind of data."""
        return Options(**options).length
