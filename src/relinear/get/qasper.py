"""The papers of Qasper as texts."""

from collections.abc import Mapping
from typing import Any


def paper(doc: Mapping[str, Any]) -> str:
    """Title, abstract, and every section with its heading, paragraphs apart by an empty line: of a `doc` as OLMES's requests have it."""
    whole, parts = doc["full_text"], [doc["title"], doc["abstract"]]
    for heading, paragraphs in zip(whole["section_name"], whole["paragraphs"], strict=True):
        parts += [(heading or "").rpartition(" ::: ")[2].strip(), *paragraphs]
    return "\n\n".join(filter(None, (" ".join(part.split()) for part in parts)))
