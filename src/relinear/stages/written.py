"""Instructions and answers that a model writes itself, for data sets with the source `written`."""

from relinear.plan.strict import ConfigError
from relinear.stages import _stage


class Stage(_stage.Tokens):
    """The stage `written`, in which a model writes instructions and answers to train on."""

    help = "Let a model write instructions and answers to train on."
    work = "relinear.get.written"
    device = True

    def settings(self, plan, node):
        """The settings by which a model writes the text. Raises ConfigError for data without a source `written`."""
        text = plan.text_of(node)
        if plan.data[text.data].options["written"] is None:
            raise ConfigError(f"data {text.data!r} has no source `written`")
        options = dict(plan.data[text.data].options["written"])
        options["tokens"] = max(round(options["tokens"] * plan.budget * text.dose), 1)
        return {"written": options, "seed": plan.seed, "kept": plan.kept(text.model, options)}
