"""The tables of README.md and docs/, from the committed results: `python -m relinear.draw.pages` writes each between its marks.

A table stands between the lines `<!-- relinear.draw.pages NAME -->` and `<!-- end -->`. Most are columns of a table that the suite has drawn in
results/reference, with the names of runs in words. The others are made from the rows that the benchmarks left there.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from relinear.core import store
from relinear.draw.claims import Verdict
from relinear.draw.costs import how_measured, read_costs
from relinear.draw.drawn import by_run, cell, counted, drawn, name_of, rows_of
from relinear.draw.kernels import decoding_steps, fastest_peers, lengths, others, peers
from relinear.draw.render import NOT_RUN, markdown, write_text
from relinear.errors import UserError
from relinear.plan.strict import WORKFLOW
from relinear.records import read_committed

ROOT = WORKFLOW.parent
SESSIONS = ("scaling", "whole")  # folders of results/reference whose files are benchmarks' sessions
END = "<!-- end -->"

LABELS = {
    "teacher": "teacher", "teacher_lora": "teacher + LoRA", "t2r": "T2R", "hedgehog": "Hedgehog", "supra": "SUPRA",
    "lolcats_linear": "LoLCATs, linear", "lolcats_window": "LoLCATs, window", "lizard": "Lizard",
    "window_128": "window of 128, untrained", "window_128_lora": "window of 128 + LoRA",
    "window_bytes_of_lolcats": "window of LoLCATs' bytes + LoRA", "window_bytes_of_lizard": "window of Lizard's bytes + LoRA",
    "teacher_dynamic": "teacher, transformers' cache", "lolcats_linear_shared": "LoLCATs, linear, shared states",
    "lolcats_window_shared": "LoLCATs, window, shared states", "lizard_shared": "Lizard, shared states",
}  # fmt: skip


def replace_block(page: str, name: str, block: str) -> str:
    """The page with the block of this name exchanged. Raises UserError for a page without its marks."""
    mark = f"<!-- {name} -->\n"
    if page.count(mark) != 1 or END not in page.split(mark)[1]:
        raise UserError(f"the page needs the lines {mark.strip()} and {END} once, in this order")
    before, rest = page.split(mark)
    return f"{before}{mark}{block}{END}{rest.split(END, 1)[1]}"


def label(run: str) -> str:
    """A run in words; one that has none, by its name."""
    return LABELS.get(run, f"`{run}`")


# --- results ---


def chosen(path: Path, *columns: str) -> str:
    """These columns of a drawn table of runs; last, the average that is published for each run, and of which model."""
    ours, published = drawn(path)
    models, averages, with_mmlu = (by_run(published, column) for column in ("Model", "Avg, no MMLU", "Avg"))
    rows = []
    for row in ours:
        run = name_of(row["Run"])
        value = averages.get(run) or (f"with MMLU {with_mmlu[run]}" if with_mmlu.get(run) else "")
        own = ["" if (found := cell(row, column)).startswith("not defined") else found for column in columns]
        rows.append([label(run), *own, f"{value} ({models[run]})" if value else ""])
    return markdown(["Run", *columns, "Published avg, no MMLU"], rows)


def mini(reference: Path) -> str:
    """The committed table of `make table2`, some of its columns."""
    columns = ("Perplexity", "Perplexity, without linear part", "Long text (papers)", "PIQA", "ARC-e", "Avg, no MMLU")
    return chosen(reference / "table2_mini/comparison/table2.md", *columns)


def headline(reference: Path) -> str:
    """The headline table: whole task sets, and what a window of the last tokens cannot do."""
    columns = ("Perplexity", "PIQA", "ARC-e", "ARC-c norm", "HellaSwag norm", "WinoGrande", "Avg, no MMLU", "LAMBADA",
               "Long text (novels)", "Needle 2048", "Answers beyond 128 tokens, F1", "State, MiB")  # fmt: skip
    return chosen(reference / "smollm2/comparison/table2.md", *columns)


CONTROLLED = ("teacher_lora", "window_128_lora", "lolcats_window", "window_bytes_of_lolcats", "lizard", "window_bytes_of_lizard")
CONTROLS = {  # the words of a row, in which table its column stands, and what it is called there
    "keys that a layer holds": ("controls", "Positions"),
    "state, MiB": ("controls", "State, MiB"),
    "perplexity, short held-out text": ("controls", "Perplexity"),
    "novels: perplexity over the teacher's, positions 512 to 1023": ("controls", "Novels over teacher's, 512-1024"),
    "the same, positions 1024 to 2047": ("controls", "1024-2048"),
    "average of five tasks, without MMLU": ("controls", "Avg, no MMLU"),
    "LAMBADA": ("controls", "LAMBADA"),
    "needle among 1024 tokens, exact": ("recall", "Needle 1024, exact"),
    "16 pairs, asked for 256 tokens after the list": ("recall", "16 pairs, far"),
    "answers from beyond 128 tokens, F1": ("recall", "Answers, F1 beyond"),
}


def controls(reference: Path) -> str:
    """Hybrids beside windows of the same bytes: a run a column."""
    tables = {name: drawn(reference / f"smollm2/comparison/{name}.md")[0] for name in ("controls", "recall")}
    rows = [[words, *(by_run(tables[table], column)[run] for run in CONTROLLED)] for words, (table, column) in CONTROLS.items()]
    return markdown(["", *(sized(run, reference / "smollm2") for run in CONTROLLED)], rows)


def held(run: str, folder: Path) -> int | None:
    """The keys that a layer of a committed run holds, as it was measured; None where it was not."""
    file = folder / "runs" / run / "state_bytes/metrics.json"
    readings = json.loads(store.read(file))["readings"] if store.exists(file) else []
    return next((round(r["value"]) for r in readings if (r["metric"], r["of"]) == ("positions", "model")), None)


def sized(run: str, folder: Path) -> str:
    """A run in words; a window of a hybrid's bytes with the keys that it holds, and as full attention where no sequence of its training is as
    long."""
    keys, step = held(run, folder), folder / "runs" / run / "finetune/run.json"
    if not run.startswith("window_bytes_of_") or keys is None or not store.exists(step):
        return label(run)
    length = json.loads(store.read(step))["config"]["budget"]["seq_len"]
    words = f"{label(run).replace('window of', f'window of {keys:,} keys,')}"
    return f"full attention ({words}; it was trained on sequences of {length:,})" if keys > length else words


ACCOUNTED = {"smollm2": "SmolLM2-135M", "qwen": "Qwen2.5-Coder-1.5B"}
NUMBERS = (4, 2)  # bytes a number of a linear state


def accountings(reference: Path) -> str:
    """The state of the hybrids by four accountings of their linear part, and the keys that a window of as many bytes holds: states of every query
    head, as they were measured, or one for the query heads of a key head, each at 4 or 2 bytes a number. Keys and values have 2."""
    rows = []
    for scale, words in ACCOUNTED.items():
        [model] = (folder for folder in store.nodes(reference / scale) if folder.parent.name == "models")
        shape = json.loads(store.read(model / "metrics.json"))
        layers, heads, groups, dim = (shape[name] for name in ("layers", "heads", "kv_heads", "head_dim"))
        a_key = 2 * 2 * groups * dim * layers  # bytes of a position's keys and values
        for method in ("lolcats", "lizard"):
            run = {"lolcats": "lolcats_window", "lizard": "lizard"}[method]
            readings = json.loads(store.read(reference / scale / "runs" / run / "state_bytes/metrics.json"))["readings"]
            size, near = (next(r["value"] for r in readings if (r["metric"], r["of"]) == (metric, "model")) for metric in ("bytes", "positions"))
            linear = size - near * a_key  # of query heads, 4 bytes a number
            cells = []
            for share in (1, groups / heads):
                for number in NUMBERS:
                    total = near * a_key + linear * share * number / 4
                    cells.append(f"{total / 2**20:.2f}: {int(total // a_key):,}")
            rows.append([f"{label(run)}, {words}", *cells])
    return markdown(["MiB: keys of a window"] + [f"{of} heads, {number} bytes" for of in ("query", "key") for number in NUMBERS], rows)


def switched_off(reference: Path) -> str:
    """Trained hybrids with a part switched off, beside windows that never had one."""
    [table] = drawn(reference / "smollm2/comparison/controls.md")
    shown = [row for row in table if name_of(row["Run"]) in ("lolcats_window", "lizard", "window_128_lora", "teacher_lora")]
    columns = {
        "Perplexity": "Perplexity", "without linear part": "without its linear part", "without window": "without its window",
        "gate open": "with its gate open", "without meta tokens": "without meta tokens",
        "Novels, 1024-2048": "Novels, 1024 to 2047", "1024-2048, without linear part": "without its linear part",
    }  # fmt: skip
    rows = [[label(name_of(row["Run"])), *("" if row[c].startswith("not defined") else row[c] for c in columns)] for row in shown]
    return markdown(["Run", *columns.values()], rows)


def sources(reference: Path) -> str:
    """Perplexity on held-out text of every source, of the runs that the controls have, and each method's."""
    [table] = drawn(reference / "smollm2/comparison/sources.md")
    texts = ["Introductions", "Instructions", "Kernel documentation", "Brown", "Novels, to 8192", "Papers, to 8192"]
    columns = [text for text in texts if any(row[text] != NOT_RUN for row in table)] + ["State, MiB", "State at Llama-3-8B, MiB"]
    return markdown(["Run", *columns], [[label(run), *(row[c] for c in columns)] for row in table if (run := name_of(row["Run"])) in LABELS])


def transfer(reference: Path) -> str:
    """LoLCATs Table 1."""
    [table] = drawn(reference / "smollm2/lolcats/table1.md")
    columns = {
        "Feature map": "Feature map", "Transfer": "Transfer", "PPL@0": "Perplexity before", "PPL@2": "after", "MSE": "MSE", "KL": "KL",
        "paper's PPL@0": "Paper: before", "paper's PPL@2": "after",
    }  # fmt: skip
    return markdown([*columns.values()], [[row[column] for column in columns] for row in table])


def recall(reference: Path) -> str:
    """Hedgehog Tables 2 and 3: accuracy on associative recall, the floor, entropy, and the paper's accuracy."""
    rows: dict[str, list[str]] = {}
    for table in ("table2", "table3"):
        for row in drawn(reference / f"hedgehog_smollm2/hedgehog/{table}.md")[0]:  # the second table repeats rows of the first
            rows.setdefault(re.sub(r", \d+ seeds$", "", row["Attention"]), [cell(row, column) for column in ("AR", "Floor", "Entropy", "paper's AR")])
    return markdown(["Attention", "Recall", "Without recall", "Entropy", "Paper: recall"], [[name, *cells] for name, cells in rows.items()])


def maps(reference: Path) -> str:
    """Hedgehog Table 4: KL from softmax attention on an encoder, and the paper's."""
    [table] = drawn(reference / "hedgehog_smollm2/hedgehog/table4.md")
    head = [column.split(" (")[0].replace("paper's", "Paper:") for column in table[0]]  # without the data that stand in
    return markdown(head, [[*row.values()] for row in table])


def domain(reference: Path) -> str:
    """Hedgehog Table 10: a pretrained model in one domain, and the paper's."""
    return _wt103(reference / "wt103_smollm2/hedgehog/table10.md", "Model", "Gained, %")


def scratch(reference: Path) -> str:
    """Hedgehog Table 7: language models from scratch, and the paper's."""
    return _wt103(reference / "wt103_smollm2/hedgehog/table7.md", "Attention", "Gap closed, %")


def _wt103(path: Path, *columns: str) -> str:
    """These columns of a table of language models and its perplexity, beside the paper's for the same rows."""
    ours, published = drawn(path)
    paper = [row["Perplexity"] for row in published if name_of(row["Run"]).startswith("wt103_")]  # the rest are rows of other papers
    shown = [*columns, next(column for column in ours[0] if column.startswith("Perplexity"))]
    paper += [""] * (len(ours) - len(paper))  # the last rows are our own
    rows = [[*(row[column] for column in shown), number] for row, number in zip(ours, paper, strict=True)]
    return markdown([*columns, "Perplexity", "Paper: perplexity"], rows)


def second_teacher(reference: Path) -> str:
    """Hybrids and windows of equal bytes, linearized from a second teacher whose MMLU is above chance."""
    [table] = drawn(reference / "qwen/comparison/second.md")
    columns = {
        "Tokens": "Tokens", "Positions": "Keys that a layer holds", "Perplexity": "Perplexity", "without linear part": "without its linear part",
        "1024-2048": "Novels over teacher's, 1024 to 2047", "16 pairs, far": "16 pairs, far, %", "Needle 2048": "Needle 2048, %",
        "Answers, F1 beyond": "Answers beyond 128, F1", "Avg, no MMLU": "Avg, no MMLU", "Average kept, %": "average kept, %",
        "MMLU, letter": "MMLU, %", "MMLU kept, %": "MMLU kept, %", "MMLU, text norm": "MMLU by text, %",
        "Won or tied, %": "Won or tied, %", "State, MiB": "State, MiB",
    }  # fmt: skip
    found = [{column.partition(" (n=")[0]: cell for column, cell in row.items()} for row in table]
    shown = [column for column in columns if any(row[column] != NOT_RUN for row in found)]
    rows = [[sized(name_of(row["Run"]), reference / "qwen"), *("" if row[c].startswith("not defined") else row[c] for c in shown)] for row in found]
    return markdown(["Run", *(columns[column] for column in shown)], rows)


def _as_drawn(name: str, file: str, without: str | None = None, ran: str | None = None) -> Callable[[Path], str]:
    """A block of that name: the first table of a drawn file, without the columns whose title has `without` in it, and, where `ran` names a column,
    without the rows that were not run for it."""

    def block(reference: Path) -> str:
        table = drawn(reference / file)[0]
        shown = [column for column in table[0] if without is None or without not in column]
        return markdown(shown, [[row[column] for column in shown] for row in table if ran is None or row[ran] != NOT_RUN])

    block.__name__ = name
    return block


arena = _as_drawn("arena", "lra_smollm2/hedgehog/table6.md")
summaries = _as_drawn("summaries", "samsum_smollm2/hedgehog/table11.md")
tasks = _as_drawn("tasks", "hedgehog_smollm2/hedgehog/table8.md", without="paper's")
search = _as_drawn("search", "search_smollm2/comparison/search.md")
alike = _as_drawn("alike", "smollm2/comparison/notransfer.md", without="Trained")
recipes = _as_drawn("recipes", "smollm2/comparison/recipes.md")
details = _as_drawn("details", "smollm2_quarter/comparison/details.md", ran="Perplexity")


def windows(reference: Path) -> str:
    """Lizard Table 4, a line for each combination of window and meta tokens that was run; last, how many of how many."""
    [table] = drawn(reference / "lizard_smollm2/lizard/table4.md")
    sizes = [re.search(r"w=(\d+)", column)[1] for column in table[0] if column.startswith("Perplexity")]
    rows = []
    for size in sizes:
        for row in table:
            own = {column.split(",")[0]: cell for column, cell in row.items() if re.search(rf"w={size}\b", column)}
            if own["Perplexity"] != NOT_RUN:
                mmlu = "" if own["MMLU"] == NOT_RUN else own["MMLU"]
                rows.append([size, row["meta"], own["Perplexity"], own["LAMBADA"], mmlu, own["paper's MMLU"]])
    head = ["Window", "Meta tokens", "Perplexity", "LAMBADA", "MMLU", "Paper: MMLU"]
    return f"{markdown(head, rows)}\n\n{len(rows)} of {len(sizes) * len(table)} combinations were run.\n"


def ranks(reference: Path) -> str:
    """Lizard Table 6."""
    [table] = drawn(reference / "lizard_smollm2/lizard/table6.md")
    columns = {"Perplexity": "Perplexity", "LAMBADA": "LAMBADA", "Avg, no MMLU": "Avg, no MMLU", "MMLU": "MMLU"}
    columns |= {"paper's Avg, no MMLU": "Paper: avg, no MMLU", "paper's MMLU": "Paper: MMLU"}
    rows = [[name_of(row["Run"]).removeprefix("lizard_r"), *(cell(row, column) for column in columns)] for row in table]
    return markdown(["Rank", *columns.values()], rows)


PARTS = {  # run of Lizard Tables 2, 3 and 5 -> its parts
    "lizard": "window, gate and linear part",
    "lizard_gate_none": "no gate",
    "lizard_gate_mamba2": "Mamba-2's gate",
    "lizard_gate_low_rank": "a gate for each channel",
    "lizard_gate_pool": "a gate that pools keys",
    "lizard_gate_pool_max": "a gate that takes a key's maximum",
    "window_128_lora": "no linear part",
    "lizard_no_window": "no window",
    "lizard_no_transfer": "no transfer",
    "lizard_full": "all weights trained",
    "lizard_softmax_0.25": "a quarter of the layers softmax",
    "lizard_softmax_0.5": "half of the layers softmax, every second",
    "lizard_softmax_first": "half of the layers softmax, the first",
    "lizard_softmax_last": "half of the layers softmax, the last",
    "lizard_softmax_0.75": "three quarters of the layers softmax",
    "teacher_lora_5e-4": "teacher + LoRA",
}


def parts(reference: Path) -> str:
    """Lizard Tables 2, 3 and 5: what each part is worth."""
    measured: dict[str, dict[str, str]] = {}
    for table in ("hybrids_smollm2/lizard/table2", "smollm2/lizard/table3", "smollm2/lizard/table5"):
        records, shown = rows_of(reference / f"{table}.csv"), drawn(reference / f"{table}.md")[0]
        measured |= {record["run"]: row for record, row in zip(records, shown, strict=False)}
    columns = ["Perplexity", "Novels, over the teacher's", "LAMBADA", "16 pairs", "16 pairs, far", "Avg, no MMLU"]
    return markdown(["Lizard with", *columns], [[words, *(cell(measured[run], column) for column in columns)] for run, words in PARTS.items()])


def uptraining(reference: Path) -> str:
    """SUPRA Table 3: models from scratch and uptrained ones, those that were run."""
    table = drawn(reference / "smollm2/supra/table3.md")[0]
    columns = ["Perplexity", "LAMBADA", "HellaSwag norm", "paper's HellaSwag norm"]
    rows = [
        [row["Model"], row["Begins with"], row["Tokens"], *(cell(row, column) for column in columns)] for row in table if row["Trained"] != NOT_RUN
    ]
    return markdown(["Model", "Begins with", "Tokens", *columns[:-1], "Paper: HellaSwag"], rows)


def factors(reference: Path) -> str:
    """SUPRA's decay study: T2R made into SUPRA one factor at a time, and SUPRA by its decays."""
    table = drawn(reference / "smollm2/supra/decayfactors.md")[0]
    columns = ["W begins", "Normalizer", "RoPE", "Decay", "Perplexity", "Novels, 128-256", "4096-8192", "LAMBADA"]
    return markdown(columns, [[cell(row, column) for column in columns] for row in table])


def contexts(reference: Path) -> str:
    """SUPRA Table 2: hidden passages and books against the length of the context."""
    table = drawn(reference / "smollm2/supra/table2.md")[0]
    columns = ["SQuAD 2048", "SQuAD 4096", "SQuAD 8192", "SQuAD 16384", "Books 2048", "Books 8192", "Books 16384"]
    rows = []
    for row in table:
        name = row["Run"].strip("`")
        rows.append([LABELS.get(name, name), *(cell(row, column).partition(":")[0] for column in columns)])
    return markdown(["Run", *columns], rows)


def made_with(reference: Path) -> str:
    """The versions, the card and the commits that made each committed folder, as its records tell; one that is dirty is marked by +."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    records = [path for path in reference.rglob("*.json") if path.name.endswith(".provenance.json") or path.parts[-2] in SESSIONS]
    records += [folder / "run.json" for place in store.campaigns(reference) for folder in store.nodes(place)]
    for path in sorted(records):
        record = json.loads(read_committed(path))
        # A record tells of itself, or of the sessions that left it.
        for entry in [record, *record.get("sessions", []), *record.get("runs", [])]:
            if not isinstance(entry, dict) or "versions" not in entry:
                continue
            git, versions = entry.get("git", entry), entry["versions"]
            card = (entry.get("hardware") or {}).get("gpu") or entry.get("gpu") or record.get("gpu") or entry.get("device") or "CPU"
            libraries = [versions.get(name, "") for name in ("torch", "transformers", "triton")]
            commits = found.setdefault((path.relative_to(reference).parts[0], card, *libraries), {})
            commits[f"`{git['commit'][:7]}`" + "+" * bool(git.get("dirty"))] = None
    rows = [[f"`{folder}`", *rest, ", ".join(sorted(commits))] for (folder, *rest), commits in sorted(found.items())]
    return markdown(["In `results/reference`", "on", "torch", "transformers", "triton", "commits"], rows, align="left")


def verdicts(reference: Path) -> str:
    """The numbers of claims of each committed table or figure that are reproduced, contradicted and not tested. A result that several have, in
    whatever words, is counted in the first, where `table6` is before `table13`. A table without claims has no row."""
    files = (path for path in reference.rglob("*claims.csv") if rows_of(path))
    paths = sorted(files, key=lambda path: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", path.as_posix())])
    found = Counter((first, verdict) for (*_, verdict, _), (first, *_) in counted(paths).items())
    rows = [[f"`{path.relative_to(reference).as_posix()}`", *(str(found[path, verdict]) for verdict in get_args(Verdict))] for path in paths]
    return markdown(["Claims in `results/reference`", "reproduced", "contradicted", "not tested"], rows)


# --- costs ---


def generating(reference: Path) -> str:
    """Decoding at Mistral-7B's shape: at the largest batch that the teacher holds, and at a run's own largest.

    A plus follows the commit of rows from a session whose tree had uncommitted changes.
    """
    rows = [row for row in read_costs(reference / "efficiency/efficiency.csv") if row.model == "mistral-7b" and row.sweep == "batch" and row.ok]
    largest = {run: max((row for row in rows if row.run == run), key=lambda row: row.batch) for run in dict.fromkeys(row.run for row in rows)}
    teacher = largest["teacher"]
    same = {row.run: row for row in rows if row.batch == teacher.batch}
    sessions = how_measured(reference / "efficiency/efficiency.csv")["sessions"]
    changed = tuple(session["commit"] for session in sessions if session["dirty"])
    found = []
    for run, most in largest.items():
        speeds = [same[run].decode_tokens_per_second, most.decode_tokens_per_second]
        cells = [f"{speed:,.0f} ({speed / teacher.decode_tokens_per_second:.1f}x)" for speed in speeds]
        commit = f"`{most.commit}`{'+' * any(name.startswith(most.commit) for name in changed)}"
        found.append([label(run), f"{most.cache_bytes / most.batch / 2**20:.0f}", cells[0], f"{most.batch:,}", cells[1], commit])
    head = ["Run", "MiB a sequence", f"tokens/s, batch {teacher.batch}", "largest batch", "tokens/s there", "commit"]
    return markdown(head, found)


def inputs(reference: Path) -> str:
    """Decoding at Llama-3-8B's shape, a batch of 16, against the length of the input; and memory."""
    rows = [row for row in read_costs(reference / "efficiency/efficiency.csv") if row.model == "llama-3-8b" and row.sweep == "input"]
    runs = list(dict.fromkeys(row.run for row in rows))
    cells = {(row.run, row.prompt): row for row in rows}
    found = []
    for prompt in sorted({row.prompt for row in rows}):
        mine = [cells[run, prompt] for run in runs]
        speeds = [f"{row.decode_tokens_per_second:,.0f}" for row in mine]
        found.append([f"{prompt:,}", *speeds, *(f"{row.peak_bytes / 2**30:.0f}" for row in mine)])
    names = [label(run) for run in runs]
    return markdown(["Input, tokens", *(f"{name}, tokens/s" for name in names), *(f"{name}, GiB" for name in names)], found)


def reading(reference: Path) -> str:
    """Seconds of reading whole inputs at Llama-3-8B's shape, against their length: the teacher beside the hybrids."""
    rows = [row for row in read_costs(reference / "efficiency/efficiency.csv") if row.model == "llama-3-8b" and row.sweep == "input"]
    seconds = {(row.run, row.prompt): row.batch * row.prompt / row.prefill_tokens_per_second for row in rows}
    hybrids = [run for run in dict.fromkeys(row.run for row in rows) if run != "teacher"]
    found = []
    for prompt in sorted({row.prompt for row in rows}):
        own = seconds["teacher", prompt]
        found.append([f"{prompt:,}", f"{own:.2f}", *(f"{seconds[run, prompt]:.2f} ({own / seconds[run, prompt]:.2f}x)" for run in hybrids)])
    return markdown(["Input, tokens", "teacher, s", *(f"{label(run)}, s" for run in hybrids)], found)


def growth(reference: Path) -> str:
    """The effect of generating 32,768 tokens on the time of a token, on a process and on a prefill."""
    rows = rows_of(reference / "decoding/decoding.csv")
    found = []
    for run in dict.fromkeys(row["run"] for row in rows):
        own = {phase: [row for row in rows if (row["run"], row["phase"]) == (run, phase)] for phase in ("decode", "turns", "prefill")}
        early, late = (float(row["cpu_ms_per_token"]) for row in own["turns"])
        mib = [float(row["process_mib"]) for row in own["decode"]]
        state = [float(row["state_bytes"]) for row in own["decode"]]
        short, long = (float(row["seconds"]) for row in own["prefill"])
        found.append([run, f"{late / early:.3f}x", f"{100 * (mib[-1] / mib[0] - 1):.2f} %", f"{state[-1] / state[0]:,.0f}x", f"{long / short:.2f}x"])
    return markdown(["Run", "time of a token, last over second tenth", "growth of the process", "growth of the state", "prefill, 16k over 8k"], found)


def training(reference: Path) -> str:
    """Tokens per second of training SmolLM2-135M's shape on one GPU, at two lengths."""
    speeds: dict[tuple[str, str], str] = {}
    for file in ("smollm2", "smollm2_2048"):
        for row in json.loads(read_committed(reference / f"scaling/{file}.json"))["rows"]:
            speeds[row["run"], f"{row['stage']}, {row['length']}"] = f"{row['tokens_per_second'] / 1000:.0f}k"
    columns = ("distill, 1024", "distill, 2048", "finetune, 1024", "finetune, 2048")
    runs = dict.fromkeys(run for run, _ in speeds)
    return markdown(["Run", *columns], [[label(run), *(speeds.get((run, column), "") for column in columns)] for run in runs])


def parity(reference: Path) -> str:
    """The distances by which pieces, a prefix and padding move a model's logits, and whether generating equals full passes."""
    cells = []
    for row in rows_of(reference / "parity/parity.csv"):
        apart = [float(row[column]) for column in ("pieces", "prefix", "padded")]
        cells.append([row["run"], *(f"{value:.0e}" if value else "0" for value in apart), f"{row['equal']} of {row['new_tokens']}"])
    return markdown(["Run", "in pieces", "a prefix alone", "padded", "tokens equal to full passes"], cells)


# --- pages ---

PAGES: dict[str, Sequence[Callable[[Path], str]]] = {
    "README.md": (mini,),
    "docs/results.md": (
        controls,
        accountings,
        switched_off,
        sources,
        second_teacher,
        headline,
        transfer,
        alike,
        search,
        recipes,
        recall,
        maps,
        domain,
        scratch,
        summaries,
        tasks,
        arena,
        ranks,
        windows,
        parts,
        details,
        uptraining,
        factors,
        contexts,
        made_with,
        verdicts,
    ),  # fmt: skip
    "docs/running.md": (training,),
    "docs/models.md": (parity,),
    "docs/efficiency.md": (generating, inputs, growth),
    "docs/kernels.md": (fastest_peers, decoding_steps, peers, others, lengths, reading),
}


def written(page: str, text: str, reference: Path) -> str:
    """The page, by its path in the repository, with all its tables as the committed results have them."""
    for table in PAGES[page]:
        text = replace_block(text, f"relinear.draw.pages {table.__name__}", table(reference).rstrip("\n") + "\n")
    return text


def main() -> None:
    """Write the tables into the pages."""
    for page in PAGES:
        path = ROOT / page
        try:
            write_text(path, written(page, path.read_text(encoding="utf-8"), ROOT / "results/reference"))
        except UserError as error:
            raise SystemExit(f"error: {page}: {error}") from None


if __name__ == "__main__":
    main()
