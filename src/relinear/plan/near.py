"""What stands in an error about a name that there is not: the names near it, then those that there are."""

from collections.abc import Iterable
from difflib import get_close_matches

MANY = 16  # of more names an error shows the first few
FEW = 8


def possible(name: object, have: Iterable[object]) -> str:
    """`near it: ...; have ..., ... (290 in all)`: near names first, and only where there are many; long lists
    cut."""
    names = [str(known) for known in have]
    if len(names) <= MANY:
        return f"have {', '.join(names) or 'none'}"
    given, small = str(name).casefold(), {known.casefold(): known for known in names}
    near = [small[found] for found in get_close_matches(given, small, 3)] or [
        known for key, known in small.items() if len(given) > 2 and given in key
    ][:3]
    return (
        f"{'near it: ' + ', '.join(near) + '; ' if near else ''}have {', '.join(names[:FEW])}, ..."
        f" ({len(names)} in all)"
    )
