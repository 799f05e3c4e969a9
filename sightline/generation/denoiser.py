"""The denoiser: the UNet of diffusers, told the time and a representation, with a Linear for each encoder.

    embedding = time_embedding(t) + Linear((h − μ) / s),      GroupNorm(x) · (1 + scale(embedding)) + shift(embedding)

which is what the released code of RCDM does (Bordes et al. 2022). With `unshuffle` the UNet sees squares of pixels as
channels, a quarter of the places at 2, which makes a step four times cheaper.

Files of a model, in the folder of a checkpoint:

config.json, diffusion_pytorch_model.safetensors   the UNet: `diffusers.UNet2DModel.from_pretrained(folder)`
scheduler_config.json                              the scheduler that draws samples
conditions.safetensors                             of encoder i: i.mean, i.scale, i.linear.weight, i.linear.bias
conditions.json                                    encoders, features, size of the pictures, process of noise

B pictures, D width of a representation, E of the embedding.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sightline.core.errors import InputError, first_line, nearest
from sightline.core.settings import make_settings
from sightline.generation.noise import PROCESSES, Process, diffusers, process_named

RESAMPLE = ("conv", "resnet")
FILE = "conditions.json"


@dataclass(frozen=True)
class Shape:
    """What the pictures and the UNet are like."""

    size: int = 24  # pixels of a picture
    unshuffle: int = 2  # squares of so many pixels become channels
    channels: tuple[int, ...] = (64, 128)  # of each level of the UNet, the finest first
    layers: int = 1  # residual blocks of a level
    attention: tuple[int, ...] = ()  # levels with attention, by how many places they have in a row; the coarsest has it
    head_width: int = 64  # channels of a head of attention
    resample: str = "conv"  # or resnet: up and down by residual blocks, and all norms, as in ADM
    process: str = "flow"  # of noise, or ddpm

    def __post_init__(self) -> None:
        if self.process not in PROCESSES:
            raise InputError(f"There is no process {self.process!r} of noise{nearest(self.process, PROCESSES)}")
        if self.resample not in RESAMPLE:
            raise InputError(f"There is no way {self.resample!r} to resample{nearest(self.resample, RESAMPLE)}")
        for key in ("size", "unshuffle", "layers", "head_width"):
            if getattr(self, key) < 1:
                raise InputError(f"{key} is {getattr(self, key)}, but at least 1 is needed")
        if not self.channels or min(self.channels) < 1:
            raise InputError(f"channels is {list(self.channels)}, but a number for each level is expected")
        if self.size % (unit := self.unshuffle * 2 ** (len(self.channels) - 1)):
            raise InputError(
                f"Pictures of {self.size} pixels cannot be halved {len(self.channels) - 1} times after unshuffle="
                f"{self.unshuffle}; choose a multiple of {unit}"
            )
        for places in self.attention:
            if places not in self.places:
                raise InputError(f"No level has {places} places in a row; attention can be at {list(self.places)}")

    @property
    def places(self) -> tuple[int, ...]:
        """Places in a row of each level."""
        return tuple(self.size // self.unshuffle // 2**level for level in range(len(self.channels)))

    def unet(self, outputs: int) -> dict[str, Any]:
        """Settings of `UNet2DModel`."""
        with_attention = [places in self.attention for places in self.places]
        plain = {"conv": ("DownBlock2D", "UpBlock2D"), "resnet": ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D")}
        down, up = plain[self.resample]
        numbers, groups = 3 * self.unshuffle**2, math.gcd(32, *self.channels)
        return {
            "sample_size": self.size // self.unshuffle,
            "in_channels": numbers,
            "out_channels": numbers * outputs,
            "block_out_channels": self.channels,
            "layers_per_block": self.layers,
            "down_block_types": tuple("AttnDownBlock2D" if here else down for here in with_attention),
            "up_block_types": tuple("AttnUpBlock2D" if here else up for here in reversed(with_attention)),
            "downsample_type": self.resample,
            "upsample_type": self.resample,
            "attention_head_dim": min(self.head_width, *self.channels),
            "norm_num_groups": groups,
            # With scale and shift diffusers leaves out the norm before attention at the coarsest level, which ADM has.
            "attn_norm_num_groups": groups if self.resample == "resnet" else None,
            "class_embed_type": "identity",
            "resnet_time_scale_shift": "scale_shift",
        }


class Condition(nn.Module):
    """A representation on its way into the UNet: centred, scaled by one number, and a Linear."""

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(()))
        self.linear = nn.Linear(width, embedding)

    def forward(self, features: Tensor) -> Tensor:  # (B, D) -> (B, E)
        """The embedding that is added to that of the time."""
        embedded: Tensor = self.linear((features - self.mean) / self.scale)
        return embedded


class Denoiser(nn.Module):
    """The UNet and the conditions of all encoders."""

    def __init__(self, shape: Shape, widths: Sequence[int]) -> None:
        super().__init__()
        self.shape, self.outputs = shape, process_named(shape.process).outputs
        self.unet = diffusers().UNet2DModel(**shape.unet(self.outputs))
        nn.init.zeros_(self.unet.conv_out.weight)  # at first every picture is the mean one
        nn.init.zeros_(self.unet.conv_out.bias)
        self.conditions = nn.ModuleList(Condition(width, 4 * shape.channels[0]) for width in widths)

    def embed(self, features: Sequence[Tensor], which: Tensor) -> Tensor:
        """Embeddings (B, E): `which` (B,) says whose representation a picture has, `features` those of each encoder.

        An encoder without pictures is part of the computation all the same, or processes would wait for its gradients.
        """
        embedded = torch.zeros(len(which), 4 * self.shape.channels[0], device=which.device)
        for number, (condition, own) in enumerate(zip(self.conditions, features, strict=True)):
            rows = (which == number).nonzero()[:, 0]
            embedded = embedded.index_copy(0, rows, condition(own.to(which.device)).float())
        return embedded

    def forward(self, noisy: Tensor, times: Tensor, embedded: Tensor) -> Tensor:
        """(B, 3, h, w) → (B, 3 · outputs, h, w)."""
        small = F.pixel_unshuffle(noisy, self.shape.unshuffle)
        (seen,) = self.unet(small, times, class_labels=embedded, return_dict=False)
        return torch.cat([F.pixel_shuffle(part, self.shape.unshuffle) for part in seen.chunk(self.outputs, 1)], 1)


@dataclass(frozen=True, eq=False)
class Model:
    """A trained denoiser, and what it was conditioned on."""

    denoiser: Denoiser
    encoders: tuple[Mapping[str, Any], ...]  # name, reference, weights and feature of each

    @property
    def process(self) -> Process:
        return process_named(self.denoiser.shape.process)

    @property
    def size(self) -> int:
        return self.denoiser.shape.size

    def embed(self, number: int, features: Tensor) -> Tensor:
        """Embeddings of representations of one encoder."""
        embedded: Tensor = self.denoiser.conditions[number](features.to(self.device))
        return embedded

    @property
    def device(self) -> torch.device:
        return next(self.denoiser.parameters()).device

    def network(self, embedded: Tensor) -> Any:
        """What a process of noise calls."""
        return lambda noisy, times: self.denoiser(noisy, times, embedded)


def save_model(folder: Path, denoiser: Denoiser, encoders: Sequence[Mapping[str, Any]]) -> None:
    """Write the files of a model, in the format of diffusers."""
    denoiser.unet.save_pretrained(folder)
    process_named(denoiser.shape.process).scheduler().save_pretrained(folder)
    tensors = {name: value.detach().cpu().contiguous() for name, value in denoiser.conditions.state_dict().items()}
    save_file(tensors, folder / "conditions.safetensors")
    about = {
        "encoders": [dict(encoder) for encoder in encoders],
        "shape": asdict(denoiser.shape),
        "pictures": "RGB in [-1, 1]; the UNet sees them after torch.nn.functional.pixel_unshuffle by shape.unshuffle",
        "condition": "class_labels of the UNet = i.linear((representation - i.mean) / i.scale)",
    }
    (folder / FILE).write_text(json.dumps(about, indent=1))


def load_model(folder: Path, device: torch.device | str = "cpu") -> Model:
    diffusers()
    try:
        about = json.loads((folder / FILE).read_text())
        tensors = load_file(folder / "conditions.safetensors")
        widths = [tensors[f"{number}.mean"].shape[0] for number in range(len(about["encoders"]))]
        denoiser = Denoiser(make_settings(Shape, about["shape"]), widths)
        denoiser.unet = diffusers().UNet2DModel.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
        denoiser.conditions.load_state_dict(tensors)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"Cannot read the diffusion model in {str(folder)!r}: {first_line(error)}") from error
    return Model(denoiser.to(device).eval().requires_grad_(False), tuple(about["encoders"]))
