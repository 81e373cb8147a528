"""A hook of the site: its first page begins with the Quickstart of README.md, which is no page of the
site."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
SECTION = re.compile(r"^## Quickstart\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown, page, config, files):
    """The first page with the section below its title. Raises ValueError where README.md has no such section,
    or one with links, which would lead elsewhere from docs/."""
    if page.file.src_uri != "index.md":
        return markdown
    found = SECTION.search(README.read_text())
    if found is None or "](" in found[0]:
        raise ValueError(
            f"{README} needs a section `## Quickstart` without links, for the first page of the site"
        )
    title, rest = markdown.split("\n", 1)
    return f"{title}\n\n{found[0].rstrip()}\n\n## What this is\n{rest}"
