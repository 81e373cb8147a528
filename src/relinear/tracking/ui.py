"""The addresses of MLflow's UI for the runs of each experiment, which its first page does not list, and a
view that compares rows.

MLflow keeps a shared view as a tag of the experiment and opens it by its key: which runs, columns and charts
it shows.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from relinear.errors import UserError
from relinear.tracking import rows
from relinear.tracking.store import PAGES, access, connect, search

SECONDS_TO_END = 10  # that a server is given
VIEW = "rows"
TAG = f"mlflow.sharedViewState.{VIEW}"
PARAMETERS = ("method", "window", "rank", "gate")
LINE = {
    "xAxisKey": "step",
    "selectedXAxisMetricKey": "",
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "lineSmoothness": 0,
    "ignoreOutliers": False,
    "range": {},
}
METRICS = ("ppl", "ppl_long", "avg_no_mmlu", "mmlu_acc", "state_mib")


def links(uri: str, address: str) -> dict[str, str]:
    """Experiment of relinear -> the address of its runs, for a UI at `address` on the store `uri`; the newest
    first."""
    return {
        name: f"{address}/#/experiments/{number}/runs?{PAGES}" for name, number in _experiments(connect(uri))
    }


def comparisons(uri: str, address: str) -> dict[str, str]:
    """Experiment of relinear -> the address of a view that compares its rows alone, which this writes into
    the store; the newest first.

    An experiment without rows has no such view."""
    with access(uri):
        client, found = connect(uri), {}
        for name, number in _experiments(client):
            shown = list(search(client, number, f"tags.`{rows.KIND}` = 'row'"))
            if not shown:  # benchmarks are no rows
                continue
            client.set_experiment_tag(
                number, TAG, json.dumps(view({metric for run in shown for metric in run.data.metrics}))
            )
            found[name] = (
                f"{address}/#/experiments/{number}/runs?viewStateShareKey={VIEW}&compareRunsMode=CHART&{PAGES}"
            )
    return found


def _experiments(client: Any) -> list[tuple[str, str]]:
    found = client.search_experiments(order_by=["last_update_time DESC"])
    return [(x.name, x.experiment_id) for x in found if x.name.startswith("relinear-")]


def view(measured: Collection[str] = METRICS) -> dict[str, Any]:
    """Rows and no seeds, stages or inputs: losses, two of the table's columns, bytes against long-text
    perplexity, coordinates over window, rank and gate, what differs. Losses and columns come first: two
    charts a line, they fill the window before one scrolls.

    A chart is there if its metrics are among those `measured`, so that none is empty.
    """
    upper, lower = {"metricSectionId": "rows"}, {"metricSectionId": "what differs"}
    outcomes = [name for name in ("ppl", "avg_no_mmlu") if name in measured]
    charts = [
        *(
            {
                "type": "LINE",
                **upper,
                "metricKey": name,
                "selectedMetricKeys": [name],
                "displayName": name,
                **LINE,
            }
            for name in ("distill/loss", "finetune/loss")
        ),
        *(
            {"type": "BAR", **upper, "metricKey": name, "displayName": name}
            for name in ("ppl", "avg_no_mmlu")
        ),
        {
            "type": "SCATTER",
            **upper,
            "xaxis": {"key": "state_mib", "type": "METRIC"},
            "yaxis": {"key": "ppl_long", "type": "METRIC"},
        },
        {
            "type": "PARALLEL",
            **upper,
            "selectedParams": ["window", "rank", "gate"],
            "selectedMetrics": outcomes,
            "showAllRuns": True,
        },
        {
            "type": "DIFFERENCE",
            **lower,
            "chartName": "what differs",
            "compareGroups": ["Parameters", "Model metrics"],
            "showChangeFromBaseline": False,
            "showDifferencesOnly": True,
            "baselineColumnUuid": "",
        },
    ]
    charts = [chart for chart in charts if _needs(chart) <= set(measured)]
    sections = [
        {"uuid": name, "name": name, "columns": wide, "cardHeight": 360}
        for name, wide in (("rows", 2), ("what differs", 1))
    ]
    common = {"deleted": False, "isGenerated": False}
    columns = [
        *(f"params.`{name}`" for name in PARAMETERS),
        *(f"metrics.`{name}`" for name in METRICS if name in measured),
    ]
    return {
        "searchFilter": f"tags.`{rows.KIND}` = 'row'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "selectedColumns": columns,
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": False,
        # Else MLflow sorts sections by name, and its own, of curves' names, stand above ours.
        "isAccordionReordered": True,
        "compareRunCharts": [
            {"uuid": f"chart{n}", "runsCountToCompare": 100, **common, **chart}
            for n, chart in enumerate(charts)
        ],
        "compareRunSections": [
            {"display": True, "isReordered": False, **common, **section} for section in sections
        ],
    }


def _needs(chart: dict[str, Any]) -> set[str]:
    """The metrics without which a chart is empty."""
    axes = {chart[axis]["key"] for axis in ("xaxis", "yaxis") if axis in chart}
    return axes | ({chart["metricKey"]} if "metricKey" in chart else set())


def require_port(port: int) -> None:
    """Raise UserError for a port of 127.0.0.1 that another program has, or that this user may not take: links
    to it would show whatever answers there."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, after one that has ended
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"port {port} of 127.0.0.1 cannot be had: {error.strerror}; possible: another one, --port"
                " 5001 (make ui PORT=5001)"
            ) from None


def serve(store: str, port: int) -> int:
    """Run MLflow's UI on 127.0.0.1 until it ends, and end it where this process is interrupted or told to
    end; returns its exit status.

    It is in a session of its own, since each of its processes would print a traceback at Ctrl-C, and is
    without MLflow's executor of jobs, whose five processes nothing here asks for.
    """
    options = ["--backend-store-uri", store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "ui", *options, "--uvicorn-opts", "--log-level warning"],
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
    )
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a terminal that is closed
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    try:
        return server.wait()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave the server behind
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(SECONDS_TO_END)


def open_later(address: str, link: str) -> bool:
    """Have another process open `link` in the browser once a UI answers at `address`; returns False, and does
    nothing, without a display."""
    if sys.platform != "darwin" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    command = [
        sys.executable,
        "-c",
        "import sys; from relinear.tracking.ui import open_once_up; open_once_up(*sys.argv[1:])",
        address,
        link,
    ]
    subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return True


def open_once_up(address: str, link: str, seconds: float = 120) -> bool:
    """Open `link` in the browser once a UI answers at `address`; returns whether it did within so many
    seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return webbrowser.open(link)
        time.sleep(0.5)
    return False
