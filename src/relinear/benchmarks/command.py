"""The command line of every benchmark: the parameters of its `main` are the options."""

import sys
from collections.abc import Callable

import typer
from typer.core import TyperCommand

from relinear.errors import UserError


class Words(TyperCommand):
    """A command whose options of several values take all words that follow them: `--gpus 1 2` is `--gpus 1
    --gpus 2`."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        """Parse the arguments after repeating an option of several values before each of its further
        words."""
        several = {
            name for option in self.params if getattr(option, "multiple", False) for name in option.opts
        }
        words: list[str] = []
        option = None
        for word in args:
            if word.startswith("-"):
                option = word if word in several else None
            elif option is not None and words[-1] != option:
                words.append(option)
            words.append(word)
        return super().parse_args(ctx, words)


def run(main: Callable[..., None]) -> None:
    """Call `main` with what the command line says. A user's mistake is one line on stderr."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=Words, help=sys.modules[main.__module__].__doc__.splitlines()[0])(main)
    try:
        app()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
