"""ViT: an encoder of a picture's patches behind a first token, whose last state one linear layer reads as
classes (Dosovitskiy et al. 2020).

A picture comes as a sequence of its pixels, row by row, the channels of each side by side: numbers from 0 to
255, as data, trainings and measures have tokens. Everything after that is transformers'
ViTForImageClassification.
"""

from typing import Literal, Self

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, ViTConfig, ViTForImageClassification
from transformers.models.vit.modeling_vit import ViTPatchEmbeddings

from relinear.attention import _base
from relinear.errors import UserError
from relinear.families import _family
from relinear.families._layer import EncoderAttention, Layout
from relinear.families.tiny import number_tokenizer
from relinear.folders import config_of, load_whole, require_sized

VALUES = 256  # of a pixel's channel
HALF = 127.5  # the hub's checkpoints read values from -1 to 1


class PixelConfig(ViTConfig):
    """The configuration of a ViT that reads pixels."""

    model_type = "vit_of_pixels"
    vocab_size: int = VALUES

    @property
    def pixels(self) -> int:
        """The numbers that a picture comes as."""
        return self.image_size**2 * self.num_channels

    @property
    def max_position_embeddings(self) -> int:
        """The places of the first token and of the patches, which a method that reads where tokens stand is
        told."""
        return 1 + (self.image_size // self.patch_size) ** 2


class Positions(nn.Module):
    """A vector for the first token and for each patch. An encoder is asked how many tokens its positions are
    for: here as many as `pixels`."""

    padding_idx = None

    def __init__(self, patches: int, pixels: int, width: int):
        super().__init__()
        self.weight, self.num_embeddings = nn.Parameter(torch.zeros(1, 1 + patches, width)), pixels


class Embeddings(nn.Module):
    """The first token and the patches of a picture, each with its position."""

    def __init__(self, config: PixelConfig):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.patch_embeddings = ViTPatchEmbeddings(config)
        self.position_embeddings = Positions(
            self.patch_embeddings.num_patches, config.pixels, config.hidden_size
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        for drawn in (
            self.cls_token,
            self.position_embeddings.weight,
            self.patch_embeddings.projection.weight,
        ):
            nn.init.trunc_normal_(drawn, std=config.initializer_range)
        nn.init.zeros_(self.patch_embeddings.projection.bias)

    def forward(self, pixels: Tensor, **kwargs) -> Tensor:
        """Vectors ``[B, 1 + patches, width]`` of pictures ``[B, channels, side, side]``."""
        patches = self.patch_embeddings(pixels)
        return self.dropout(
            torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1)
            + self.position_embeddings.weight
        )


class PixelViT(ViTForImageClassification):
    """A ViT with its classes, of pictures that come as pixels."""

    config_class = PixelConfig
    main_input_name = "input_ids"

    def __init__(self, config: PixelConfig):
        super().__init__(config)
        self.vit.embeddings = Embeddings(config)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        token_type_ids=None,
        **kwargs,
    ):
        """`logits` ``[B, classes]`` of pictures ``[B, pixels]``, which are whole: there is no padding to
        mask. Raises ValueError for others."""
        if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] != self.config.pixels:
            got = "none" if input_ids is None else list(input_ids.shape)
            side, channels = self.config.image_size, self.config.num_channels
            raise ValueError(
                f"pictures are [batch, {side} x {side} x {channels} = {self.config.pixels}] pixels; got {got}"
            )
        picture = input_ids.view(
            -1, self.config.image_size, self.config.image_size, self.config.num_channels
        ).permute(0, 3, 1, 2)
        return super().forward(pixel_values=(picture.float() / HALF - 1).to(self.dtype), **kwargs)

    def save_pretrained(self, *args, save_original_format: bool = False, **kwargs):
        """As transformers', the tensors by the names that they have here, and not by those of the first
        ViTs."""
        return super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)


AutoConfig.register(PixelConfig.model_type, PixelConfig)
AutoModel.register(PixelConfig, PixelViT)


class PatchAttention(EncoderAttention):
    """ViT's projections around a method. A mask is of pixels, all of which are there, and not of patches."""

    def inputs(self, x, position_embeddings, key_mask):
        """The method's inputs, with no padding among them."""
        return super().inputs(x, position_embeddings, None)


class Options(_base.Options):
    """Sizes of one from scratch, as ViTConfig names them; `classes`: how many it tells apart."""

    classes: PositiveInt
    image_size: PositiveInt
    patch_size: PositiveInt
    num_channels: Literal[1, 3] = 1
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 2
    initializer_range: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _fit(self) -> Self:
        for whole, part in (("hidden_size", "num_attention_heads"), ("image_size", "patch_size")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{whole} must be a multiple of {part}, {getattr(self, part)}")
        return self


class Family(_family.Family):
    """ViT: an encoder of pictures, with a layer that tells their classes."""

    Options = Options
    layouts = {PixelViT: Layout("layers", "attention", PatchAttention)}

    def positions(self, model):
        """The pixels of its pictures."""
        return model.config.pixels

    def open(self, folders, dtype):
        """Model and a tokenizer of pixels, out of a folder with a ViTForImageClassification, or one that was
        saved here. Raises UserError for any other."""
        folder = folders[0]
        if len(folders) > 1 or not (folder / "config.json").is_file():
            raise UserError(
                f"{', '.join(map(str, folders))} holds no one config.json; family 'vit' opens one folder with"
                " it and safetensors"
            )
        config = config_of(folder)
        kind = {ViTConfig: ViTForImageClassification, PixelConfig: PixelViT}.get(type(config))
        if kind is None or not isinstance(config.image_size, int):
            raise UserError(
                f"{folder} holds a model of type {config.model_type!r}; family 'vit' opens ViTs of square"
                " pictures"
            )
        require_sized(folder, kind)
        found = load_whole(kind, folder, dtype, config=config)
        if kind is PixelViT:
            return found.eval(), number_tokenizer(VALUES)
        settings = {
            k: v
            for k, v in config.to_dict().items()
            if k not in ("model_type", "architectures", "transformers_version")
        }
        model, table = (
            PixelViT(PixelConfig.from_dict(settings)).to(dtype),
            "vit.embeddings.position_embeddings",
        )
        model.load_state_dict(
            {
                f"{name}.weight" if name == table else name: tensor
                for name, tensor in found.state_dict().items()
            }
        )
        return model.eval(), number_tokenizer(VALUES)

    def random(self, options, seed, dtype):
        """A ViT of random weights, and a tokenizer with one token for each value of a pixel."""
        given = Options.parse(self.name, dict(options))
        config = PixelConfig(**given.model_dump(exclude={"classes"}), num_labels=given.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return PixelViT(config).to(dtype).eval(), number_tokenizer(VALUES)
