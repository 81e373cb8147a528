"""`make table2` says what it needs, shows a line a job, says in silence what is at work, and compares with
the committed table."""

import csv
import subprocess
import sys

import pytest
from conftest import ROOT

from relinear import watched
from relinear.plan.plan import Plan

COMMITTED = ROOT / "results/reference/table2_mini/comparison/table2.csv"
BLOCK = """
[Sat Nov 28 16:32:39 2026]
rule measure:
    input: results/mini/models/tiny/run.json
    jobid: {id}
    wildcards: name={name}, measure=perplexity
    priority: 1
measure {name} perplexity:  50%|#####     | 1/2
""".strip()
BEGUN = BLOCK.format(id=7, name="lizard").splitlines()
DONE = ["Finished jobid: 7 (Rule: measure)", "1 of 4 steps (25%) done"]


def test_a_job_is_one_line_and_the_state_names_the_others():
    watch = watched.Watch({"measure lizard perplexity": 30.0, "distill lizard": 90.0}, slots=1)
    other = ["localrule asset:", "    jobid: 2", "    wildcards: name=ai2-olmo-eval"]
    shown = [watch.read(line) for line in [*BEGUN, *other, *DONE]]
    assert [line for line in shown if line] == ["measure lizard perplexity: 0 s"]
    assert watch.done == 30
    said = watch.state(60)
    assert said.startswith("1 of 4 jobs done in 01:00, about 0") and said.endswith(
        "left; at work: asset ai2-olmo-eval (0 s)"
    )
    assert watched.Watch({}).state(5) == "no job done in 00:05; at work: Snakemake, which chooses the jobs"


def test_the_time_left_is_that_of_the_records_until_the_jobs_say_otherwise(monkeypatch):
    """An hour's work of two cores: a minute of Snakemake's own and slow first jobs promised five hours. A
    machine that is half as fast is noticed."""
    clock = [1000.0]
    monkeypatch.setattr(watched.time, "monotonic", lambda: clock[0])
    names = [f"measure run{n} perplexity" for n in range(36)]
    watch = watched.Watch({"measure lizard perplexity": 10.0, **dict.fromkeys(names, 200.0)}, slots=2)
    assert watch.left() == ""
    clock[0] += 60  # Snakemake chooses the jobs
    for line in BEGUN:
        watch.read(line)
    clock[0] += 60  # six times its own
    for line in DONE:
        watch.read(line)
    assert watch.left().startswith(", about 1:0"), watch.left()  # an hour, a little more
    for number, name in enumerate(names[:18]):  # one at a time, so an hour is left of them
        for line in BLOCK.format(id=number, name=name.split()[1]).splitlines():
            watch.read(line)
        clock[0] += 200
        watch.read(f"Finished jobid: {number} (Rule: measure)")
    assert watch.left().startswith(", about 55:"), watch.left()
    for number, name in enumerate(names[18:], 18):
        for line in BLOCK.format(id=number, name=name.split()[1]).splitlines():
            watch.read(line)
        watch.read(f"Finished jobid: {number} (Rule: measure)")
    assert watch.left() == ", about 00:00 left"


def test_warnings_and_all_lines_from_an_error_on_are_shown():
    watch = watched.Watch({})
    lines = [
        "Building DAG of jobs...",
        "WARNING: the store",
        *BEGUN,
        "Error in rule measure:",
        "    jobid: 7",
        "    log: a.log",
    ]
    assert [line for line in map(watch.read, lines) if line] == ["WARNING: the store", *lines[-3:]]


def process(tmp_path, lines, code=0, seconds=0):
    """A command that prints the lines, waits and ends with the code."""
    script = tmp_path / "snakemake.py"
    script.write_text(
        f"import sys, time\nprint({chr(10).join(lines)!r},"
        f" flush=True)\ntime.sleep({seconds})\nsys.exit({code})\n"
    )
    return [sys.executable, str(script)]


def test_nothing_is_silent_where_no_bar_is(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(watched, "QUIET", 0.5)
    assert watched.run(process(tmp_path, BEGUN, seconds=3), {}) == 0
    assert "at work: measure lizard perplexity (" in capfd.readouterr().out


@pytest.mark.parametrize("line", ["Error in rule measure:", "the disk went away"])
def test_a_failure_has_its_words_and_its_exit_status(tmp_path, capfd, line):
    assert watched.run(process(tmp_path, [*BEGUN, line], code=3), {}) == 3
    assert line in capfd.readouterr().out


def test_what_is_left_is_told_by_committed_runs(tmp_path):
    plan = Plan(scale="mini", results=tmp_path)
    needs = watched.needs(plan)
    said = watched.before(plan, needs, cores=2)
    assert None not in needs.seconds.values() and said.startswith(
        f"{len(needs.seconds)} jobs and the drawing are left: about "
    )
    assert needs.longest < sum(needs.seconds.values())
    assert (
        2**30 < needs.memory_bytes < 8 * 2**30
        and 1e9 < needs.disk_bytes < 2e9
        and 1e8 < needs.download_bytes < 1e9
    )
    smoke = Plan(scale="smoke", results=tmp_path)
    assert "no record of scale smoke" in watched.before(smoke, watched.needs(smoke), cores=2)


def test_a_table_of_another_machine_is_as_near_as_expected_or_said_to_be_further(tmp_path):
    with COMMITTED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    told = {row["run"]: row for row in rows}
    told["teacher"]["ppl"], told["t2r"]["ppl"] = "16.12", "499"  # as on another CPU
    told["window_128"]["ppl"], told["hedgehog"]["ppl"], told["supra"]["ppl"] = "17", "200", "nan"
    told["lizard"]["avg_no_mmlu"], told["lolcats_window"]["ppl"] = "20", "not run"
    with (tmp_path / "table2.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows([*rows, rows[0] | {"run": "mine"}])
    lines = watched.compared(tmp_path / "table2.csv", COMMITTED).splitlines()[2:]
    found = {
        cells[0]: (cells[3], cells[6])
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    }
    near, far = "as near as expected", "FURTHER THAN EXPECTED"
    assert found == {
        "teacher": (near, near),
        "teacher_lora": (near, near),
        "t2r": (near, near),
        "lolcats_linear": (near, near),
        "window_128": (far, near),
        "hedgehog": (far, near),
        "supra": (far, near),
        "lolcats_window": ("no number", near),
        "lizard": (near, far),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scale"], "a choice is name=value, such as scale=smoke; got 'scale'"),
        (["scael=smoke"], "unknown --config scael; possible: scale"),
        (["scale=smok"], "'smok'"),
        (["--cores", "two"], "--cores is a number or all; got 'two'"),
    ],
)
def test_choices_that_are_none_are_refused_before_anything_starts(words, said):
    command = [sys.executable, "-m", "relinear.cli", "table2", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and said in done.stderr


def test_a_finished_table_is_told_and_shown(clone):
    output = clone.relinear("table2", "scale=smoke", "--cores", "2").stdout
    assert "relinear: results/table2.csv at scale smoke: nothing but the drawing may be left." in output
    assert "| `lizard`" in output and "results/table2.csv is there" in output
