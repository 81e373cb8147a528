"""Hedgehog parameters: the share of parameters that its maps are at Llama-2-7B's shape, by the forms that a
map can have."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from relinear.draw.claims import Value
from relinear.draw.render import markdown, write_csv, write_text

# in percent: what is printed, and its last digit
PRINTED, LAST = 0.495, 0.001
FORMS = {  # name -> the method's options
    "two, with biases": {"bias": True},
    "two": {},
    "one, with a bias": {"tied": True, "bias": True},
    "one": {"tied": True},
}
PLACES = {"rows": FORMS, "columns": ("last_digits",), "axes": {}}
COLUMNS = ("maps_of_each_head", "parameters", "maps", "of_all", "of_the_original")


class Counts(NamedTuple):
    """Parameters of a model with Hedgehog's maps: the teacher's own, and the maps'."""

    teacher: int
    maps: int

    @property
    def of_all(self) -> float:
        """The maps' share of the model with its maps, in percent."""
        return 100 * self.maps / (self.teacher + self.maps)

    @property
    def of_the_original(self) -> float:
        """The maps' share of the teacher, in percent."""
        return 100 * self.maps / self.teacher


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write parameters.csv and parameters.md, a form of the map a row."""
    found = counts(tuple(spec.options["llama"].items()))
    rows = [
        (name, own.teacher, own.maps, f"{own.of_all:.4f}", f"{own.of_the_original:.4f}")
        for name, own in found.items()
    ]
    files = [out / f"parameters.{suffix}" for suffix in spec.makes]
    write_csv(files[0], COLUMNS, [dict(zip(COLUMNS, row, strict=True)) for row in rows])
    shown = markdown(
        ["Maps of each head", "Llama-2-7B", "Maps", "Of both, %", "Of Llama-2-7B, %"],
        [[name, f"{teacher:,}", f"{maps:,}", *shares] for name, teacher, maps, *shares in rows],
    )
    legend = (
        f"Parameters, counted at Llama-2-7B's shape. The paper prints {PRINTED} % (appendix B.5). Two: a map"
        " of queries and one of keys (Listing 2);\none: of both (section 4.2)."
    )
    notes = [f"- {note.where}: {note.text}." for note in spec.misprints]
    write_text(files[1], "\n".join([f"**{spec.label}.**", "", shown, "", legend, "", *notes]) + "\n")
    return files


def look(spec, about):
    """How many of the printed share's last digits a form's share is away from it."""
    found = counts(tuple(spec.options["llama"].items()))

    def value(point) -> Value | str:
        own = found[point.row]
        name = f"{own.maps:,} of {own.teacher:,} are {own.of_the_original:.4f} %, in last digits off"
        return Value(abs(own.of_the_original - PRINTED) / LAST, 0.0, name)

    return value


@functools.cache
def counts(shape: tuple[tuple[str, int], ...]) -> Mapping[str, Counts]:
    """Form of the map -> its numbers of parameters, counted on the meta device, so that nothing is
    allocated."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from relinear.linearize.model import linearize

    def count(options) -> Counts:
        with torch.device("meta"):
            model = linearize(LlamaForCausalLM(LlamaConfig(**dict(shape))), "hedgehog", **options)
        maps = sum(p.numel() for p in model.method_parameters().values())
        return Counts(sum(p.numel() for p in model.parameters()) - maps, maps)

    return {name: count(options) for name, options in FORMS.items()}
