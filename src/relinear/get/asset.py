"""Obtain one asset and keep its manifest, with its licence, as the stage's metrics."""

from relinear.get import assets
from relinear.plan.assets import catalogue
from relinear.plan.job import Job


def work(job: Job) -> dict:
    """Verify the asset's files, obtaining them first if the cache lacks them; print where they come from and
    under which licence.

    The row of an asset from the hub has the commit."""
    known = catalogue(job.workflow / "assets.yaml")
    name = job.settings["asset"]
    folder = assets.obtain(name, verify=True, assets=known)
    [row] = assets.manifest([name], known)
    if known[name].source == "hub":
        # the snapshot's commit, for which a branch's name stood when it was obtained
        row["commit"] = folder.name
    print(f"{row['name']}: {row['package']} {row['version']}, {row['licence']}. {row['attribution']}")
    return {"assets": [row]}
