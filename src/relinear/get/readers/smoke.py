"""512 stories of a name, an animal and a place: a text whose regularities a tiny model can learn."""

from collections.abc import Iterator
from itertools import product

from relinear.get.readers._document import Document

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
ANIMALS = ("fox", "owl", "cat", "hare", "wolf", "toad", "crow", "deer")
PLACES = ("mill", "lake", "barn", "hill", "road", "well", "gate", "farm")


def read(_path: None) -> Iterator[Document]:
    """The stories; they lie in no file."""
    for name, animal, place in product(NAMES, ANIMALS, PLACES):
        yield Document(
            f"{name} saw the {animal} by the {place}. The {animal} looked at {name} and left the {place}."
            f" {name} told a friend about the {animal}."
        )
