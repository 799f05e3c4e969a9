"""Write an encoder as timm or transformers load it by themselves, checked by loading it there and comparing outputs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pkgutil
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sightline.core.errors import InputError, first_line, nearest, some
from sightline.core.files import explain, replacing
from sightline.core.references import Reference, parse_reference
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.encoders.sources import checkpoint
from sightline.encoders.sources.huggingface import quiet
from sightline.encoders.sources.timm import option_value
from sightline.images.preprocess import Preprocess

TARGETS = ("timm", "huggingface")
# What the libraries look for in a folder.
WEIGHTS_FILE, CONFIG, PROCESSOR = "model.safetensors", "config.json", "preprocessor_config.json"
PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl")
HEADER = ("origin", "weights", "architecture", "preprocess", "config")
TOLERANCE = 1e-5


class Converted(NamedTuple):
    """What was written, how far its outputs are from the encoder's, and the line of Python that loads it."""

    path: Path
    difference: float  # the largest one, as a part of the largest output
    load: str
    notes: tuple[str, ...]  # on how the encoder was read


class Package(NamedTuple):
    """What another library needs to have an encoder."""

    to: str
    config: dict[str, Any]
    state: dict[str, Tensor]
    beside: dict[str, dict[str, Any]]  # JSON files beside the weights
    pooled: bool = True  # whether a model without classifier pools its features as the encoder does


class Call(NamedTuple):
    """How another library is called to load what was written."""

    function: str  # "timm:create_model"
    what: str
    options: dict[str, Any]

    def __str__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"{self.function.replace(':', '.')}({self.what!r}{options})"

    def run(self, **more: Any) -> Any:
        """Do it."""
        return pkgutil.resolve_name(self.function)(self.what, **self.options, **more)


def convert(what: str | Encoder, out: str | Path, to: str = "timm", *, overwrite: bool = False) -> Converted:
    """Write an encoder, or the one in a checkpoint file, for `timm` or `huggingface`.

    `out` is a folder, or the name of a file that ends in .safetensors; transformers has to find the configuration
    beside the file. Nothing is left behind unless the other library loads it and computes the same.
    """
    if to not in TARGETS:
        raise InputError(f"Encoders cannot be converted to {to!r}{nearest(to, TARGETS)}")
    if to == "huggingface" and importlib.util.find_spec("transformers") is None:
        raise InputError("Writing for Hugging Face needs transformers; pip install 'sightline[huggingface]'")
    out = Path(out).expanduser()
    if out.suffix in PICKLED:
        raise InputError(f"{str(out)!r} would be a pickle; write {str(out.with_suffix('.safetensors'))!r}, or a folder")
    encoder = _encoder(what)
    ours = {"stem=small": "", "attention_window": ", unless its window is lifted (run:FOLDER?window=none)"}
    ours |= {"windows": ""}  # of ViTDet
    for own, unless in ours.items():
        if own in (encoder.architecture or ""):
            raise InputError(
                f"{encoder.name!r} has {own}, which neither timm nor transformers can build; "
                f"only Sightline can use it{unless}"
            )
    package = _for_timm(encoder, out) if to == "timm" else _for_huggingface(encoder, out)
    file = _file(out)
    _refuse_what_is_there(file, package, overwrite)
    difference = _write(encoder, package, out)
    return Converted(out, difference, str(_call(package, out)), tuple(encoder.notes))


def _encoder(what: str | Encoder) -> Encoder:
    """What is there as a file, or does not begin with the name of a source, is a checkpoint."""
    if isinstance(what, Encoder):
        return what
    if Path(what).expanduser().exists():  # a path may have an @ or ? in it, a reference may not
        return load_encoder(checkpoint.load(Reference("checkpoint", what, None, {})))
    return load_encoder(what if re.match(r"[\w-]+:", what) else f"checkpoint:{what}")


def _file(out: Path) -> Path:
    return out if out.suffix == ".safetensors" else out / WEIGHTS_FILE


def _refuse_what_is_there(file: Path, package: Package, overwrite: bool) -> None:
    """Only what an earlier conversion has written may be replaced."""
    ours = _converted(file)
    for name in (file.name, *package.beside):
        path = file.parent / name
        if not os.path.lexists(path):
            continue
        if name not in ours or path.is_symlink():
            raise InputError(f"{str(path)!r} exists, and `sightline convert` did not write it; choose another name")
        if not overwrite:
            raise InputError(f"{str(path)!r} exists; choose another name, or replace it with --overwrite")


def _converted(file: Path) -> tuple[str, ...]:
    """What a conversion has written: weights with our header, and the configurations if they are those it tells of."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as weights:
            about = weights.metadata() or {}
    except (SafetensorError, OSError):
        return ()
    if not set(HEADER) <= about.keys():
        return ()
    try:
        beside = json.loads((file.parent / CONFIG).read_text("utf-8")) == json.loads(about["config"])
    except (OSError, ValueError):
        beside = False
    return (file.name, CONFIG, PROCESSOR) if beside else (file.name,)


def _write(encoder: Encoder, package: Package, out: Path) -> float:
    """Write to a temporary folder on the same disk, check, and only then put the files in place."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = _file(out)
    near = next(parent for parent in file.absolute().parents if parent.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".sightline-", dir=near) as temporary:
            work = Path(temporary)
            state = {key: value.detach().cpu().contiguous() for key, value in package.state.items()}
            save_file(state, work / file.name, _about(encoder, package))
            for name, content in package.beside.items():
                (work / name).write_text(json.dumps(content, indent=2))
            difference = _check(encoder, package, _call(package, work / file.name if file == out else work))
            for name in (file.name, *package.beside):  # the weights tell whose the others are
                with replacing(file.parent / name) as spot:
                    os.replace(work / name, spot)
    except SafetensorError as error:
        raise InputError(f"Cannot write {str(file)!r}: {first_line(error)}") from error
    except OSError as error:
        raise InputError(explain(error, file)) from error
    return difference


def _about(encoder: Encoder, package: Package) -> dict[str, str]:
    """The header of the file: where the weights are from and how the model is built; names of folders stay private."""
    values = (
        re.sub(r"[^:@?]*/", "", encoder.reference),
        encoder.weights,
        encoder.architecture or "",
        json.dumps(asdict(encoder.preprocess)),
        json.dumps(package.config),
    )
    return {"format": "pt", **dict(zip(HEADER, values, strict=True))}


def _call(package: Package, out: Path) -> Call:
    """How the other library loads a folder or a file."""
    config, alone = package.config, _file(out) == out
    if package.to == "timm" and alone:
        options = {"num_classes": config["num_classes"], **config["model_args"], "checkpoint_path": str(out)}
        return Call("timm:create_model", config["architecture"], options)
    if package.to == "timm":
        return Call("timm:create_model", f"local-dir:{out}", {"pretrained": True})
    classifies = "id2label" in config
    auto = "AutoModelForImageClassification" if classifies else "AutoModel"
    # Else transformers would give a ViT a random pooler.
    options = {} if classifies or package.pooled else {"add_pooling_layer": False}
    return Call(f"transformers:{auto}.from_pretrained", str(out.parent if alone else out), options)


# ---------------------------------------------------------------------------------------------------------------
# timm


def _for_timm(encoder: Encoder, out: Path) -> Package:
    """Its own names, and a configuration as timm's models on the hub have; a file alone has it in its header."""
    if encoder.architecture is None or not encoder.architecture.startswith("timm:"):
        raise InputError(
            f"Encoder {encoder.name!r} ({type(encoder.module).__name__}) is not a model that timm builds from a name; "
            "convert one of timm, of `sightline pretrain`, or of a checkpoint file without its decoder or head"
        )
    module: Any = encoder.module
    reference = parse_reference(encoder.architecture)
    arguments = {key: option_value(text) for key, text in reference.options.items()}
    if (size := arguments.pop("size", None)) is not None and hasattr(module, "patch_embed"):
        arguments["img_size"] = size
    known = {key: module.pretrained_cfg.get(key) for key in ("fixed_input_size", "first_conv", "classifier")}
    config = {
        "architecture": reference.id.partition(".")[0],
        "num_classes": module.num_classes,
        "num_features": module.num_features,
        # timm takes None for something that was not said, but not in a configuration.
        "model_args": {k: v for k, v in arguments.items() if k not in ("seed", "num_classes") and v is not None},
        **({} if encoder.classes is None else {"label_names": encoder.classes}),
        "pretrained_cfg": {key: value for key, value in known.items() if value} | _timm_preprocess(encoder.preprocess),
    }
    return Package("timm", config, module.state_dict(), {} if _file(out) == out else {CONFIG: config})


def _timm_preprocess(preprocess: Preprocess) -> dict[str, Any]:
    resize = preprocess.resize or preprocess.size
    return {
        "input_size": [3, *preprocess.size],
        "interpolation": preprocess.interpolation,
        "crop_pct": _crop_pct(min(preprocess.size), resize if isinstance(resize, int) else min(resize)),
        "crop_mode": "center" if isinstance(resize, int) else "squash",
        "mean": preprocess.mean,
        "std": preprocess.std,
    }


def _crop_pct(side: int, resized: int) -> float:
    """The part of the resized side that is kept; timm divides by it and rounds down.

    >>> _crop_pct(224, 256), math.floor(9 / (9 / 14)), math.floor(9 / _crop_pct(9, 14))
    (0.875, 13, 14)
    """
    ratio = side / resized
    while math.floor(side / ratio) < resized:
        ratio = math.nextafter(ratio, 0)
    return ratio


# ---------------------------------------------------------------------------------------------------------------
# transformers


def _for_huggingface(encoder: Encoder, out: Path) -> Package:
    from sightline.encoders.files.transformers_names import rename

    renamed, name = rename(encoder), _file(out).name
    config = renamed.config | ({} if name == WEIGHTS_FILE else {"transformers_weights": name})
    beside = {CONFIG: config, PROCESSOR: _processor(encoder.preprocess)}
    return Package("huggingface", config, renamed.state, beside, renamed.pooled)


def _processor(preprocess: Preprocess) -> dict[str, Any]:
    """An image processor that resizes the shorter side, or both, and crops the centre."""
    from PIL import Image

    height, width = preprocess.size
    size = preprocess.resize or preprocess.size
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": preprocess.resize is not None,
        "size": {"shortest_edge": size} if isinstance(size, int) else {"height": size[0], "width": size[1]},
        "resample": int(Image.Resampling[preprocess.interpolation.upper()]),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": preprocess.mean,
        "image_std": preprocess.std,
        "do_convert_rgb": True,
    }


# ---------------------------------------------------------------------------------------------------------------
# The check


@torch.inference_mode()
def _check(encoder: Encoder, package: Package, call: Call) -> float:
    """The largest difference of features and outputs for random images; a large one is an error."""
    images = torch.randn(2, 3, *encoder.preprocess.size, generator=torch.Generator().manual_seed(0))
    module: Any = encoder.module
    with encoder.evaluating():
        ours = [module.forward_features(images), module(images)]
    library = call.function.partition(":")[0]
    try:
        with torch.random.fork_rng(devices=[]):
            theirs = _timm_outputs(call, images) if library == "timm" else _transformers_outputs(call, images, package)
    except Exception as error:  # whatever the library raises
        raise InputError(
            f"{library} cannot load {encoder.name!r} as it was written, so nothing was kept: {first_line(error)}"
        ) from error
    difference = max(_difference(*pair) for pair in zip(ours, theirs, strict=False))
    if not difference <= TOLERANCE:
        raise InputError(
            f"{encoder.name!r} does not compute the same in {library}, so nothing was kept: outputs differ by "
            f"{difference:.1e} of their scale"
        )
    return difference


def _timm_outputs(call: Call, images: Tensor) -> list[Tensor]:
    model = call.run().eval()
    return [model.forward_features(images), model(images)]


def _transformers_outputs(call: Call, images: Tensor, package: Package) -> list[Tensor]:
    with quiet():
        model, info = call.run(output_loading_info=True)
    if names := sorted([*info["missing_keys"], *info["unexpected_keys"]]):
        raise ValueError(f"weights missing or left over: {some(names)}")
    found = model.eval().base_model(images)
    if "id2label" in package.config:
        return [found.last_hidden_state, model(images).logits]
    return [found.last_hidden_state, *([found.pooler_output.flatten(1)] if package.pooled else [])]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference as a part of the largest value."""
    if ours.shape != theirs.shape:
        return math.inf
    return float((ours - theirs).abs().max() / (float(ours.abs().max()) or 1.0))
