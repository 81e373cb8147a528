"""An asset: a model, a text or evaluation items, obtained from its registry and verified."""

from relinear.stages import _stage


class Stage(_stage.Stage):
    """The stage `asset`, which obtains and verifies an asset."""

    help = "Obtain and verify an asset."
    work = "relinear.get.asset"
    torch = False
    obtains = True

    def folder(self, node):
        """The folder of its results, below the scale's."""
        return f"assets/{node.name}"

    def settings(self, plan, node):
        """The name of the asset."""
        return {"asset": node.name}

    def assets(self, plan, node):
        """The asset itself, which the work obtains."""
        return [node.name]
