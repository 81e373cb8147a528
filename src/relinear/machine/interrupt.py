"""Ctrl-C: its exception comes where nothing can lose it (`patient`), and while Snakemake's jobs run it is one
line, in place of an error and a log for each job that it ended (`OneLine`)."""

import logging
import signal
import sys
import threading
from types import TracebackType

from relinear.machine.warm import INTERRUPTED, after_imports, signalled

BEGINS = "Terminating processes on user request"  # Snakemake's own words
SAID = "stopped; give the same command again, and it goes on from here"


def patient() -> None:
    """Have Ctrl-C raise KeyboardInterrupt after an import that is under way, and be one line where it ends
    this process. Where Ctrl-C is ignored, as in a shell's background job, it stays so."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, after_imports(signal.default_int_handler))
    sys.excepthook = _without_traceback


def _without_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if signalled(error):
        print(INTERRUPTED, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


class OneLine(logging.Filter):
    """A filter of Snakemake's logger: the message of an interrupt becomes ours, and nothing comes after
    it."""

    stopped = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is printed."""
        if self.stopped:
            return False
        if str(record.msg).startswith(BEGINS):
            self.stopped, record.msg, record.args = True, SAID, ()
        return True
