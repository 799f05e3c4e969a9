"""The Python of README and docs, run as it is written on small encoders and few images."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from support.documents import ROOT, Block, blocks
from support.references import SMALL
from torch import nn

import sightline as sl
from sightline.analyses.cka import CkaConfig as Cka
from sightline.analyses.probes import ProbesConfig as Probes

# Blocks that train for minutes, or look at such a training; contract/test_docs.py checks that their calls fit.
TRAINED = ("dense", "figures", "finetuning", "pretraining", "rcdm", "studies", "transfer", "analyses/dynamics")
TRAIN = {f"docs/{name}.md" for name in TRAINED}
# What is not at hand, or larger than a test needs it.
INSTEAD = {
    "timm:vit_small_patch16_224.dino": "timm:vit_tiny_patch16_224@random?size=32&patch_size=8&embed_dim=24&num_heads=3",
    "shapes?size=224": "shapes?size=32",
    '"shapes", limit=1024': '"shapes?size=48", limit=1024',
    "limit=1024": "limit=48",
    "zoo:…": "zoo:dino",
    '"block.3", "block.8"': '"block.1", "block.3"',
    "batches=[32, 64, 128, 256, 512, 1024], counts=[256, 512, 1024], draws=10": "batches=[8, 16], counts=[16], draws=2",
    "folder:/data/val": "shapes?size=32",
    "folder:cue-conflict?names=shape-texture": "shapes:conflict?size=32",
    "range(800)": "range(8)",
    "range(800, 1000)": "range(8, 12)",
    "(224, 224)": "(32, 32)",
    "shapes:scenes": "shapes:scenes?size=32",
}
BLOCKS = [block for block in blocks("python") if block.page not in TRAIN]


@pytest.fixture(scope="module")
def at_hand() -> dict[str, Any]:
    """The names that pages use without saying where they come from."""
    random = np.random.default_rng(0)
    deep = INSTEAD["timm:vit_small_patch16_224.dino"]
    labels, groups = np.arange(24) % 3, np.arange(24) % 4
    maps = torch.from_numpy(random.random((2, 3, 197, 197))).softmax(-1)
    patches = random.normal(size=(2, 196, 6))
    rows = {name: random.normal(size=(24, 6)) for name in ("train", "test", "train_mirrored", "test_mirrored")}
    picture = Image.fromarray(random.integers(0, 255, (40, 50, 3), dtype=np.uint8))
    return {
        **rows,
        **dict.fromkeys(("labels", "a", "b", "truth", "plain", "noisy", "decisions", "shape"), labels),
        "sl": sl,
        "np": np,
        "pd": pd,
        "torch": torch,
        "Preprocess": sl.Preprocess,
        "encoders": {name: sl.load_encoder(f"{deep}&seed={n}") for n, name in enumerate(("dino", "mae"))},
        "images": sl.load_images("shapes?size=32", limit=48),
        "my_module": nn.Sequential(nn.Conv2d(3, 8, 32, 32), nn.Flatten(), nn.Linear(8 * 7 * 7, 8)),
        "pil_image": picture,
        "another": picture,
        "pixels": random.integers(0, 255, (24, 8, 8, 3), dtype=np.uint8),
        "x": random.normal(size=(64, 6)),
        "y": random.normal(size=(64, 5)),
        "scores_a": random.normal(size=(24, 9)),
        "scores_b": random.normal(size=(24, 9)),
        "texture": (labels + 1) % 3,
        "groups": groups,
        "maps": maps,
        "patches": patches,
        "before": patches[0],
        "after": patches[1],
        "heads": random.normal(size=(2, 3, 16, 4)),
        "tokens": random.normal(size=(2, 197, 6)),
        "keys": np.arange(3, dtype=np.uint64),
    }


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs(block: Block, at_hand: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = block.code
    for written, instead in INSTEAD.items():
        code = code.replace(written, instead)
    names = {**at_hand, **OTHERWISE.get(block.page, lambda _: {})(at_hand)}
    exec(compile(code, str(ROOT / block.page), "exec"), names)


def _run(at_hand: dict[str, Any]) -> dict[str, Any]:
    """A finished comparison in runs/x."""
    sl.analyze(at_hand["encoders"], at_hand["images"], ["cka", "knn"], out="runs/x", show_progress=False)
    return {}


def _several(at_hand: dict[str, Any]) -> dict[str, Any]:
    """A finished comparison of three encoders and of seeds of two of them in runs/x, measured once for all blocks."""
    if "several" not in at_hand:
        seeds = [f"{name}-{number}" for name in ("mae", "dino") for number in range(3)]
        small = f"{SMALL.replace('depth=2', 'depth=4')}"
        encoders = {
            name: sl.load_encoder(f"{small}&seed={n}") for n, name in enumerate(["moco", "dino", "mae", *seeds])
        }
        sites = ["block.*", "norm"]
        asked = {"cka": Cka(tokens=("all",)), "knn": None, "attention": None, "probes": Probes(kinds=("ridge",))}
        run = sl.analyze(encoders, at_hand["images"], asked, sites=sites, out="runs/x", batch=8, show_progress=False)
        at_hand["several"] = run.path.absolute() if run.path else None
    else:
        shutil.copytree(at_hand["several"], "runs/x")
    return {"run": sl.open_run("runs/x")}


# What a page takes for granted besides.
OTHERWISE: dict[str, Any] = {
    "docs/runs.md": _run,
    "docs/contrasts.md": _several,
    "docs/findings.md": _several,
    "docs/analyses/diversity.md": lambda known: {"before": known["patches"], "after": known["patches"] + 1},
    "docs/analyses/tokens.md": lambda known: {"tokens": known["x"][:24], "before": known["patches"][0]},
    "docs/images.md": lambda known: {"labels": known["labels"][:12] % 2, "pixels": known["pixels"][:12]},
    "docs/encoders.md": lambda known: {"encoder": known["encoders"]["dino"]},
}
