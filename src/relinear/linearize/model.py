"""Swap the attention of a pretrained transformers causal LM for a linear-time method; every other weight stays bit-identical.

A linearized model is a transformers model: its class is a subclass of the teacher's class, made here, and its layers keep the teacher's
projections under the teacher's names, so that peft targets, checkpoints and `generate()` work as before.
"""

import json
import math
import warnings
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma3 import Gemma3ForCausalLM
from transformers.models.gpt2 import GPT2LMHeadModel
from transformers.models.llama import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral import MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from relinear.attention import load, options
from relinear.attention._base import Attention, Heads, Inputs, softmax_output
from relinear.errors import UserError
from relinear.files import MANIFEST
from relinear.linearize.checks import check_padding, check_piece, check_positions, check_prompt
from relinear.linearize.loading import StrictLoading
from relinear.linearize.state import RecurrentCache, nbytes

PIECE = 2048  # tokens: what the chunked forms hold of that many fits a core's caches, so a long prompt takes time linear in its length


class LinearizedAttention(nn.Module):
    """The teacher's projections around a method instead of softmax attention. Same names, same call as the layer it replaces."""

    PARTS: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")

    def __init__(self, teacher: nn.Module, method: Attention):
        super().__init__()
        for name in self.PARTS:
            if hasattr(teacher, name):
                setattr(self, name, getattr(teacher, name))
        self.layer_idx = teacher.layer_idx
        self.method = method
        self.recording: list[Tensor] | None = None  # while a list: keep each input, and answer as the teacher's softmax attention

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, T, H, D]``, k and v ``[B, T, Hkv, D]`` before any rotary embedding."""
        shape = (*x.shape[:2], -1, self.method.heads.dim)
        q, k, v = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        return (self.q_norm(q), self.k_norm(k), v) if hasattr(self, "q_norm") else (q, k, v)

    def output(self, y: Tensor) -> Tensor:
        return self.o_proj(y)

    def inputs(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, key_mask: Tensor | None) -> Inputs:
        """The method's inputs, as the teacher projects them. x ``[B, T, hidden]``."""
        return Inputs(x, *self.project(x), *(position_embeddings or (None, None)), key_mask)

    def attend(self, inputs: Inputs, state) -> tuple[Tensor, Any]:
        """The method over a piece of any length: on a CPU, where no gradient is kept, `PIECE` tokens at a time."""
        if inputs.x.is_cuda or torch.is_grad_enabled() or inputs.x.shape[1] <= PIECE:
            return self.method(inputs, state)
        outputs = []
        for piece in zip(*(repeat(None) if x is None else x.split(PIECE, 1) for x in inputs), strict=False):
            y, state = self.method(Inputs(*piece), state)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        # `Linearized.forward` sends the padding mask down as [B, 1, 1, T]; with no column, or None, every token is real.
        key_mask = None if attention_mask is None or attention_mask.shape[-1] == 0 else attention_mask[:, 0, 0]
        inputs = self.inputs(hidden_states, position_embeddings, key_mask)
        if self.recording is not None:
            self.recording.append(hidden_states)
            return self.output(softmax_output(inputs._replace(key_mask=None), self.method.heads).flatten(2)), None
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        y, state = self.attend(inputs, None if layer is None else layer.state)
        if layer is not None:
            layer.advance(state, hidden_states.shape[1])
        return self.output(y.to(hidden_states.dtype).flatten(2)), None


class FusedLinearizedAttention(LinearizedAttention):
    """The same where one projection makes q, k and v (GPT-2)."""

    PARTS = ("c_attn", "c_proj", "resid_dropout")

    def project(self, x):
        return tuple(p.unflatten(-1, (-1, self.method.heads.dim)) for p in self.c_attn(x).chunk(3, -1))

    def output(self, y):
        return self.resid_dropout(self.c_proj(y))


class Family(NamedTuple):
    """Where a teacher's class keeps the attention that is swapped."""

    layers: str = "layers"  # of the model below the output head
    attention: str = "self_attn"  # of a layer
    swapped: type[LinearizedAttention] = LinearizedAttention
    rotary_by_type: bool = False  # local and global layers rotate at different frequencies


FAMILIES: dict[type[PreTrainedModel], Family] = {
    LlamaForCausalLM: Family(),
    MistralForCausalLM: Family(),
    Qwen2ForCausalLM: Family(),
    Qwen3ForCausalLM: Family(),
    Gemma3ForCausalLM: Family(rotary_by_type=True),
    GPT2LMHeadModel: Family("h", "attn", FusedLinearizedAttention),
}


class Linearized(StrictLoading):
    """Mixed in front of the teacher's class: builds the swapped layers from the config, and calls the model with a recurrent cache."""

    family: Family
    _is_stateful = True  # transformers then refuses assisted decoding: a recurrent state cannot take rejected tokens back

    def __init__(self, config):
        super().__init__(config)
        swap(self, self.family, config.relinear)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                use_cache=None, **kwargs):  # fmt: skip
        x = input_ids if input_ids is not None else inputs_embeds
        batch, length = x.shape[:2]
        use_cache = (not self.training and self.config.use_cache) if use_cache is None else use_cache
        cache = self.make_cache() if past_key_values is None and use_cache else past_key_values
        if cache is not None and not isinstance(cache, RecurrentCache):
            raise TypeError(f"a linearized model's past_key_values is a RecurrentCache; got {type(cache).__name__}")
        if length == 0:
            raise ValueError(f"got a piece of 0 tokens, of shape {list(x.shape)}; possible: at least one")
        if cache is not None:
            cache.bind(self._kind(), batch)
        if attention_mask is not None:
            check_piece(attention_mask, batch, length, cache)
        # Masks cover the past too; the state remembers it, so the layers need this piece's columns only.
        real = torch.ones(batch, length, dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask[:, -length:].bool()
        counts = real.cumsum(1) if cache is not None or attention_mask is not None else torch.arange(1, length + 1, device=x.device)[None]
        if cache is not None and cache.lengths is not None:
            counts = counts + cache.lengths[:, None]
        positions = (counts - 1).clamp(min=0) if position_ids is None else position_ids
        check_positions(self, length + (0 if cache is None else cache.get_seq_length()), positions)
        if cache is not None:
            cache.lengths = counts[:, -1]
        # A 4-D mask passes through transformers' mask building untouched, whatever its version: no T x T matrix is ever made.
        mask = real[:, None, None, : 0 if attention_mask is None else length]
        return super().forward(
            input_ids=input_ids, attention_mask=mask, inputs_embeds=inputs_embeds, past_key_values=cache,
            position_ids=positions, use_cache=bool(use_cache), **kwargs,
        )  # fmt: skip

    def generate(self, inputs=None, *args, **kwargs):
        """As in transformers, with a recurrent cache. Raises ValueError for a prompt, mask or cache that cannot be continued."""
        prompt = next((p for p in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if p is not None), None)
        if prompt is not None:
            check_prompt(prompt, kwargs.get("attention_mask"), kwargs.get("past_key_values"))
        return super().generate(inputs, *args, **kwargs)

    def make_cache(self) -> RecurrentCache:
        """An empty recurrent cache for this model."""
        return RecurrentCache(self.config.num_hidden_layers)

    def state_bytes(self, batch: int = 1) -> int:
        """Bytes of the state of `batch` sequences, from the first token on. Layers kept as softmax add keys and values that grow."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return sum(nbytes(layer.method.init_state(batch, device="meta"), wide) for layer in self.attention_layers())

    def _kind(self) -> dict[str, Any]:
        """What a cache must have in common with the model that reads it."""
        heads = self.attention_layers()[0].method.heads
        shape = {"layers": self.config.num_hidden_layers, "heads": heads.heads, "key heads": heads.groups, "head dimension": heads.dim}
        return {**self.config.relinear, **shape}

    def _prepare_attention_mask_for_generation(self, *args, **kwargs):
        mask = super()._prepare_attention_mask_for_generation(*args, **kwargs)
        check_padding(mask)  # one that transformers made from the padding token
        return mask

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.make_cache()

    def blocks(self) -> nn.ModuleList:
        return getattr(self.base_model, self.family.layers)

    def attention_layers(self) -> list[LinearizedAttention]:
        return [getattr(block, self.family.attention) for block in self.blocks()]

    def rotary(self, x: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Each layer's rotary cosines and sines for a sequence from its start, in the dtype of x ``[B, T, hidden]``."""
        layers, embedding = len(self.attention_layers()), getattr(self.base_model, "rotary_emb", None)
        if embedding is None:
            return [None] * layers
        positions = torch.arange(x.shape[1], device=x.device)[None]
        if self.family.rotary_by_type:
            return [embedding(x, positions, kind) for kind in self.config.layer_types]
        return [embedding(x, positions)] * layers

    def method_parameters(self) -> dict[str, nn.Parameter]:
        """What the methods added to the teacher, by full name."""
        return {n: p for n, p in self.named_parameters() if ".method." in n}


def _classes(teacher: type[PreTrainedModel]) -> tuple[type, type[PreTrainedModel]]:
    """The linearized config and model class of one teacher class."""
    base = teacher.config_class
    config = type(f"Relinear{base.__name__}", (base,), {"model_type": f"relinear_{base.model_type}", "__module__": __name__})
    name = f"Relinear{teacher.__name__}"
    model = type(name, (Linearized, teacher), {"config_class": config, "family": FAMILIES[teacher], "__module__": __name__})
    globals().update({config.__name__: config, name: model})  # found by pickle and by transformers under their own names
    return config, model


CLASSES = {teacher: _classes(teacher) for teacher in FAMILIES}
for _config, _model in CLASSES.values():
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)


def _windows(model: PreTrainedModel, family: Family) -> list[int | None]:
    """The sliding window that the teacher itself limits each layer to; None where it sees everything."""
    whole = getattr(model.config, "sliding_window", None)  # of all layers, where they do not say it themselves (Mistral)
    layers = getattr(model.base_model, family.layers)
    return [getattr(getattr(layer, family.attention), "sliding_window", whole) for layer in layers]


def _kept(keep: float | Sequence[int] | None, windows: list[int | None]) -> list[int]:
    """The layers that stay softmax. See `linearize`."""
    n = len(windows)
    if keep is None:
        mixed = None in windows
        return [i for i, window in enumerate(windows) if window is not None and mixed]
    if isinstance(keep, int | float):
        if not 0 <= keep < 1:
            raise ValueError(f"keep_softmax_layers is a ratio in [0, 1) or a list of layers; got {keep}")
        return [i for i in range(n) if int((i + 1) * keep) > int(i * keep)]
    if set(keep) - set(range(n)):
        raise ValueError(f"keep_softmax_layers must be in 0..{n - 1}; got {sorted(keep)}")
    return sorted(set(keep))


def swap(model: PreTrainedModel, family: Family, recipe: dict[str, Any]) -> None:
    """Replace the attention of each layer as `recipe` ({"method", "options", "keep_softmax_layers"}) says."""
    config, windows = model.config, _windows(model, family)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for i, layer in enumerate(getattr(model.base_model, family.layers)):
        teacher, kept = getattr(layer, family.attention), i in recipe["keep_softmax_layers"]
        name = "softmax" if kept else recipe["method"]
        heads = Heads(config.hidden_size, config.num_attention_heads, groups, dim, getattr(teacher, "scaling", dim**-0.5), windows[i])
        method = load(name)(heads, options(name, {} if kept else recipe["options"]))
        device = next(teacher.parameters()).device
        setattr(layer, family.attention, family.swapped(teacher, method.to(device)))


def linearize(
    model: PreTrainedModel, method: str, *, keep_softmax_layers: float | Sequence[int] | None = None, **given
) -> PreTrainedModel:  # fmt: skip
    """Swap the attention of `model` in place and return it. Every weight the teacher had stays bit-identical.

    `given` are the method's options (`relinear.attention.<method>.Options`). Methods keep their parameters in float32.
    `keep_softmax_layers` lists the layers that stay softmax, or says what share of them, evenly spaced (Lizard Table 2: 0.5, every second
    layer). None keeps only what is linear already: the local layers of a teacher that mixes sliding windows with global attention (Gemma 3).
    Raises ValueError for an unknown method or option and for an architecture that is not supported.
    """
    if type(model) not in CLASSES:
        have = ", ".join(t.__name__ for t in CLASSES)
        raise ValueError(f"cannot linearize {type(model).__name__}; can: {have}")
    if getattr(model.config, "use_bidirectional_attention", False):
        raise ValueError("cannot linearize a teacher with use_bidirectional_attention=True; can: causal language models")
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        # Not in transformers' Gemma 3, whatever its configuration says: what it computes is the teacher that a method mimics.
        warnings.warn("attn_logit_softcapping is set, but transformers does not apply it; the linearized model does not either", stacklevel=2)
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(quantizer, "packed_modules", None) == {}:
        quantizer.remove_quantization_config(model)  # read from GGUF: marked as quantised and so not to be saved, its weights being plain
    family, checked = FAMILIES[type(model)], options(method, given)
    recipe = {
        "method": method, "options": checked.model_dump(mode="json"),
        "keep_softmax_layers": _kept(keep_softmax_layers, _windows(model, family)),
    }  # fmt: skip
    config, linearized = CLASSES[type(model)]
    swap(model, family, recipe)
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures", "transformers_version")}
    model.config = config.from_dict({**settings, "relinear": recipe, "architectures": [linearized.__name__]})
    model.config._attn_implementation = "sdpa"
    model.__class__ = linearized
    return model


def _unmasked(module, query, key, value, attention_mask, scaling=None, **kwargs) -> tuple[Tensor, None]:
    """torch's fused attention without a mask. One query reads its group's keys once: the heads of a group stand in as rows."""
    batch, heads, length, dim = query.shape
    if length == 1:
        out = F.scaled_dot_product_attention(query.view(batch, key.shape[1], -1, dim), key, value, scale=scaling).view(batch, heads, 1, dim)
    else:
        out = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2), None


UNMASKED = "unmasked"
AttentionInterface.register(UNMASKED, _unmasked)  # of an implementation without a mask function transformers asks for no mask


def maskless(model: PreTrainedModel) -> bool:
    """Have a model attend without looking at a mask, in place, for inputs without padding; whether it can.

    Linearized models do so without being told. A teacher cannot where it limits its layers to sliding windows.
    """
    if isinstance(model, Linearized):
        return True
    if type(model) not in FAMILIES or any(_windows(model, FAMILIES[type(model)])):
        return False
    model.set_attn_implementation(UNMASKED)
    return True


NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)  # Gemma's adds 1 to its weight


def fuse_norms(model: nn.Module) -> None:
    """Compute each RMSNorm with torch's kernel for it, in place: for training on a GPU, where transformers' seven take a sixth of a step of
    SmolLM2. It rounds to bfloat16 once where those do twice."""
    for layer in model.modules():
        if isinstance(layer, NORMS):
            layer.forward = MethodType(_norm, layer)  # a method: a copy of the model has its own


def _norm(layer: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], layer.weight, layer.variance_epsilon)


def load_teacher(folder: Path | str, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The teacher of a `teacher` stage folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()


def save_method(model: PreTrainedModel, path: Path) -> None:
    """The parameters that the method added, as safetensors."""
    save_file({n: p.detach().cpu().contiguous() for n, p in model.method_parameters().items()}, path)


def _load_into(model: PreTrainedModel, path: Path, expected: set[str]) -> None:
    """Load named tensors; exactly the expected ones, else ValueError."""
    tensors = load_file(path)
    if set(tensors) != expected:
        raise ValueError(f"{path}: missing {sorted(expected - set(tensors))[:3]}, unexpected {sorted(set(tensors) - expected)[:3]}")
    model.load_state_dict(tensors, strict=False)


def assemble(
    teacher: Path, method: str, given: dict, *, distilled: Path | None = None, finetuned: Path | None = None,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> PreTrainedModel:  # fmt: skip
    """A run's model from its stage folders: the teacher, its attention swapped, then what each stage trained.

    The method `softmax` leaves the teacher as transformers has it. Raises ValueError where a folder's tensors are not the model's.
    """
    model = load_teacher(teacher, dtype, device)
    if method != "softmax":
        model = linearize(model, method, **given)
    if distilled is not None:
        _load_into(model, distilled / "method.safetensors", set(model.method_parameters()))
    if finetuned is None:
        return model.eval()
    if (finetuned / "model.safetensors").is_file():
        _load_into(model, finetuned / "model.safetensors", {n for n, _ in model.named_parameters()})
    if (finetuned / "method.safetensors").is_file():
        _load_into(model, finetuned / "method.safetensors", set(model.method_parameters()))
    if (finetuned / "adapter").is_dir():
        # In the model's dtype: peft's default computes float32 adapters beside bfloat16 weights, at three times the cost.
        model = PeftModel.from_pretrained(model, finetuned / "adapter", autocast_adapter_dtype=False)
    return model.to(device).eval()


def teacher_of(run: Path) -> Path:
    """The folder of a run's teacher: beside its runs or, of committed results (`results/reference/<scale>`), made anew in `results/<scale>`.

    Raises UserError where none is, and where its weights are others than the run's.
    """
    scale = run.parents[1]
    own, made = scale / "teacher", scale.parents[1] / scale.name / "teacher"
    if not own.is_dir():
        raise UserError(f"the run {run} has lost its teacher: {own} is not there")
    if not (scale / MANIFEST).is_file():
        return own
    if not (made / "run.json").is_file():
        raise UserError(f"the teacher of {run} is not in {made}; `relinear teacher --scale {scale.name}` makes it")
    records = (json.loads((folder / "run.json").read_text()) for folder in (own, made))
    theirs, ours = ({name: x["sha256"] for name, x in r["artefacts"].items() if name.endswith(".safetensors")} for r in records)
    if theirs != ours:
        raise UserError(f"{made} is another teacher than that of {run}: by their run.json the weights differ")
    return made


def load_run(folder: Path | str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """The model of a run folder (`results/<scale>/runs/<run>`), as far as its stages are finished. Raises UserError for any other folder."""
    folder = Path(folder).resolve()
    finished = [s for s in ("distill", "finetune", "evaluate") if (folder / s / "run.json").is_file()]
    if not finished:
        raise UserError(f"{folder} is no run: it has no finished distill, finetune or evaluate stage; a run is results/<scale>/runs/<run>")
    teacher = teacher_of(folder)
    config = json.loads((folder / finished[0] / "run.json").read_text())["config"]
    trained = {s: folder / s if s in finished else None for s in ("distill", "finetune")}
    return assemble(
        teacher, config["method"], config["options"], distilled=trained["distill"], finetuned=trained["finetune"], dtype=dtype, device=device
    )


def trained_parameters(stages: dict[str, Path]) -> int:
    """How many distinct parameters a run's stages trained, from what they saved."""
    counts: dict[str, int] = {}
    for folder in stages.values():
        for path in sorted(folder.rglob("*.safetensors")):
            with safe_open(path, "pt") as f:
                counts |= {n: math.prod(f.get_slice(n).get_shape()) for n in f.keys()}  # noqa: SIM118
    return sum(counts.values())
