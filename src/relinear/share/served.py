"""Linearized models in vLLM: a folder that `relinear export` or `save_pretrained` wrote is served where
relinear is installed beside vLLM. vLLM finds them by `relinear.share.vllm_plugin`.

The model is the same modules as everywhere in relinear, called with the tokens of all requests of a step,
one after another. A layer with a state of fixed size has a page for each sequence in vLLM's cache, as Mamba
layers have. It holds the bytes of the method's state, whatever the method: one layer may have a window and a
linear state, and the memory of a sequence does not grow. vLLM may read a prompt in pieces, and go on from
the pages of an earlier prompt with the same beginning. Layers that see all positions have vLLM's own
attention, with paged keys and values.

Written for vLLM 0.32: `MambaBase` and `IsHybrid` there say what a layer and a model with states provide.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from relinear.attention._base import Attention as Method
from relinear.attention._base import Inputs
from relinear.errors import UserError
from relinear.families._layer import LinearizedAttention
from relinear.linearize.model import Linearized
from relinear.linearize.state import tree_map

ALIGNED = 16  # bytes: the places of a state's tensors in its page are multiples


class Leaf(NamedTuple):
    """A tensor of a state: where it lies in the page of a sequence."""

    at: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Page:
    """The places of a method's state, whatever its nested tuples, in one page of bytes."""

    def __init__(self, method: Method, dtype: torch.dtype):
        self.state = method.init_state(1, "meta", dtype)
        self.leaves: list[Leaf] = []
        self.bytes = 0
        tree_map(self._add, self.state)

    def _add(self, x: Tensor) -> None:
        self.leaves.append(Leaf(self.bytes, tuple(x.shape[1:]), x.dtype))
        self.bytes += math.ceil(x.nbytes / ALIGNED) * ALIGNED

    def views(self, pages: Tensor) -> Any:
        """The state of all sequences at once, of uint8 pages ``[N, bytes]``: the same memory."""
        leaves = iter(self.leaves)

        def view(_) -> Tensor:
            leaf = next(leaves)
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            return pages[:, leaf.at : leaf.at + size].view(leaf.dtype).view(len(pages), *leaf.shape)

        return tree_map(view, self.state)


@dataclass
class Step:
    """The sequences that a step has tokens of, and where their states lie."""

    starts: list[int]  # of each sequence's tokens among all, and their end
    before: list[int]  # tokens that each sequence has had
    pages: Tensor  # [sequences] int64


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes a `Step` of what vLLM has scheduled."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):  # abstract there
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Step:
        """The step, with one look at the lengths for all layers."""
        common = common_attn_metadata
        table = mamba_get_block_table_tensor(
            common.block_table_tensor,
            common.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        return Step(
            common.query_start_loc_cpu.tolist(),
            common.compute_num_computed_tokens().tolist(),
            table[:, 0].long(),
        )


class Backend(AttentionBackend):
    """The name of layers with a state, and what makes their metadata."""

    @staticmethod
    def get_name() -> str:
        """As messages call it."""
        return "RELINEAR"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """The class that makes the metadata."""
        return StepBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Whether a sequence has a state in place of keys and values."""
        return True


class StateLayer(MambaBase, nn.Module):
    """A linearized attention layer whose states lie in vLLM's cache, one page a sequence."""

    def __init__(self, attention: LinearizedAttention, name: str, config: VllmConfig):
        nn.Module.__init__(self)
        self.attention, self.name = attention, name
        self.page = Page(attention.method, config.model_config.dtype)
        self.kv_cache = (torch.empty(0),)
        config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """One state: the page."""
        return ((self.page.bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Bytes."""
        return (torch.uint8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Of the kinds that vLLM names, the one of linear attention."""
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Ours, in place of the kind's."""
        return Backend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take over the pages of all sequences."""
        super().bind_kv_cache(kv_cache)
        self.states = self.page.views(self.kv_cache[0])

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        """As `LinearizedAttention.forward`, of the tokens ``[1, N, hidden]`` of a step."""
        inputs = self.attention.inputs(hidden_states, position_embeddings, None)
        steps = get_forward_context().attn_metadata
        # without metadata vLLM asks how much memory a step takes
        y = self.attention.attend(inputs, None)[0] if steps is None else self._step(inputs, steps[self.name])
        return self.attention.output(y.to(hidden_states.dtype).flatten(2)), None

    def _step(self, inputs: Inputs, step: Step) -> Tensor:
        """Head outputs ``[1, N, H, D]``: sequences that go on by one token together, others one by one."""
        y = torch.zeros_like(inputs.q, dtype=inputs.v.dtype)
        lengths = [end - start for start, end in zip(step.starts, step.starts[1:], strict=False)]
        several = [i for i, n in enumerate(lengths) if n == 1 and step.before[i]]
        if several:
            sequences = torch.tensor(several, device=y.device)
            tokens = torch.tensor([step.starts[i] for i in several], device=y.device)
            one = Inputs(*(None if x is None else x[0, tokens][:, None] for x in inputs))
            y[0, tokens] = self._attend(one, step.pages[sequences], goes_on=True)[:, 0]
        for i, n in enumerate(lengths):
            if n and not (n == 1 and step.before[i]):
                tokens = slice(step.starts[i], step.starts[i + 1])
                piece = Inputs(*(None if x is None else x[:, tokens] for x in inputs))
                y[:, tokens] = self._attend(piece, step.pages[i : i + 1], goes_on=step.before[i] > 0)
        return y

    def _attend(self, inputs: Inputs, pages: Tensor, *, goes_on: bool) -> Tensor:
        """Head outputs of sequences of equal length, whose states are read from their pages and written
        there."""
        state = tree_map(lambda x: x[pages], self.states) if goes_on else None
        y, after = self.attention.attend(inputs, state)
        tree_map(lambda x, new: x.index_copy_(0, pages, new.to(x.dtype)), self.states, after)
        return y.to(inputs.v.dtype)


class SoftmaxLayer(nn.Module):
    """A layer that stays softmax and sees all positions: vLLM's attention, with its paged keys and values."""

    def __init__(self, attention: LinearizedAttention, name: str, config: VllmConfig):
        super().__init__()
        self.attention, heads = attention, attention.method.heads
        self.attend = Attention(
            heads.heads,
            heads.dim,
            heads.scale,
            num_kv_heads=heads.groups,
            cache_config=config.cache_config,
            prefix=name,
        )

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        """As `LinearizedAttention.forward`, of the tokens ``[1, N, hidden]`` of a step."""
        inputs = self.attention.inputs(hidden_states, position_embeddings, None)
        q, k = inputs.rotated()
        y = self.attend(*(x[0].flatten(1) for x in (q, k, inputs.v)))
        return self.attention.output(y[None]), None


class ServedForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """A linearized model as vLLM calls one."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        _require_possible(vllm_config)
        self.config = vllm_config.model_config.hf_config
        self.model = _built(self.config, vllm_config.model_config.dtype)
        if all(attention.method.grows for attention in self.model.attention_layers()):
            raise UserError(
                "each layer of this model is softmax over all positions, so none has a state; possible: the"
                " teacher's own class, which vLLM has"
            )
        self.tensors = self.model.state_dict(keep_vars=True)  # by the names that folders have
        for i, block in enumerate(self.model.blocks()):
            place = self.model.layout.attention
            attention = block.get_submodule(place)
            layer = SoftmaxLayer if attention.method.grows else StateLayer
            block.set_submodule(place, layer(attention, f"{prefix}layers.{i}", vllm_config))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """The embeddings of tokens."""
        return self.model.get_input_embeddings()(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        """Hidden states ``[N, hidden]`` after the last layer, of the tokens ``[N]`` of a step."""
        given = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        out = self.model.base_model(
            **{name: x[None] for name, x in given.items()},
            position_ids=positions[None],
            # passes through transformers' mask building untouched, as in `Linearized.forward`
            attention_mask=torch.ones(1, 1, 1, 0, dtype=torch.bool, device=positions.device),
            use_cache=False,
        )
        return out.last_hidden_state[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits ``[N, vocabulary]``."""
        logits = self.model.get_output_embeddings()(hidden_states)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def load_weights(self, weights) -> set[str]:
        """Copy a folder's tensors into the model. Raises UserError for one that is missing, too many or of
        another shape."""
        copied = set()
        for name, tensor in weights:
            if name not in self.tensors or self.tensors[name].shape != tensor.shape:
                raise UserError(f"{name} {list(tensor.shape)} of the folder is no tensor of its model")
            self.tensors[name].data.copy_(tensor)
            copied.add(id(self.tensors[name]))  # of tied tensors a folder has one
        if missing := [name for name, tensor in self.tensors.items() if id(tensor) not in copied]:
            raise UserError(f"the folder lacks tensors of its model: {', '.join(missing)}")
        return {name for name, _ in self.named_parameters()}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig):
        """The shape of the largest page of a layer."""
        dtype = vllm_config.model_config.dtype
        with torch.device("meta"):
            model = _built(vllm_config.model_config.hf_config, dtype)
        pages = [Page(x.method, dtype) for x in model.attention_layers() if not x.method.grows]
        return ((max((page.bytes for page in pages), default=0),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig):
        """Bytes."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls):
        """A page is copied whole."""
        return (get_temporal_copy_spec,)


def _built(config, dtype: torch.dtype) -> Linearized:
    """The model of a config, without weights; what methods add is float32, as everywhere."""
    config = copy.deepcopy(config)
    if getattr(config, "layer_types", ()) is None:  # `relinear.share.vllm_plugin` has removed it
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # which the initialization would have done
    for parameter in model.method_parameters().values():
        parameter.data = parameter.data.float()
    return model.eval().requires_grad_(False)


def _require_possible(config: VllmConfig) -> None:
    """Raises UserError for what vLLM is asked to do and states do not allow."""
    parallel = config.parallel_config
    for what, got in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
    ):
        if got > 1:
            raise UserError(f"a linearized model is served by one device; got {what}={got}, possible: 1")
    for what, got in (
        ("quantization", config.model_config.quantization),
        ("speculative_config", config.speculative_config),
        ("lora_config", config.lora_config),
    ):
        if got is not None:
            raise UserError(f"a linearized model is served without {what}; got {got}, possible: leave it out")
