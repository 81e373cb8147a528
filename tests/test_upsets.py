"""A part of the fault campaign's commands (`upsets`): begun with something wrong, or upset while they run,
they end the same."""

import sys

import pytest
import upsets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, signals and mounts as on Linux"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return upsets.Results(tmp_path_factory.mktemp("upsets")).prepare()


# One after the other in one folder: the same command is given again once, after all of them.
TOLD = [kind for kind in upsets.BEGUN_KINDS if kind.says]
BEGUN = [TOLD, *([kind] for kind in upsets.BEGUN_KINDS if kind not in TOLD)]


@pytest.mark.parametrize("kinds", BEGUN, ids=lambda kinds: ", ".join(kind.name for kind in kinds))
def test_a_command_that_begins_with_something_wrong_says_so_and_works_once_that_is_mended(results, kinds):
    what, said = upsets.begun(results, *kinds)
    assert what == "held", f"{what}: {said}"


@pytest.mark.parametrize("number", range(0, 12, 4))
def test_a_command_that_is_upset_ends_as_an_undisturbed_one(results, number):
    name, kind = upsets.names(60)[number]
    what, said = upsets.judged(results, name, kind)
    assert what in ("held", "not run"), f"{what}: {said}"


def test_what_is_judged_would_be_seen():
    """A command that says nothing of what is wrong."""
    for kind in TOLD:
        [said] = upsets.faults_of(kind, upsets.Ended(0, ""))
        assert said == f"{kind.name}: it ended with 0, and did not say {kind.says!r}"
