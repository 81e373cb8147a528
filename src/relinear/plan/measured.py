"""A finished measurement, read from its folder or from a store. No metric imports this module: keys do not
count how results are read."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from relinear.core import store
from relinear.plan.readings import At, Reading


class Source(NamedTuple):
    """The record behind a cell: its name (`relinear.core.store.named`), key and sha256, and the sha256 of the
    metrics.json beside it."""

    file: str
    key: str
    sha256: str
    metrics_sha256: str


class Measured(NamedTuple):
    """A finished measurement of a run.

    `facts`: method, variant, trainable_params and tokens (step -> training tokens) of the run as it was
    measured, and `collapsed` where the metric can tell. `folder` holds further files of the measurement
    (attention weights, items).
    """

    run: str
    measure: str
    scale: str
    readings: tuple[Reading, ...]
    facts: dict[str, Any]
    source: Source
    folder: Path

    def find(self, metric: str, of: str | None = None, at: At | None = None) -> Reading | None:
        """The one reading of a metric; `of` may be left out where the metric has one object. None if there is
        none.

        Raises ValueError where several fit.
        """
        fits = [
            r
            for r in self.readings
            if r.metric == metric and of in (None, r.of) and (at is None and not r.at or r.at == at)
        ]
        if len(fits) > 1:
            raise ValueError(
                f"{self.source.file}: {metric} is read {len(fits)} times: of {', '.join(r.of for r in fits)};"
                " say of which"
            )
        return fits[0] if fits else None

    def all(self, metric: str, of: str | None = None) -> list[Reading]:
        """All readings of a metric that have a value, along its axes."""
        return [r for r in self.readings if r.metric == metric and of in (None, r.of) and r.value is not None]


def load(folder: Path) -> Measured:
    """A finished measurement from its folder, or of a store (`relinear.core.store`).

    Raises FileNotFoundError where it is not finished, ValueError where it is malformed."""
    texts = []
    for file in (folder / "metrics.json", folder / "run.json"):
        if not store.exists(file):
            raise FileNotFoundError(f"{file} is missing: the measurement did not finish")
        texts.append(store.read(file))
    metrics, record = (
        _json(text, folder / name) for text, name in zip(texts, ("metrics.json", "run.json"), strict=True)
    )
    try:
        metrics_sha256, record_sha256 = (hashlib.sha256(text).hexdigest() for text in texts)
        source = Source(store.named(folder), record["key"], record_sha256, metrics_sha256)
        readings = tuple(Reading(**reading) for reading in metrics["readings"])
        return Measured(
            record["run"], record["measure"], record["scale"], readings, metrics["facts"], source, folder
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no measurement of this version: {error}") from None


def _json(text: bytes, file: Path) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
