"""The tables and figures of the papers: every `workflow/papers/<paper>/<stem>.yaml` as a checked artefact.

    >>> artefact = available(WORKFLOW / "papers")["lolcats_figure3"]
    >>> artefact.spec.label, artefact.reads()
    ('LoLCATs Figure 3', [('lolcats_exp', 'fidelity')])

Imports neither torch nor matplotlib: the Snakefile reads it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from relinear.plan.claims import BestOf, Read, Spec
from relinear.plan.deviations import Deviations
from relinear.plan.figures import AttentionMaps, Curves, Grid, Own
from relinear.plan.finite import parse
from relinear.plan.forms import check_form
from relinear.plan.published import FILE, published, relabelled
from relinear.plan.published import tables as published_tables
from relinear.plan.sane import read_yaml
from relinear.plan.strict import ConfigError, Strict
from relinear.plan.tables import Column, Picture, Table

SHAPES: dict[str, type[Spec]] = {
    "table": Table,
    "picture": Picture,
    "curves": Curves,
    "attention_maps": AttentionMaps,
    "grid": Grid,
    "own": Own,
    "deviations": Deviations,
}
SCRIPTED = ("own", "picture")  # shapes that a file beside the spec draws
NO_SPECS = ("paper", "runs")  # files of a paper's folder that are no table or figure
COLUMNS = "columns.yaml"  # in the workflow: columns that several tables have
READ = {"measure", "mean", "recovery", "ties"}  # a column that says one of these is a table's own
# in a spec: the stem of another of its paper, from which it takes what it does not say itself
SAME_AS = "same_as"


class Finding(Strict):
    """A finding for the reader. Its numbers are read from a committed table: `{rows[lizard][ppl]:.1f}` in
    `says` is a cell.

    `of`: the table, below `results/reference`. `ascending`: (run, column) of cells; the finding is true if
    their values rise in this order.
    """

    says: str
    of: str = Field(pattern=r"\.csv$")
    ascending: tuple[tuple[tuple[str, str], ...], ...] = Field(min_length=1)


class Untested(Strict):
    """A claim of a paper for which no table or figure here compares anything, and why."""

    claim: str
    source: str
    why: str
    published: str = ""


class Paper(Strict):
    """A paper.yaml: the paper's title and address, the labels of all its tables and figures, and our
    findings.

    `forms`: method -> options of the method and settings of its steps that a run must have before a claim of
    this paper is judged by it (`relinear.plan.forms`). `best_of`: the recipes of which the paper takes the
    best.
    """

    title: str
    arxiv: str | None = Field(default=None, pattern=r"^\d{4}\.\d{4,5}$")
    labels: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    forms: dict[str, dict[str, Any]] = {}
    untested: tuple[Untested, ...] = ()
    best_of: BestOf | None = None


@dataclass(frozen=True)
class Artefact:
    """A table or figure. `file` is its spec on this machine.

    `same_as`: the stem of the spec that supplies what its own leaves out. `forms`: paper -> method -> what
    claims ask of a run of that method.
    """

    file: Path
    spec: Spec
    same_as: str | None = None
    forms: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def paper(self) -> str:
        """The paper's folder."""
        return self.file.parent.name

    @property
    def stem(self) -> str:
        """The spec's file name without its ending."""
        return self.file.stem

    @property
    def name(self) -> str:
        """The name of its rule and of its target for `snakemake`: `lolcats_figure3`."""
        return f"{self.paper}_{self.stem}"

    @property
    def path(self) -> str:
        """The spec's path in the repository, whatever machine it is on."""
        return f"workflow/papers/{self.paper}/{self.file.name}"

    @property
    def rows_path(self) -> str:
        """The path in the repository of the spec in which its rows stand, for pointers to published
        numbers."""
        return f"workflow/papers/{self.paper}/{self.same_as or self.stem}.yaml"

    @property
    def published_path(self) -> str:
        """The path in the repository of the paper's published numbers."""
        return f"workflow/papers/{self.paper}/{FILE}"

    @property
    def beside(self) -> list[str]:
        """What a table has from other files than its spec, by which Snakemake sees a change: columns and
        published numbers."""
        if not isinstance(self.spec, Table):
            return []
        entries = [(line.name, entry) for line in self.spec.lines for entry in self.spec.printed(line.name)]
        printed = [f"{row}, {entry.model}, {entry.source}: {entry.values}" for row, entry in entries]
        return [*(repr(column) for column in self.spec.columns), *printed]

    @property
    def script(self) -> Path | None:
        """The file beside the spec that draws it, where no shared shape does."""
        return self.file.with_suffix(".py") if self.spec.draw in SCRIPTED else None

    @property
    def seeds(self) -> bool:
        """Whether a row is the mean over several trainings."""
        return isinstance(self.spec, Table | AttentionMaps) and self.spec.seeds

    def reads(self, scale: str | None = None) -> list[Read]:
        """The measurements it needs, as (run, measure), in order and each once; at a scale, without those
        that it leaves out there."""
        return self.spec.reads(scale)

    @property
    def not_at(self) -> set[str]:
        """The scales at which something of it is left out."""
        parts = (*self.spec.columns, *self.spec.lines) if isinstance(self.spec, Table) else ()
        of = self.spec.best_of
        return {scale for part in (*parts, *([of] if of else ())) for scale in part.not_at}

    def files(self) -> list[str]:
        """The input files that are no measurements of runs."""
        return self.spec.files()

    def outputs(self, folder: str) -> list[str]:
        """The files that are drawn into a folder."""
        return [f"{folder}/{self.stem}.{suffix}" for suffix in self.spec.suffixes]

    @property
    def module(self) -> str:
        """The module that draws it, for the code's hash. An artefact with a `script` changes with that file,
        too."""
        return f"relinear.draw.{self.spec.draw}"


def papers(folder: Path) -> dict[str, Paper]:
    """Every paper below `workflow/papers`, by its folder. Raises ConfigError for a folder without a good
    paper.yaml."""
    found = {
        sub.name: parse(Paper, read_yaml(sub / "paper.yaml"), f"{sub.name}/paper.yaml")
        for sub in _folders(folder)
    }
    for name, paper in found.items():
        for method, form in paper.forms.items():
            check_form(form, f"{name}/paper.yaml: forms: {method}", method)
    return found


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(("_", ".")))


def available(folder: Path, added: Mapping[str, list[str]] | None = None) -> dict[str, Artefact]:
    """Every table and figure below `workflow/papers`, by name; `added`: `<paper>/<stem>` of a table -> runs
    to show after its own rows.

    Raises ConfigError for a spec that is wrong, and for runs added to what is no table with a list of rows.
    """
    known = papers(folder)
    files = [
        file for sub in _folders(folder) for file in sorted(sub.glob("*.yaml")) if file.stem not in NO_SPECS
    ]
    tables = {f"{file.parent.name}/{file.stem}": file for file in files}
    for sub in _folders(folder):
        if unknown := set(published_tables(sub)) - {file.stem for file in files if file.parent == sub}:
            raise ConfigError(f"{sub.name}/{FILE}: no table {', '.join(sorted(unknown))}")
    for table, runs in (added or {}).items():
        if table not in tables:
            raise ConfigError(f"run {runs[0]!r} is to be shown in {table!r}; have {', '.join(tables)}")
    found = [_read(file, known, (added or {}).get(table, [])) for table, file in tables.items()]
    return {artefact.name: artefact for artefact in found}


def read(path: Path) -> Artefact:
    """The table or figure that a spec describes. Raises ConfigError, with what was got and what is possible,
    for whatever is wrong in it."""
    return _read(path, papers(path.parent.parent))


def _read(path: Path, known: Mapping[str, Paper], added: Sequence[str] = ()) -> Artefact:
    where, data = f"{path.parent.name}/{path.name}", read_yaml(path)
    same_as = data.pop(SAME_AS, None)
    base = {} if same_as is None else _base(path, same_as, data)
    data = base | data
    if isinstance(data.get("columns"), list):
        shared = shared_columns(path.parents[2])
        data["columns"] = [_column(given, shared, where) for given in data["columns"]]
    if added:
        if not isinstance(data.get("rows"), list):
            raise ConfigError(f"run {added[0]!r} is to be shown in {where}, which has no list of rows")
        data["rows"] += [{"run": run} for run in added]
    script = path.with_suffix(".py").is_file()
    shape = data.setdefault("draw", "own" if script else "table")
    if not isinstance(shape, str) or shape not in SHAPES:
        raise ConfigError(f"{where}: no shape draw: {shape!r}; have {', '.join(SHAPES)}")
    if script != (shape in SCRIPTED):
        has = "a" if script else "no"
        raise ConfigError(
            f"{where}: {path.stem}.py draws it exactly where it says draw: {' or '.join(SCRIPTED)}; got draw:"
            f" {shape}, {has} file"
        )
    spec = parse(SHAPES[shape], data, where)
    spec.take_best(known[path.parent.name].best_of)
    if isinstance(spec, Table):
        spec.put_beside(
            relabelled(published(path.parent, same_as or path.stem), base.get("label", ""), spec.label)
        )
    try:
        spec.check()
        _check_names(spec, path, known)
        for row, form in spec.forms.items():
            check_form(form, f"{where}: forms: {row}")
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Artefact(path, spec, same_as, {name: paper.forms for name, paper in known.items()})


def shared_columns(workflow: Path) -> dict[str, dict[str, Any]]:
    """The columns that several tables have, by name, from `workflow/columns.yaml`; none without that file.

    Raises ConfigError for a file that is no mapping of names to columns.
    """
    path = workflow / COLUMNS
    return _shared_columns(path, path.stat().st_mtime_ns) if path.is_file() else {}


@functools.lru_cache(maxsize=8)
def _shared_columns(path: Path, _: int) -> dict[str, dict[str, Any]]:
    """The same. `_`: the time of the file's last change, so that an edited file is read again."""
    found = read_yaml(path)
    for name, column in found.items():
        parse(Column, {"name": name} | column if isinstance(column, dict) else column, f"{COLUMNS}: {name}")
    return found


def _column(given: Any, shared: Mapping[str, Mapping[str, Any]], where: str) -> Any:
    """A column as a table says it: the name of a shared one, a shared one and what differs, or one of its
    own."""
    name = given.get("name") if isinstance(given, dict) else given
    if isinstance(given, str) and given not in shared:
        raise ConfigError(f"{where}: no column {given!r} in {COLUMNS}; have {', '.join(shared) or 'none'}")
    if not isinstance(name, str) or name not in shared or isinstance(given, dict) and READ & given.keys():
        return given
    return {"name": name} | shared[name] | (given if isinstance(given, dict) else {})


def _base(path: Path, same_as: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The spec beside a spec that it is `same_as`. Raises ConfigError where there is none, where that has a
    base, too, and for rows of both."""
    where = f"{path.parent.name}/{path.name}"
    have = sorted(file.stem for file in path.parent.glob("*.yaml") if file.stem not in (*NO_SPECS, path.stem))
    if same_as not in have:
        raise ConfigError(
            f"{where}: {SAME_AS} is a table or figure of the same paper; got {same_as!r}; have"
            f" {', '.join(have)}"
        )
    base = read_yaml(path.with_name(f"{same_as}.yaml"))
    if SAME_AS in base:
        raise ConfigError(
            f"{where}: {SAME_AS} {same_as}, which is itself {SAME_AS} {base[SAME_AS]}; name that"
        )
    if "rows" in data:
        raise ConfigError(f"{where} is {SAME_AS} {same_as} and has rows of its own; give one or the other")
    return base


def _check_names(spec: Spec, path: Path, known: Mapping[str, Paper]) -> None:
    """Raises ValueError for a label, source or paper that no paper.yaml has, and for a file that is not
    called as its label is."""
    own = known[path.parent.name]
    if own.labels:
        if spec.label not in own.labels:
            raise ValueError(f"{path.parent.name} has no {spec.label!r}; have {', '.join(own.labels)}")
        words = spec.label.split()
        stems = ["".join(some).lower() for some in (words[-2:], words[1:])]  # the second without the paper
        if path.stem not in stems:
            raise ValueError(f"{spec.label} belongs into {stems[0]}.yaml")
    labels = [spec.label, *(label for paper in known.values() for label in paper.labels)]
    for source in spec.sources():
        if source not in labels:
            raise ValueError(
                f"{FILE}: no table {source!r} to take published numbers from; have {', '.join(labels)}"
            )
    for claim in spec.claims:
        if claim.paper is not None and claim.paper not in known:
            raise ValueError(f"claim {claim.claim!r}: no paper {claim.paper!r}; have {', '.join(known)}")
