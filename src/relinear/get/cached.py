"""Whether an asset is on this machine, or would have to be downloaded.

No stage imports this, so it is part of no key.
"""

import importlib.util
from pathlib import Path

from relinear.get import assets
from relinear.plan.assets import Asset, Own, default_cache


def cached(asset: Asset | Own, cache: Path | None = None) -> bool:
    """Whether an asset's folder is in the cache, or its files in that of the hub's client. Their contents are
    compared by `obtain`."""
    if isinstance(asset, Own):
        return True
    if asset.source != "hub":
        return ((default_cache() if cache is None else cache) / asset.folder).exists()
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            asset.package, repo_type=asset.repo_type, revision=asset.version, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return False
    return not assets._missing_from_snapshot(asset, Path(folder))
