"""Swap the attention of a pretrained transformers model for a linear-time method; every other weight stays
bit-identical.

A linearized model is a transformers model: its class is a subclass of the teacher's class, made here, and its
layers keep the teacher's projections under the teacher's names, so that peft targets, checkpoints and
`generate()` work as before.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from relinear import families
from relinear.attention import load, options
from relinear.attention._base import Heads
from relinear.errors import UserError
from relinear.families._layer import Layout, LinearizedAttention
from relinear.linearize.checks import (
    check_generation,
    check_mask,
    check_outputs,
    check_padding,
    check_positions,
    check_prompt,
    check_start,
    take_cache,
)
from relinear.linearize.documents import documents, refuse_state, take, unpadded
from relinear.linearize.loading import StrictLoading
from relinear.linearize.releases import CACHE_NAMES, cache_name, warn_untested
from relinear.linearize.state import RecurrentCache, nbytes


class Linearized(StrictLoading):
    """Mixed in front of the teacher's class: builds the swapped layers from the config, and calls the model
    with a recurrent cache."""

    layout: Layout
    causal = True
    # transformers then refuses assisted decoding: a recurrent state cannot take rejected tokens back
    _is_stateful = True

    def __init__(self, config):
        super().__init__(config)
        swap(self, self.layout, config.relinear, self.causal)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        """The output of the teacher's class, computed on the recurrent cache. The arguments are the
        teacher's.

        A new cache is made where `use_cache` asks for one and none is given. Where nothing asks, an evaluated
        model makes one if it can: not for rows that are padded on the right, nor for rows of several
        documents. Raises ValueError for inputs that no state fits.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                f"give input_ids or inputs_embeds; got {'neither' if input_ids is None else 'both'}"
            )
        x = input_ids if input_ids is not None else inputs_embeds
        batch, length = x.shape[:2]
        cache, given = take_cache(kwargs), take(kwargs)
        check_outputs(self, kwargs)
        if length == 0:
            raise ValueError(f"got a piece of 0 tokens, of shape {list(x.shape)}; possible: at least one")
        if cache is not None:
            cache.bind(self._kind(), batch)
        told = cache is not None or bool(use_cache)  # that a state is kept
        makes = cache is None and (
            use_cache if use_cache is not None else not self.training and self.config.use_cache
        )
        right, pauses = (
            (False, False)
            if attention_mask is None
            else check_mask(attention_mask, batch, length, cache, told)
        )
        packed = None
        if given or (position_ids is not None and length > 1):
            packed = documents(given, position_ids, attention_mask, (batch, length), x.device)
        if packed is not None and told:
            refuse_state(packed, batch)
        if makes and not (right and not told) and packed is None:
            if use_cache and position_ids is not None:
                check_start(position_ids, attention_mask)
            cache = self.make_cache()
            cache.bind(self._kind(), batch)
        # Masks cover the past too; the state remembers it, so the layers need this piece's columns only.
        real = (
            torch.ones(batch, length, dtype=torch.bool, device=x.device)
            if attention_mask is None
            else attention_mask[:, -length:].bool()
        )
        counts = (
            real.cumsum(1)
            if cache is not None or attention_mask is not None
            else torch.arange(1, length + 1, device=x.device)[None]
        )
        if cache is not None and cache.lengths is not None:
            counts = counts + cache.lengths[:, None]
        if position_ids is not None:
            positions = position_ids
        else:
            positions = (counts - 1).clamp(min=0) if packed is None else packed.positions
        longest = (
            length + (0 if cache is None else cache.get_seq_length()) if packed is None else packed.longest
        )
        check_positions(self, longest, positions)
        if cache is not None:
            cache.lengths = counts[:, -1]
        if packed is not None:
            kwargs["documents"] = packed
        if pauses and cache is not None:
            kwargs["unpadded"] = unpadded(real)
        # A 4-D mask passes through transformers' mask building untouched, whatever its version: no T x T
        # matrix is ever made.
        mask = real[:, None, None, : 0 if attention_mask is None else length]
        return super().forward(
            input_ids=input_ids,
            attention_mask=mask,
            inputs_embeds=inputs_embeds,
            position_ids=positions,
            use_cache=cache is not None and use_cache is not False,
            **{cache_name(): cache},
            **kwargs,
        )

    def generate(self, inputs=None, *args, **kwargs):
        """As in transformers, with a recurrent cache. Raises ValueError for a prompt, mask or cache that
        cannot be continued."""
        check_generation(self, args[0] if args else kwargs.get("generation_config"), kwargs)
        prompt = next(
            (p for p in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if p is not None), None
        )
        if prompt is not None:
            check_prompt(
                prompt,
                kwargs.get("attention_mask"),
                next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None),
            )
        return super().generate(inputs, *args, **kwargs)

    def make_cache(self) -> RecurrentCache:
        """An empty recurrent cache for this model."""
        return RecurrentCache(self.config.num_hidden_layers)

    def state_bytes(self, batch: int = 1) -> int:
        """Bytes of the state of `batch` sequences, from the first token on. Layers kept as softmax add keys
        and values that grow."""
        return sum(
            nbytes(layer.method.init_state(batch, "meta", self.dtype)) for layer in self.attention_layers()
        )

    def _kind(self) -> dict[str, Any]:
        """The facts in which a cache and the model that reads it must agree."""
        heads = self.attention_layers()[0].method.heads
        shape = {
            "layers": self.config.num_hidden_layers,
            "heads": heads.heads,
            "key heads": heads.groups,
            "head dimension": heads.dim,
        }
        return {**self.config.relinear, **shape}

    def _prepare_attention_mask_for_generation(self, *args, **kwargs):
        mask = super()._prepare_attention_mask_for_generation(*args, **kwargs)
        check_padding(mask)  # transformers made this mask from the padding token
        return mask

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if model_kwargs.get(cache_name()) is None and generation_config.use_cache is not False:
            model_kwargs[cache_name()] = self.make_cache()
        if (cache := model_kwargs.get(cache_name())) is not None:
            cache.ends, cache.generated = generation_config._eos_token_tensor, 0

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if (cache := model_kwargs.get(cache_name())) is not None:
            cache.generated += 1
        return model_kwargs

    # transformers asks its signature whether `inputs_embeds` can be a prompt
    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        """As in transformers, but that what is fed to a row after its end is padding: its state stays as it
        was, and the row can go on."""
        given = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        cache = given.get(cache_name())
        if cache is not None and cache.ends is not None and cache.generated and len(input_ids) > 1:
            ended = (
                torch.isin(input_ids[:, -cache.generated :], cache.ends.to(input_ids.device))
                .cumsum(1)
                .roll(1, 1)
            )
            ended[:, 0] = 0  # ends before this token
            mask = given.get("attention_mask")
            mask = (
                input_ids.new_ones(len(input_ids), cache.get_seq_length() + 1)
                if mask is None
                else mask.clone()
            )
            mask[:, -cache.generated :] *= ended == 0
            given["attention_mask"] = mask
        return given

    def blocks(self) -> nn.ModuleList:
        """The model's layers, first to last."""
        return self.layout.blocks(self)

    def attention_layers(self) -> list[LinearizedAttention]:
        """The linearized attention modules, first to last."""
        return self.layout.attention_layers(self)

    def rotary(self, x: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Each layer's rotary cosines and sines for a sequence from its start, in the dtype of x ``[B, T,
        hidden]``."""
        return self.layout.rotary(self, x)

    def method_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the methods added to the teacher, by full name."""
        return {n: p for n, p in self.named_parameters() if ".method." in n}


class LinearizedEncoder(Linearized):
    """As `Linearized`, for a model whose tokens see each other both ways: one pass over whole texts, no
    cache, nothing to decode."""

    causal = False
    _is_stateful = False

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        use_cache=None,
        logits_to_keep=None,
        **kwargs,
    ):
        """The output of the teacher's class, from one pass. Raises UserError where a cache is asked for."""
        if use_cache or any(kwargs.pop(name, None) is not None for name in CACHE_NAMES):
            raise UserError(NO_DECODING.format(name=type(self).__name__))
        check_outputs(self, kwargs)
        if given := take(kwargs):
            raise ValueError(
                f"an encoder reads one text a row; got {', '.join(given)}. Possible: texts side by side,"
                " padded, with attention_mask"
            )
        x = input_ids if input_ids is not None else inputs_embeds
        batch, length = x.shape[:2]
        if attention_mask is not None and attention_mask.shape != (batch, length):
            raise ValueError(
                f"attention_mask must be [batch, tokens] = {[batch, length]}; got"
                f" {list(attention_mask.shape)}"
            )
        if position_ids is None and length > (limit := self.position_table[1]):
            raise ValueError(
                f"this encoder has {limit} positions; got {length} tokens and no position_ids. Possible:"
                " shorter texts, or `restarted_positions`, which begin anew where the table ends"
            )
        real = (
            torch.ones(batch, length, dtype=torch.bool, device=x.device)
            if attention_mask is None
            else attention_mask.bool()
        )
        # passes through transformers' mask building untouched
        mask = real[:, None, None, : 0 if attention_mask is None else length]
        return super(Linearized, self).forward(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    @property
    def position_table(self) -> tuple[int, int]:
        """The first entry of the learned positions that a token can have, and how many there are from it
        on."""
        table = self.base_model.embeddings.position_embeddings
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        return first, table.num_embeddings - first

    def restarted_positions(self, length: int) -> Tensor:
        """Position ids ``[1, T]`` of a text of any length, from the first again wherever the table ends
        (Hedgehog Table 5)."""
        first, limit = self.position_table
        return first + torch.arange(length, device=self.device)[None] % limit

    def generate(self, *args, **kwargs):
        """Raises UserError: an encoder does not decode."""
        raise UserError(NO_DECODING.format(name=type(self).__name__))

    def make_cache(self) -> RecurrentCache:
        """Raises UserError: an encoder does not decode."""
        raise UserError(NO_DECODING.format(name=type(self).__name__))

    def state_bytes(self, batch: int = 1) -> int:
        """0: nothing is kept from one text to the next."""
        return 0


NO_DECODING = (
    "{name} is an encoder: its tokens see each other both ways, so it reads whole texts and does not decode;"
    " possible: a causal model"
)


def _called_as(teacher: type[PreTrainedModel], mixed: type[Linearized]) -> Callable:
    """`mixed.forward` with the signature of the teacher's. Trainer, TRL and generate() read it: for labels,
    columns and logits_to_keep."""
    signature = inspect.signature(teacher.forward)
    names = tuple(p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]

    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False))
        # torch.compile traces no set and no comprehension here
        if len(args) > len(given) or len({**given, **kwargs}) < len(given) + len(kwargs):
            raise TypeError(
                f"forward takes {', '.join(names)}, each once; got {len(args)} by position and"
                f" {', '.join(kwargs) or 'none'} by name"
            )
        return mixed.forward(self, **given, **kwargs)

    forward.__signature__, forward.__doc__ = signature, mixed.forward.__doc__
    return forward


def _classes(teacher: type[PreTrainedModel], layout: Layout) -> tuple[type, type[PreTrainedModel]]:
    """The linearized config and model class of one teacher class."""
    warn_untested()
    base = teacher.config_class
    config = type(
        f"Relinear{base.__name__}",
        (base,),
        {"model_type": f"relinear_{base.model_type}", "__module__": __name__},
    )
    name = f"Relinear{teacher.__name__}"
    mixed = Linearized if layout.swapped.causal else LinearizedEncoder
    forward = _called_as(teacher, mixed)
    model = type(
        name,
        (mixed, teacher),
        {"config_class": config, "layout": layout, "forward": forward, "__module__": __name__},
    )
    # found by pickle and by transformers under their own names
    globals().update({config.__name__: config, name: model})
    return config, model


LAYOUTS = {
    teacher: layout
    for name in families.available()
    for teacher, layout in families.load(name).layouts.items()
}
CLASSES = {teacher: _classes(teacher, layout) for teacher, layout in LAYOUTS.items()}
for _config, _model in CLASSES.values():
    AutoConfig.register(_config.model_type, _config)
    (AutoModelForCausalLM if _model.causal else AutoModel).register(_config, _model)


Kept = float | Mapping[str, float] | Sequence[int] | None


def _kept(keep: Kept, windows: list[int | None]) -> list[int]:
    """The layers that stay softmax. See `linearize`."""
    n = len(windows)
    if keep is None:
        mixed = None in windows
        return [i for i, window in enumerate(windows) if window is not None and mixed]
    if isinstance(keep, int | float | Mapping):
        [(end, share)] = keep.items() if isinstance(keep, Mapping) and len(keep) == 1 else [(None, keep)]
        if end not in (None, "first", "last") or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(
                "keep_softmax_layers is a ratio in [0, 1), {'first': ratio}, {'last': ratio} or a list"
                f" of layers; got {keep}"
            )
        if end is None:
            return [i for i in range(n) if int((i + 1) * share) > int(i * share)]
        return list(range(int(n * share)) if end == "first" else range(n - int(n * share), n))
    if set(keep) - set(range(n)):
        raise ValueError(f"keep_softmax_layers must be in 0..{n - 1}; got {sorted(keep)}")
    return sorted(set(keep))


def swap(model: PreTrainedModel, layout: Layout, recipe: dict[str, Any], causal: bool) -> None:
    """Replace the attention of each layer as `recipe` ({"method", "options", "keep_softmax_layers"}) says."""
    config, windows = model.config, layout.windows(model)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    blocks = layout.blocks(model)
    for i, block in enumerate(blocks):
        teacher, kept = block.get_submodule(layout.attention), i in recipe["keep_softmax_layers"]
        name = "softmax" if kept else recipe["method"]
        scale, positions = (
            getattr(teacher, "scaling", dim**-0.5),
            getattr(config, "max_position_embeddings", None),
        )
        heads = Heads(
            config.hidden_size, config.num_attention_heads, groups, dim, scale, windows[i], positions, causal
        )
        chosen = options(name, {} if kept else recipe["options"])
        if hasattr(chosen, "of_layer"):
            chosen = chosen.of_layer(i, len(blocks))
        method = load(name)(heads, chosen)
        device = next(teacher.parameters()).device
        block.set_submodule(layout.attention, layout.swapped(teacher, method.to(device)))


def recipe_of(
    model: PreTrainedModel, method: str, *, keep_softmax_layers: Kept = None, **given
) -> dict[str, Any]:
    """The recipe that the config of `model` has once it is linearized with a method and options; also of a
    model that is linearized already."""
    layout = model.layout if isinstance(model, Linearized) else LAYOUTS[type(model)]
    kept = _kept(keep_softmax_layers, layout.windows(model))
    return {
        "method": method,
        "options": options(method, given).model_dump(mode="json"),
        "keep_softmax_layers": kept,
    }


def linearize(
    model: PreTrainedModel, method: str, *, keep_softmax_layers: Kept = None, **given
) -> PreTrainedModel:
    """Swap the attention of `model` in place and return it. Every weight the teacher had stays bit-identical.

    `given` are the method's options (`relinear.attention.<method>.Options`). Methods keep their parameters in
    float32. `keep_softmax_layers` lists the layers that stay softmax, or says what share of them, evenly
    spaced (Lizard Table 2: 0.5, every second layer) or, as {"first": 0.5} or {"last": 0.5}, at one end. None
    keeps only what is linear already: the local layers of a teacher that mixes sliding windows with global
    attention (Gemma 3). Raises ValueError for an unknown method or option and for an architecture that is not
    supported.
    """
    if type(model) not in CLASSES:
        have = ", ".join(t.__name__ for t in CLASSES)
        raise ValueError(
            f"cannot linearize {type(model).__name__}"
            f"{', which is linearized already' if isinstance(model, Linearized) else ''}"
            f"{': merge its adapters, merge_and_unload()' if hasattr(model, 'merge_and_unload') else ''}"
            f"; can: {have}"
        )
    if getattr(model.config, "use_bidirectional_attention", False):
        raise ValueError(
            "cannot linearize a teacher with use_bidirectional_attention=True; can: causal language models,"
            " and encoders"
        )
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        # transformers' Gemma 3 ignores this entry of its configuration, and its computation is the teacher
        # that a method mimics.
        warnings.warn(
            "attn_logit_softcapping is set, but transformers does not apply it; the linearized model does not"
            " either",
            stacklevel=2,
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(quantizer, "packed_modules", None) == {}:
        # read from GGUF: marked as quantised and so not to be saved, its weights being plain
        quantizer.remove_quantization_config(model)
    recipe = recipe_of(model, method, keep_softmax_layers=keep_softmax_layers, **given)
    config, linearized = CLASSES[type(model)]
    swap(model, LAYOUTS[type(model)], recipe, linearized.causal)
    settings = {
        k: v
        for k, v in model.config.to_dict().items()
        if k not in ("model_type", "architectures", "transformers_version")
    }
    model.config = config.from_dict({**settings, "relinear": recipe, "architectures": [linearized.__name__]})
    model.config._attn_implementation = "sdpa" if linearized.causal else "eager"
    model.__class__ = linearized
    return model
