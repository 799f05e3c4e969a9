"""Checkpoints of MAE: training, released, fine-tuned, linear probe; its resize of positions; its decoder."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from support.official_vit import (
    DEPTH,
    HEADS,
    PATCH,
    SIDE,
    SIZE,
    WIDTH,
    State,
    activations,
    blocks,
    check_sites,
    images,
    layer_norm,
    linear,
    run_blocks,
    saved,
    sincos,
    vit,
)
from torch import Tensor
from torch.nn import functional as F

import sightline as sl
from sightline.core.errors import InputError
from sightline.encoders.files.reading import read_checkpoint
from sightline.encoders.formats import mae
from sightline.encoders.watching import capture

POSITIONS = sincos(SIDE, SIDE, WIDTH, row_first=False)
ENCODER = vit() | {"pos_embed": POSITIONS}
NARROW = 16  # width of the decoder
FINE_TUNING = argparse.Namespace(model="vit_base_patch16", finetune="x.pth", global_pool=True, nb_classes=5)


def decoder() -> State:
    random = torch.Generator().manual_seed(3)

    def layer(name: str, *shape: int) -> State:
        values = [torch.randn(s, generator=random) * 0.2 for s in (shape, shape[:1])]
        return {f"{name}.weight": values[0] + (len(shape) == 1), f"{name}.bias": values[1]}

    state = {"mask_token": torch.randn(1, 1, NARROW), "decoder_pos_embed": sincos(SIDE, SIDE, NARROW, row_first=False)}
    state |= layer("decoder_embed", NARROW, WIDTH) | blocks("decoder_blocks", NARROW, layer)
    return state | layer("decoder_norm", NARROW) | layer("decoder_pred", PATCH * PATCH * 3, NARROW)


DECODER = decoder()


def training() -> dict[str, Any]:
    return {
        "model": ENCODER | DECODER,
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": 799,
        "scaler": {},
        "args": argparse.Namespace(model="mae_vit_base_patch16", mask_ratio=0.75),
    }


@pytest.mark.parametrize("content", [training(), {"model": ENCODER}, ENCODER], ids=["training", "released", "bare"])
def test_encoder(content: Any, tmp_path: Path) -> None:
    path = saved(content, tmp_path)
    encoder = sl.load_encoder(f"mae:{path}?heads={HEADS}")
    check_sites(encoder, activations(ENCODER, images()), images())
    assert encoder.preprocess == sl.Preprocess((SIZE, SIZE), 18, "bicubic")
    left_over = len(DECODER) if "args" in content else 0
    assert [note.split()[0] for note in encoder.notes] == ([str(left_over)] if left_over else [])


def test_format_and_part(tmp_path: Path) -> None:
    found = mae.layout(read_checkpoint(saved(training(), tmp_path)), {"heads": "3"})
    assert (found.format, found.part) == ("MAE, training checkpoint", "model")
    assert set(found.left_over) == set(DECODER)
    found = mae.layout(read_checkpoint(saved({"model": ENCODER}, tmp_path)), {"heads": "3"})
    assert (found.format, found.part, found.left_over) == ("MAE, encoder only", "model", ())


@pytest.mark.parametrize("pooled", [True, False])
def test_fine_tuned(pooled: bool, tmp_path: Path) -> None:
    """Positions are trained then; the classifier is kept."""
    state = vit(classes=5, pooled=pooled)
    path = saved({"model": state, "args": FINE_TUNING}, tmp_path)
    encoder = sl.load_encoder(f"mae:{path}?heads={HEADS}")
    expected = activations(state, images())
    assert expected["head.0"].shape == (2, 5)
    check_sites(encoder, expected, images())
    assert encoder.notes == []
    assert mae.recognizes(read_checkpoint(path)) == "its arguments are those of MAE's fine-tuning"
    assert mae.layout(read_checkpoint(path), {"heads": "3"}).format == "MAE, with classifier"


def test_linear_probe(tmp_path: Path) -> None:
    """The probe normalises features with the mean and variance of a BatchNorm before its linear layer."""
    mean, variance = torch.randn(WIDTH), torch.rand(WIDTH) + 0.1
    weight, bias = torch.randn(5, WIDTH) * 0.1, torch.randn(5)
    head = {"head.0.running_mean": mean, "head.0.running_var": variance, "head.0.num_batches_tracked": torch.tensor(9)}
    head |= {"head.1.weight": weight, "head.1.bias": bias}
    encoder = sl.load_encoder(f"mae:{saved({'model': ENCODER | head}, tmp_path)}?heads={HEADS}")
    expected = activations(ENCODER, images())
    normed = torch.nn.functional.batch_norm(expected["norm"][:, 0].float(), mean, variance, eps=1e-6)
    check_sites(encoder, expected | {"head.0": normed @ weight.T + bias}, images())
    assert encoder.notes == ["the BatchNorm of the linear probe is part of the classifier"]


def test_the_classifier_decides(tmp_path: Path) -> None:
    """Analyses of decisions use the head of a fine-tuned file as it is."""
    path = saved({"model": vit(classes=16, pooled=True), "args": FINE_TUNING}, tmp_path)
    shapes = sl.load_images(f"shapes?size={SIZE}", limit=32)
    references = [f"mae:{path}?heads={heads}" for heads in (2, 3)]
    result = sl.analyze(references, shapes, ["agreement"], batch=8, workers=0, show_progress=False)["agreement"]
    assert list(result.classifier.values) == ["own head"] * 2
    assert list(result.classifier_site.values) == ["head.0"] * 2


@pytest.mark.parametrize(("height", "width"), [(24, 24), (8, 8), (8, 24)])
def test_positions_are_resized_as_the_official_code_does(height: int, width: int, tmp_path: Path) -> None:
    """Bicubic to the new size, without antialiasing: fine-tuning at another size starts from these."""
    rows, columns = height // PATCH, width // PATCH
    encoder = sl.load_encoder(f"mae:{saved(training(), tmp_path)}?heads={HEADS}&size={height}x{width}")
    patches = POSITIONS[:, 1:].reshape(1, SIDE, SIDE, WIDTH).permute(0, 3, 1, 2)
    resized = F.interpolate(patches, size=(rows, columns), mode="bicubic", align_corners=False)
    positions = torch.cat([POSITIONS[:, :1], resized.permute(0, 2, 3, 1).reshape(1, rows * columns, WIDTH)], 1)
    check_sites(encoder, activations(ENCODER | {"pos_embed": positions}, images(height, width)), images(height, width))


@pytest.mark.parametrize(
    ("size", "resize"), [("224", 256), ("96", 109), ("448", 448), ("64x96", (73, 109)), ("224x448", (224, 448))]
)
def test_preprocessing(size: str, resize: Any, tmp_path: Path) -> None:
    """256 pixels, of which 224 are seen; larger images are seen whole."""
    preprocess = sl.load_encoder(f"mae:{saved({'model': ENCODER}, tmp_path)}?heads=3&size={size}").preprocess
    assert (preprocess.resize, preprocess.interpolation) == (resize, "bicubic")
    assert preprocess.size == tuple(int(side) for side in (size.split("x") * 2)[:2])


# The decoder


def decoded(encoded: Tensor, heads: int, positions: Tensor) -> State:
    """Sites of the decoder with all patches visible, and the pixels."""
    state = {name: value.double() for name, value in DECODER.items()}
    sites = {"decoder.embed": linear(state, "decoder_embed", encoded) + positions.double()}
    sites |= run_blocks(state, "decoder_blocks", sites["decoder.embed"], heads, "decoder.block")
    sites["decoder.norm"] = layer_norm(state, "decoder_norm", sites[f"decoder.block.{DEPTH - 1}"])
    return sites | {"pixels": linear(state, "decoder_pred", sites["decoder.norm"])[:, 1:]}


@torch.no_grad()
@pytest.mark.parametrize("heads", [2, 4])
def test_decoder(heads: int, tmp_path: Path) -> None:
    path = saved(training(), tmp_path)
    both = sl.load_encoder(f"mae:{path}?heads={HEADS}&decoder=true&decoder_heads={heads}")
    expected = activations(ENCODER, images())
    expected |= decoded(expected["norm"], heads, DECODER["decoder_pos_embed"])
    pixels = expected.pop("pixels")
    check_sites(both, expected, images())
    torch.testing.assert_close(both(images()), pixels.float(), rtol=0, atol=1e-5)
    assert torch.equal(both.module.decoder.mask_token, DECODER["mask_token"])
    assert both.notes == []  # nothing of the file is left over


@torch.no_grad()
def test_decoder_at_another_size(tmp_path: Path) -> None:
    """The positions of the decoder are resized as those of the encoder."""
    both = sl.load_encoder(f"mae:{saved(training(), tmp_path)}?heads={HEADS}&decoder=true&decoder_heads=2&size=24")
    with capture(both, ["norm", "decoder.**"]) as sites:
        pixels = both(images(24, 24))
    patches = DECODER["decoder_pos_embed"][:, 1:].reshape(1, SIDE, SIDE, NARROW).permute(0, 3, 1, 2)
    resized = F.interpolate(patches, size=(6, 6), mode="bicubic").permute(0, 2, 3, 1).reshape(1, 36, NARROW)
    positions = torch.cat([DECODER["decoder_pos_embed"][:, :1], resized], 1)
    expected = decoded(sites["norm"].double(), 2, positions)
    torch.testing.assert_close(pixels, expected["pixels"].float(), rtol=0, atol=1e-5)


def test_encoder_and_decoder_are_compared_like_any_encoder(tmp_path: Path) -> None:
    shapes = sl.load_images(f"shapes?size={SIZE}", limit=16)
    both = f"mae:{saved(training(), tmp_path)}?heads=3&decoder=true&decoder_heads=2"
    result = sl.analyze(both, shapes, ["knn"], batch=8, workers=0, show_progress=False)["knn"]
    assert {"block.2", "decoder.block.2"} <= set(result.site.values.tolist())


def test_what_the_decoder_needs(tmp_path: Path) -> None:
    path, alone = saved(training(), tmp_path), saved({"model": ENCODER}, tmp_path, "alone.pth")
    with pytest.raises(InputError, match=r"MAE's decoder has no official model of width 16.*write \?decoder_heads="):
        sl.load_encoder(f"mae:{path}?heads=3&decoder=true")
    with pytest.raises(InputError, match=r"The file has no decoder .*leave decoder=true out"):
        sl.load_encoder(f"mae:{alone}?heads=3&decoder=true&decoder_heads=2")
    with pytest.raises(InputError, match=r"decoder_heads is for the decoder; write decoder=true to load it"):
        sl.load_encoder(f"mae:{path}?heads=3&decoder_heads=2")
    with pytest.raises(InputError, match=r"decoder=yes is neither true nor false"):
        sl.load_encoder(f"mae:{path}?heads=3&decoder=yes")


# Recognising


def test_recognizes(tmp_path: Path) -> None:
    def why(content: Any) -> str:
        return mae.recognizes(read_checkpoint(saved(content, tmp_path)))

    assert why(training()) == "it has a ViT with decoder_embed and decoder_pred"
    assert why({"model": ENCODER}) == "its positions are MAE's sine-cosine, column first"
    assert why({"model": vit()}) == ""
    assert why({"model": vit() | {"pos_embed": sincos(SIDE, SIDE, WIDTH, row_first=True)}}) == ""
    assert why({"model": {"weight": torch.zeros(3)}}) == ""
    assert why({"model": vit() | {"pos_embed": torch.zeros(5)}}) == ""
    one = vit(side=1) | {"pos_embed": sincos(1, 1, WIDTH, row_first=False)}
    assert why({"model": one}) == ""  # of a single patch, both orders are the same


def test_the_heads_of_official_widths() -> None:
    """Base, large and huge."""
    assert mae.OFFICIAL.heads == {768: 12, 1024: 16, 1280: 16}
    assert mae.DECODER_HEADS == {512: 16}
