"""The laws under the oldest and the newest transformers of the range; `test_uses.py` has exported folders."""

import re
import tomllib
import warnings

import pytest
import releases
from packaging.requirements import Requirement
from packaging.version import Version

from relinear.linearize import releases as known

ENDS = {"oldest": releases.OLDEST, "newest": releases.NEWEST}
# The small law: every method and every family, with its cache against full passes; then what else a release
# can break silently.
LAWS = (
    "test_every_teacher_family_generates_what_full_passes_generate or test_a_document_in_a_packed_row or "
    "test_a_state_that_was_not_handed_on or test_generate_computes_the_logits_of_the_last_position or "
    "test_what_generate_returns or test_a_trainer_trains_and_evaluates"
)
RUN = """
import sys, pytest, transformers
assert transformers.__version__.startswith(sys.argv[1]), transformers.__version__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/test_laws.py", "tests/test_documents.py", "tests/test_generate.py",
                      "tests/test_trainer.py", "-k", sys.argv[2]]))
"""  # noqa: E501


def release_of(requirements) -> str:
    return requirements[0].partition("==")[2].rstrip(".*")


def test_the_range_is_what_is_tested():
    project = tomllib.loads((releases.ROOT / "pyproject.toml").read_text())["project"]
    [wanted] = [r for r in map(Requirement, project["dependencies"]) if r.name == "transformers"]
    oldest, newest = (".".join(map(str, end)) for end in (known.OLDEST, known.NEWEST))
    assert str(wanted.specifier) == f"<{known.NEWEST[0]}.{known.NEWEST[1] + 1},>={oldest}"
    assert Version(release_of(releases.OLDEST)).release[:2] == known.OLDEST
    assert Version(release_of(releases.NEWEST)).release[:2] == known.NEWEST
    assert release_of(releases.NEWEST) == newest


@pytest.mark.parametrize("end", ENDS)
def test_the_laws_hold_under_the_release(end):
    folder = releases.or_skip(releases.installed, ENDS[end])
    ours = tuple(releases.ROOT / name for name in ("src", "kernels", "tests"))
    run = releases.python(folder, "-c", RUN, release_of(ENDS[end]), LAWS, paths=ours)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    passed = int(re.search(r"(\d+) passed", run.stdout)[1])
    assert passed > 100 and "failed" not in run.stdout, run.stdout[-2000:]


@pytest.mark.parametrize(
    ("release", "warned"),
    [("5.16.1", True), ("5.17.0", False), ("5.24.3", False), ("5.25.0.dev0", True), ("6.0.0", True)],
)
def test_a_release_outside_the_range_is_said(release, warned, monkeypatch):
    monkeypatch.setattr(known.transformers, "__version__", release)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        known.warn_untested.__wrapped__()
    assert len(said) == warned
    if warned:
        assert re.search(
            rf"tested with transformers 5.17 to 5.24; got {release}.*Possible: pip install"
            r" 'transformers>=5.17,<5.25'",
            str(said[0].message),
        )


def test_a_release_that_names_the_cache_in_a_third_way_is_an_error(monkeypatch):
    monkeypatch.setattr(
        known.GenerationMixin, "prepare_inputs_for_generation", lambda self, input_ids, memory=None: {}
    )
    with pytest.raises(
        ImportError,
        match="hands caches on under another name than cache or past_key_values; Possible: pip install",
    ):
        known.cache_name.__wrapped__()
