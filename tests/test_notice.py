"""NOTICE names whatever is committed that was made from the work of others, with its licence."""

import re
import subprocess

import pytest
import yaml
from conftest import ROOT

from relinear.core import store

NOTICE = (ROOT / "NOTICE").read_text()
PLAIN = {
    "task",
    "subject",
    "set",
    "source",
    "sha256",
    "kind",
    "key",
    "value",
    "choice",
    "question",
    "prompt",
    "rule",
}  # names, hashes, words and texts of ours
MEASURES = yaml.safe_load((ROOT / "workflow/measures.yaml").read_text())


def committed(pattern: str) -> list[str]:
    return subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize(
    "folder", sorted({name.rpartition("/")[0] for name in committed("workflow/instructions/*")})
)
def test_what_models_wrote_is_named_with_the_licence_of_the_model(folder):
    licence = yaml.safe_load((ROOT / "workflow/assets.yaml").read_text())[folder.rpartition("/")[2]][
        "licence"
    ]
    assert re.search(rf"^  {re.escape(folder)} +.*{re.escape(licence)}$", NOTICE, re.M)


def test_weights_are_named_by_their_folder():
    for kind, pattern in (("*.safetensors", "*.safetensors"), ("tensors.parquet", "*/tensors.parquet")):
        folders = {"/".join(name.split("/")[:3]) for name in committed(pattern)}
        assert folders and folders == set(re.findall(rf"^  (\S+): {re.escape(kind)}", NOTICE, re.M)), kind


def test_texts_in_committed_items_are_named_by_their_measurement():
    """One training of each measurement; all have the same fields."""
    seen, texts = set(), set()
    for node in (
        node for place in store.campaigns(ROOT / "results/reference") for node in store.nodes(place)
    ):
        measure = node.name
        if measure in seen or not (items := store.columns(node)):
            continue
        seen.add(measure)
        texts |= {
            (measure, field)
            for field, values in items.items()
            if field not in PLAIN and any(isinstance(x, str) for x in values)
        }
    assert (
        ("haystack", "written") in texts
        and ("needle", "answer") in texts
        and ("qasper_yes_no", "gold") in texts
    )
    for measure, field in texts:
        named = measure if measure in NOTICE else MEASURES[measure]["metric"]
        assert re.search(rf"\b{named.replace('_yes_no', '')}\b", NOTICE, re.I) and f"`{field}`" in NOTICE, (
            measure,
            field,
        )


def test_licences_are_those_of_the_catalogue():
    assets = yaml.safe_load((ROOT / "workflow/assets.yaml").read_text())
    for name, said in (
        ("wikipedia-intros", "CC-BY-SA-4.0"),
        ("linux-doc", "GPL-2.0-only"),
        ("qasper", "CC-BY-4.0"),
        ("passages", "MSR-LA"),
    ):
        assert said in assets[name]["licence"] and said in NOTICE
