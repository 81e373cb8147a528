"""Pages compute their numbers: what stands below each block is what the block prints."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from relinear.draw import quote, speeds

CONTROLS, SECOND = "smollm2/comparison/controls", "smollm2/comparison/second"


def test_every_page_is_what_its_blocks_print():
    done = subprocess.run(
        [sys.executable, "-m", "relinear.draw.quote", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def page(tmp_path, code: str, text: str) -> str:
    """A page with one block, in a folder that takes the repository's place."""
    path = tmp_path / "README.md"
    path.write_text(f"# A page\n\n<!-- [[[cog\n{code}\n]]] -->\n{text}\n<!-- [[[end]]] -->\n")
    return path


def test_a_number_that_changed_is_told_by_the_check_and_written_without_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(quote, "ROOT", tmp_path)
    path = page(
        tmp_path, f"say(f\"Lizard has {{cell('{CONTROLS}', 'lizard', 'ppl'):.1f}}.\")", "Lizard has 99.9."
    )
    before = path.read_text()
    assert quote.main(["--check"]) == 5 and path.read_text() == before
    assert (
        "README.md  (changed)" in (said := "".join(capfd.readouterr()))
        and "python -m relinear.draw.quote" in said
    )
    assert quote.main([]) == 0 and "\nLizard has 12.1.\n" in path.read_text()
    assert quote.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("assert rows('smollm2/comparison/controls')['lizard']['ppl'] > 100", "AssertionError"),
        (
            "say(cell('smollm2/comparison/contrls', 'lizard', 'ppl'))",
            "has no smollm2/comparison/contrls.csv; near: smollm2/comparison/controls",
        ),
        (
            "say(cell('smollm2/comparison/controls', 'lizzard', 'ppl'))",
            "controls.csv has no 'lizzard'; have lizard",
        ),
        (
            "say(cell('smollm2/comparison/controls', 'lizard', 'pppl'))",
            "controls.csv has no 'pppl'; have ppl",
        ),
        (
            (
                f"difference('{SECOND}', 'lizard ratio_beyond < window_bytes_of_lizard ratio_beyond',"
                " 'reproduced')"
            ),
            "is contradicted, and the page says",
        ),
        (
            f"difference('{SECOND}', 'lizard ppl < nothing', 'reproduced')",
            "second has no 'lizard ppl < nothing'",
        ),
    ],
)
def test_a_sentence_that_no_longer_holds_stops_the_page(tmp_path, monkeypatch, capfd, code, said):
    monkeypatch.setattr(quote, "ROOT", tmp_path)
    path = page(tmp_path, code, "It was so.")
    assert quote.main([]) not in (0, 5)
    assert said in "".join(capfd.readouterr()) and "It was so." in path.read_text()


DAMAGED = {  # what a block reads, and what is said of it
    "kernels.csv": (b"a,b\n1,2\n", "rows('kernels')", "kernels.csv is not what"),
    "whole.json": (b"{", "told('whole.json')", "whole.json is not what"),
    "bench/whole.json": (b"{", "told('bench/whole.json')", "whole.json cannot be read: Expecting property"),
    "bench/deep.json": (b"[" * 10**5, "told('bench/deep.json')", "deep.json cannot be read: maximum rec"),
    "bench/gone.json": (None, "told('bench/gone.json')", "gone.json cannot be read: [Errno 2] No such file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line_with_the_place_of_the_block(tmp_path, monkeypatch, capfd, name):
    content, code, said = DAMAGED[name]
    if content is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    if "/" not in name:
        manifest = {"scale": "smoke", "files": {name: "0" * 64}}
        (tmp_path / "reference.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(quote, "ROOT", tmp_path)
    monkeypatch.setattr(quote, "REFERENCE", tmp_path)
    path = page(tmp_path, f"import relinear.draw.quote as its\nsay(str(its.{code}))", "It was so.")
    assert quote.main(["--check"]) == 4 and "It was so." in path.read_text()
    [told] = capfd.readouterr().err.splitlines()
    assert told.startswith(f"error: {path}, the block at line 3: ") and said in told, told


def test_a_page_that_is_no_text_is_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(quote, "ROOT", tmp_path)
    (tmp_path / "README.md").write_bytes(b"\xff")
    assert quote.main(["--check"]) == 1
    assert capfd.readouterr().err.startswith("error: a page is no UTF-8 text: 'utf-8' codec can't")


def test_another_argument_is_refused(capsys):
    assert (
        quote.main(["--cheque"]) == 2 and "possible: python -m relinear.draw.quote" in capsys.readouterr().err
    )


def test_a_number_is_written_with_its_error_as_asked():
    number = quote.Number("12.1138", 0.19237)
    assert (str(number), f"{number}", f"{number:.1f}", f"{number:±.1f}") == (
        "12.11 ± 0.19",
        "12.11 ± 0.19",
        "12.1",
        "12.1 ± 0.2",
    )
    assert str(abs(quote.Number(-3.2, 0.5))) == "3.20 ± 0.50" and f"{quote.Number(7):±.0f}" == "7"
    assert number < 13 and number + 1 == pytest.approx(13.1138)


def test_a_table_has_empty_cells_where_nothing_is_and_says_where_seeds_are_fewer():
    shown = {"teacher": "A", "teacher_lora": "B", "lizard": "C"}
    columns = {"Perplexity": "ppl", "without linear part": "ppl_no_linear:.1f"}
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in quote.table(CONTROLS, columns, shown).splitlines()
    ]
    assert (
        lines[0] == ["Run", "Perplexity", "without linear part"]
        and lines[2][2] == ""
        and re.fullmatch(r"\d+\.\d", lines[4][2])
    )
    assert "64.5 ± 2.4 (1 seed)" in quote.table(
        "smollm2/comparison/recall", {"pairs": "kv_16_far:±.1f"}, shown
    )


def test_what_is_said_fills_its_lines_and_keeps_tables_lists_and_errors_whole(capsys):
    words = "word " * 30
    quote.say(
        f"{words}12.11 ± 0.19 {words}\n\n- one\n  and more\n- {words}", "| a |\n|---|", "the end 1 + ELU"
    )
    paragraph, items, table, end = capsys.readouterr().out.strip().split("\n\n")
    assert max(map(len, (paragraph + items).splitlines())) <= 110 and "12.11 ± 0.19" in paragraph
    assert items.splitlines()[0] == "- one and more" and items.splitlines()[2].startswith("  word")
    assert table == "| a |\n|---|" and end == "the end 1 + ELU"


def test_tables_of_speeds_are_relative_to_softmax_attention_at_its_largest_batch():
    most, gains = speeds.largest(), speeds.gains()
    assert gains["teacher"] == (1, 1) and all(row.batch >= most["teacher"].batch for row in most.values())
    assert f"({gains['lolcats_linear'][0]:.1f}x)" in (quote.ROOT / "docs/efficiency.md").read_text()
