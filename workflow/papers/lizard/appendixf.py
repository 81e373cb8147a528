"""Lizard Appendix F: questions, and under each the paper's answers and those of our runs."""

from pathlib import Path

from relinear.draw.render import NOT_RUN, markdown, plus_minus, quoted, write_csv, write_text
from relinear.plan.items import read_items

COLUMNS = ("question", "run", "written", "tokens", "ended", "repeated", "declined")
COUNTED = {"ended": "Ended", "repeated": "Repeated", "declined": "Declined"}


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write appendixf.csv, an answer a row, and appendixf.md, the page to read."""
    found = {run: measured[run, measure] for run, measure in spec.reads()}
    answers = {
        run: {item["question"]: item for item in read_items(m.folder)} if m else {}
        for run, m in found.items()
    }
    questions = list(dict.fromkeys(question for own in answers.values() for question in own))
    files = [out / f"appendixf.{suffix}" for suffix in spec.makes]
    write_csv(
        files[0],
        COLUMNS,
        (
            {"run": run} | answers[run][question]
            for question in questions
            for run in found
            if question in answers[run]
        ),
    )
    counts = [[f"`{run}`", *(_share(m, metric) for metric in COUNTED)] for run, m in found.items()]
    shown = markdown(["Run", *(f"{title}, %" for title in COUNTED.values())], counts)
    head = [
        f"**{spec.label}: {spec.says}**; {about.where('`')}.",
        *([about.demonstration] if about.demonstration else []),
    ]
    legend = (
        "Of the answers, ± a standard error. Ended: by themselves. Repeated: of an answer's runs of four"
        " tokens, those that it had before."
    )
    parts = [
        *head,
        shown,
        f"{legend} Declined: has words such as *sorry*, *cannot* or *do not have*, a guess.",
    ]
    for place, question in enumerate(questions):
        parts.append(f"## {question}")
        printed = spec.options["published"] if not place else {}
        for run, own in answers.items():
            if run in printed:
                parts.append(quoted(f"the paper's {run}", printed[run]))
            parts.append(
                quoted(f"`{run}`", own[question]["written"] or "(nothing)" if question in own else NOT_RUN)
            )
    parts += [f"- {note.where}: {note.text}." for note in spec.misprints]
    write_text(files[1], "\n\n".join(parts) + "\n")
    return files


def _share(found, metric: str) -> str:
    reading = found and found.find(metric)
    return (
        plus_minus(100 * reading.value, None if reading.stderr is None else 100 * reading.stderr)
        if reading
        else NOT_RUN
    )
