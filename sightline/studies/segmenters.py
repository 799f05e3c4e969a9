"""How well are images segmented from these encoders? A head of the same kind each, frozen or end to end.

    mIoU   mean over classes of the pixels that are decided right over those that are decided or there

over all pixels of the test images at the resolution of their labels, with windows that slide over the images
(transfer/segmentation/sliding.py). Intervals are over groups of test images, which are the same for all encoders, so
that differences are paired.

Source: Oquab et al. 2023, "DINOv2" (a linear head); Xiao et al. 2018, "Unified Perceptual Parsing for Scene
Understanding", Bao et al. 2022, "BEiT", and Park et al. 2023, table G.1 (UperNet).

RUN/trainings/ENCODER             a training each, with its segments.npz
RUN/results/segmenters.nc, …      see core/run_folder.py
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from sightline.core.groups import Axis, Kept, LeftOut
from sightline.core.provenance import fingerprint
from sightline.core.results import ENDS, interval
from sightline.core.run_folder import Run
from sightline.encoders.encoder import Encoder
from sightline.images.label_maps import BACKGROUND, channels
from sightline.images.sets import Images
from sightline.images.thumbnails import thumbnail_size
from sightline.measure.estimators.overlap import iou_of, mean_over_classes, miou_difference, miou_of
from sightline.measure.request import named_encoders
from sightline.report.figures import FIRST, Figure, KeyNumber, Table, class_figure, coloured, of_encoders
from sightline.training.launch import Launch
from sightline.transfer.segmentation.segment import NAME, SegmentConfig, check, make_recipe, shown_ids, train_segmenter
from sightline.transfer.segmentation.sliding import Segmented
from sightline.transfer.trainings import NOT_YET, Reuse, folder_of, prepare, train_each

TOPIC = "transfer"
TITLE = "Segmentation with a trained head"
QUESTION = "How well does a head trained on these encoders predict the class of every pixel?"
FORMULA = """\
IoU_c = pixels of class c decided as c / (pixels of class c + pixels decided as c − the former)
mIoU  = mean over classes of IoU_c
s²    = (g − 1)/g Σᵢ (mIoU without group i of the images − their mean)²,   mIoU ± t · s"""
HOW_TO_READ = """\
Each encoder has a head of the same kind, trained with the same settings. A frozen encoder with a linear head shows what
its patches already hold; UperNet, or an encoder that is trained as well, shows how good a start it is. All pixels are
counted in one confusion matrix, at the resolution of the labels; pixels without a label are left out, and so are
classes that occur neither in the labels nor in the decisions. A difference between two encoders is more certain than
the two intervals suggest, because both see the same images: its own interval is in the second table. Intervals do not
say how much another seed of the training would change. The analysis `segmentation` says which block to take, without
any training."""
SOURCE = (
    'Oquab et al. 2023, "DINOv2"; Xiao et al. 2018, "Unified Perceptual Parsing for Scene Understanding"; Bao et al. '
    '2022, "BEiT"; Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?", table G.1'
)

KIND = "segmenters"
GROUPS = 50  # of test images, for intervals


def segment(
    encoders: Mapping[str, Encoder | str] | Sequence[Encoder | str] | Encoder | str,
    images: str | Images | None,
    out: str | Path,
    recipe: str | Path | None,
    settings: Mapping[str, Any],
    launch: Launch,
    reuse: Reuse | None = None,
) -> Run:
    """Train a segmenter on each encoder, see `sightline.api`, and measure it on the test images.

    `reuse` are runs by encoder whose trainings are known to be the same: they are taken over.
    """
    asked = prepare(make_recipe, named_encoders(encoders), images, out, recipe or NAME, settings, launch)
    members, data, base = asked.members, asked.data, asked.recipe
    for encoder in members.values():
        check(base, encoder, data)

    def train(name: str, folder: Path) -> Mapping[str, Segmented]:
        return train_segmenter(members[name], data, folder, recipe=recipe, settings=settings, launch=asked.each)

    def result(found: Mapping[str, Mapping[str, Segmented]]) -> xr.Dataset:
        return _result(found, list(members), data, base.config)

    folders = {name: folder_of(asked.out, name) for name in members}
    return train_each(KIND, asked, folders, train, result, reuse=reuse)


def _result(
    found: Mapping[str, Mapping[str, Segmented]], encoders: Sequence[str], data: Images, config: SegmentConfig
) -> xr.Dataset:
    """mIoU and IoU with intervals, differences, and the gallery, as far as they are known."""
    names = [BACKGROUND, *data.classes]
    common = [image for image in next(iter(found.values())) if all(image in of for of in found.values())]
    groups = {name: _groups(np.stack([of[image].counts for image in common])) for name, of in found.items()}
    miou, apart = np.full((len(encoders), 3), np.nan), np.full((len(encoders), len(encoders), 3), np.nan)
    iou = np.full((len(encoders), len(names)), np.nan)
    for i, name in enumerate(encoders):
        if name in groups:
            miou[i], iou[i] = miou_of(groups[name]), iou_of(groups[name].sum(0))
            for j, other in enumerate(encoders):
                if other in groups:
                    apart[i, j] = miou_difference(groups[name], groups[other])
    first = next(iter(groups.values()))
    data_vars: dict[str, Any] = {
        **{f"miou{end}": ("encoder", miou[:, k]) for k, end in enumerate(ENDS)},
        **{f"difference{end}": (("encoder", "other"), apart[..., k]) for k, end in enumerate(ENDS)},
        "iou": (("encoder", "class"), iou),
        "pixels": ("class", first.sum(0)[2].astype(np.float64)),
        "reason": ("encoder", np.array(["" if name in found else NOT_YET for name in encoders])),
    }
    result = xr.Dataset(
        data_vars,
        coords={"encoder": list(encoders), "other": list(encoders), "class": names},
        attrs={
            "test_images": len(common),
            "head": config.head,
            "encoders": "frozen" if config.frozen else "trained along",
            "interval": f"95 %: jackknife over {len(first)} groups of the test images, the same for all encoders",
            "labels": "their own resolution; pixels without a label are left out",
            "windows": "of the size that was trained with, sliding by two thirds over images resized to it on their "
            "shorter side; scores averaged",
            "upsampling": "bilinear",
        },
    )
    return _kept(groups, encoders, common).beside(result.merge(_gallery(found, data)))


def _kept(groups: Mapping[str, NDArray[np.int64]], encoders: Sequence[str], images: Sequence[str]) -> Kept:
    """mIoU and IoU without each group of test images, so that differences of any of them have an interval."""
    some = next(iter(groups.values()))
    missing = np.full((len(some), some.shape[-1]), np.nan)
    iou = [iou_of(groups[name].sum(0) - groups[name]) if name in groups else missing for name in encoders]
    without = np.stack(iou, 1)  # (G, encoders, classes)
    kept = Kept({"group": Axis(fingerprint(["groups of neighbours", list(images)]), "groups of the test images")})
    kept.add("iou", LeftOut("iou_left_out"), iou_left_out=(("group", "encoder", "class"), without))
    kept.add("miou", LeftOut("left_out"), left_out=(("group", "encoder"), mean_over_classes(without)))
    return kept


def _groups(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n, 3, K) of images → (g, 3, K) of groups of them, neighbours in different ones."""
    number = min(GROUPS, len(counts))
    return np.stack([counts[start::number].sum(0) for start in range(number)])


def _gallery(found: Mapping[str, Mapping[str, Segmented]], data: Images) -> xr.Dataset:
    """Some test images: the image, its labels, and the decisions of each encoder."""
    place = {str(data.ids[i]): int(i) for i in data.indices("test")}
    shown = [image for image in shown_ids(data) if all(image in of for of in found.values())]
    classes, rows = len(data.classes) + 1, []
    for image in shown:
        pixels = data.source.read([place[image]])[0].image
        truth = data.targets([place[image]])[0].segmentation
        assert pixels is not None, "it was read before"
        assert truth is not None
        pictures = [_thumbnail(pixels), coloured(_thumbnail(channels(truth)), classes)]
        rows.append([*pictures, *(coloured(of[image].picture, classes) for of in found.values())])
    if not rows:
        return xr.Dataset()
    side = max(max(picture.shape[:2]) for row in rows for picture in row)
    about = {
        "title": "Images, labels and decisions",
        "caption": "Light grey is the background, dark what is left out; each class has a colour of its own.",
    }
    axes = [f"gallery_{axis}" for axis in ("row", "column", "y", "x", "rgb")]
    squares = np.array([[_square(picture, side) for picture in row] for row in rows], np.uint8)
    return xr.Dataset(
        {"gallery": (axes, squares, about)},
        coords={"gallery_row": shown, "gallery_column": ["image", "labels", *found]},
    )


def _thumbnail(pixels: NDArray[Any]) -> NDArray[Any]:
    """Pixels (H, W, …) under the centres of a small picture's."""
    rows, columns = (
        (2 * np.arange(n) + 1) * length // (2 * n)
        for n, length in zip(thumbnail_size(pixels.shape[:2]), pixels.shape[:2], strict=True)
    )
    small: NDArray[Any] = pixels[rows[:, None], columns]
    return small


def _square(picture: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    whole = np.full((side, side, 3), 255, np.uint8)
    whole[: picture.shape[0], : picture.shape[1]] = picture
    return whole


# The page


def tables(result: xr.Dataset) -> list[Table]:
    """mIoU as the papers print it, and differences from the first encoder."""
    head = {"linear": "a linear head", "upernet": "UperNet"}[str(result.attrs["head"])]
    printed = [
        Table(
            "mIoU",
            f"In per cent, {head} on encoders that are {result.attrs['encoders']}; {result.attrs['interval']}.",
            ["encoder", "mIoU", "95 %"],
            [[str(name), *_cells(result.sel(encoder=name), "miou", "")] for name in result.encoder.values],
        )
    ]
    if result.sizes["encoder"] > 1:
        first = str(result.encoder.values[0])
        others = result.encoder.values[1:]
        printed.append(
            Table(
                f"Differences from {first}",
                f"mIoU minus that of {first} in points, on the same images.",
                ["encoder", "difference", "95 %"],
                [[str(n), *_cells(result.sel(encoder=n, other=first), "difference", "+")] for n in others],
            )
        )
    return printed


def _cells(one: xr.Dataset, name: str, sign: str) -> list[str]:
    value, low, high = (100 * one[f"{name}{end}"].item() for end in ENDS)
    if not np.isfinite(value):
        return ["–", "–"]
    return [f"{value:{sign}.1f}", f"{low:{sign}.1f} – {high:{sign}.1f}"]


def figures(result: xr.Dataset) -> list[Figure]:
    table = result[["iou", "pixels"]].to_dataframe().reset_index().dropna(subset="iou")
    caption = "The easiest class on top; those without test pixels are left out."
    return [] if table.empty else [class_figure(table, caption)]


def headlines(result: xr.Dataset) -> list[tuple[str, str, str]]:
    lines = []
    for name in result.encoder.values:
        value, low, high = (result[f"miou{end}"].sel(encoder=name).item() for end in ENDS)
        if np.isfinite(value):
            detail = f"mIoU, {result.attrs['head']} head, {result.attrs['encoders']}, {interval(low, high)}"
            lines.append((str(name), f"{value:.1%}", detail))
    return lines


def key_numbers(result: xr.Dataset) -> list[KeyNumber]:
    about = f"mIoU, {result.attrs['head']} head, {result.attrs['encoders']}"
    return of_encoders(result, "miou", title="mIoU", about=about, style=".1%", best="highest", place=FIRST)
