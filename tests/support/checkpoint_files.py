"""Tiny checkpoints of every format, as official code lays them out, for recognition and inspection."""

import argparse
from typing import Any

import timm
import torch
from support import official_beit
from support.official_vit import SIDE, WIDTH, State, sincos, vit

LORA = {f"base_model.model.blocks.{i}.attn.qkv.lora_{x}.weight": torch.zeros(2, 2) for i in range(2) for x in "AB"}
ADAM = {"state": {0: {"exp_avg": torch.zeros(3), "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
NO_VISION_MODEL = {
    "LoRA": (LORA, "is an adapter (LoRA)"),
    "optimiser": (ADAM, "holds the state of an optimiser and no model"),
    "optimiser of a training": ({"optimizer": ADAM, "epoch": 3}, "holds the state of an optimiser and no model"),
    "text": ({"model.embed_tokens.weight": torch.zeros(9, 4), "model.norm.weight": torch.ones(4)}, "is a text model"),
    "GPT-2": ({"transformer": {"wte.weight": torch.zeros(9, 4)}}, "it embeds words (transformer.wte.weight)"),
    "nothing": ({"epoch": 3, "names": ["a"]}, "holds no state dict (a mapping of names to tensors), but epoch, names"),
    "unknown": (
        {"visual.conv.weight": torch.zeros(2, 3, 4, 4)},
        "is not in a format that Sightline recognises (visual.conv.weight)",
    ),
}


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: value for name, value in state.items()}


def recognisable() -> dict[str, tuple[dict[str, Any], str, State]]:
    """Content of a file, the format that it is to be recognised as, and the weights of its encoder in it."""
    plain, other, beit = vit(), vit(seed=1), official_beit.weights()
    absolute = official_beit.weights(shared=False, positions=True)
    column, row = (plain | {"pos_embed": sincos(SIDE, SIDE, WIDTH, row_first=first)} for first in (False, True))
    decoder = {
        "mask_token": torch.ones(1, 1, 8),
        "decoder_embed.weight": torch.ones(8, WIDTH),
        "decoder_pred.weight": torch.ones(48, 8),
    }
    head = {"head.last_layer.weight_g": torch.ones(6, 1)}
    moco = prefixed(row, "module.base_encoder.") | prefixed(other, "module.momentum_encoder.")
    args = argparse.Namespace(lr=0.1, betas=[0.9, 0.95])
    return {
        "mae": ({"model": column | decoder, "optimizer": ADAM, "args": args}, "MAE, training checkpoint", column),
        "mae released": ({"model": column}, "MAE, encoder only", column),
        "moco_v3": ({"state_dict": moco, "arch": "vit_small"}, "MoCo-v3, training checkpoint", row),
        "dino": (
            {
                "student": prefixed(other, "module.backbone.") | prefixed(head, "module."),
                "teacher": prefixed(plain, "backbone.") | head,
                "dino_loss": {"center": torch.zeros(1, 6)},
            },
            "DINO, training checkpoint",
            plain,
        ),
        "msn": (
            {
                "encoder": prefixed(other, "module."),
                "target_encoder": prefixed(plain, "module."),
                "prototypes": torch.ones(4, WIDTH),
            },
            "MSN, training checkpoint",
            plain,
        ),
        "msn released": (
            {"target_encoder": prefixed(plain, "module."), "prototypes": torch.ones(4, WIDTH)},
            "MSN, training checkpoint",
            plain,
        ),
        "simmim": ({"model": prefixed(beit, "encoder.") | {"decoder.0.bias": torch.ones(3)}}, "SimMIM, training", beit),
        "beit": ({"model": beit | {"lm_head.weight": torch.ones(7, WIDTH)}}, "BEiT, training checkpoint", beit),
        "beit absolute": (
            {"model": absolute | {"lm_head.weight": torch.ones(7, WIDTH)}},
            "BEiT, training checkpoint",
            absolute,
        ),
        "vit": (vit(classes=5), "ViT, with classifier", vit(classes=5)),
    }


def of_timm(name: str, **options: Any) -> torch.nn.Module:
    """A model with weights that are all different."""
    torch.manual_seed(0)
    module: torch.nn.Module = timm.create_model(name, **options)
    for value in module.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape) * 0.1 + 0.05)
    return module.eval()
