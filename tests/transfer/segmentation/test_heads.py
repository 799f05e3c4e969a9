"""UperNet against the head of transformers with the same weights, and the maps that a ViT gives it."""

from typing import Any

import pytest
import torch

from sightline.transfer.segmentation.heads import Auxiliary, LinearHead, Scales, UperNet

pytestmark = pytest.mark.unit

WIDTHS, CHANNELS, CLASSES = (8, 12, 16, 20), 6, 5


def copied(ours: torch.nn.Module, theirs: torch.nn.Module, names: dict[str, str]) -> None:
    """Their weights in ours; `names` are beginnings, theirs → ours, and nothing may be left over on either side."""
    words = {"conv.": "0.", "batch_norm.": "1."}
    state = {}
    for name, value in theirs.state_dict().items():
        start = next(start for start in names if name.startswith(start))
        rest = name.removeprefix(start)
        for word, number in words.items():
            rest = rest.replace(word, number)
        state[names[start] + rest] = value
    ours.load_state_dict(state)


def config() -> Any:
    import transformers

    kinds: Any = transformers  # whose configurations mypy knows without what they inherit

    return kinds.UperNetConfig(
        backbone_config=kinds.ResNetConfig(out_features=["stage1"]),
        hidden_size=CHANNELS,
        auxiliary_channels=CHANNELS,
        num_labels=CLASSES,
        auxiliary_num_convs=1,
        auxiliary_concat_input=False,
        pool_scales=[1, 2, 3, 6],
    )


@pytest.mark.parametrize("training", [False, True])
def test_upernet_is_that_of_transformers(training: bool) -> None:
    from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

    torch.manual_seed(0)
    maps = [torch.randn(2, width, 24 // 2**i, 16 // 2**i) for i, width in enumerate(WIDTHS)]
    theirs, ours = UperNetHead(config(), list(WIDTHS)), UperNet(WIDTHS, CHANNELS, CLASSES, dropout=0.0)
    names = {"classifier.": "classifier.", "psp_modules.": "pooled.", "bottleneck.": "top."}
    names |= {"lateral_convs.": "lateral.", "fpn_convs.": "smooth.", "fpn_bottleneck.": "fuse."}
    copied(ours, theirs, names)
    torch.testing.assert_close(ours.train(training)(maps), theirs.train(training)(maps))
    helping, twin = Auxiliary(WIDTHS[2], CHANNELS, CLASSES, 0.0), UperNetFCNHead(config(), list(WIDTHS))
    copied(helping, twin, {"convs.0.": "layer.", "classifier.": "classifier."})
    torch.testing.assert_close(helping.train(training)(maps), twin.train(training)(maps))


def test_blocks_become_maps_of_four_resolutions() -> None:
    scales = Scales(6)
    whole = torch.randn(2, 24, 5, 7)
    found = scales([whole])
    assert [tuple(x.shape[1:]) for x in found] == [(6, 20, 28), (6, 10, 14), (6, 5, 7), (6, 3, 4)]
    torch.testing.assert_close(found[2], whole[:, 12:18])
    assert LinearHead(24, 3, 0.1)([whole]).shape == (2, 3, 5, 7)
