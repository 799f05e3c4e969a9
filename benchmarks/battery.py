"""What each analysis adds to the bare forward pass, alone and all together, in real passes.

    python benchmarks/battery.py [--rounds 8] [--only cka,attention] [--also transformations] [--together]
    python benchmarks/battery.py --encoder zoo:moco_v3 --encoder zoo:mae --size 48      # other encoders

By default two ViT-S/16 (224 px, random weights), batches of 32, a round is a batch. Before each batch the same encoders
see as many images bare; `step` is the median ratio of a step of the pass to the bare forwards before and after it, with
the tenths of the rounds on either side, and `around` the seconds before the first step and after the last: hashes of
the weights, figures drawn from samples, intervals. `usual` is what one would write instead: a forward pass for each
analysis, attention maps unfused, activations kept, plain functions on them.
"""

from __future__ import annotations

import statistics

import torch
from shared import TINY, Beside, arguments, bare_pass, begin, in_turn, ratio
from torch import Tensor

import sightline as sl
from sightline.analyses.attention import attention_distance, attention_nmi
from sightline.analyses.diversity import token_cosine

VIT = "timm:vit_small_patch16_224@random"
TRAIN = 32  # images, for the analyses that fit a classifier


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, rounds=8)
    parser.add_argument("--encoder", action="append", help="a reference; may be repeated")
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", help="these analyses, separated by commas; by default those of `sightline compare`")
    parser.add_argument("--also", help="these, too")
    parser.add_argument("--together", action="store_true", help="all in one pass, and nothing else")
    asked = begin(parser, encoder=[TINY, TINY], size=16, batch=8, only="attention,cka,knn")
    names = asked.encoder or [VIT, f"{VIT}?seed=1"]
    encoders = {f"{number}": sl.load_encoder(name) for number, name in enumerate(names)}
    test = (asked.rounds + 2) * asked.batch  # the last batch of a split has no bare forward of its own after it
    images = sl.load_images(f"shapes?size={asked.size}&train={TRAIN}&val=0&test={test}")
    only = asked.only.split(",") if asked.only else None
    also = asked.also.split(",") if asked.also else []

    def measured(**which: object) -> tuple[Beside, list[str]]:
        beside = Beside(encoders, asked.clock)
        return beside, list(beside.measure(images, asked.batch, **which))

    together, chosen = measured(analyses=only, also=also)
    print(f"bare forward of a batch of {asked.batch}: {statistics.median(together.bares):.3f} s")
    print(f"{'':24}{'step':>8}{'tenths':>18}{'around':>10}")
    line(f"all {len(chosen)} in one pass", together)
    for name in [] if asked.together else chosen:
        line(name, measured(analyses=[name])[0])
    if not asked.together and all(hasattr(one.module, "blocks") for one in encoders.values()):
        bare = bare_pass(encoders, asked.batch)
        pixels = torch.randint(0, 256, (asked.batch, 3, asked.size, asked.size), dtype=torch.uint8)
        with torch.inference_mode():
            taken = in_turn(
                {"bare": bare, "usual": lambda: usual(encoders, pixels)}, asked.rounds // 3 + 1, asked.clock
            )
        print(f"{'usual':24}   {ratio(taken['usual'], taken['bare'])}")


def line(label: str, beside: Beside) -> None:
    """One row of the table."""
    ratios = beside.ratios()
    tenths = f"{ratios[len(ratios) // 10]:.3f} … {ratios[-1 - len(ratios) // 10]:.3f}"
    print(f"{label:24}{statistics.median(ratios):8.3f}{tenths:>18}{beside.around:8.2f} s", flush=True)


def usual(encoders: dict[str, sl.Encoder], pixels: Tensor) -> None:
    """The default analyses without Sightline's pass: each has a forward pass of its own."""
    for encoder in encoders.values():
        inputs, tokens = encoder.preprocess.normalize(pixels), encoder.tokens
        assert tokens is not None

        def forward(*sites: str, encoder: sl.Encoder = encoder, inputs: Tensor = inputs) -> dict[str, Tensor]:
            with sl.capture(encoder, list(sites)) as acts:
                encoder(inputs)
            return acts

        for maps in unfused_maps(encoder, inputs):  # attention
            attention_distance(maps, tokens.grid, 16, tokens.prefix)
            attention_nmi(maps, tokens.prefix)
        for site, x in forward("block.*", "block.*.mid", "block.*.heads").items():  # diversity
            if site.endswith("heads"):
                unit = torch.nn.functional.normalize(x, dim=-1)
                torch.einsum("bhnd,bgnd->bhg", unit, unit)
            else:
                token_cosine(x[:, tokens.prefix :])
        for x in forward("block.*").values():  # fourier
            maps = x[:, tokens.prefix :].mT.unflatten(2, tokens.grid)
            (torch.fft.fft2(maps).abs() + 1e-6).log().mean((0, 1))
        for x in forward("block.*").values():  # spectra, of two images of a batch
            torch.linalg.svdvals(x[:2, tokens.prefix :])
        forward("block.*")  # tokens
        kept = forward("block.*.norm1", "block.*.qkv", "block.*.fc1")  # cka
        grams = torch.stack([x.flatten(1) @ x.flatten(1).T for x in kept.values()])
        grams.flatten(1) @ grams.flatten(1).T
        {site: (x[:, 0].clone(), x.mean(1)) for site, x in forward("block.*", "norm").items()}  # k-NN


def unfused_maps(encoder: sl.Encoder, inputs: Tensor) -> list[Tensor]:
    """Attention maps as hooks on the dropout of unfused attention give them."""
    maps: list[Tensor] = []
    layers = [block.attn for block in encoder.module.blocks]
    handles = [layer.attn_drop.register_forward_hook(lambda _, __, x: maps.append(x)) for layer in layers]
    for layer in layers:
        layer.fused_attn = False
    encoder(inputs)
    for layer, handle in zip(layers, handles, strict=True):
        layer.fused_attn = True
        handle.remove()
    return maps


if __name__ == "__main__":
    main()
