"""Documents of packages, as plain text, each once, none of which an evaluation asks about: data of any size
to make streams of."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from relinear.get import converters
from relinear.plan.assets import Own
from relinear.plan.entries import one_of
from relinear.plan.strict import Strict
from relinear.stages import _stage
from relinear.stages._work import Entry, Scaled, Work


class Options(Strict):
    """An entry of data.yaml with `make: corpus`."""

    sources: Annotated[dict[str, str], Field(min_length=1)]  # asset -> a file of get/converters
    # assets of evaluation items: of these no document has 13 words in a row
    items: Annotated[tuple[str, ...], Field(min_length=1)]
    language: str | None = "en"  # of which documents are; null: any


class Stage(_stage.Stage):
    """The stage `corpus`, which converts packages to plain documents."""

    help = "Convert packages to plain documents."
    work = "relinear.get.corpus"

    def resolve(self, entry, scale):
        """The options of the data as they are."""
        options = scale.data[entry.node.name].options
        reaches = tuple(
            f"{converters.__name__}.{name}"
            for name in sorted(set(options["sources"].values()))
            if name in converters.available()
        )
        assets = (*options["sources"], *options["items"])
        return Work(
            dict(options),
            self.work,
            reaches=reaches,
            assets=assets,
            refused=_stage.first(self._reasons(entry, scale)),
        )

    def _reasons(self, entry: Entry, scale: Scaled) -> Iterator[str]:
        """A converter that there is not, and a package of which no licence is taken."""
        for source, converter in scale.data[entry.node.name].options["sources"].items():
            one_of(f"converter of {entry.node.name}: {source},", converter, converters.available())
            asset = scale.assets[one_of("asset", source, scale.assets)]
            names = [path.name for path in asset.files] if isinstance(asset, Own) else asset.members
            if not any(map(converters.LICENCE.search, names)):
                yield (
                    f"{entry.node}: source {source!r} has no licence file among {', '.join(names[:4])};"
                    " possible: the package's copyright, LICENSE or COPYING among the `members` of the asset"
                )
