"""Stage 2: a linearized model is trained as a language model, by LoRA, in full, or in the method's own
parameters alone."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relinear.stages import _stage, _training
from relinear.weights import WIDEST


class Options(_training.Recipe):
    """The options of a `finetune` step in runs.yaml."""

    kind: Literal["lora", "full", "method"]  # method: only the parameters that the method added
    train_embeddings: bool = True  # full: train the tables of embeddings too, and a head that is tied to one
    # lora: train the method's own parameters too (methods without a transfer stage need it)
    train_method: bool = False
    method_lr: Annotated[float, Field(gt=0)] | None = None  # their learning rate; the adapter's if not given
    # the share of the loss that is the KL divergence from the model as it was before any method; the rest is
    # that of the next token
    kl: Annotated[float, Field(ge=0, le=1)] = 0.0
    kl_beyond: Annotated[int, Field(ge=0)] = 0  # first position of a sequence that counts whole in it
    kl_within: Annotated[float, Field(ge=0, le=1)] = 0.1  # what earlier positions count
    lora_rank: Annotated[int, Field(gt=0, le=WIDEST)] = 8
    lora_alpha: Annotated[int, Field(gt=0, le=WIDEST)] = 16
    lora_targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        given = [
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        ]
        if self.kind != "lora" and (
            unfit := [name for name in given if name == "train_method" or name.startswith("lora_")]
        ):
            raise ValueError(
                f"{unfit[0]} is of kind lora; got kind {self.kind}, possible: kind lora, or without"
                f" {unfit[0]}"
            )
        if not self.kl and (unfit := [name for name in given if name.startswith("kl_")]):
            raise ValueError(
                f"{unfit[0]} is of the KL divergence from the teacher; got kl 0, possible: kl above 0, or"
                f" without {unfit[0]}"
            )
        if self.kind != "full" and not self.train_embeddings:
            raise ValueError(
                f"train_embeddings is of kind full; got kind {self.kind}, possible: kind full, or without"
                " train_embeddings"
            )
        if "method_lr" in given and (self.kind == "full" or (self.kind == "lora" and not self.train_method)):
            trained = f"kind {self.kind}" + (" and train_method false" if self.kind == "lora" else "")
            raise ValueError(
                f"method_lr is the rate of a method's own parameters; got {trained}, possible: kind lora with"
                " train_method, or kind method"
            )
        return self


class Stage(_training.Step):
    """The stage `finetune`, which trains the linearized model on text."""

    help = "Stage 2: train the linearized model on text, by LoRA, in full, or in its method's parameters."
    work = "relinear.train.finetune"
    Options, Budget = Options, _training.Budget

    def reasons(self, entry, scale, recipe, budget):
        """Why the training cannot be done."""
        yield from _stage.unless_causal(entry, scale, "finetune trains a model to predict the next token")
        yield from super().reasons(entry, scale, recipe, budget)
        if recipe.kl and not recipe.kl_within and recipe.kl_beyond >= budget["seq_len"]:
            yield (
                f"{entry.node}: sequences of {budget['seq_len']} tokens have no position beyond kl_beyond"
                f" {recipe.kl_beyond}, and kl_within 0 leaves out the others; possible: a smaller kl_beyond"
            )
