"""The fault campaign: settings that are malformed, result files that are damaged, and commands that are
upset, each with what must happen.

`python tests/faults.py --inputs 1000 --upsets 60 --log FILE` judges that many inputs, cuts, empties, flips
and deletes every file of a finished folder, upsets that many commands while they run (`upsets.py`), and
prints what was wrong; tests do a part of it. Everything is drawn from a seed, so that a case can be made
again by its number.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import malformed
import upsets
import yaml
from test_stage import Mirror

from relinear.errors import UserError
from relinear.plan.plan import Plan, from_cli
from relinear.plan.strict import WORKFLOW
from relinear.records import believed, set_aside
from relinear.stage import run_stage

# The outcomes of an input: refused with a message; no effect; another valid setting; nonsense that was
# accepted; a traceback.
CLEAR, HARMLESS, TAKEN, SILENT, CRASH = "clear", "harmless", "taken", "silent", "crash"
NOT_RUN = "not run"  # this machine does not allow it
GOOD = (CLEAR, HARMLESS, TAKEN)
# Values that no setting can have. If a plan accepts one, a stage finds it out later, or nobody does.
NONSENSE = (math.nan, math.inf, -math.inf, 10**30, "x`touch PWNED`", "../../esc", "a" * 5000, "\x07")
STRANGE = (None, "", 0, -1, 1.5, True, 1e308, [], {}, [None], {"x": 1}, "zzz", *NONSENSE)
SLOWEST = 5.0  # seconds of a processor that a plan may take to judge an input


class Outcome(NamedTuple):
    """A case with its outcome, its message, and the commit whose code was judged."""

    case: str
    what: str
    said: str
    commit: str = ""


# --- settings ---


def settings(workflow: Path = WORKFLOW) -> list[Path]:
    """Every YAML file that the plan of the smoke scale reads, below `workflow`."""
    found = (p.relative_to(workflow) for p in sorted(workflow.rglob("*.yaml")))
    return [
        p
        for p in found
        if p.parts[0] not in ("instructions", "rules") and (p.parts[0] != "scales" or p.stem == "smoke")
    ]


def linked(to: Path, workflow: Path = WORKFLOW) -> Path:
    """A copy of the YAML files of `workflow`, with all that is large in links."""
    for path in workflow.rglob("*"):
        if path.is_file():
            (to / path.relative_to(workflow)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(workflow)).symlink_to(path)
    return to


def places(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """The paths to all values in a tree."""
    if at:
        yield at
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(value, (*at, key))


def mutate(draw: random.Random, text: str) -> tuple[str, bytes, bool]:
    """One way to break a file: its description, the file's new content, and whether that content is nonsense
    to every reader."""
    data = text.encode()
    of_bytes = {
        "empty": lambda: b"",
        "cut": lambda: data[: draw.randrange(len(data))],
        "not UTF-8": lambda: data + b"\xff\xfe: 1\n",
        "a list": lambda: b"- 1\n",
        "a word": lambda: b"zzz\n",
        "a number": lambda: b"3\n",
        "not YAML": lambda: data + b"\na: [1\n",
        "a tab": lambda: b"\t" + data,
        "an anchor that is none": lambda: data + b"\nzzz: *nothing\n",
        "a tag": lambda: data + b"\nzzz: !!python/name:os.system\n",
        "a key twice": lambda: data + b"\n" + _entry(draw, text).encode(),
    }
    if draw.random() < 0.25:
        what = draw.choice(sorted(of_bytes))
        return what, of_bytes[what](), what != "cut"
    tree = yaml.safe_load(text)
    where = draw.choice(list(places(tree)))
    parent = tree
    for key in where[:-1]:
        parent = parent[key]
    at = ".".join(map(str, where))
    how = draw.choice(("value", "value", "value", "gone", "renamed"))
    if how == "gone":
        del parent[where[-1]]
        return f"{at} gone", _dumped(tree), False
    if how == "renamed" and isinstance(parent, dict):
        name = draw.choice(
            (f"{where[-1]}x", "zzz", "", 5, "x`touch PWNED`", "a/b", "../esc", "--help", None, "no: 1")
        )
        parent[name] = parent.pop(where[-1])
        return f"{at} called {name!r}", _dumped(tree), False
    old, value = parent[where[-1]], draw.choice(STRANGE)
    parent[where[-1]] = value
    nonsense = (
        any(value is x for x in NONSENSE)
        and not isinstance(old, str)
        or (isinstance(value, bool) and type(old) in (int, float))
    )
    if where[0] == "options" and tree.get("draw") == "own":
        nonsense = False  # published numbers, which only the artefact's own script reads
    if where[0] == "rows" and "text" in where and isinstance(value, str):
        nonsense = False  # what a table prints in a row: a word may stand where a number or `false` stood
    return f"{at} = {str(value)[:40]!r}", _dumped(tree), nonsense


def _entry(draw: random.Random, text: str) -> str:
    tree = yaml.safe_load(text)
    name = draw.choice(sorted(map(str, tree)))
    return yaml.safe_dump({name: tree.get(name)}, allow_unicode=True)


def _dumped(tree: Any) -> bytes:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()


def meaning(workflow: Path) -> tuple:
    """Everything that rules ask of a plan: nodes with their keys, folders and commands; tables with what they
    read and write. Raises the errors that rules would raise."""
    plan = from_cli({"scale": "smoke"}, workflow=workflow)
    plan.check()
    drawn = {
        name: (a.spec.model_dump_json(), a.outputs("out"), plan.files(a), list(plan.reads(a)))
        for name, a in plan.artefacts.items()
    }
    nodes = plan.behind(
        [node for artefact in plan.artefacts.values() for node in plan.reads(artefact).values()]
    )
    told = {str(node): (plan.settings(node), plan.folder(node).as_posix()) for node in nodes}
    return drawn, told, plan.config.model_dump_json()


def judge(workflow: Path, usual: tuple, nonsense: bool) -> tuple[str, str]:
    """The outcome of planning a workflow, and the message."""
    began = time.process_time()
    try:
        found = meaning(workflow)
    except UserError as error:
        said = str(error)
        clear = said.strip() and len(said) < 8000 and time.process_time() - began < SLOWEST
        return (CLEAR if clear else SILENT), said
    except Exception:
        return CRASH, traceback.format_exc(limit=-3)
    if found == usual:
        return HARMLESS, ""
    if time.process_time() - began > SLOWEST:
        return SILENT, f"took {time.process_time() - began:.0f} s"
    return (SILENT if nonsense else TAKEN), ""


def inputs(count: int, seed: int = 0, wanted: Callable[[str], bool] = lambda case: True) -> Iterator[Outcome]:
    """Judge this many malformed settings: one half broken as text or as a tree, where files take turns, the
    other half drawn from the schemas."""
    usual, files = meaning(WORKFLOW), settings()
    random.Random(seed).shuffle(files)
    schemas = malformed.drawn(sorted(files), count // 2, seed)
    with tempfile.TemporaryDirectory() as folder:
        workflow = linked(Path(folder) / "workflow")
        for number in range(count):
            half = number // 2
            if number % 2 and half < len(schemas):
                name, at, value, tree, nonsense = schemas[half]
                what, data = f"{at} = {str(value)[:40]!r}", _dumped(tree)
            else:
                draw, name = random.Random(f"{seed} {number}"), files[half % len(files)]
                what, data, nonsense = mutate(draw, (WORKFLOW / name).read_text(encoding="utf-8"))
            if not wanted(case := f"{number} {name}: {what}"):
                continue
            (workflow / name).unlink()
            (workflow / name).write_bytes(data)
            outcome, said = judge(workflow, usual, nonsense)
            (workflow / name).unlink()
            (workflow / name).symlink_to(WORKFLOW / name)
            yield Outcome(case, outcome, said)


# --- result files ---


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "emptied": lambda path: path.write_bytes(b""),
    "flipped": flip,
    "deleted": Path.unlink,
}
LAST = "measure hedgehog perplexity"
COMMAND = re.compile(r"run `relinear ([^`]+?) --scale")


def prepared(results: Path) -> Plan:
    """A finished chain of every kind of step at smoke scale: a model, what it wrote, a text, activations, two
    trainings, two measurements."""
    plan = Plan(scale="smoke", results=results)
    for node in plan.behind([plan.node(*LAST.split())]):
        run_stage(plan, node, importlib.import_module(plan.work(node).module).work)
    return plan


def contents(plan: Plan) -> dict[str, str]:
    """The sha256 of what the last step made: its readings."""
    record = believed(plan.folder(plan.node(*LAST.split())))
    return {name: entry["sha256"] for name, entry in record["artefacts"].items()} if record else {}


def files_of(plan: Plan) -> list[Path]:
    return sorted(
        p.relative_to(plan.root) for p in plan.root.rglob("*") if p.is_file() and ".work" not in p.parts
    )


def again(plan: Plan) -> tuple[str, str]:
    """Ask for the last step as a user does: rules see what is missing, a step that fails names a command, and
    that command is given."""
    said = list(set_aside(plan.root))
    last = plan.node(*LAST.split())
    for node in plan.behind([last]):
        if (plan.folder(node) / "run.json").is_file() and node != last:
            continue
        for _ in range(12):
            try:
                run_stage(plan, node, importlib.import_module(plan.work(node).module).work)
                break
            except UserError as error:
                said.append(str(error))
                if "\n" in str(error) or not (command := COMMAND.search(str(error))):
                    return SILENT, " | ".join(said)
                mended = plan.node(*command[1].split())
                with contextlib.suppress(UserError):
                    run_stage(plan, mended, importlib.import_module(plan.work(mended).module).work)
        else:
            return SILENT, f"not mended by what it names: {said}"
    return CLEAR, " | ".join(said)


def rounds(plan: Plan, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[Outcome]:
    """Damage each file of a finished folder in each way, run its last step again, and compare every step's
    contents with what they were."""
    usual, last = contents(plan), plan.folder(plan.node(*LAST.split()))
    cases = [(name, damage) for name in files_of(plan) for damage in DAMAGES]
    with tempfile.TemporaryDirectory() as folder:
        whole = shutil.copytree(plan.results, Path(folder) / "results")
        for number, (name, damage) in enumerate(cases):
            if not wanted(number):
                continue
            shutil.rmtree(plan.results)
            # to the same place, since an adapter names the folder of its model
            shutil.copytree(whole, plan.results)
            DAMAGES[damage](plan.root / name)
            if last not in (plan.root / name).parents:
                shutil.rmtree(last)  # otherwise there would be nothing to do
            yield Outcome(f"{number} {name} {damage}", *_round(plan, usual, (plan.root / name).parent))


def _round(plan: Plan, usual: dict[str, str], damaged: Path) -> tuple[str, str]:
    """The outcome for a damaged folder when its last step is asked for again, and the message."""
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(io.StringIO()):
            what, said = again(plan)
    except Exception:
        return CRASH, traceback.format_exc(limit=-4)
    said += heard.getvalue()
    if what == CLEAR and contents(plan) != usual:
        return SILENT, f"ends with other readings: {said}"
    if what == CLEAR and damaged.relative_to(plan.root).as_posix() not in said:
        return HARMLESS, said  # the last step does not read this file, or not this part of it
    return what, said


def upset(count: int, wanted: Callable[[str], bool]) -> Iterator[Outcome]:
    """Upset a running command that many times (`upsets`), and begin it with each thing wrong that can be."""
    kinds = [*upsets.names(count), *((f"begun {kind.name}", kind) for kind in upsets.BEGUN_KINDS if count)]
    cases = [(name, kind) for name, kind in kinds if wanted(name)]
    if not cases:
        return
    with tempfile.TemporaryDirectory() as folder:
        results = upsets.Results(Path(folder)).prepare()
        for name, kind in cases:
            what, said = (
                upsets.begun(results, kind)
                if isinstance(kind, upsets.Begun)
                else upsets.judged(results, name, kind)
            )
            yield (
                Outcome(name, CLEAR, said)
                if what == "held"
                else Outcome(name, NOT_RUN if what == "not run" else SILENT, f"{what}: {said}")
            )


def judged_commit() -> str:
    """The last commit that changed what is judged, with `-dirty` where it is not what lies there."""
    said = [
        subprocess.run(
            ["git", *command, "--", "src", "kernels", "workflow"],
            cwd=WORKFLOW.parent,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for command in (("log", "-1", "--format=%h"), ("status", "--porcelain"))
    ]
    return said[0] + ("-dirty" if said[1] else "")


def main() -> int:
    """Judge, log each outcome as a line of JSON, and say what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-rounds", action="store_true", help="no damaged files")
    parser.add_argument("--upsets", type=int, default=0, help="commands that are upset while they run")
    parser.add_argument(
        "--log", type=Path, help="a file of JSON lines; cases that it has already are not judged again"
    )
    given = parser.parse_args()
    importlib.import_module("relinear.tracking.live").Tracker = Mirror
    commit = judged_commit()
    known = (
        [Outcome(*json.loads(line)) for line in given.log.read_text().splitlines()]
        if given.log and given.log.is_file()
        else []
    )
    done = {outcome.case for outcome in known}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(given.log.open("a")) if given.log else sys.stdout
        judged = [inputs(given.inputs, given.seed, lambda case: case not in done)]
        if not given.no_rounds:
            plan = prepared(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "results")
            names = [
                f"{number} {name} {damage}"
                for number, (name, damage) in enumerate((n, d) for n in files_of(plan) for d in DAMAGES)
            ]
            judged.append(rounds(plan, lambda number: names[number] not in done))
        judged.append(upset(given.upsets, lambda case: case not in done))
        for outcome in (one for part in judged for one in part):
            told = outcome.what not in GOOD or outcome.case.startswith(("upset", "begun"))
            brief = outcome._replace(said=outcome.said if told else "", commit=commit)
            log.write(json.dumps(brief) + "\n")
            log.flush()
            known.append(outcome)
    counts = {
        what: sum(outcome.what == what for outcome in known) for what in (*GOOD, NOT_RUN, SILENT, CRASH)
    }
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    bad = [outcome for outcome in known if outcome.what in (SILENT, CRASH)]
    for outcome in bad:
        print(f"{outcome.what}: {outcome.case}\n{outcome.said}", file=sys.stderr)
    return len(bad) > 0


if __name__ == "__main__":
    raise SystemExit(main())
