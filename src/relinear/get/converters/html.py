"""Pages of HTML: headings, paragraphs, lists and code of the main part, without navigation, by the library
resiliparse."""

import re

from resiliparse.extract.html2text import extract_plain_text

MARKUP = re.compile(rb"<(script|style|a)\b.*?</\1\s*>|<[^>]*>|\s+", re.DOTALL | re.IGNORECASE)


def convert(data: bytes) -> tuple[str, int]:
    """The text of a page, and the bytes between its tags; white space does not count, nor do scripts, styles,
    and links, of which navigation is."""
    return extract_plain_text(data.decode(errors="ignore"), main_content=True, alt_texts=False), len(
        MARKUP.sub(b"", data)
    )
