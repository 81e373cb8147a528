"""A client of an MLflow server whose calls end.

A time limit of a socket counts from one byte to the next, so a server that sends a byte a second keeps a call for hours.
"""

import threading
from collections.abc import Callable
from typing import Any

SECONDS = 15  # for a whole answer; every job of a command waits so long once
SECONDS_OF_FILES = 600  # for calls that send or fetch files


class Bounded:
    """An MlflowClient, of which a method that takes longer than its bound raises TimeoutError."""

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name.startswith("_") or not callable(found):
            return found
        bound = SECONDS_OF_FILES if "artifact" in name or name == "log_text" else SECONDS
        return lambda *given, **named: _within(bound, lambda: found(*given, **named))


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call returns or raises. A call that is not done in time is left to a thread that ends with this process."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # raised again below, in the thread that asked
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
