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


@pytest.mark.parametrize("kind", upsets.BEGUN_KINDS, ids=lambda kind: kind.name)
def test_a_command_that_begins_with_something_wrong_says_so_and_works_once_that_is_mended(results, kind):
    what, said = upsets.begun(results, kind)
    assert what == "held", f"{what}: {said}"


@pytest.mark.parametrize("number", range(0, 12, 4))
def test_a_command_that_is_upset_ends_as_an_undisturbed_one(results, number):
    name, kind = upsets.names(60)[number]
    what, said = upsets.judged(results, name, kind)
    assert what in ("held", "not run"), f"{what}: {said}"


def test_what_is_judged_would_be_seen(results):
    """A command that says nothing of what is wrong."""
    said = upsets.Begun("nothing", lambda results: upsets.nullcontext(), "something")
    assert upsets.begun(results, said)[0].startswith("it ended with 0, and did not say 'something'")
