"""Every claim of the papers once, with its verdict, the reason and the parts of its error; totals by paper
and by reason.

docs/claims.md shows `page` (relinear.draw.quote writes it); `relinear claims` prints the totals and lists
claims.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from relinear.draw.beside import VERDICTS
from relinear.draw.claims import (
    BESIDE,
    BY_CHANCE,
    STANDARD_ERRORS,
    UNTESTED,
    WITHIN_ERROR,
    Verdict,
    compared,
)
from relinear.draw.render import markdown, number, titled
from relinear.draw.report import Told, judged
from relinear.errors import UserError
from relinear.plan.specs import Artefact, available, papers
from relinear.plan.strict import WORKFLOW

ROOT = WORKFLOW.parent
OURS = "comparison"  # the folder of our own tables, which repeat papers' claims beside our questions
BOTH = "reproduced and contradicted"
NO_ROW = "no row"
# Words in a reason -> the kind of it, the first that fits: what is first is furthest from a verdict. Whatever
# else a reason says is of numbers that are not there.
KINDS = {
    "is a demonstration": "measured as a demonstration alone",
    "another form than the paper's": "another form",
    "other dose": "another dose",
    "other recipe": "another recipe, kernel or card",
    "not informative": "not informative: the teacher fails, or what is untrained does as well",
    "one training of": "one training of unknown spread",
    "standard errors better than chance": "at chance",
    ": no room": "no room between the rows",
    WITHIN_ERROR: "within error",
}
NO_NUMBER = "not run, or no number"
# Within error: whether the difference is beyond two errors of its items alone, as it is printed
BY_TRAININGS = "within error, which more trainings could settle"
BY_ITEMS = "within error of the items alone"
WITHIN = re.compile(rf"(\S+) ± \S+(?: \(paired\))? is {WITHIN_ERROR} of (\S+?)(?:;|$)")
UNTESTED_KINDS = (*list(KINDS.values())[:-1], BY_TRAININGS, BY_ITEMS, NO_NUMBER, NO_ROW)
MEASURED = re.compile(r"(?:difference|ratio) \S+(?: ± \S+)?")


class Stated(NamedTuple):
    """A claim, by whom, which labels test it, and the rows that claims files have of it, with the drawing of
    each, `<folder>/<paper>/<stem>`. `why`: without rows, the reason. `bound`: `ours` if the paper does not
    print its margin or ratio."""

    paper: str
    claim: str
    source: str
    labels: tuple[str, ...]
    compared: str
    published: str
    rows: tuple[tuple[str, dict[str, str]], ...]
    why: str = ""
    bound: str | None = None

    @property
    def told(self) -> tuple[str, dict[str, str]] | None:
        """The drawing and the row that speak for the claim: the first that has a verdict, else the first that
        is nearest to one."""
        return max(self.rows, key=lambda each: _nearness(each[1]), default=None)

    @property
    def verdict(self) -> str:
        """The verdict; BOTH where one place reproduces and another contradicts it."""
        found = {row["verdict"] for _, row in self.rows} - {UNTESTED}
        return BOTH if len(found) > 1 else found.pop() if found else UNTESTED

    @property
    def reason(self) -> str:
        """Why it has its verdict."""
        return self.told[1]["reason"] if self.told else self.why

    @property
    def kind(self) -> str:
        """The kind of the reason of a claim that is not tested; else its verdict."""
        if self.verdict != UNTESTED:
            return self.verdict
        if not self.rows:
            return NO_ROW if not self.compared else NO_NUMBER
        kind, row = kind_of(self.reason), self.told[1]
        if kind != KINDS[WITHIN_ERROR]:
            return kind
        return _part_of_error(row) if row["error_items"] else NO_NUMBER  # of the form that speaks


def _part_of_error(row: Mapping[str, str]) -> str:
    """Which part of its error keeps a row from a verdict: BY_ITEMS or BY_TRAININGS."""
    value, bound = map(float, WITHIN.search(row["reason"]).groups())
    alone = abs(value - bound) > STANDARD_ERRORS * float(row["error_items"])
    return BY_TRAININGS if alone else BY_ITEMS


def kind_of(reason: str) -> str:
    """The kind of a reason for which a claim is not tested."""
    return next((kind for words, kind in KINDS.items() if words in reason), NO_NUMBER)


def _nearness(row: Mapping[str, str]) -> int:
    """How near a row is to a verdict: larger is nearer."""
    kinds = [NO_NUMBER, *KINDS.values()]
    return len(kinds) if row["verdict"] != UNTESTED else kinds.index(kind_of(row["reason"]))


def stated(root: Path = ROOT) -> list[Stated]:
    """The claims of the papers, in the order of their labels. Those of tables that a paper prints twice are
    one, with both labels."""
    found: dict[tuple[str, str], Stated] = {}
    folder, reference = root / "workflow/papers", root / "results/reference"
    artefacts, told = available(folder), VERDICTS.of_all(reference)
    for name, paper in papers(folder).items():
        own = {
            artefact.spec.label: artefact for artefact in artefacts.values() if artefact.paper == name != OURS
        }
        for artefact in (own[label] for label in paper.labels if label in own):
            for each in _of(artefact, reference, told):
                place = (name, each.compared)
                found[place] = (
                    found[place]._replace(labels=(*found[place].labels, *each.labels))
                    if place in found
                    else each
                )
        for claim in paper.untested:
            found[name, claim.claim] = Stated(
                name, claim.claim, claim.source, (), "", claim.published, (), claim.why
            )
    return list(found.values())


def _of(artefact: Artefact, reference: Path, told: Told) -> Iterator[Stated]:
    """The paper's own claims of a table or figure, with the rows of all folders that have it."""
    found = judged(artefact, reference, told)
    rows = [(place.relative_to(reference).as_posix(), row) for place, own in found.items() for row in own]
    for claim in artefact.spec.claims:
        if not claim.ours:
            own = tuple((place, row) for place, row in rows if row["claim"] == claim.claim)
            what = compared(claim, artefact.spec)
            yield Stated(
                artefact.paper,
                claim.claim,
                claim.source,
                (artefact.spec.label,),
                what,
                claim.published or "",
                own,
                artefact.spec.not_run,
                claim.margin_by,
            )


def asked(reference: Path) -> list[dict[str, str]]:
    """The results on questions of our own, proxies among them, each once."""
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    for file in sorted(reference.glob(f"*/{VERDICTS.file}")):
        for row in itertools.chain.from_iterable(VERDICTS.committed(file.parent).values()):
            if row["whose"] != "paper":
                seen.setdefault((row["compared"], _measured(row) or row["claim"], row["verdict"]), row)
    return list(seen.values())


def _measured(row: Mapping[str, str]) -> str:
    """The difference or ratio that a row of a claims file has, or the number that was held to a bound; empty
    where it has none."""
    found = MEASURED.search(row["figures"])
    return found[0] if found else row["figures"].partition("; published")[0] if row["error"] else ""


def by_chance(rows: Iterable[Mapping[str, str]]) -> tuple[int, float]:
    """How many comparisons of numbers with errors are behind the rows that were judged or are within error,
    and how many of these chance alone would put beyond two errors if nothing differed.

    A claim beside several rows is a comparison beside each, and one by two forms is a comparison by each.
    """
    n = sum(
        "±" in compared.partition("; published")[0]
        for row in rows
        if row["verdict"] != UNTESTED or kind_of(row["reason"]) == KINDS[WITHIN_ERROR]
        for compared in row["figures"].split(BESIDE)
    )
    return n, BY_CHANCE * n


def totals(claims: Sequence[Stated], ours: Sequence[dict[str, str]]) -> str:
    """The verdicts by paper, and those on our own questions, as a Markdown table."""
    titles = {name: f"of {name}" for name in dict.fromkeys(claim.paper for claim in claims)}
    rows = [
        _row(
            titles[name],
            [c.verdict for c in claims if c.paper == name],
            [c.told[1] for c in claims if c.paper == name and c.told],
        )
        for name in titles
    ]
    rows.append(
        _row(
            "of all papers",
            [claim.verdict for claim in claims],
            [claim.told[1] for claim in claims if claim.told],
        )
    )
    for words, proxies in (("our own questions", False), ("our own, a proxy for a paper's number", True)):
        own = [row for row in ours if ("proxy" in row["whose"]) == proxies]
        rows.append(_row(words, [row["verdict"] for row in own], own))
    return markdown(
        [
            "Claims",
            *get_args(Verdict),
            BOTH,
            "comparisons with an error",
            "of these, that chance alone would decide",
        ],
        rows,
    )


def _row(words: str, verdicts: Sequence[str], rows: Sequence[dict[str, str]]) -> list[str]:
    n, chance = by_chance(rows)
    counts = Counter(verdicts)
    return [words, *(str(counts[verdict]) for verdict in (*get_args(Verdict), BOTH)), str(n), f"{chance:.1f}"]


def reasons(claims: Sequence[Stated]) -> str:
    """Why papers' claims are not tested, by paper, as a Markdown table."""
    names = list(dict.fromkeys(claim.paper for claim in claims))
    counts = Counter((claim.kind, claim.paper) for claim in claims if claim.verdict == UNTESTED)
    kinds = [kind for kind in UNTESTED_KINDS if any(counts[kind, name] for name in names)]
    return markdown(
        ["Not tested, since", *names],
        [[kind, *(str(counts[kind, name]) for name in names)] for kind in kinds],
    )


def _cells(claim: Stated, reference: Path) -> dict[str, str]:
    place, row = claim.told or ("", {})
    errors = (
        [number(float(row[part])) for part in ("error_items", "error_training")] if row.get("error") else []
    )
    where = ", ".join(dict.fromkeys(filter(None, (claim.source, *claim.labels))))
    cells = {
        "Claim": claim.claim,
        "Where": where,
        "Compared": f"{claim.compared}{', a bound of ours' if claim.bound else ''}",
        "Published": claim.published,
        "Verdict": claim.verdict,
        "Error: items, trainings": ", ".join(errors),
        "Trainings": row.get("trainings", ""),
        "Reason": claim.reason,
        "In": _link(reference, place) if place else "",
    }
    return {title: cell.replace("|", "\\|") for title, cell in cells.items()}


def _link(reference: Path, place: str) -> str:
    """A folder's name as a link, from a page of docs/, to what it has of a drawing: the table, the picture,
    or, of a figure whose weights are not committed, the verdicts."""
    folder = place.partition("/")[0]
    files = (f"{place}.md", f"{place}.png", f"{folder}/{VERDICTS.file}")
    return f"[{folder}](../results/reference/{next(f for f in files if (reference / f).is_file())})"


def page(root: Path = ROOT) -> str:
    """Totals and all claims, by paper and by verdict or reason, as Markdown."""
    claims, ours = stated(root), asked(root / "results/reference")
    titles = {name: paper.title for name, paper in papers(root / "workflow/papers").items()}
    parts = ["## Totals", totals(claims, ours), reasons(claims)]
    for name in dict.fromkeys(claim.paper for claim in claims):
        own = [claim for claim in claims if claim.paper == name]
        parts.append(f"## {titles[name]}")
        judged = (*get_args(Verdict)[:2], BOTH)
        for kind in (*judged, *UNTESTED_KINDS):
            of_kind = [_cells(claim, root / "results/reference") for claim in own if claim.kind == kind]
            if of_kind:
                untested = "" if kind in judged else "Not tested: "
                parts += [
                    f"### {untested}{kind} ({name}, {len(of_kind)})",
                    titled(of_kind, align="left"),
                ]
    return "\n\n".join(parts)


def listed(paper: str | None = None, verdict: str | None = None) -> Iterator[str]:
    """The totals in plain text, or, where a paper or a verdict is named, the claims of it, a line each.
    Raises UserError for a paper that makes no claims here, and for a verdict that there is not."""
    claims = stated()
    have = list(dict.fromkeys(claim.paper for claim in claims))
    if paper is not None and paper not in have:
        raise UserError(f"no paper {paper!r} makes claims; have {', '.join(have)}")
    if verdict is not None and verdict not in (*get_args(Verdict), BOTH):
        raise UserError(f"no verdict {verdict!r}; have {', '.join((*get_args(Verdict), BOTH))}")
    if paper is None and verdict is None:
        yield from (totals(claims, asked(ROOT / "results/reference")), "", reasons(claims))
        return
    for claim in claims:
        if paper in (None, claim.paper) and verdict in (None, claim.verdict):
            yield (
                f"{claim.paper} | {', '.join(claim.labels) or claim.source} | {claim.claim} | {claim.verdict}"
                f" | {claim.reason}"
            )
