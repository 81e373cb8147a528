"""Readers of texts, one file each, with a function `read(path) -> Iterator[Document]`. The folder is the
registry.

A source of data.yaml is read by the file of its name (`linux-doc` by linux_doc.py), or by the one that
`reader:` names, else by its files' endings. Imports neither torch nor transformers.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path, PurePath
from types import ModuleType

from relinear.errors import UserError

# of files -> their reader
ENDINGS = {".jsonl": "rows", ".json": "rows", ".parquet": "rows", ".txt": "plain", ".md": "plain"}
ALIKE = {"alpaca-cleaned": "instructions", "written": "instructions"}  # sources that have one form


def available() -> list[str]:
    """Names of all readers."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of a reader."""
    return importlib.import_module(f"{__name__}.{name}")


def chosen(source: str, files: Iterable[PurePath] = (), given: str | None = None) -> str:
    """The name of the reader of a source. Raises UserError, naming the possible ones, where there is none."""
    if given is not None:
        if given not in available():
            raise UserError(f"no reader {given!r} of texts; have {', '.join(available())}")
        return given
    name = ALIKE.get(source, source.replace("-", "_"))
    if name in available():
        return name
    endings = sorted({file.suffix for file in files})
    found = {ENDINGS[ending] for ending in endings if ending in ENDINGS}
    if len(found) == 1:
        return found.pop()
    raise UserError(
        f"no text source {source!r}: no file of get/readers has its name, and its files end in"
        f" {', '.join(filter(None, endings)) or 'nothing'}; possible: files of one kind"
        f" ({', '.join(ENDINGS)}), or `reader:` with one of {', '.join(available())}"
    )
