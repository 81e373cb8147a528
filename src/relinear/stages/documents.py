"""Whole documents for one model's vocabulary, to measure on: each keeps its length, and none is trained
on."""

from typing import Annotated, Literal

from pydantic import Field

from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage


class Options(Strict):
    """An entry of data.yaml with `make: documents`: of its `sources` the documents of `shortest` tokens and
    more.

    `part` heldout: only those that texts of the same sources hold out, a tenth by their hash; all: of sources
    that nothing trains on.
    """

    # assets, or `smoke`; get/documents.py has the reader of each
    sources: Annotated[tuple[str, ...], Field(min_length=1)]
    shortest: Positive
    part: Literal["all", "heldout"] = "all"


class Stage(_stage.Sourced):
    """The stage `documents`, which tokenises whole documents for a model."""

    help = "Tokenise whole documents for a model."
    work = "relinear.get.documents"

    def resolve(self, entry, scale):
        """The options of the data as they are."""
        return self.of_sources(entry, scale, dict(scale.data[entry.text.data].options))
