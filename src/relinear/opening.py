"""What is raised on somebody's folder or text when it is opened for the first time, as one line.

`relinear.folders` tells what a stage may meet. Here is what only a file of one's own can raise: a config.json
whose entries do not fit together, a reader that meets another kind of text. No stage reaches this module, so
that it may learn of more without another key for any result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from relinear.errors import UserError
from relinear.folders import FAILURES
from relinear.machine.disk import refusal

LONGEST = 500  # characters of another library's message
UNFIT = (*FAILURES, AssertionError, StrictDataclassError)


def in_words(error: BaseException) -> str:
    """An error's kind and text in one line: a KeyError's text is a name alone."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


@contextmanager
def configuring(folder: Path) -> Iterator[None]:
    """A context in which whatever a folder's config.json raises is a UserError."""
    file = folder if folder.is_file() else folder / "config.json"
    with _telling(f"{file} makes no model", "the config.json that belongs to the weights"):
        yield


@contextmanager
def reading(given: str, reader: str) -> Iterator[None]:
    """A context in which whatever the reader of a text raises is a UserError, but for a library that is not
    installed."""
    possible = "a text of that form, or another --reader"
    with _telling(f"{given} cannot be read as {reader!r}", possible, ImportError):
        yield


@contextmanager
def _telling(what: str, possible: str, *others: type[Exception]) -> Iterator[None]:
    """`others`, and what a disk refuses, are no fault of the file: they are raised as they are."""
    try:
        yield
    except (UserError, *others):
        raise
    except UNFIT as error:
        if refusal(error):
            raise
        raise UserError(f"{what}: {in_words(error)}; possible: {possible}") from error
