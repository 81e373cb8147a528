"""A text with splits of its own, whole, as token streams for one model's vocabulary."""

from relinear.plan.strict import ConfigError, Strict
from relinear.stages import _stage


class Options(Strict):
    """An entry of data.yaml with `make: splits`: all of the training split is trained on, and the test split
    is held out."""

    source: str  # an asset; get/splits.py has the reader of each


class Stage(_stage.Sourced):
    """The stage `splits`, which tokenises the splits of a text for a model."""

    help = "Tokenise a text that has splits of its own for a model."
    work = "relinear.get.splits"

    def resolve(self, entry, scale):
        """The source alone. Raises ConfigError for a dose, of which such a text has none."""
        data, _, dose = entry.text
        if dose != 1:
            raise ConfigError(f"data {data!r} have a size of their own, and a dose is of texts; got {dose:g}")
        return self.of_sources(entry, scale, {"source": scale.data[data].options["source"]})
