"""Watching a training of one's own: the numbers of a pass, in a plain loop, with Lightning and with Hugging Face."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.references import HUGGINGFACE, SMALL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import sightline as sl
from sightline.core.errors import InputError

IMAGES = "shapes?size=32&train=64&val=0&test=48"
DEEPER = SMALL.replace("depth=2", "depth=3") + "&seed=5"


def train(module: nn.Module, watched: Any = None, steps: int = 4, first: int = 0) -> None:
    """A few steps on noise, which move the weights far."""
    random = torch.Generator().manual_seed(first)
    optimizer = torch.optim.AdamW(module.parameters(), 0.02)
    for step in range(first, first + steps):
        if watched is not None:
            watched(step)
        loss = module(torch.randn(8, 3, 32, 32, generator=random)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, sl.Encoder, sl.Encoder]:
    """A watched training, its folder, and the encoder before and after."""
    out = tmp_path_factory.mktemp("watch") / "run"
    encoder = sl.load_encoder(SMALL)
    before = sl.load_encoder(copy.deepcopy(encoder.module), preprocess=encoder.preprocess)
    watched = sl.watch(encoder, IMAGES, every=2, out=out, reference=DEEPER, show_progress=False)
    train(encoder.module, watched)
    watched.end(4)
    return out, before, encoder


def test_numbers_are_those_of_a_pass(trained: tuple[Path, sl.Encoder, sl.Encoder]) -> None:
    out, before, after = trained
    table = pd.read_csv(out / "metrics.csv").set_index("step")
    assert table.index.tolist() == [0, 2, 4]
    encoders = {"start": before, "now": after, "reference": sl.load_encoder(DEEPER)}
    run = sl.analyze(encoders, sl.load_images(IMAGES), ["knn", "attention", "cka"], show_progress=False)
    for step, name in ((0, "start"), (4, "now")):
        row, knn = table.loc[step], run["knn"].accuracy.sel(encoder=name, site="norm")
        assert row.knn_cls == pytest.approx(float(knn.sel(feature="cls")), rel=1e-5)
        assert row.knn_gap == pytest.approx(float(knn.sel(feature="gap_without_cls")), rel=1e-5)
        cka = run["cka"].cka.sel(encoder_a=name, tokens="all")
        for block, same in ((0, 0), (1, 2)):  # the last block with the last one
            nmi = run["attention"].nmi_mean.sel(encoder=name, site=f"block.{block}.attn_map")
            assert row[f"nmi.block.{block}"] == pytest.approx(float(nmi), rel=1e-5)
            of_layer = cka.sel(site_a=f"block.{block}")
            start = of_layer.sel(encoder_b="start", site_b=f"block.{block}")
            reference = of_layer.sel(encoder_b="reference", site_b=f"block.{same}")
            assert row[f"cka_start.block.{block}"] == pytest.approx(float(start), abs=1e-6)
            assert row[f"cka_reference.block.{block}"] == pytest.approx(float(reference), abs=1e-6)
        assert row.nmi == pytest.approx((row["nmi.block.0"] + row["nmi.block.1"]) / 2, rel=1e-5)
    assert table.cka_start[0] == pytest.approx(1)
    assert table.cka_start[4] < 0.999
    assert table.rank_cls.between(1, 48).all()


def test_tensorboard_has_the_same(trained: tuple[Path, sl.Encoder, sl.Encoder]) -> None:
    table = pd.read_csv(trained[0] / "metrics.csv")
    board = EventAccumulator(str(trained[0] / "tensorboard"))
    board.Reload()
    found = [(event.step, event.value) for event in board.Scalars("cka_start")]
    assert [step for step, _ in found] == table.step.tolist()
    np.testing.assert_allclose([value for _, value in found], table.cka_start, rtol=1e-5)


def test_watching_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for name in ("watched", ""):
        encoder = sl.load_encoder(SMALL + "&drop_rate=0.3")
        torch.manual_seed(0)
        encoder.module.train()
        how: dict[str, Any] = {"every": 1, "out": tmp_path / name, "limit": 16, "show_progress": False}
        train(encoder.module, sl.watch(encoder, IMAGES, **how) if name else None, steps=2)
        ends.append((encoder.module.state_dict(), torch.rand(4), encoder.module.training))
    assert ends[0][2] is ends[1][2] is True
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=0, atol=0)
    for name, value in ends[0][0].items():
        torch.testing.assert_close(value, ends[1][0][name], rtol=0, atol=0)


def test_a_resumed_training_keeps_its_start(tmp_path: Path) -> None:
    encoder = sl.load_encoder(SMALL)
    how: dict[str, Any] = {"analyses": ["cka"], "every": 1, "out": tmp_path / "run"}
    how |= {"limit": 16, "show_progress": False}
    first = sl.watch(encoder, IMAGES, **how)
    train(encoder.module, first, steps=3)  # rows 0, 1, 2
    first.close()
    with pytest.raises(InputError, match=r"holds a watched training; choose another folder, or pass resume=True"):
        sl.watch(encoder, IMAGES, **how)
    row = sl.watch(encoder, IMAGES, **how, resume=True)(2)  # from a checkpoint after step 2, say
    table = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert table.step.tolist() == [0, 1, 2]
    assert row["cka_start"] < 0.999  # with the first look, not with this one
    assert table.cka_start[2] == pytest.approx(row["cka_start"], rel=1e-5)
    again = sl.watch(encoder, IMAGES, **how, overwrite=True)
    assert again(0)["cka_start"] == pytest.approx(1)
    assert len(pd.read_csv(tmp_path / "run" / "metrics.csv")) == 1


def test_networks_without_attention_or_of_no_known_family(tmp_path: Path) -> None:
    cnn = sl.load_encoder("timm:resnet10t@random?size=32")
    row = sl.watch(cnn, IMAGES, out=tmp_path / "cnn", limit=16, show_progress=False)(0)
    names = {"step", "knn_gap", "rank_gap", "centred_rank_gap", "cka_start", "seconds"}
    assert {key.partition(".")[0] for key in row} == names
    own = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 6))
    known = sl.load_encoder(own, preprocess=sl.Preprocess(size=(32, 32), resize=32))
    row = sl.watch(known, IMAGES, out=tmp_path / "own", limit=16, show_progress=False)(0)
    assert 1 <= row["rank_gap"] <= 6  # of what the last layer gives
    assert row["cka_start.3"] == pytest.approx(1)


def test_a_diverged_training_has_no_numbers_but_goes_on(tmp_path: Path) -> None:
    encoder = sl.load_encoder(SMALL)
    watched = sl.watch(encoder, IMAGES, every=1, out=tmp_path / "run", limit=16, show_progress=False)
    watched(0)
    with torch.no_grad():
        next(encoder.module.parameters()).fill_(math.nan)
    row = watched(1)
    assert all(math.isnan(row[name]) for name in ("knn_cls", "rank_gap", "nmi", "cka_start"))


def test_errors_are_sentences(tmp_path: Path) -> None:
    encoder, out = sl.load_encoder(SMALL), tmp_path / "run"
    with pytest.raises(InputError, match=r"cannot be watched by 'knnn'; did you mean 'knn'"):
        sl.watch(encoder, IMAGES, ["knnn"], out=out)
    with pytest.raises(InputError, match=r"attention cannot be watched: .* leave it out"):
        sl.watch(sl.load_encoder("timm:resnet10t@random?size=32"), IMAGES, ["attention"], out=out)
    with pytest.raises(InputError, match=r"every 0 steps"):
        sl.watch(encoder, IMAGES, every=0, out=out)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not a run folder"):
        sl.watch(encoder, IMAGES, out=tmp_path / "notes")
    assert not out.exists()


@pytest.mark.filterwarnings("ignore")  # of Lightning, about itself
def test_lightning_calls_it(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = sl.load_encoder(SMALL).module
            self.head = nn.LazyLinear(4)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.02)

    lit = Lit()
    lit.head(lit.encoder(torch.zeros(1, 3, 32, 32)))
    data = torch.utils.data.TensorDataset(torch.randn(24, 3, 32, 32), torch.arange(24) % 4)
    watched = sl.watch(
        lit.encoder, IMAGES, ["rank", "cka"], every=2, out=tmp_path / "run", limit=16, show_progress=False
    )
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[watched.lightning()],
        accumulate_grad_batches=2,
        default_root_dir=tmp_path / "lightning",
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(lit, torch.utils.data.DataLoader(data, batch_size=4))
    table = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert table.step.tolist() == [0, 2, 3]  # six batches, two to a step
    assert table.cka_start[0] == pytest.approx(1)
    assert table.cka_start[2] < 1 - 1e-5


@pytest.mark.filterwarnings("ignore")  # of transformers, about itself
def test_hugging_face_calls_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.ViTConfig(**HUGGINGFACE, num_labels=4)
    model = transformers.ViTForImageClassification(config)
    data = [{"pixel_values": torch.randn(3, 32, 32), "labels": number % 4} for number in range(24)]
    watched = sl.watch(model, IMAGES, every=2, out=tmp_path / "run", limit=16, show_progress=False)
    how = transformers.TrainingArguments(
        str(tmp_path / "trainer"),
        per_device_train_batch_size=8,
        max_steps=3,
        learning_rate=0.05,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    transformers.Trainer(model, how, train_dataset=data, callbacks=[watched.huggingface()]).train()
    table = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert table.step.tolist() == [0, 2, 3]
    assert {"knn_cls", "rank_gap", "nmi.block.1", "cka_start.block.0"} <= set(table)
    assert table.cka_start[2] < 1 - 1e-5
