"""The one format of provenance: which file each cell comes from, and the hash of each such file."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relinear.draw.render import write_text
from relinear.files import sha256
from relinear.plan.measured import Source
from relinear.plan.specs import Artefact

Origin = str | list[str] | None


def write_provenance(
    path: Path,
    artefact: Artefact,
    scale: str,
    cells: Mapping[str, Mapping[str, Origin]],
    sources: Iterable[Source],
    files: Mapping[Path, Any],
) -> Path:
    """Write {artefact, scale, sources, cells} as JSON; returns the path.

    cells: row -> column -> a run.json, several where the cell is a mean over seeds, an entry of the spec
    (`file#/pointer`), or None for an empty cell. sources: the records named there, and those that a verdict
    stands on. files: other files named there -> what is known of how they were measured.
    """
    records: dict[str, Any] = {
        s.file: {"key": s.key, "sha256": s.sha256, "metrics_sha256": s.metrics_sha256} for s in sources
    }
    records |= {file.as_posix(): {"sha256": sha256(file), "measured": about} for file, about in files.items()}
    record = {"artefact": artefact.name, "scale": scale, "sources": records, "cells": cells}
    write_text(path, json.dumps(record, indent=1) + "\n")
    return path


def joined(drawing: Mapping[str, Any], verdicts: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a drawing that stays, with the sources of verdicts that were made later."""
    return {**drawing, "sources": {**verdicts["sources"], **drawing["sources"]}}
