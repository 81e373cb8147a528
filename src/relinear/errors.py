"""Errors that a user can mend: the message is all they need, so the command line prints it without a traceback."""


class UserError(ValueError):
    """What was asked for does not exist, does not fit or is missing; the message says what was got and what is possible."""
