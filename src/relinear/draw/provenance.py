"""The one format of provenance: which file each cell comes from, and the hash of each such file.

A drawing's provenance lies beside it. In a folder of committed results that of all drawings is one file, by
`<paper>/<stem>`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relinear.draw.render import write_text
from relinear.files import sha256
from relinear.plan.measured import Source
from relinear.plan.specs import Artefact
from relinear.records import read_committed, read_json

Origin = str | list[str] | None
FILE = "provenance.json"  # of all drawings in a folder of committed results
BESIDE = f".{FILE}"  # ends the name of the file beside a drawing


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


def committed(folder: Path) -> dict[str, dict[str, Any]]:
    """The provenance of each drawing in a folder of committed results, by `<paper>/<stem>`."""
    return json.loads(read_committed(folder / FILE)) if (folder / FILE).is_file() else {}


def of(place: Path) -> dict[str, Any]:
    """The provenance of the drawing `<folder>/<paper>/<stem>`, from beside it or from the folder's one file;
    empty where there is none."""
    own = place.with_name(place.name + BESIDE)
    if own.is_file():
        return json.loads(read_committed(own))
    return committed(place.parents[1]).get(f"{place.parent.name}/{place.name}", {})


def of_drawings(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """As `committed`, of those among these files in the folder that are provenance beside a drawing."""
    return {
        path.relative_to(folder).as_posix().removesuffix(BESIDE): read_json(path)
        for path in files
        if path.name.endswith(BESIDE)
    }


def joined(drawing: Mapping[str, Any], verdicts: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a drawing that stays, with the sources of verdicts that were made later."""
    return {**drawing, "sources": {**verdicts["sources"], **drawing["sources"]}}


def write_committed(folder: Path, told: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write what `committed` reads; returns the path."""
    write_text(folder / FILE, json.dumps(dict(sorted(told.items())), indent=1) + "\n")
    return folder / FILE
