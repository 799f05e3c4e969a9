"""Images per second of pre-training: our step, lightly's step, the pipeline.

    python benchmarks/pretrain.py [--objectives simclr,dino] [--rounds 5] [--steps 10] [--bf16]

Backbone, heads, batch and views are those of the objective's small recipe. Each round runs the same number of steps of

    step        our training loop on views that are made already: forward, backward, clipping, optimiser, teacher
    lightly     the same method, views, masks and widths, with the modules of `lightly` in the manner of its examples
    pipeline    the views alone, of images that are decoded already
    together    our training loop with its pipeline
    bf16        with `--bf16`, the step in bfloat16 autocast, which kills the process on some CPUs
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import statistics
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from shared import CLOCKS, Work, arguments, begin, peer, ratio
from torch import Tensor, nn

import sightline as sl
from sightline.training.backbones import build
from sightline.training.feed import Feed
from sightline.training.loop import Loop, make_fabric
from sightline.training.objective import Views
from sightline.training.recipe import PretrainingRecipe, make_recipe, read_recipe

if peer("lightly"):
    from lightly.loss import DINOLoss, MSNLoss, NTXentLoss
    from lightly.models import utils
    from lightly.models.modules import MaskedVisionTransformerDecoderTIMM, MaskedVisionTransformerTIMM, heads

WARM_UP = 2  # steps of the round before the first

Pixels = tuple[Tensor, ...]
launched = functools.cache(make_fabric)


def speed(step: Work, steps: int, batch: int, clock: str) -> float:
    began = CLOCKS[clock]()
    for _ in range(steps):
        step()
    return steps * batch / (CLOCKS[clock]() - began)


def train(
    objective: nn.Module,
    feed: Feed,
    recipe: PretrainingRecipe,
    precision: str,
    clock: str,
    made: list[Views] | None = None,
) -> float:
    """The real loop over the views of the feed, or over the same ones again and again."""
    ticks: list[float] = []
    source = feed.views() if made is None else itertools.repeat(made, feed.steps)

    def clocked(start: int = 0) -> Iterator[list[Views]]:
        for forwards in source:
            ticks.append(CLOCKS[clock]())
            yield forwards

    feed.views = clocked  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        fabric = launched("cpu", precision, devices=1, nodes=1)
        Loop(objective, feed, recipe.optimization, Path(folder), fabric, recipe.objective, show_progress=False).run()
    # Without the first step, which allocates the optimiser's state, and the last one, which saves a checkpoint.
    return (feed.steps - 2) * feed.batch / (ticks[-1] - ticks[1])


# ---- lightly ----------------------------------------------------------------------------------------------------
#
# Its examples, on our views: one forward per view (of MSN per size), AdamW with PyTorch's defaults, no clipping. Where
# a detail decides the work, ours is followed: MSN's small views are not masked, and its prototypes are trained. There
# is no example of MoCo-v3: here it is that of MoCo both ways, without a memory bank, and with the heads that lightly
# describes for v3.


def vit_of(recipe: PretrainingRecipe, any_size: bool = False) -> Any:
    option = "&dynamic_img_size=True" if any_size else ""
    return sl.load_encoder(recipe.backbone.reference() + option).module.train()


def trained(
    recipe: PretrainingRecipe, loss: Callable[[], Tensor], *modules: nn.Module, before_step: Work = tuple
) -> Work:
    optimizer = torch.optim.AdamW(nn.ModuleList(modules).parameters(), lr=recipe.optimization.peak_lr)

    def step() -> None:
        loss().backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def simclr(recipe: PretrainingRecipe, pixels: Pixels) -> Work:
    vit, c = vit_of(recipe), recipe.config
    head = heads.SimCLRProjectionHead(vit.num_features, c.hidden, c.out, c.layers)
    criterion = NTXentLoss(c.temperature)
    return trained(recipe, lambda: criterion(*[head(vit(x)) for x in pixels]), vit, head)


def moco_v3(recipe: PretrainingRecipe, pixels: Pixels) -> Work:
    vit, c = vit_of(recipe), recipe.config
    vit.patch_embed.proj.requires_grad_(not c.stop_grad_patch)
    projector = heads.MoCoProjectionHead(vit.num_features, c.hidden, c.out, num_layers=3, batch_norm=True)
    predictor = heads.MoCoProjectionHead(c.out, c.hidden, c.out, num_layers=2, batch_norm=True)
    vit_momentum, projector_momentum = (copy.deepcopy(m).requires_grad_(False) for m in (vit, projector))
    criterion = NTXentLoss(c.temperature)

    def loss() -> Tensor:
        utils.update_momentum(vit, vit_momentum, c.momentum)
        utils.update_momentum(projector, projector_momentum, c.momentum)
        q1, q2 = (predictor(projector(vit(x))) for x in pixels)
        k1, k2 = (projector_momentum(vit_momentum(x)).detach() for x in pixels)
        return criterion(q1, k2) + criterion(q2, k1)

    return trained(recipe, loss, vit, projector, predictor)


def dino(recipe: PretrainingRecipe, pixels: Pixels) -> Work:
    student, c = vit_of(recipe, any_size=True), recipe.config
    teacher = copy.deepcopy(student).requires_grad_(False)
    widths = (student.num_features, c.hidden, c.bottleneck, c.out)
    with warnings.catch_warnings(action="ignore"):  # its weight normalisation is deprecated
        head = heads.DINOProjectionHead(*widths, batch_norm=c.batch_norm, freeze_last_layer=c.freeze_last_layer)
        teacher_head = heads.DINOProjectionHead(*widths, batch_norm=c.batch_norm).requires_grad_(False)
    criterion = DINOLoss(c.out, c.warmup_temperature, c.teacher_temperature, c.warmup_temperature_epochs)

    def loss() -> Tensor:
        utils.update_momentum(student, teacher, c.momentum)
        utils.update_momentum(head, teacher_head, c.momentum)
        teacher_out = [teacher_head(teacher(x)) for x in pixels[:2]]
        return criterion(teacher_out, [head(student(x)) for x in pixels], epoch=0)

    return trained(recipe, loss, student, head, before_step=lambda: head.cancel_last_layer_gradients(current_epoch=0))


def msn(recipe: PretrainingRecipe, pixels: Pixels) -> Work:
    anchor, c = MaskedVisionTransformerTIMM(vit_of(recipe, any_size=True)), recipe.config
    anchor_head = heads.MSNProjectionHead(anchor.vit.num_features, c.hidden, c.out)
    target, target_head = (copy.deepcopy(m).requires_grad_(False) for m in (anchor, anchor_head))
    prototypes = nn.Linear(c.out, c.prototypes, bias=False)
    criterion = MSNLoss(c.temperature, regularization_weight=c.me_max)

    def loss() -> Tensor:
        utils.update_momentum(anchor, target, c.momentum)
        utils.update_momentum(anchor_head, target_head, c.momentum)
        rand, focal = torch.cat(pixels[1 : 1 + c.rand_views]), pixels[1 + c.rand_views :]
        keep, _ = utils.random_token_mask((len(rand), anchor.sequence_length), c.mask_ratio)
        targets = target_head(target(pixels[0]))
        anchors = [anchor_head(anchor(rand, idx_keep=keep))]
        if focal:
            anchors.append(anchor_head(anchor(torch.cat(focal))))
        return criterion(torch.cat(anchors), targets, prototypes.weight, c.sharpening)

    return trained(recipe, loss, anchor, anchor_head, prototypes)


def mae(recipe: PretrainingRecipe, pixels: Pixels) -> Work:
    encoder, c, images = MaskedVisionTransformerTIMM(vit_of(recipe)), recipe.config, pixels[0]
    patch, length = recipe.backbone.patch, encoder.sequence_length
    embedding = nn.Linear(encoder.vit.embed_dim, c.decoder_width)
    decoder = MaskedVisionTransformerDecoderTIMM(length - 1, c.decoder_width, c.decoder_depth, c.decoder_heads)
    prediction, criterion = nn.Linear(c.decoder_width, 3 * patch**2), nn.MSELoss()

    def loss() -> Tensor:
        keep, mask = utils.random_token_mask((len(images), length), c.mask_ratio)
        visible = embedding(encoder.encode(images, idx_keep=keep))
        tokens = utils.set_at_index(visible.new_zeros(len(images), length, c.decoder_width), keep, visible)
        found = prediction(utils.get_at_index(decoder(tokens, idx_mask=mask), mask))
        return criterion(found, utils.get_at_index(utils.patchify(images, patch), mask - 1))

    return trained(recipe, loss, encoder, embedding, decoder, prediction)


def simmim(recipe: PretrainingRecipe, pixels: Pixels) -> Work:
    encoder, c, images = MaskedVisionTransformerTIMM(vit_of(recipe)), recipe.config, pixels[0]
    patch, criterion = recipe.backbone.patch, nn.L1Loss()
    prediction = nn.Linear(encoder.vit.embed_dim, 3 * patch**2)

    def loss() -> Tensor:
        _, mask = utils.random_token_mask((len(images), encoder.sequence_length), c.mask_ratio)
        found = prediction(utils.get_at_index(encoder.encode(images, idx_mask=mask), mask))
        return criterion(found, utils.get_at_index(utils.patchify(images, patch), mask - 1))

    return trained(recipe, loss, encoder, prediction)


PEERS: dict[str, Callable[[PretrainingRecipe, Pixels], Work]] = {
    f.__name__: f for f in (simclr, moco_v3, dino, msn, mae, simmim)
}


def measure(name: str, asked: argparse.Namespace) -> None:
    """Print the table of an objective."""
    torch.manual_seed(0)
    recipe = make_recipe(name, read_recipe(name), {"depth": 1, "batch": 8} if asked.smoke else {})
    batch = recipe.optimization.batch
    images = sl.load_images(f"shapes?size={recipe.backbone.size}&train={max(asked.images, batch)}&val=0&test=0")
    feed = Feed(images, recipe.plugin.views(recipe.config, recipe.backbone), batch=batch, epochs=1)
    objective = recipe.plugin.Objective(build(recipe.backbone).module, recipe.config)
    made = next(feed.views())
    lightly = PEERS[name](recipe, made[0].pixels) if peer("lightly") else None

    def run(tool: str, steps: int) -> float:
        if tool == "lightly" and lightly is not None:
            return speed(lightly, steps, batch, asked.clock)
        fed = feed.over(feed.policies, (steps + 2) / feed.order.per_epoch)
        if tool == "pipeline":
            return speed(functools.partial(next, fed.views()), steps, batch, asked.clock)
        again = None if tool == "together" else made
        return train(objective, fed, recipe, "bf16" if tool == "bf16" else "float32", asked.clock, again)

    tools = ["step", *(["lightly"] if lightly else []), "pipeline", "together", *(["bf16"] if asked.bf16 else [])]
    rates: dict[str, list[float]] = {tool: [] for tool in tools}
    for number in range(asked.rounds + 1):
        for tool in tools[number % len(tools) :] + tools[: number % len(tools)]:
            rate = run(tool, asked.steps if number else WARM_UP)
            if number:
                rates[tool].append(rate)
    sizes = ", ".join(f"{n} of {side} px" for side, n in Counter(view.shape[-1] for view in made[0].pixels).items())
    print(f"\n{name}, batch {batch}, views: {sizes} ({asked.rounds} rounds of {asked.steps} steps)")
    for tool, values in rates.items():
        relative = "" if tool == "step" else f"   the step makes {ratio(rates['step'], values)} times as many"
        print(f"  {tool:<10}{statistics.median(values):8.0f} images/s{relative}", flush=True)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--objectives", default=",".join(PEERS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--images", type=int, default=1024, help="drawn for each objective; more take longer to draw")
    parser.add_argument("--bf16", action="store_true", help="the step in bfloat16, too")
    asked = begin(parser, objectives="dino,mae", steps=1, images=24)
    names = asked.objectives.split(",")
    if unknown := set(names) - set(PEERS):
        parser.error(f"no peer of {', '.join(sorted(unknown))}; choose from {', '.join(PEERS)}")
    for name in names:
        measure(name, asked)


if __name__ == "__main__":
    main()
