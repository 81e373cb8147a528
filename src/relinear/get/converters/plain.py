"""Files that are read as they are: plain text, reStructuredText, Markdown, Perl's POD, source code."""

import re

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def convert(data: bytes) -> tuple[str, int]:
    """The file without control characters and without bytes that are no UTF-8, and the bytes that it has;
    white space does not count."""
    return CONTROL.sub("", data.decode(errors="ignore")).strip(), len(b"".join(data.split()))
