"""A run's records as an RO-Crate, for readers that know no run.json: what was made of what, at which commit,
when, and what the files' sha256 are.

By the profile Process Run Crate each step is an action: its instrument is this suite at a commit, its objects
are the steps and data before it, its result is its folder. In the crate's folder lie run.json and
metrics.json of each; weights and other large files are named by their sha256.
"""

import datetime
import io
from pathlib import Path
from typing import Any, NamedTuple

from rocrate.model import ContextEntity
from rocrate.rocrate import ROCrate

from relinear import records
from relinear.core import store
from relinear.errors import UserError
from relinear.files import folder_aside
from relinear.plan.assets import catalogue
from relinear.share.free import require_free

PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
LICENCE = "https://spdx.org/licenses/Apache-2.0"  # of records, which are this suite's
KEPT = ("run.json", "metrics.json")


class Step(NamedTuple):
    """A finished step or measurement: its record, and the folder of each parent by role, None of one that is
    not there or is another by now."""

    record: dict[str, Any]
    parents: dict[str, Path | None]


def write(run: Path | str, out: Path | str) -> Path:
    """Write the run folder `run` (`results/<scale>/runs/<run>`), and the steps that it was made from, as the
    crate `out`; returns `out`.

    Raises UserError for a folder without a finished step, a record that cannot be believed, and an `out` that
    holds something.
    """
    run, out = Path(run).resolve(), Path(out).resolve()
    require_free(out)
    found = _with_parents(run)
    last = max(_ended(step.record) for step in found.values())
    crate = ROCrate()
    crate.name = f"{run.name}, scale {found[min(found)].record['scale']} of relinear"
    crate.datePublished = last
    crate.license = _named(crate, LICENCE, LICENCE.rpartition("/")[2])
    crate.description = f"Records of the run {run.name} and of the steps that it was made from."
    profile = {
        "@type": ["CreativeWork", "Profile"],
        "name": "Process Run Crate",
        "version": PROFILE.rpartition("/")[2],
    }
    crate.root_dataset.append_to("conformsTo", crate.add(ContextEntity(crate, PROFILE, properties=profile)))
    scale = run.parents[1]
    results = {
        folder: crate.add_dataset(dest_path=f"{folder.relative_to(scale).as_posix()}/") for folder in found
    }
    for folder, step in found.items():
        _add(crate, folder.relative_to(scale).as_posix(), folder, step, results)
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(out) as scratch:
        crate.write(scratch)
    return out


def _with_parents(run: Path) -> dict[Path, Step]:
    """A run's steps and measurements and all that they were made from, by folder, each after its parents."""
    found: dict[Path, Step] = {}

    def add(folder: Path, record: dict[str, Any]) -> None:
        if folder not in found:
            parents = {role: _parent(run.parents[1], parent) for role, parent in record["parents"].items()}
            for made in filter(None, parents.values()):
                add(*made)
            found[folder] = Step(record, {role: made and made[0] for role, made in parents.items()})

    for folder in store.parts(run):
        add(folder, records.believed(folder))
    if not found:
        raise UserError(
            f"{run} is no run: it has no finished step or measurement; a run is results/<scale>/runs/<run>"
        )
    return found


def _parent(scale: Path, parent: dict[str, str]) -> tuple[Path, dict[str, Any]] | None:
    """A parent's folder and record, below the scale's folder as it lies now; None where that is not there or
    is another by now."""
    folder = scale / records.place(parent["path"])
    record = records.believed(folder)
    return (folder, record) if record and record["key"] == parent["key"] else None


def _add(crate: ROCrate, name: str, folder: Path, step: Step, results: dict[Path, Any]) -> None:
    """The action of one step, its files and what it read."""
    record, result = step.record, results[folder]
    result["name"] = name
    for file in KEPT:
        if store.exists(folder / file):
            text = io.StringIO(store.read(folder / file).decode())
            result.append_to(
                "hasPart",
                crate.add_file(text, f"{name}/{file}", properties={"encodingFormat": "application/json"}),
            )
    for file, entry in record["artefacts"].items():
        if file not in KEPT:
            result.append_to(
                "mentions",
                _named(
                    crate,
                    f"#{name}/{file}",
                    file,
                    sha256=entry["sha256"],
                    contentSize=str(entry.get("bytes", "")),
                ),
            )
    read = []
    for role, parent in record["parents"].items():
        made = step.parents[role]
        read.append(
            results[made] if made else _named(crate, f"#{parent['key']}", role, identifier=parent["key"])
        )
    for data in record.get("datasets", ()):
        about = {"sha256": data["sha256"]}
        if asset := catalogue().get(data["name"]):
            about |= {"license": asset.licence, "creditText": asset.attribution}
        read.append(_named(crate, f"#data/{data['name']}/{data['sha256'][:12]}", data["name"], **about))
    crate.add_action(
        _suite(crate, record),
        f"#{name}",
        object=read,
        result=result,
        properties={
            "name": name,
            "identifier": record["key"],
            "startTime": record["started"],
            "endTime": _ended(record),
            "actionStatus": "http://schema.org/CompletedActionStatus",
        },
    )


def _named(crate: ROCrate, at: str, name: str, **about: str) -> ContextEntity:
    """What is no file of the crate, by its name."""
    return crate.get(at) or crate.add(
        ContextEntity(crate, at, properties={"@type": "CreativeWork", "name": name, **about})
    )


def _suite(crate: ROCrate, record: dict[str, Any]) -> ContextEntity:
    """This suite at the record's commit, and the libraries that it had."""
    commit = str((record.get("git") or {}).get("commit"))
    libraries = sorted(f"{name} {version}" for name, version in record.get("versions", {}).items())
    about = {
        "@type": "SoftwareApplication",
        "name": "relinear",
        "softwareVersion": commit,
        "softwareRequirements": libraries,
    }
    return crate.get(f"#relinear@{commit}") or crate.add(
        ContextEntity(crate, f"#relinear@{commit}", properties=about)
    )


def _ended(record: dict[str, Any]) -> str:
    began = datetime.datetime.fromisoformat(record["started"])
    return (began + datetime.timedelta(seconds=record["wall_seconds"])).isoformat(timespec="seconds")
