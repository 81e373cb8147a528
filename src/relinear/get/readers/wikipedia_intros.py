"""The introductions of Wikipedia's vital articles, as their package has them."""

import json
from collections.abc import Iterator
from pathlib import Path

from relinear.get.readers._document import Document


def read(path: Path) -> Iterator[Document]:
    """One document an article."""
    for file in sorted(path.rglob("summaries_en-us.json")):
        for article in json.loads(file.read_text(encoding="utf-8")).values():
            yield Document(article["extract"])
