"""Methods of several parts, each of which can be switched off in a trained model when it is measured."""

from collections.abc import Iterable
from typing import ClassVar

from relinear.errors import UserError

ATTENDING = ("linear", "window")  # parts that bring values; one of them must be left


class Parts:
    """A mixin for methods with parts that can be switched off: `class Method(Parts, Attention)`.

    `PARTS` names all parts that the method can have; its file says what is left when one is off.

    With a part off a layer may keep another state, so a cache that was filled before is of no use after.
    """

    PARTS: ClassVar[tuple[str, ...]]
    switched_off: frozenset[str] = frozenset()

    @classmethod
    def parts(cls, options) -> tuple[str, ...]:
        """The parts that a layer with these options has."""
        raise NotImplementedError

    @classmethod
    def check_parts(cls, options, names: Iterable[str]) -> None:
        """Raises UserError for a part that a layer with these options does not have, and where none that
        attends would be left."""
        name, have = cls.__module__.rpartition(".")[2], cls.parts(options)
        if unknown := [part for part in names if part not in have]:
            raise UserError(
                f"{name} ({options}) has no part {unknown[0]!r} to switch off; possible: {', '.join(have)}"
            )
        if not [part for part in have if part in ATTENDING and part not in names]:
            raise UserError(
                f"{name} ({options}) without {' and '.join(names)} attends to nothing; it has"
                f" {', '.join(have)}"
            )

    def switch_off(self, names: Iterable[str]) -> None:
        """Compute without these parts from now on; with all of them if none is named. Raises UserError as
        `check_parts` does."""
        if names := tuple(names):
            self.check_parts(self.options, names)
        self.switched_off = frozenset(names)
