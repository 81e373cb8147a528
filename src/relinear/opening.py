"""What is raised on somebody's folder or text when it is opened for the first time, as one line.

`relinear.folders` tells what a stage may meet. Here is what only a file of one's own can raise: a config.json
whose entries do not fit together, a reader that meets another kind of text. No stage reaches this module, so
that it may learn of more without another key for any result.
"""

import traceback
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from relinear.errors import UserError
from relinear.folders import FAILURES
from relinear.machine.disk import refusal
from relinear.weights import files_of, require_finite

LONGEST = 500  # characters of another library's message
UNFIT = (*FAILURES, AssertionError, EOFError, zlib.error, StrictDataclassError)
DATA = (str, bytes, int, float, list, dict, type(None))  # what files hold
CODE = Path(__file__).parent
READERS = CODE / "get"


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
    """A context in which whatever the reader of a text raises is a UserError with the line of code that met
    it, but for a library that is not installed, and a fault of the reader's own code."""
    possible = "a text of that form, or another --reader"
    with _telling(f"{given} cannot be read as {reader!r}", possible, ImportError):
        yield


@contextmanager
def working(given: Mapping[str, Path], opens: bool) -> Iterator[None]:
    """A context for the work of a step on files of one's own, by the names of their assets. What it raises is
    a UserError, as of `configuring` where the step `opens` a model, else as of `reading`."""
    what = ", ".join(f"{name} ({path})" for name, path in given.items())
    if not opens:
        possible = "files of the form that their reader takes, or another `reader:` in data.yaml"
        with _telling(f"{what} cannot be read", possible, ImportError):
            yield
        return
    described = any((folder / "config.json").is_file() for folder in given.values())
    form = "config.json that belongs to finite weights" if described else "complete GGUF of finite weights"
    try:
        with _telling(f"{what} makes no model", f"a {form}"):
            yield
    except UserError:
        for folder in given.values():
            for file in _weights(folder):
                require_finite(file)  # which names the tensor
        raise


def _weights(folder: Path) -> list[Path]:
    """The safetensors of a folder; none of a GGUF's."""
    with suppress(UserError):
        return files_of(folder)
    return []


@contextmanager
def _telling(what: str, possible: str, *others: type[Exception]) -> Iterator[None]:
    """`others`, what a disk refuses, and an attribute that code lacks are no fault of the file: they are
    raised as they are."""
    try:
        yield
    except (UserError, *others):
        raise
    except UNFIT as error:
        if refusal(error) or _of_code(error):
            raise
        raise UserError(f"{what}: {in_words(error)}{_met_by(error)}; possible: {possible}") from error


def _of_code(error: BaseException) -> bool:
    """Whether an error is a fault of our own code: a line of it asked for an attribute that is not there. It
    is the file's fault where it gave one of `DATA` in the place of a record, and where another library asked,
    as one does of a configuration."""
    if not isinstance(error, AttributeError) or isinstance(error.obj, DATA) and error.name:
        return False
    *_, last = traceback.extract_tb(error.__traceback__)
    return CODE in Path(last.filename).parents


def _met_by(error: BaseException) -> str:
    """The last line of `READERS` that an error passed."""
    passed = [f for f in traceback.extract_tb(error.__traceback__) if READERS in Path(f.filename).parents]
    return f" (in {Path(passed[-1].filename).name}, line {passed[-1].lineno})" if passed else ""
