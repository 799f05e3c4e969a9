"""How hard `shapes` is: test accuracy of raw pixels, of a random ViT and of a small supervised ViT.

    python benchmarks/shapes_difficulty.py [--epochs 8] [--size 64]

Prints one line per measurement; chance is 1/16 = 6.25 %.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import timm
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.images.loading import load_images
from sightline.images.sets import Images


def pixels(images: Images, split: str) -> tuple[Tensor, Tensor]:
    """uint8 (n, 3, S, S) and labels of a split."""
    items = images.source.read(images.indices(split).tolist())
    stacked = np.stack([item.image for item in items if item.image is not None])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(images.labels_of(split))


def scaled(x: Tensor) -> Tensor:
    """uint8 to about −2 … 2."""
    return (x.float() / 255 - 0.45) / 0.25


def nearest_neighbours(train: Tensor, labels: Tensor, test: Tensor, k: int = 20) -> Tensor:
    """Cosine k-NN with votes exp(sim / 0.07)."""
    train, test = (F.normalize(x.flatten(1), dim=1) for x in (train, test))
    similarity, index = (test @ train.T).topk(k, dim=1)
    votes = torch.zeros(len(test), 16).scatter_add_(1, labels[index], (similarity / 0.07).exp())
    return votes.argmax(1)


def vit(size: int, width: int = 128, depth: int = 6) -> nn.Module:
    """Small ViT with heads of 32 channels on 8 × 8 patches, mean-pooled."""
    return timm.models.VisionTransformer(
        img_size=size,
        patch_size=size // 8,
        embed_dim=width,
        depth=depth,
        num_heads=width // 32,
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images = load_images(f"shapes?size={arguments.size}")
    (train, labels), (test, truth) = pixels(images, "train"), pixels(images, "test")
    untrained = vit(arguments.size).eval()
    for name, guess in {
        "20-NN on pixels": nearest_neighbours(scaled(train), labels, scaled(test)),
        "linear probe of a random ViT": linear_probe(untrained, train, labels, test),
    }.items():
        print(f"{name}: {(guess == truth).float().mean().item():.1%}", flush=True)
    supervise(vit(arguments.size), train, labels, test, truth, arguments.epochs)


if __name__ == "__main__":
    main()
