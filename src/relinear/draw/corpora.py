"""What each source of the corpora is: the catalogue's facts beside counts in SmolLM2's tokens, for
docs/corpora.md.

`python -m relinear.draw.corpora FOLDER` takes the counts of a finished stream, such as
results/smollm2/stream/docs-100m@smollm2-135m-instruct-x10, to `workflow/corpora.csv`. A row names the archive
that was counted, so a source with another archive has no counts.
"""

import csv
import sys
from pathlib import Path

from relinear.draw.render import write_csv
from relinear.plan.assets import catalogue
from relinear.plan.catalogue import read_data
from relinear.plan.strict import WORKFLOW
from relinear.records import read_json

COUNTED = WORKFLOW / "corpora.csv"
# long: tokens of documents of 4,096 and more
COLUMNS = ("source", "sha256", "documents", "tokens", "long", "heldout")


def counts() -> dict[str, dict[str, int]]:
    """Source -> its counts, of the archive that the catalogue has."""
    known = catalogue()
    with COUNTED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["sha256"] == known[row["source"]].sha256]
    return {row["source"]: {name: int(row[name]) for name in COLUMNS[2:]} for row in rows}


def table() -> str:
    """The sources of all corpora as a table in Markdown, with sums."""
    known, counted, data = catalogue(), counts(), read_data()
    lines = [
        (
            "| Corpus | Source | Package, version | Licence | Documents | Tokens | In documents of 4,096+ |"
            " Held out |"
        ),
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for corpus, entry in data.items():
        for source in entry.options["sources"] if entry.make == "corpus" else ():
            asset, own = known[source], counted[source]
            lines.append(
                f"| `{corpus}` | `{source}` | {asset.package} {asset.version} | {asset.licence} |"
                f" {_cells(own)} |"
            )
    total = {name: sum(own[name] for own in counted.values()) for name in COLUMNS[2:]}
    return "\n".join([*lines, f"| all | | | | {_cells(total)} |"])


def _cells(own: dict[str, int]) -> str:
    """`1,234 | 5.67M | 2.30M (41 %) | 0.57M`."""
    long = f"{own['long'] / 1e6:.2f}M ({100 * own['long'] / own['tokens']:.0f} %)"
    return f"{own['documents']:,} | {own['tokens'] / 1e6:.2f}M | {long} | {own['heldout'] / 1e6:.2f}M"


def main(folder: Path) -> None:
    """Write the counts of a stream."""
    known = catalogue()
    found = read_json(folder / "metrics.json")["sources"]
    write_csv(
        COUNTED,
        COLUMNS,
        [
            {"source": name, "sha256": known[name].sha256} | {c: own[c] for c in COLUMNS[2:]}
            for name, own in found.items()
        ],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
