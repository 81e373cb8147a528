"""Errors that a user can mend: the message is all they need, so the command line prints it without a
traceback."""


class UserError(ValueError):
    """A request for something that does not exist, does not fit or is missing. The message says what was got
    and what is possible."""
