"""Every plugin of Sightline with its contract: mypy checks here that each file has what its contract asks for.

`contract/test_contracts.py` checks that no plugin is missing. What a file may leave out is listed by member, so that
mypy sees the type of it where a file has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr

from sightline.analyses import (
    agreement,
    attention,
    cka,
    diversity,
    dynamics,
    fourier,
    invariance,
    inversion,
    knn,
    minibatch,
    noise,
    orientation,
    probes,
    segmentation,
    shape_bias,
    similarity,
    spectra,
    tokens,
    transformations,
)
from sightline.core.contract import Study
from sightline.encoders.contract import Family, Format, ModelSource
from sightline.encoders.families import autoencoder, convnext, eva, projected, resnet, vit
from sightline.encoders.families import huggingface as huggingface_family
from sightline.encoders.formats import beit, convnext_v2, dino, mae, moco_v3, msn, simmim
from sightline.encoders.sources import checkpoint, huggingface, run, timm, torchvision, zoo
from sightline.images.contract import ImageSource
from sightline.images.sources import arrays, coco, folder, masks, parquet, shapes
from sightline.images.sources import huggingface as huggingface_images
from sightline.measure.contract import AnalysisFile, FurtherImages
from sightline.studies import rcdm, reinit
from sightline.training.backbones import Backbone
from sightline.training.objective import First, ObjectiveFile
from sightline.training.objectives import beit as beit_objective
from sightline.training.objectives import dino as dino_objective
from sightline.training.objectives import hybrid, simclr, supervised
from sightline.training.objectives import mae as mae_objective
from sightline.training.objectives import moco_v3 as moco_v3_objective
from sightline.training.objectives import msn as msn_objective
from sightline.training.objectives import simmim as simmim_objective

ANALYSES: Mapping[str, AnalysisFile] = {
    "agreement": agreement,
    "attention": attention,
    "cka": cka,
    "diversity": diversity,
    "dynamics": dynamics,
    "fourier": fourier,
    "invariance": invariance,
    "inversion": inversion,
    "knn": knn,
    "minibatch": minibatch,
    "noise": noise,
    "orientation": orientation,
    "probes": probes,
    "segmentation": segmentation,
    "shape_bias": shape_bias,
    "similarity": similarity,
    "spectra": spectra,
    "tokens": tokens,
    "transformations": transformations,
}
PROJECTION: Mapping[str, tuple[str, ...]] = {
    "cka": cka.PROJECTION,
    "invariance": invariance.PROJECTION,
    "knn": knn.PROJECTION,
    "similarity": similarity.PROJECTION,
    "transformations": transformations.PROJECTION,
}
IMAGES: Mapping[str, Mapping[str, FurtherImages]] = {"shape_bias": shape_bias.IMAGES}
ANALYSIS_TARGETS: Mapping[str, bool] = {}
CONFIG: Mapping[str, type[Any]] = {
    "agreement": agreement.Config,
    "attention": attention.Config,
    "cka": cka.Config,
    "dynamics": dynamics.Config,
    "invariance": invariance.Config,
    "inversion": inversion.Config,
    "knn": knn.Config,
    "minibatch": minibatch.Config,
    "noise": noise.Config,
    "orientation": orientation.Config,
    "probes": probes.Config,
    "segmentation": segmentation.Config,
    "shape_bias": shape_bias.Config,
    "similarity": similarity.Config,
    "spectra": spectra.Config,
    "tokens": tokens.Config,
    "transformations": transformations.Config,
}
VIEWS: Mapping[str, Callable[[Any, str], tuple[str, ...]]] = {
    "invariance": invariance.views,
    "inversion": inversion.views,
    "noise": noise.views,
    "orientation": orientation.views,
    "shape_bias": shape_bias.views,
    "transformations": transformations.views,
}
PRECISION: Mapping[str, Callable[[Any], str]] = {"probes": probes.precision}
SUMMARY: Mapping[str, Callable[[xr.Dataset], Sequence[str]]] = {
    "inversion": inversion.summary,
    "probes": probes.summary,
    "segmentation": segmentation.summary,
    "transformations": transformations.summary,
}

OBJECTIVES: Mapping[str, ObjectiveFile] = {
    "beit": beit_objective,
    "dino": dino_objective,
    "hybrid": hybrid,
    "mae": mae_objective,
    "moco_v3": moco_v3_objective,
    "msn": msn_objective,
    "simclr": simclr,
    "simmim": simmim_objective,
    "supervised": supervised,
}
LABELS: Mapping[str, bool] = {"supervised": supervised.LABELS}
TARGETS: Mapping[str, bool] = {}
FIRST: Mapping[str, Callable[[Any, Backbone], First | None]] = {
    "beit": beit_objective.first,
    "hybrid": hybrid.first,
}

FORMATS: Mapping[str, Format] = {
    "beit": beit,
    "convnext_v2": convnext_v2,
    "dino": dino,
    "mae": mae,
    "moco_v3": moco_v3,
    "msn": msn,
    "simmim": simmim,
}
SOURCES: Mapping[str, ModelSource] = {
    "checkpoint": checkpoint,
    "huggingface": huggingface,
    "run": run,
    "timm": timm,
    "torchvision": torchvision,
    "zoo": zoo,
}
FAMILIES: Mapping[str, Family] = {
    "autoencoder": autoencoder,
    "convnext": convnext,
    "eva": eva,
    "huggingface": huggingface_family,
    "projected": projected,
    "resnet": resnet,
    "vit": vit,
}
DATASETS: Mapping[str, ImageSource] = {
    "arrays": arrays,
    "coco": coco,
    "folder": folder,
    "huggingface": huggingface_images,
    "masks": masks,
    "parquet": parquet,
    "shapes": shapes,
}
STUDIES: Mapping[str, Study] = {"rcdm": rcdm, "reinit": reinit}

KINDS: Mapping[str, Mapping[str, object]] = {
    "analyses": ANALYSES,
    "datasets": DATASETS,
    "families": FAMILIES,
    "formats": FORMATS,
    "objectives": OBJECTIVES,
    "sources": {**SOURCES, **FORMATS},
    "studies": STUDIES,
}
