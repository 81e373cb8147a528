"""Stage 2: a linearized model is trained as a language model, by LoRA, in full, or in the method's own parameters alone."""

from typing import Annotated, Literal

from pydantic import Field

from relinear.plan.strict import Positive
from relinear.stages import _training

WIDEST = 65536  # no model has wider projections, and no adapter a higher rank than they have columns


class Options(_training.Recipe):
    """The options of a `finetune` step in runs.yaml."""

    kind: Literal["lora", "full", "method"]  # method: only the parameters that the method added
    train_method: bool = False  # lora: train the method's own parameters too (methods without a transfer stage need it)
    method_lr: Annotated[float, Field(gt=0)] | None = None  # their learning rate; the adapter's if not given
    lora_rank: Annotated[int, Field(gt=0, le=WIDEST)] = 8
    lora_alpha: Positive = 16
    lora_targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")


class Stage(_training.Step):
    """The stage `finetune`, which trains the linearized model on text."""

    help = "Stage 2: train the linearized model on text, by LoRA, in full, or in its method's parameters."
    work = "relinear.train.finetune"
    Options, Budget = Options, _training.Budget

    def check(self, plan, node, processes):
        """Raise ConfigError for an encoder, and for settings that cannot work."""
        plan.require_causal(node, "finetune trains a model to predict the next token")
        super().check(plan, node, processes)
