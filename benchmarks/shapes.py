"""The embedded images: how many of them are drawn in a second, and how hard they are.

    python benchmarks/shapes.py [--of speed,difficulty] [--workers 2] [--epochs 8] [--size 64]

Speed: the fastest of `--rounds` passes, the start of the workers included. Difficulty: test accuracy of raw pixels, of
a random ViT and of a small supervised ViT on its way; chance is 1/16 = 6.25 %.
"""

from __future__ import annotations

import time

import numpy as np
import timm
import torch
from shared import arguments, begin
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

import sightline as sl
from sightline.analyses.knn import knn_predict
from sightline.images.pipeline import batches

WIDTH, DEPTH = 128, 6  # of the ViTs


def rate(reference: str, size: int, count: int, workers: int) -> float:
    """Images per second of a pass over `count` images."""
    images = sl.load_images(f"{reference}?size={size}&train={count}&val=0&test=0")
    start, geometry = time.perf_counter(), [sl.Preprocess(size=(size, size))]
    seen = sum(len(batch.ids) for batch in batches(images, geometry, splits=["train"], batch=64, workers=workers))
    return seen / (time.perf_counter() - start)


def pixels(images: sl.Images, split: str) -> tuple[Tensor, Tensor]:
    """uint8 (n, 3, S, S) and labels of a split."""
    items = images.source.read(images.indices(split).tolist())
    stacked = np.stack([item.image for item in items if item.image is not None])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(images.labels_of(split))


def scaled(x: Tensor) -> Tensor:
    """uint8 to about −2 … 2."""
    return (x.float() / 255 - 0.45) / 0.25


def vit(size: int) -> nn.Module:
    """Small ViT with heads of 32 channels on 8 × 8 patches, mean-pooled."""
    return timm.models.VisionTransformer(
        img_size=size,
        patch_size=size // 8,
        embed_dim=WIDTH,
        depth=DEPTH,
        num_heads=WIDTH // 32,
        num_classes=16,
        class_token=False,
        global_pool="avg",
    )


def linear_probe(model: nn.Module, train: Tensor, labels: Tensor, test: Tensor) -> Tensor:
    """Logistic regression on standardised means of the patch tokens of the last block."""
    with torch.inference_mode():
        x, y = (
            torch.cat([model.forward_features(scaled(part)).mean(1) for part in data.split(256)])
            for data in (train, test)
        )
    mean, std = x.mean(0), x.std(0) + 1e-6
    fit = LogisticRegression(C=0.1, max_iter=2000).fit(((x - mean) / std).numpy(), labels.numpy())
    return torch.from_numpy(fit.predict(((y - mean) / std).numpy()))


def supervise(model: nn.Module, train: Tensor, labels: Tensor, test: Tensor, truth: Tensor, epochs: int) -> None:
    """AdamW, warm-up of an epoch, cosine; random shifts and mirror images as augmentation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    generator = torch.Generator().manual_seed(0)
    start, steps, step = time.monotonic(), epochs * -(-len(train) // 64), 0
    for epoch in range(1, epochs + 1):
        model.train()
        for rows in torch.randperm(len(train), generator=generator).split(64):
            past = step / steps
            optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, past * epochs) * 0.5 * (1 + np.cos(np.pi * past))
            dy, dx = torch.randint(-6, 7, (2,), generator=generator).tolist()
            x = scaled(train[rows].roll((dy, dx), (2, 3)))
            x = x.flip(-1) if torch.rand((), generator=generator) < 0.5 else x
            loss = F.cross_entropy(model(x), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        model.eval()
        with torch.inference_mode():
            guess = torch.cat([model(scaled(part)).argmax(1) for part in test.split(256)])
        passed, accuracy = (time.monotonic() - start) / 60, (guess == truth).float().mean().item()
        print(f"supervised ViT, {epoch} epochs, {passed:.1f} min: {accuracy:.1%}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--of", default="speed,difficulty")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--limit", type=int, help="images of each split for the difficulty; by default all")
    asked = begin(parser, workers=0, epochs=1, size=16, limit=64)
    counts = {16: 32} if asked.smoke else {32: 8192, 64: 8192, 224: 1024}
    for reference in ("shapes", "shapes:conflict", "shapes:scenes") if "speed" in asked.of else ():
        for size, count in counts.items():
            best = max(rate(reference, size, count, asked.workers) for _ in range(asked.rounds))
            print(f"{reference:16} {size:4} px {best:8.0f} images/s with {asked.workers} workers", flush=True)
    if "difficulty" not in asked.of:
        return
    torch.manual_seed(0)
    images = sl.load_images(f"shapes?size={asked.size}", limit=asked.limit)
    (train, labels), (test, truth) = pixels(images, "train"), pixels(images, "test")
    raw = [scaled(part).flatten(1).numpy() for part in (train, test)]
    for name, guess in {
        "20-NN on pixels": torch.from_numpy(knn_predict(raw[0], labels.numpy(), raw[1], k=20, temperature=0.07)),
        "linear probe of a random ViT": linear_probe(vit(asked.size).eval(), train, labels, test),
    }.items():
        print(f"{name}: {(guess == truth).float().mean().item():.1%}", flush=True)
    supervise(vit(asked.size), train, labels, test, truth, asked.epochs)


if __name__ == "__main__":
    main()
