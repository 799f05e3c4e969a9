"""Projection heads: the layers that an objective trains behind the features of an encoder, and then looks through.

A head is a row of layers,

    y = activation(norm(W x + b)),        x divided by its length first where the layer is a `unit` one

described by head.json, so that neither the recipe nor the code of a training is needed to build it again:

FOLDER/head.json          {"layers": [{"part": "projector", "inputs": 96, "outputs": 512, …}, …]}
FOLDER/head.safetensors   0.linear.weight, 0.norm.running_mean, … of each layer by its number

A predictor goes on where the projector ends. Weights of length one (the last layer of DINO, the prototypes of MSN) are
kept as the matrix W that they amount to.

B images, D width of the features.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sightline.core.errors import InputError, nearest
from sightline.core.files import write_atomically
from sightline.encoders.files.weights import read_weights

ACTIVATIONS: dict[str, type[nn.Module]] = {"": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU}
FILES = ("head.json", "head.safetensors")


@dataclass(frozen=True)
class Layer:
    """What a layer of a head consists of."""

    part: str  # what it belongs to: projector, predictor, prototypes
    inputs: int
    outputs: int
    bias: bool = True
    unit: bool = False  # its inputs are divided by their length first
    norm: str = ""  # "batch": batch normalisation; "batch, not affine": without scale and shift
    activation: str = ""

    def __post_init__(self) -> None:
        for key, known in (("norm", ("", "batch", "batch, not affine")), ("activation", tuple(ACTIVATIONS))):
            if (given := getattr(self, key)) not in known:
                raise InputError(f"A head has no {key} {given!r}{nearest(given, known)}")


class Trained(NamedTuple):
    """A layer and its weights: linear.weight, linear.bias, norm.running_mean, …"""

    layer: Layer
    weights: Mapping[str, Tensor]


def empty_head(layers: Sequence[Layer]) -> nn.Sequential:
    """A head whose weights are yet to be loaded; no random numbers are drawn for them."""
    with torch.device("meta"):
        head = nn.Sequential(*map(_Layer, layers))
    return head.to_empty(device="cpu").eval()


class _Layer(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.unit = layer.unit
        self.linear = nn.Linear(layer.inputs, layer.outputs, layer.bias)
        self.norm = nn.BatchNorm1d(layer.outputs, affine=layer.norm == "batch") if layer.norm else nn.Identity()
        self.activation = ACTIVATIONS[layer.activation]()

    def forward(self, x: Tensor) -> Tensor:  # (B, inputs) -> (B, outputs)
        y: Tensor = self.activation(self.norm(self.linear(F.normalize(x, dim=1) if self.unit else x)))
        return y


class Projected(nn.Module):
    """An encoder of timm and the head that it feeds with its pooled features."""

    def __init__(self, encoder: Any, head: nn.Sequential) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, h, w) -> (B, outputs)
        """What the last layer of the head gives."""
        pooled = self.encoder.forward_head(self.encoder.forward_features(images), pre_logits=True)
        outputs: Tensor = self.head(pooled)
        return outputs


# From the weights of a training, ours or an official one


def mlp_layers(state: Mapping[str, Tensor], part: str, activation: str) -> tuple[Trained, ...]:
    """The layers of an `nn.Sequential` of linear layers, batch normalisations and activations, by its state dict.

    A linear layer begins each of them; all but the last one end in the activation.

    >>> state = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).state_dict()
    >>> for layer, weights in mlp_layers(state, "projector", "relu"):
    ...     print(layer.inputs, layer.outputs, layer.bias, layer.norm, layer.activation, len(weights))
    4 8 False batch relu 6
    8 2 True   2
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name in sorted(state, key=_place):
        module, _, weight = name.rpartition(".")
        modules.setdefault(module, {})[weight] = state[name].detach()
    groups: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # a linear layer and the norm after it
    for weights in modules.values():
        if "weight" in weights and weights["weight"].ndim == 2:
            groups.append((weights, {}))
        else:
            groups[-1][1].update(weights)
    return tuple(
        Trained(
            Layer(
                part,
                inputs=linear["weight"].shape[1],
                outputs=linear["weight"].shape[0],
                bias="bias" in linear,
                norm="" if not norm else "batch" if "weight" in norm else "batch, not affine",
                activation=activation if number < len(groups) else "",
            ),
            {f"linear.{key}": value for key, value in linear.items()}
            | {f"norm.{key}": value for key, value in norm.items()},
        )
        for number, (linear, norm) in enumerate(groups, 1)
    )


def _place(name: str) -> int:
    """The number of a module of an `nn.Sequential`; a single layer has none."""
    first = name.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def unit_layer(weight: Tensor, part: str = "prototypes") -> Trained:  # (outputs, inputs)
    """The products of inputs of length one with the rows of a matrix."""
    weight = weight.detach()
    layer = Layer(part, weight.shape[1], weight.shape[0], bias=False, unit=True)
    return Trained(layer, {"linear.weight": weight})


def state_of(head: Sequence[Trained]) -> dict[str, Tensor]:
    return {f"{number}.{name}": value for number, (_, own) in enumerate(head) for name, value in own.items()}


def parts_in_words(layers: Sequence[Layer]) -> str:
    """Which sites are which part of a head.

    >>> parts_in_words([Layer("projector", 4, 4), Layer("projector", 4, 4), Layer("prototypes", 4, 9)])
    'head.0 and head.1 are the projector, head.2 the prototypes'
    """
    sites: dict[str, list[str]] = {}
    for number, layer in enumerate(layers):
        sites.setdefault(layer.part, []).append(f"head.{number}")
    joined = {
        part: names[0] if len(names) == 1 else (" to " if len(names) > 2 else " and ").join((names[0], names[-1]))
        for part, names in sites.items()
    }
    (first, where), *others = joined.items()
    be = "is" if len(sites[first]) == 1 else "are"
    return ", ".join([f"{where} {be} the {first}", *(f"{where} the {part}" for part, where in others)])


# On disk


def save_head(head: Sequence[Trained], folder: Path) -> None:
    """Write head.json and head.safetensors beside an encoder."""
    from safetensors.torch import save

    about = {"layers": [asdict(layer) for layer, _ in head]}
    tensors = {name: value.cpu().contiguous().clone() for name, value in state_of(head).items()}
    write_atomically(folder / "head.safetensors", save(tensors))
    write_atomically(folder / "head.json", json.dumps(about, indent=2).encode())


def read_head(folder: Path) -> tuple[list[Layer], dict[str, Tensor]]:
    """The layers of the head in a folder, and the state dict of an `empty_head` of them."""
    if not all((folder / name).is_file() for name in FILES):
        raise InputError(f"{str(folder)!r} has no projection head ({' and '.join(FILES)}): leave head=true out")
    try:
        layers = [Layer(**fields) for fields in json.loads((folder / "head.json").read_text())["layers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"Cannot read {str(folder / 'head.json')!r}; save the encoder and its head again") from error
    return layers, read_weights(folder / "head.safetensors")
