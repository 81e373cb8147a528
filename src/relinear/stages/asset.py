"""An asset: a model, a text or evaluation items, obtained from its registry and verified."""

from relinear.stages import _stage


class Stage(_stage.Stage):
    """The stage `asset`, which obtains and verifies an asset."""

    help = "Obtain and verify an asset."
    work = "relinear.get.asset"
    torch = False
    obtains = True

    def folder(self, node):
        return f"assets/{node.name}"

    def settings(self, plan, node):
        return {"asset": node.name}

    def assets(self, plan, node):
        return [node.name]
