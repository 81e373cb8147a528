"""The values between the plan and a stage: what a node is of, what a stage may look up, and the answer, the
node's work."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relinear import stages
from relinear.plan.assets import Asset, Own
from relinear.plan.entries import Data, Measure, Model, Scale, multiple, one_of, whole_tokens
from relinear.plan.names import LinkNodes, Node, Resolved, Text
from relinear.plan.strict import ConfigError


@dataclass(frozen=True)
class Scaled:
    """The entries of `workflow/` and the amounts of one scale, with a user's budget and seed: all that a
    stage may look up."""

    name: str  # of the scale
    config: Scale
    budget: float
    seed: int
    models: Mapping[str, Model]
    data: Mapping[str, Data]
    measures: Mapping[str, Measure]
    assets: Mapping[str, Asset | Own]
    workflow: Path

    def stand_in(self, kind: str, name: str) -> str:
        """The model or data that the scale takes for a name. Raises ConfigError where there is none of that
        name."""
        have = getattr(self, kind)
        one_of(kind, name, have)
        taken = getattr(self.config.stand_ins, kind).get(name, name)
        return one_of(f"stand-in ({kind}) of scale {self.name!r},", taken, have)

    def data_for(self, data: str, model: str) -> str:
        """The data set that stands in for another; where a model has the vocabulary of one data set alone,
        that one for any text."""
        name, own = self.stand_in("data", data), self.models[model].data
        if own is None or self.data[name].make == "items":
            return name
        return one_of(f"data of model {model!r},", own, self.data)

    def text(self, data: str, model: str, dose: float = 1.0) -> Node:
        """The node of the tokens that stand in for a data set. Raises ConfigError for data that are no
        tokens."""
        name = self.data_for(data, model)
        made = self.data[name].make
        if made in stages.texts() or made not in stages.available():
            return Node(made, str(Text(self.text_data(name), model, dose)))
        if dose != 1:
            raise ConfigError(f"data {name!r} have a size of their own, and a dose is of texts; got {dose:g}")
        return Node(made, name)

    def text_data(self, data: str, kind: str | None = None) -> str:
        """The name of a data set that is a text, or of one kind of texts. Raises ConfigError for any
        other."""
        kinds = (kind,) if kind else stages.texts()
        if self.data[data].make not in kinds:
            have = ", ".join(name for name, found in self.data.items() if found.make in kinds)
            raise ConfigError(f"data {data!r} is no {kind or 'text'}; have {have}")
        return data

    def sequence(self, data: str) -> int | None:
        """Tokens of each sequence of a data set; None of one that is cut into sequences of any length."""
        found = self.data[data]
        return stages.stage(found.make).sequence(found.options) if found.make in stages.available() else None

    def sees(self, model: str) -> bool:
        """Whether a model reads pictures: its one data set is of these."""
        own = self.models[model].data
        return own in self.data and stages.makes(self.data[own].make, "pictures")

    def labelled(self) -> list[str]:
        """The data sets whose texts have labels."""
        return [name for name, found in self.data.items() if stages.makes(found.make, "labelled")]

    def train_tokens(self, dose: float, own: int | None = None) -> int:
        """Unique training tokens of a dose: of the scale's, or of a data set's `own`, which the budget
        multiplies, too."""
        tokens = self.config.text.train_tokens if own is None else own * self.budget
        return multiple(tokens * dose, whole_tokens(self.config))

    def times_budget(self, examples: int | None) -> int | None:
        """The examples that the budget makes of an entry's; None: all that there are."""
        return examples and max(round(examples * self.budget), 1)


@dataclass(frozen=True)
class Entry:
    """What a node is of: a text, a run with the chain ahead of the node, or the asset, model or data of the
    node's name."""

    node: Node
    text: Text | None = None
    run: Resolved | None = None
    chain: tuple[LinkNodes, ...] = ()
    # trained step of the chain -> its settings in runs.yaml
    recipes: Mapping[Node, dict[str, Any]] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The name of the model that a text or a run is of."""
        return self.text.model if self.text else self.run.model

    @functools.cached_property
    def trained(self) -> dict[str, Node]:
        """The trained steps ahead of the node by role: the stage for the run's own, `run/stage` for another
        run's."""
        return {self._role(step): step for link in self.chain for step in link.steps}

    @property
    def links(self) -> list[dict[str, Any]]:
        """The chain as plain data, its steps as roles of the node's parents."""
        return [
            {
                "method": link.method,
                "options": link.options,
                "steps": [self._role(step) for step in link.steps],
            }
            for link in self.chain
        ]

    def _role(self, step: Node) -> str:
        return step.stage if step.name == self.node.name else f"{step.name}/{step.stage}"


@dataclass(frozen=True)
class Work:
    """A stage's answer for one node."""

    settings: dict[str, Any]  # effective, as plain data; part of the key
    module: str  # with `work(job) -> metrics`
    # further entry points of the code that makes the result: modules found by name
    reaches: tuple[str, ...] = ()
    parents: Mapping[str, Node] = field(default_factory=dict)  # role -> a node whose folder the work reads
    assets: tuple[str, ...] = ()  # that the work reads from the cache
    refused: str | None = None  # why the work cannot be done
    beyond: str | None = None  # a measurement: why its lengths are beyond what the model reads
    # a training: the scale's least learning rate, where the run asks for a lower one
    raised: float | None = None
    # a training: the tokens of a sequence that the run asks for, where the scale has less
    shortened: int | None = None
    sequences: int | None = None  # a training: those of one step, which processes share evenly

    @property
    def modules(self) -> list[str]:
        """Entry points of the code that makes the result."""
        return [self.module, *self.reaches]
