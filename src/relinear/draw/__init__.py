"""Tables and figures: measurements in, files out; no training, no network, no torch.

The spec of a table or figure (`relinear.plan.specs`) names a shape, and the shape is a module of this folder:
`table`, `picture`, `curves`, `attention_maps`, `grid`, `deviations`, `own`. Each offers `drawn(artefact,
measured, about)`, which returns what `relinear.draw.drawing` writes.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from relinear.draw.spreads import UNASKED, Spreads
from relinear.plan.forms import Form
from relinear.plan.measured import Measured

# by (run, measure); None: left out at this scale, or not finished
Measurements = Mapping[tuple[str, str], Measured | None]


class About(NamedTuple):
    """The circumstances of the measurements that are not in their readings.

    `budget` and `seed` are the plan's. `teacher`: names of the models that the runs begin with; `kind`: what
    they are. `demonstration`: a line that warns of budgets and learning rates far from the papers'.
    `nothing_to_judge`: why no claim can be judged at this scale.
    `of_shape`: the measures that all trainings of a run have the same. `later`: stage -> the runs that come
    after a step of it now, and were measured without one.
    `data`: measure -> the data that it was made on, or that stood in for them. `own_data`: column -> the
    same, where its runs' models know no other. `undefined`: (run, measure) of a table's cells that no
    measurement can fill -> why. `forms`: run -> what it is made of, as its records say; `planned`: the same
    of runs that were not measured, as the plan has it. `spreads`: how far trainings of a method are apart.
    `best`: run -> the run of its best recipe, where all that its paper has are measured; `alone`: those of
    these runs whose other recipes are all worse by more than the errors of items and of training. `files`: an
    artefact's input that is no measurement -> where it lies, if not where the spec says.
    """

    scale: str
    teacher: str | None = None
    demonstration: str | None = None
    nothing_to_judge: str | None = None
    of_shape: Collection[str] = ()
    later: Mapping[str, Collection[str]] = {}
    data: Mapping[str, str] = {}
    own_data: Mapping[str, str] = {}
    undefined: Mapping[tuple[str, str], str] = {}
    files: Mapping[str, Path] = {}
    forms: Mapping[str, Form] = {}
    planned: Mapping[str, Form] = {}
    spreads: Spreads = UNASKED
    best: Mapping[str, str] = {}
    alone: Collection[str] = ()
    budget: float = 1.0
    seed: int = 0
    kind: str = "teacher"

    def where(self, quote: str = "") -> str:
        """The scale, what differs from its budget of 1 and its seed of 0, and the models, for a title: `scale
        smollm2, budget 0.25, teacher ...`."""
        own = (
            f"scale {quote}{self.scale}{quote}",
            f"budget {self.budget:g}" * (self.budget != 1),
            f"seed {self.seed}" * bool(self.seed),
            f"{self.kind} {self.teacher}" * bool(self.teacher),
        )
        return ", ".join(filter(None, own))
