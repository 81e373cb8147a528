"""All readings of a campaign as one table."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from relinear.core import store

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("node", "run", "seed", "measure", "metric", "of", "at", "value", "stderr", "n", "why")
SEED = re.compile(r"-seed(\d+)$")


def frame(place: Path | str) -> "pd.DataFrame":
    """The readings of a campaign's results, such as `results/mini` or `results/reference/smollm2`: a row a reading, with `COLUMNS`.

    `node` is `runs/<run>/<measure>`. `run` is the run's name without `-seed<n>`, `seed` is that n, or 0. `at` is JSON with sorted keys, such as
    `{"depth": 0.5, "length": 4096}`, and `{}` for a reading of the whole. Where a metric is not defined, `value` is NaN and `why` says why.
    """
    import pandas as pd

    place, rows = Path(place), []
    for folder in store.nodes(place):
        name = folder.relative_to(place)
        if len(name.parts) < 3 or not store.exists(folder / store.METRICS):
            continue
        run = name.parts[1]
        seed = SEED.search(run)
        who = (name.as_posix(), SEED.sub("", run), int(seed[1]) if seed else 0, name.parts[2])
        for reading in json.loads(store.read(folder / store.METRICS)).get("readings", ()):
            at = json.dumps(reading["at"], sort_keys=True)
            rows.append((*who, reading["metric"], reading["of"], at, reading["value"], reading["stderr"], reading["n"], reading.get("why", "")))
    found = pd.DataFrame(rows, columns=list(COLUMNS))
    return found.astype({"seed": "int64", "value": "float64", "stderr": "float64", "n": "int64"})
