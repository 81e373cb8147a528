"""Hedgehog Listings 5 to 8: summaries of held-out texts, the paper's and those of our runs, with scores."""

from pathlib import Path

from relinear.draw.render import NOT_RUN, markdown, quoted, write_csv, write_text
from relinear.plan.items import read_items

COLUMNS = ("item", "run", "written", "right", "rouge1", "rouge2", "rougeL", "ended")
NOT_KEPT = "(text not kept: these data are not redistributed)"


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write listings5to8.csv, an answer a row, and listings5to8.md, the page to read."""
    found = {run: measured[run, measure] for run, measure in spec.reads()}
    answers = {run: {item["item"]: item for item in read_items(m.folder)} for run, m in found.items() if m}
    wanted = spec.options["items"]
    files = [out / f"listings5to8.{suffix}" for suffix in spec.makes]
    write_csv(
        files[0],
        COLUMNS,
        (
            {"run": run} | {name: own[item].get(name) for name in COLUMNS if name != "run"}
            for item in wanted
            for run, own in answers.items()
            if item in own
        ),
    )
    data = ", ".join(dict.fromkeys(about.data.values()))
    parts = [
        f"**{spec.label}: {spec.says}**; {about.where('`')}{data and f', {data}'}.",
        about.demonstration or "",
        markdown(
            ["Run", *(f"{title} of item {item}" for item in wanted for title in ("R1", "ended"))],
            [[f"`{run}`", *_scores(answers.get(run), wanted)] for run in found],
        ),
    ]
    for place, item in enumerate(wanted):
        parts.append(f"## Item {item}, beside Listing {5 + place}")
        right = next((own[item].get("right") for own in answers.values() if item in own), None)
        if right:
            parts.append(quoted("the right summary", right))
        for run in found:
            parts.append(quoted(f"the paper's `{run}`, of another text", spec.options[run][place]))
            parts.append(quoted(f"`{run}`", _written(answers.get(run), item)))
    parts += [f"- {note.where}: {note.text}." for note in spec.misprints]
    write_text(files[1], "\n\n".join(filter(None, parts)) + "\n")
    return files


def _scores(own, wanted) -> list[str]:
    """ROUGE-1 in percent of each item, and whether its answer came to an end."""
    return [
        text
        for item in wanted
        for text in (
            (f"{100 * own[item]['rouge1']:.1f}", "yes" if own[item]["ended"] else "no")
            if own and item in own
            else (NOT_RUN, "")
        )
    ]


def _written(own, item: int) -> str:
    if not own or item not in own:
        return NOT_RUN
    return own[item]["written"] or "(nothing)" if "written" in own[item] else NOT_KEPT
