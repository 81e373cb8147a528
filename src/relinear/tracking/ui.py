"""Where MLflow's UI shows the runs of each experiment: its own first page lists none of them."""

from urllib.parse import urlencode

from relinear.tracking.live import connect

KIND = urlencode({"workflowType": "machine_learning"})  # without it MLflow 3 opens the page of generative models, which is empty


def links(uri: str, address: str) -> dict[str, str]:
    """Experiment of relinear -> the address of its runs, for a UI at `address` on the store `uri`; the newest first."""
    found = connect(uri).search_experiments(order_by=["last_update_time DESC"])
    return {x.name: f"{address}/#/experiments/{x.experiment_id}/runs?{KIND}" for x in found if x.name.startswith("relinear-")}
