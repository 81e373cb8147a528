"""The papers of Qasper as texts."""

from collections.abc import Mapping
from typing import Any


def paper(doc: Mapping[str, Any]) -> str:
    """A paper's text from a `doc` of OLMES's requests: title, abstract, every section with its heading, an
    empty line between paragraphs."""
    whole, parts = doc["full_text"], [doc["title"], doc["abstract"]]
    for heading, paragraphs in zip(whole["section_name"], whole["paragraphs"], strict=True):
        parts += [(heading or "").rpartition(" ::: ")[2].strip(), *paragraphs]
    return "\n\n".join(filter(None, (" ".join(part.split()) for part in parts)))
