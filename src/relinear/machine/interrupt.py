"""Ctrl-C while Snakemake's jobs run: one line, in place of an error and a log for each job that it ended."""

import logging

BEGINS = "Terminating processes on user request"  # Snakemake's own words
SAID = "stopped; give the same command again, and it goes on from here"


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
