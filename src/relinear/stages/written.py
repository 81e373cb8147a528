"""Instructions and answers that a model writes itself, for data sets with the source `written`."""

from typing import Any

from relinear.files import sha256
from relinear.plan.sane import read_yaml
from relinear.plan.strict import ConfigError
from relinear.stages import _stage
from relinear.stages._work import Scaled, Work
from relinear.stages.text import written_tokens


class Stage(_stage.Tokens):
    """The stage `written`, in which a model writes instructions and answers to train on."""

    help = "Let a model write instructions and answers to train on."
    work = "relinear.get.written"
    device = True

    def resolve(self, entry, scale):
        """The settings by which a model writes the text. Raises ConfigError for data without a source
        `written`."""
        wanted = scale.data[entry.text.data].options["written"]
        if wanted is None:
            raise ConfigError(f"data {entry.text.data!r} has no source `written`")
        sampling = {**wanted, "tokens": written_tokens(wanted, entry, scale)}
        settings = {"written": sampling, "seed": scale.seed, "kept": _kept(entry.model, sampling, scale)}
        return Work(settings, self.work, parents=self.parents(entry))


def _kept(model: str, sampling: dict[str, Any], scale: Scaled) -> dict[str, str]:
    """Batches of instructions in `workflow/` that a model wrote with this sampling and seed: path ->
    sha256."""
    folder = scale.workflow / "instructions" / model
    if not folder.is_dir():
        return {}
    about = read_yaml(folder / "about.yaml")
    ours = {
        "teacher": {name: scale.assets[name].sha256 for name in scale.models[model].assets},
        "sampling": {name: value for name, value in sampling.items() if name != "tokens"},
        "seed": scale.seed,
    }
    if ours != {name: about.get(name) for name in ours}:
        return {}
    files = sorted(folder.glob("*.json.xz"))
    return {path.relative_to(scale.workflow).as_posix(): sha256(path) for path in files}
