"""A hook of the site: files outside docs/ that pages link to are copied into it, and the report of the
committed results is made, a page a paper.

Pages are written for GitHub, where `../results/reference/x.png` leads to a file of the repository. In the
site that file lies at `repository/results/reference/x.png`, and this hook rewrites the link. A Markdown file
that is linked becomes a page.
"""

import re
from pathlib import Path
from posixpath import relpath

from properdocs.exceptions import PluginError
from properdocs.structure.files import File, InclusionLevel

from relinear.core import store
from relinear.draw.report import report

ROOT = Path(__file__).parents[1]
FOLDER = "repository"
LINK = re.compile(r"(?<=\]\()(\.\.?/[^)#\s]+)")  # of [text](../path) and ![text](../path#anchor)


def outside(page: File) -> dict[str, str]:
    """The links of a page that leave docs/, as they are written, each with its path in the repository. Raises
    for one that leads nowhere."""
    found = {}
    for link in LINK.findall(page.content_string):
        target = (Path(page.abs_src_path).parent / link).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT):
            continue
        if not target.is_file():
            raise PluginError(f"{page.src_uri} links to {link}, which is no file of the repository")
        found[link] = target.relative_to(ROOT).as_posix()
    return found


def on_files(files, config):
    """The pages, the report's among them, and the files of the repository that they link to."""
    linked = {path for page in files.documentation_pages() for path in outside(page).values()}
    for paper, (text, paths) in report(ROOT).items():
        files.append(File.generated(config, f"papers/{paper}.md", content=text))
        linked |= paths
    for path in sorted(linked):
        # a record of a store
        there = (
            {"abs_src_path": str(ROOT / path)}
            if (ROOT / path).is_file()
            else {"content": store.read(ROOT / path)}
        )
        files.append(File.generated(config, f"{FOLDER}/{path}", **there, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown, page, config, files):
    """The page with its links leading to the copies."""
    if page.file.generated_by:
        return markdown
    here = page.file.src_uri.rpartition("/")[0]
    paths = outside(page.file)
    return LINK.sub(
        lambda link: relpath(f"{FOLDER}/{paths[link[1]]}", here or ".") if link[1] in paths else link[1],
        markdown,
    )
