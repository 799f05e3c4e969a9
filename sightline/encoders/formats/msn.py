"""Checkpoints of the official MSN: `msn:FILE`, with the options which (target, anchor), heads, size and head.

{'encoder', 'opt', 'prototypes', 'target_encoder', 'epoch', …}   training: anchor and target encoder
{'prototypes', 'target_encoder'}                                 released: the target encoder
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from sightline.encoders.files.reading import Checkpoint, tensors, without_prefix
from sightline.encoders.layouts.layout import Layout, with_head
from sightline.encoders.layouts.vit import ModelState, Official, bare, choose, unwrapped, vit_layout
from sightline.encoders.modules.positions import by_size
from sightline.encoders.modules.projection import Trained, mlp_layers, unit_layer

TITLE = "MSN"
EXAMPLE = "msn:vits16_800ep.pth.tar"
OPTIONS = ("which", "heads", "size", "head")
ENCODERS = {"target": "target_encoder", "anchor": "encoder"}
LAYERS = ("fc1", "bn1", "fc2", "bn2", "fc3")  # of the projector
OFFICIAL = Official(TITLE, {192: 3, 384: 6, 768: 12, 1024: 16}, "bilinear", by_size)


def recognizes(checkpoint: Checkpoint) -> str:
    if "prototypes" not in checkpoint.content or not tensors(checkpoint.content, ENCODERS["target"]):
        return ""
    trained = tensors(checkpoint.content, ENCODERS["anchor"])
    return f"it has prototypes{', encoder' if trained else ''} and target_encoder"


def layout(checkpoint: Checkpoint, options: Mapping[str, str]) -> Layout:
    """The encoder in a checkpoint, and its projector and prototypes with `head=true`."""
    encoders = {which: unwrapped(tensors(checkpoint.content, key)) for which, key in ENCODERS.items()}
    which, notes = choose(options, encoders)
    if which is None:
        part = bare(checkpoint)
    else:
        beside = ("prototypes",) if "prototypes" in checkpoint.content else ()
        part = ModelState(encoders[which], ENCODERS[which], True, beside, notes)
    encoder = vit_layout(checkpoint, part, OFFICIAL, options)
    return with_head(encoder, options, lambda: _head(checkpoint, part))


def _head(checkpoint: Checkpoint, part: ModelState) -> dict[str, tuple[Trained, ...]]:
    """The projector, whose layers have names instead of numbers, and the prototypes, which the loss normalises."""
    projector = without_prefix(part.state, "fc.")
    if not projector.keys() >= {f"{name}.weight" for name in LAYERS if name.startswith("fc")}:
        return {"fc.": (), "prototypes": ()}
    numbered = {f"{LAYERS.index(name.split('.')[0])}.{name.split('.')[1]}": x for name, x in projector.items()}
    prototypes = checkpoint.content.get("prototypes")
    last = (unit_layer(F.normalize(prototypes.float(), dim=1)),) if isinstance(prototypes, Tensor) else ()
    return {"fc.": mlp_layers(numbered, "projector", "gelu"), "prototypes": last}
