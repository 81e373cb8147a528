"""relinear: turn a pretrained softmax-attention Transformer into a linear-time, constant-memory model, and
reproduce the papers that do."""

import importlib

from relinear.attention import available as available_methods

__all__ = ["available_methods", "export", "linearize", "load_run"]
__version__ = "0.2.0.dev0"  # the package's version, which keys do not count

# From here on `AutoModelForCausalLM.from_pretrained` loads linearized folders. Imported by name for the
# reason given below.
importlib.import_module("relinear.share.registration").install()


def __getattr__(name: str):
    # torch and transformers take seconds to import; reading the catalogue (as the Snakefile does) needs
    # neither. By name, so that not every module of the package counts as depending on it
    # (relinear.plan.code).
    if name == "linearize":
        return importlib.import_module("relinear.linearize")
    if name == "export":
        return importlib.import_module("relinear.share.export").export_model
    if name == "load_run":
        return importlib.import_module("relinear.share.runs").load_run
    raise AttributeError(f"module 'relinear' has no attribute {name!r}; have {', '.join(__all__)}")
