"""Manuals of GNU Texinfo in the form of `info`: their nodes one after the other, without the lines that lead
from one to another."""

import re

from relinear.get.converters import plain

NODE = re.compile(r"^\x1f(?:\x0c)?\n(?:File: [^\n]*\n)?", re.MULTILINE)
TABLES = re.compile(
    r"^\x1f\n(?:Tag Table:|End Tag Table|Indirect:|Local Variables:).*?(?=^\x1f|\Z)", re.MULTILINE | re.DOTALL
)


def convert(data: bytes) -> tuple[str, int]:
    """The text of a manual, and the bytes that the file has; white space does not count."""
    text, whole = data.decode(errors="ignore"), plain.convert(data)[1]
    return plain.convert(NODE.sub("\n", TABLES.sub("", text)).encode())[0], whole
