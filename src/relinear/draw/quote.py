"""Numbers of the committed tables as text, for README.md, docs/ and the index of tables and figures.

These pages are written by cog (https://cog.readthedocs.io): a block holds Python in an HTML comment, and
below it what the Python prints. So a sentence stands beside the code that looks its numbers up, and is an
error where an `assert` in the code no longer holds:

    <!-- [[[cog
    runs = rows("smollm2/comparison/controls")
    assert runs["lizard"]["ppl"] < runs["lolcats_window"]["ppl"]
    say(f"Lizard's perplexity is {runs['lizard']['ppl']}.")
    ]]] -->
    Lizard's perplexity is 12.11 ± 0.19.
    <!-- [[[end]]] -->

`python -m relinear.draw.quote` runs all blocks, `python -m relinear.draw.quote --check` says which pages
would change.
"""

import difflib
import json
import re
import sys
import textwrap
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from relinear.draw.beside import VERDICTS, lines_of
from relinear.draw.render import NOT_DEFINED, NOT_RUN, markdown, plus_minus
from relinear.errors import UserError
from relinear.plan.near import possible
from relinear.plan.strict import WORKFLOW
from relinear.records import read_committed

ROOT = WORKFLOW.parent
REFERENCE = ROOT / "results/reference"
PAGES = ("README.md", "docs/*.md", "workflow/papers/README.md")
HERE = "python -m relinear.draw.quote"
SHOWN_AS = {  # run -> its name in the pages
    "teacher": "teacher",
    "teacher_lora": "teacher + LoRA",
    "t2r": "T2R",
    "hedgehog": "Hedgehog",
    "supra": "SUPRA",
    "lolcats_linear": "LoLCATs, linear",
    "lolcats_window": "LoLCATs, window",
    "lizard": "Lizard",
    "window_128": "window of 128, untrained",
    "window_128_lora": "window of 128 + LoRA",
    "window_bytes_of_lolcats": "window of LoLCATs' bytes + LoRA",
    "window_bytes_of_lizard": "window of Lizard's bytes + LoRA",
    "teacher_dynamic": "teacher, transformers' cache",
    "lolcats_linear_shared": "LoLCATs, linear, shared states",
    "lolcats_window_shared": "LoLCATs, window, shared states",
    "lizard_shared": "Lizard, shared states",
    "lizard_shared_window_392": "Lizard, shared states, window of 392",
    "window_bytes_of_lolcats_key_heads_bf16": "window of 131 + LoRA",
    "window_bytes_of_lizard_key_heads_bf16": "window of 198 + LoRA",
    "window_bytes_of_lizard_key_heads": "window of 264 + LoRA",
}


def say(*parts: str) -> None:
    """Print Markdown, a blank line between its parts: paragraphs and lists filled up to 110 columns, tables
    as they are.

    An item of a list begins with `- `, a table with `|`.
    """
    blocks = [block for part in parts for block in re.split(r"\n\s*\n", part.strip())]
    print("\n\n".join(block if block.startswith("|") else "\n".join(_filled(block)) for block in blocks))


def _filled(block: str) -> Iterator[str]:
    """A paragraph, or each item of a list, with filled lines."""
    for part in re.split(r"\n(?=- )", block):
        under = "  " if part.startswith("- ") else ""
        words = re.sub(r" ([±+]) ", "\xa0\\1\xa0", " ".join(part.split()))  # no line begins with either
        lines = textwrap.fill(
            words, 110, subsequent_indent=under, break_long_words=False, break_on_hyphens=False
        )
        yield lines.replace("\xa0", " ")


class Number(float):
    """A number and its standard error, None where none is known.

    As text: `12.11 ± 0.19`. With a format the number alone, `{x:.1f}`; with `±` before the format both,
    `{x:±.1f}`.
    """

    error: float | None

    def __new__(cls, value: float | str, error: float | None = None) -> Self:
        """A number from its text or value."""
        made = super().__new__(cls, value)
        made.error = error
        return made

    def __str__(self) -> str:
        return plus_minus(float(self), self.error)

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        alone = spec.removeprefix("±")
        text = format(float(self), alone)
        return text if alone == spec or self.error is None else f"{text} ± {format(self.error, alone)}"

    def __abs__(self) -> "Number":
        return Number(abs(float(self)), self.error)


class Named(dict):
    """A mapping that says which names it has, and the nearest, where it is asked for another."""

    def __init__(self, what: str, items: Mapping) -> None:
        super().__init__(items)
        self.what = what

    def __missing__(self, name: str):
        near = difflib.get_close_matches(str(name), [str(own) for own in self], n=3, cutoff=0.4) or list(self)
        raise UserError(f"{self.what} has no {name!r}; have {', '.join(map(str, near))}")


def rows(path: str, by: str | None = None) -> Mapping[str, Mapping[str, Number | str]]:
    """The rows of a committed table by run, or by its column `row` where it has one.

    `path` is below results/reference and without suffix. A cell is a `Number` where it is one, else its text.
    `by` names another column. Raises UserError for a file, a row or a column that is not there.
    """
    found = listed(path)
    key = by or ("row" if "row" in found[0] else "run")
    return Named(f"{path}.csv", {str(row[key]): row for row in found})


def cell(path: str, row: str, column: str) -> Number | str:
    """One cell of a committed table, as in `rows`."""
    return rows(path)[row][column]


def listed(path: str) -> list[Mapping[str, Number | str]]:
    """The rows of a committed table in its order, as those of `rows`."""
    file = REFERENCE / f"{path}.csv"
    if not file.is_file():
        near = difflib.get_close_matches(
            path, [_short(other) for other in REFERENCE.rglob("*.csv")], n=3, cutoff=0.6
        )
        raise UserError(
            f"results/reference has no {path}.csv" + (f"; near: {', '.join(near)}" if near else "")
        )
    found = []
    for row in lines_of(file):
        cells = {column: _cell(text, row.get(f"{column}_stderr")) for column, text in row.items()}
        found.append(Named(f"{path}.csv", cells))
    return found


def told(path: str) -> Any:
    """What a committed JSON file below results/reference holds. Raises UserError for one that is not there or
    holds no JSON, and BrokenError for one that is not as it was committed."""
    file = REFERENCE / path
    try:
        return json.loads(read_committed(file))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} cannot be read: {error}; `git checkout {file}` restores it") from None


def _short(file: Path) -> str:
    return file.relative_to(REFERENCE).with_suffix("").as_posix()


def _cell(text: str, error: str | None) -> Number | str:
    """A number where the text is one. A table writes `not run` or `not defined` for an error that is not
    there."""
    try:
        return Number(text, _number(error))
    except ValueError:
        return text


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def table(
    path: str, columns: Mapping[str, str], shown: Mapping[str, str] | None = None, head: str = "Run"
) -> str:
    """Columns of a committed table as Markdown.

    columns: title -> column, with a format after a colon, as `{"LAMBADA": "lambada_openai_acc:±.1f"}`;
    without one a number has its error and two decimals. shown: row -> its name on the page; by default every
    row. What was not run and what is not defined is an empty cell; a mean over fewer seeds than its row says
    so.
    """
    found = rows(path)
    names = shown or {name: SHOWN_AS.get(name, name) for name in found}
    lines = [
        [words, *(_text(found[name], column) for column in columns.values())] for name, words in names.items()
    ]
    return markdown([head, *columns], lines)


def _text(row: Mapping[str, Number | str], column: str) -> str:
    """A cell as text."""
    name, _, spec = column.partition(":")
    value = row[name]
    if isinstance(value, str):
        return "" if value.startswith((NOT_RUN, NOT_DEFINED)) else value
    seeds = row.get(f"{name}_seeds")
    fewer = (
        f" ({seeds:.0f} seed{'s' * (seeds > 1)})"
        if isinstance(seeds, Number) and seeds < row["seeds"]
        else ""
    )
    return format(value, spec) + fewer


def claims(path: str) -> list[dict[str, str]]:
    """The verdicts on the claims of a committed table or figure, in their order. Raises UserError where none
    are committed."""
    if (found := VERDICTS.of(REFERENCE / path)) is None:
        have = VERDICTS.committed(REFERENCE / path.partition("/")[0])
        raise UserError(
            f"results/reference has no verdicts of {path}; {possible(path.partition('/')[2], have)}"
        )
    return found


def verdicts(path: str, whose: str | None = None) -> Counter[str]:
    """How many claims of a table or figure have which verdict; `whose`: `paper` or `ours`, the start of the
    column."""
    return Counter(row["verdict"] for row in claims(path) if whose is None or row["whose"].startswith(whose))


def difference(path: str, compared: str, verdict: str) -> Number:
    """The difference, or the ratio, that a claim has for a comparison such as `a ppl < b ppl`, with its
    error.

    Raises UserError where no claim makes the comparison, and where its verdict is another: a sentence that
    quotes the difference says the verdict in words.
    """
    found = Named(f"claims of {path}", {row["compared"]: row for row in claims(path)})[compared]
    if found["verdict"] != verdict:
        raise UserError(f"{path}: {compared!r} is {found['verdict']}, and the page says {verdict}")
    value, error = re.search(r"(?:difference|ratio) ([^\s;]+)(?: ± ([^\s;]+))?", found["figures"]).groups()
    return Number(value, float(error) if error else None)


def main(arguments: list[str]) -> int:
    """Run the blocks of all pages; with `--check` write nothing, and return 5 where a page would change.

    What a block cannot read or find is one line with the block's place; code that fails, as an `assert`, has
    its traceback."""
    from cogapp.cogapp import Cog, CogCheckFailed, CogError, CogUserException

    if arguments not in ([], ["--check"]):
        print(f"error: got {' '.join(arguments)!r}; possible: {HERE}, {HERE} --check", file=sys.stderr)
        return 2
    pages = [str(page) for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    how = ["--check", f"--check-fail-msg=run `{HERE}`"] if arguments else ["-r"]
    try:
        Cog().callable_main(["cog", "-P", "-p", f"from {__spec__.name} import *", *how, *pages])
    except CogUserException as error:
        fault = error.__context__  # what the block raised
        if not isinstance(fault, UserError):
            print(f"Traceback (most recent call last):\n{error}", file=sys.stderr)
            return 4
        frames = traceback.extract_tb(fault.__traceback__)
        page, line = re.findall("<cog (.+):(.+)>", "\n".join(frame.filename for frame in frames))[0]
        print(f"error: {page}, the block at line {line}: {fault}", file=sys.stderr)
        return 4
    except CogError as error:
        print(error, file=sys.stderr)
        return 5 if isinstance(error, CogCheckFailed) else 1
    except UnicodeDecodeError as error:
        print(f"error: a page is no UTF-8 text: {error}; possible: {', '.join(PAGES)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
