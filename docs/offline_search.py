"""A hook of the site: its search works where a browser reads the pages from files, without a server.

There a browser starts no worker and fetches no JSON. So lunr, the index and the worker's code are one script,
which the search page loads.
"""

import json
from pathlib import Path

# The end of ProperDocs' script, which starts the worker.
STARTS = "if (!window.Worker) {\n  console.log"
LOADING = """var searchWorker;
if (document.getElementById("properdocs-search-query")) {
  var embedded = document.createElement("script");
  embedded.src = joinUrl(base_url, "search/embedded.js");
  embedded.onload = function () {
    searchWorker = embeddedWorker(onWorkerMessage);
    searchWorker.postMessage({init: true});
  };
  document.head.appendChild(embedded);
}
"""
# The worker's code takes these for the browser's: it need not load what is here already, and its messages are
# calls.
AROUND = """
function embeddedWorker (answer) {
  var onmessage;
  function postMessage (data) { answer({data: data}); }
  function importScripts () {}
  function XMLHttpRequest () {
    this.responseText = JSON.stringify(%s);
    this.open = function () {};
    this.addEventListener = function (name, loaded) { this.send = loaded; };
  }
%s
  return {postMessage: function (data) { onmessage({data: data}); }};
}
"""


def on_post_build(config):
    """Put lunr, the index and the worker's code into one script. Raises ValueError where ProperDocs' own
    script is not the one known here."""
    folder = Path(config["site_dir"]) / "search"
    script = (folder / "main.js").read_text()
    start = script.find(STARTS)
    if start < 0:
        raise ValueError(
            f"{folder / 'main.js'} starts its worker in another way than docs/offline_search.py knows"
        )
    (folder / "main.js").write_text(script[:start] + LOADING)
    index = json.dumps(json.loads((folder / "search_index.json").read_text()))
    (folder / "embedded.js").write_text(
        (folder / "lunr.js").read_text() + AROUND % (index, (folder / "worker.js").read_text())
    )
