"""Every plugin of Sightline with its contract: mypy checks here that each file has what its contract asks for.

Written by scripts/plugin_types.py. What a file may leave out is listed by member, so that mypy sees the type of it
where a file has it; so are classes, whose names a file chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr

from sightline.analyses import agreement as analyses_agreement
from sightline.analyses import attention as analyses_attention
from sightline.analyses import cka as analyses_cka
from sightline.analyses import diversity as analyses_diversity
from sightline.analyses import dynamics as analyses_dynamics
from sightline.analyses import fourier as analyses_fourier
from sightline.analyses import invariance as analyses_invariance
from sightline.analyses import inversion as analyses_inversion
from sightline.analyses import knn as analyses_knn
from sightline.analyses import minibatch as analyses_minibatch
from sightline.analyses import noise as analyses_noise
from sightline.analyses import orientation as analyses_orientation
from sightline.analyses import probes as analyses_probes
from sightline.analyses import segmentation as analyses_segmentation
from sightline.analyses import shape_bias as analyses_shape_bias
from sightline.analyses import similarity as analyses_similarity
from sightline.analyses import spectra as analyses_spectra
from sightline.analyses import tokens as analyses_tokens
from sightline.analyses import transformations as analyses_transformations
from sightline.core.contract import StudyFile
from sightline.encoders.contract import Family, Format, ModelSource
from sightline.encoders.families import autoencoder as families_autoencoder
from sightline.encoders.families import convnext as families_convnext
from sightline.encoders.families import eva as families_eva
from sightline.encoders.families import huggingface as families_huggingface
from sightline.encoders.families import projected as families_projected
from sightline.encoders.families import resnet as families_resnet
from sightline.encoders.families import vit as families_vit
from sightline.encoders.formats import beit as formats_beit
from sightline.encoders.formats import convnext_v2 as formats_convnext_v2
from sightline.encoders.formats import dino as formats_dino
from sightline.encoders.formats import mae as formats_mae
from sightline.encoders.formats import moco_v3 as formats_moco_v3
from sightline.encoders.formats import msn as formats_msn
from sightline.encoders.formats import simmim as formats_simmim
from sightline.encoders.formats import vitdet as formats_vitdet
from sightline.encoders.sources import checkpoint as sources_checkpoint
from sightline.encoders.sources import huggingface as sources_huggingface
from sightline.encoders.sources import run as sources_run
from sightline.encoders.sources import timm as sources_timm
from sightline.encoders.sources import torchvision as sources_torchvision
from sightline.encoders.sources import zoo as sources_zoo
from sightline.images.contract import ImageSource
from sightline.images.sources import arrays as datasets_arrays
from sightline.images.sources import coco as datasets_coco
from sightline.images.sources import folder as datasets_folder
from sightline.images.sources import huggingface as datasets_huggingface
from sightline.images.sources import masks as datasets_masks
from sightline.images.sources import parquet as datasets_parquet
from sightline.images.sources import shapes as datasets_shapes
from sightline.measure.contract import Analysis, AnalysisFile, FurtherImages
from sightline.measure.plan import Plan
from sightline.report.figures import KeyNumber, Likeness, Table
from sightline.studies import detection as studies_detection
from sightline.studies import rcdm as studies_rcdm
from sightline.studies import reinit as studies_reinit
from sightline.studies import segmenters as studies_segmenters
from sightline.training.backbones import Backbone
from sightline.training.objective import First, Objective, ObjectiveFile
from sightline.training.objectives import beit as objectives_beit
from sightline.training.objectives import dino as objectives_dino
from sightline.training.objectives import hybrid as objectives_hybrid
from sightline.training.objectives import mae as objectives_mae
from sightline.training.objectives import moco_v3 as objectives_moco_v3
from sightline.training.objectives import msn as objectives_msn
from sightline.training.objectives import simclr as objectives_simclr
from sightline.training.objectives import simmim as objectives_simmim
from sightline.training.objectives import supervised as objectives_supervised

ANALYSES: Mapping[str, AnalysisFile] = {
    "agreement": analyses_agreement,
    "attention": analyses_attention,
    "cka": analyses_cka,
    "diversity": analyses_diversity,
    "dynamics": analyses_dynamics,
    "fourier": analyses_fourier,
    "invariance": analyses_invariance,
    "inversion": analyses_inversion,
    "knn": analyses_knn,
    "minibatch": analyses_minibatch,
    "noise": analyses_noise,
    "orientation": analyses_orientation,
    "probes": analyses_probes,
    "segmentation": analyses_segmentation,
    "shape_bias": analyses_shape_bias,
    "similarity": analyses_similarity,
    "spectra": analyses_spectra,
    "tokens": analyses_tokens,
    "transformations": analyses_transformations,
}
ANALYSES_ANALYSIS: Mapping[str, Callable[[Any, Plan], Analysis]] = {
    "agreement": analyses_agreement.AgreementAnalysis,
    "attention": analyses_attention.AttentionAnalysis,
    "cka": analyses_cka.CkaAnalysis,
    "diversity": analyses_diversity.DiversityAnalysis,
    "dynamics": analyses_dynamics.DynamicsAnalysis,
    "fourier": analyses_fourier.FourierAnalysis,
    "invariance": analyses_invariance.InvarianceAnalysis,
    "inversion": analyses_inversion.InversionAnalysis,
    "knn": analyses_knn.KnnAnalysis,
    "minibatch": analyses_minibatch.MinibatchAnalysis,
    "noise": analyses_noise.NoiseAnalysis,
    "orientation": analyses_orientation.OrientationAnalysis,
    "probes": analyses_probes.ProbesAnalysis,
    "segmentation": analyses_segmentation.SegmentationAnalysis,
    "shape_bias": analyses_shape_bias.ShapeBiasAnalysis,
    "similarity": analyses_similarity.SimilarityAnalysis,
    "spectra": analyses_spectra.SpectraAnalysis,
    "tokens": analyses_tokens.TokensAnalysis,
    "transformations": analyses_transformations.TransformationsAnalysis,
}
ANALYSES_TOPIC: Mapping[str, str] = {
    "agreement": analyses_agreement.TOPIC,
    "attention": analyses_attention.TOPIC,
    "cka": analyses_cka.TOPIC,
    "diversity": analyses_diversity.TOPIC,
    "dynamics": analyses_dynamics.TOPIC,
    "fourier": analyses_fourier.TOPIC,
    "invariance": analyses_invariance.TOPIC,
    "inversion": analyses_inversion.TOPIC,
    "knn": analyses_knn.TOPIC,
    "minibatch": analyses_minibatch.TOPIC,
    "noise": analyses_noise.TOPIC,
    "orientation": analyses_orientation.TOPIC,
    "probes": analyses_probes.TOPIC,
    "segmentation": analyses_segmentation.TOPIC,
    "shape_bias": analyses_shape_bias.TOPIC,
    "similarity": analyses_similarity.TOPIC,
    "spectra": analyses_spectra.TOPIC,
    "tokens": analyses_tokens.TOPIC,
    "transformations": analyses_transformations.TOPIC,
}
ANALYSES_PROJECTION: Mapping[str, tuple[str, ...]] = {
    "cka": analyses_cka.PROJECTION,
    "invariance": analyses_invariance.PROJECTION,
    "knn": analyses_knn.PROJECTION,
    "similarity": analyses_similarity.PROJECTION,
    "transformations": analyses_transformations.PROJECTION,
}
ANALYSES_IMAGES: Mapping[str, Mapping[str, FurtherImages]] = {"shape_bias": analyses_shape_bias.IMAGES}
ANALYSES_TARGETS: Mapping[str, bool] = {}
ANALYSES_CONFIG: Mapping[str, type[Any]] = {
    "agreement": analyses_agreement.AgreementConfig,
    "attention": analyses_attention.AttentionConfig,
    "cka": analyses_cka.CkaConfig,
    "dynamics": analyses_dynamics.DynamicsConfig,
    "invariance": analyses_invariance.InvarianceConfig,
    "inversion": analyses_inversion.InversionConfig,
    "knn": analyses_knn.KnnConfig,
    "minibatch": analyses_minibatch.MinibatchConfig,
    "noise": analyses_noise.NoiseConfig,
    "orientation": analyses_orientation.OrientationConfig,
    "probes": analyses_probes.ProbesConfig,
    "segmentation": analyses_segmentation.SegmentationConfig,
    "shape_bias": analyses_shape_bias.ShapeBiasConfig,
    "similarity": analyses_similarity.SimilarityConfig,
    "spectra": analyses_spectra.SpectraConfig,
    "tokens": analyses_tokens.TokensConfig,
    "transformations": analyses_transformations.TransformationsConfig,
}
ANALYSES_VIEWS: Mapping[str, Callable[[Any, str], tuple[str, ...]]] = {
    "invariance": analyses_invariance.views,
    "inversion": analyses_inversion.views,
    "noise": analyses_noise.views,
    "orientation": analyses_orientation.views,
    "shape_bias": analyses_shape_bias.views,
    "transformations": analyses_transformations.views,
}
ANALYSES_PRECISION: Mapping[str, Callable[[Any], str]] = {"probes": analyses_probes.precision}
ANALYSES_SUMMARY: Mapping[str, Callable[[xr.Dataset], Sequence[str]]] = {
    "inversion": analyses_inversion.summary,
    "probes": analyses_probes.summary,
    "segmentation": analyses_segmentation.summary,
    "transformations": analyses_transformations.summary,
}
ANALYSES_TABLES: Mapping[str, Callable[[xr.Dataset], Sequence[Table]]] = {}
ANALYSES_KEY_NUMBERS: Mapping[str, Callable[[xr.Dataset], Sequence[KeyNumber]]] = {
    "agreement": analyses_agreement.key_numbers,
    "attention": analyses_attention.key_numbers,
    "cka": analyses_cka.key_numbers,
    "diversity": analyses_diversity.key_numbers,
    "dynamics": analyses_dynamics.key_numbers,
    "fourier": analyses_fourier.key_numbers,
    "invariance": analyses_invariance.key_numbers,
    "inversion": analyses_inversion.key_numbers,
    "knn": analyses_knn.key_numbers,
    "minibatch": analyses_minibatch.key_numbers,
    "noise": analyses_noise.key_numbers,
    "orientation": analyses_orientation.key_numbers,
    "probes": analyses_probes.key_numbers,
    "segmentation": analyses_segmentation.key_numbers,
    "shape_bias": analyses_shape_bias.key_numbers,
    "spectra": analyses_spectra.key_numbers,
    "tokens": analyses_tokens.key_numbers,
    "transformations": analyses_transformations.key_numbers,
}
ANALYSES_LIKENESS: Mapping[str, Callable[[xr.Dataset], Likeness | None]] = {
    "agreement": analyses_agreement.likeness,
    "cka": analyses_cka.likeness,
    "similarity": analyses_similarity.likeness,
}
DATASETS: Mapping[str, ImageSource] = {
    "arrays": datasets_arrays,
    "coco": datasets_coco,
    "folder": datasets_folder,
    "huggingface": datasets_huggingface,
    "masks": datasets_masks,
    "parquet": datasets_parquet,
    "shapes": datasets_shapes,
}
FAMILIES: Mapping[str, Family] = {
    "autoencoder": families_autoencoder,
    "convnext": families_convnext,
    "eva": families_eva,
    "huggingface": families_huggingface,
    "projected": families_projected,
    "resnet": families_resnet,
    "vit": families_vit,
}
FORMATS: Mapping[str, Format] = {
    "beit": formats_beit,
    "convnext_v2": formats_convnext_v2,
    "dino": formats_dino,
    "mae": formats_mae,
    "moco_v3": formats_moco_v3,
    "msn": formats_msn,
    "simmim": formats_simmim,
    "vitdet": formats_vitdet,
}
OBJECTIVES: Mapping[str, ObjectiveFile] = {
    "beit": objectives_beit,
    "dino": objectives_dino,
    "hybrid": objectives_hybrid,
    "mae": objectives_mae,
    "moco_v3": objectives_moco_v3,
    "msn": objectives_msn,
    "simclr": objectives_simclr,
    "simmim": objectives_simmim,
    "supervised": objectives_supervised,
}
OBJECTIVES_OBJECTIVE: Mapping[str, Callable[..., Objective]] = {
    "beit": objectives_beit.BeitObjective,
    "dino": objectives_dino.DinoObjective,
    "hybrid": objectives_hybrid.HybridObjective,
    "mae": objectives_mae.MaeObjective,
    "moco_v3": objectives_moco_v3.MocoV3Objective,
    "msn": objectives_msn.MsnObjective,
    "simclr": objectives_simclr.SimclrObjective,
    "simmim": objectives_simmim.SimmimObjective,
    "supervised": objectives_supervised.SupervisedObjective,
}
OBJECTIVES_CONFIG: Mapping[str, type[Any]] = {
    "beit": objectives_beit.BeitConfig,
    "dino": objectives_dino.DinoConfig,
    "hybrid": objectives_hybrid.HybridConfig,
    "mae": objectives_mae.MaeConfig,
    "moco_v3": objectives_moco_v3.MocoV3Config,
    "msn": objectives_msn.MsnConfig,
    "simclr": objectives_simclr.SimclrConfig,
    "simmim": objectives_simmim.SimmimConfig,
    "supervised": objectives_supervised.SupervisedConfig,
}
OBJECTIVES_LABELS: Mapping[str, bool] = {"supervised": objectives_supervised.LABELS}
OBJECTIVES_TARGETS: Mapping[str, bool] = {}
OBJECTIVES_FIRST: Mapping[str, Callable[[Any, Backbone], First | None]] = {
    "beit": objectives_beit.first,
    "hybrid": objectives_hybrid.first,
}
SOURCES: Mapping[str, ModelSource] = {
    "checkpoint": sources_checkpoint,
    "huggingface": sources_huggingface,
    "run": sources_run,
    "timm": sources_timm,
    "torchvision": sources_torchvision,
    "zoo": sources_zoo,
}
STUDIES: Mapping[str, StudyFile] = {
    "detection": studies_detection,
    "rcdm": studies_rcdm,
    "reinit": studies_reinit,
    "segmenters": studies_segmenters,
}
KINDS: Mapping[str, Mapping[str, object]] = {
    "analyses": ANALYSES,
    "datasets": DATASETS,
    "families": FAMILIES,
    "formats": FORMATS,
    "objectives": OBJECTIVES,
    "studies": STUDIES,
    "sources": {**SOURCES, **FORMATS},
}
ANALYSES_OPTIONAL: Mapping[str, Mapping[str, object]] = {
    "Analysis": ANALYSES_ANALYSIS,
    "TOPIC": ANALYSES_TOPIC,
    "PROJECTION": ANALYSES_PROJECTION,
    "IMAGES": ANALYSES_IMAGES,
    "TARGETS": ANALYSES_TARGETS,
    "Config": ANALYSES_CONFIG,
    "views": ANALYSES_VIEWS,
    "precision": ANALYSES_PRECISION,
    "summary": ANALYSES_SUMMARY,
    "tables": ANALYSES_TABLES,
    "key_numbers": ANALYSES_KEY_NUMBERS,
    "likeness": ANALYSES_LIKENESS,
}
OBJECTIVES_OPTIONAL: Mapping[str, Mapping[str, object]] = {
    "Objective": OBJECTIVES_OBJECTIVE,
    "Config": OBJECTIVES_CONFIG,
    "LABELS": OBJECTIVES_LABELS,
    "TARGETS": OBJECTIVES_TARGETS,
    "first": OBJECTIVES_FIRST,
}
