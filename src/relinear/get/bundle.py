"""Archives of assets in one file, for a machine without the network or without a registry's client.

The file is a tar of archives as the registries serve them, each as `<sha256>/<name>`. `unpack` compares every
hash with the catalogue, so the file need not be trusted. What comes from the hub is left out: its client has
a cache of its own.
"""

import os
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from relinear.get import assets
from relinear.plan.assets import Asset, AssetError, Own, default_cache

HERE = "the hub's assets are not in it: copy the cache of the hub's client (HF_HOME)"


def pack(names: Iterable[str], catalogue: Mapping[str, Asset | Own], out: Path) -> list[str]:
    """Download the archives of these assets into the new file `out`; the names that it has. Raises AssetError
    as `obtain` does."""
    known = [assets.known(name, catalogue) for name in sorted(set(names))]
    packed = [asset for asset in known if isinstance(asset, Asset) and asset.source != "hub"]
    cache = default_cache()
    for folder in (cache, out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with tarfile.open(unfinished, "w") as tar:
            for asset in (one for whole in packed for one in assets.archives_of(whole)):
                with assets.scratch(cache, f".{asset.sha256}.bundle-") as folder:
                    archive = assets.download(asset, folder)
                    tar.add(archive, f"{asset.sha256}/{archive.name}", filter=_anonymous)
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    if left := [asset.name for asset in known if isinstance(asset, Asset) and asset.source == "hub"]:
        print(f"{out}: {', '.join(left)}: {HERE}", file=sys.stderr)
    return [asset.name for asset in packed]


def unpack(file: Path, catalogue: Mapping[str, Asset | Own], cache: Path | None = None) -> list[str]:
    """Put the assets whose archives are all in `file` into the cache, as if they had been downloaded; their
    names.

    Raises AssetError for a file that is no bundle, or that has an archive which the catalogue does not name
    or of another hash.
    """
    cache = default_cache() if cache is None else cache
    cache.mkdir(parents=True, exist_ok=True)
    whole = [asset for asset in catalogue.values() if isinstance(asset, Asset) and asset.source != "hub"]
    wanted = {one.sha256 for asset in whole for one in assets.archives_of(asset)}
    with assets.scratch(cache, ".bundle-") as folder:
        found = dict(_archives(file, folder, wanted))
        here = [asset for asset in whole if all(one.sha256 in found for one in assets.archives_of(asset))]
        for asset in here:
            assets.obtain(asset.name, cache, assets=catalogue, archives=found)
    return [asset.name for asset in here]


def _archives(file: Path, folder: Path, wanted: set[str]) -> Iterator[tuple[str, Path]]:
    """The sha256 that is wanted, and the path, of each archive of the file, copied into `folder`."""
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                sha = path.parts[0] if member.isfile() and len(path.parts) == 2 else None
                if sha not in wanted or path.name == "..":
                    raise AssetError(
                        f"{file}: {member.name!r} is no archive of workflow/assets.yaml; possible: a file"
                        " that `relinear bundle` made, of the same commit"
                    )
                (folder / sha).mkdir(exist_ok=True)
                with open(folder / sha / path.name, "wb") as copy:
                    shutil.copyfileobj(tar.extractfile(member), copy)
                yield sha, folder / sha / path.name
    except (tarfile.TarError, EOFError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)  # tarfile's has a line a format
        raise AssetError(
            f"{file} cannot be read as a bundle: {said.rstrip(':')}; possible: a file that `relinear bundle`"
            " made"
        ) from None
    except FileNotFoundError:
        raise AssetError(f"no file {file}; possible: a file that `relinear bundle` made") from None


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Nobody's file, of no time, so that the same archives make the same bundle."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o644
    return info
