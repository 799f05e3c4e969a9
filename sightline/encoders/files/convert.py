"""Write an encoder as timm loads it by itself, checked by loading it there and comparing outputs."""

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sightline.core.errors import InputError, first_line
from sightline.core.files import explain, replacing
from sightline.core.references import Reference, parse_reference
from sightline.encoders.encoder import Encoder
from sightline.encoders.loading import load_encoder
from sightline.encoders.sources import checkpoint
from sightline.encoders.sources.timm import option_value
from sightline.images.preprocess import Preprocess

WEIGHTS_FILE, CONFIG = "model.safetensors", "config.json"  # what timm looks for in a folder
PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl")
HEADER = ("origin", "weights", "architecture", "preprocess", "config")
TOLERANCE = 1e-5


class Converted(NamedTuple):
    """What was written, how far its outputs are from the encoder's, and the line of Python that loads it."""

    path: Path
    difference: float  # the largest one, as a part of the largest output
    load: str
    notes: tuple[str, ...]  # on how the encoder was read


def convert(what: str | Encoder, out: str | Path, *, overwrite: bool = False) -> Converted:
    """Write an encoder, or the one in a checkpoint file, for timm.

    `out` is a folder, or the name of a file that ends in .safetensors. Nothing is left behind unless timm loads it and
    computes the same.
    """
    out = Path(out).expanduser()
    if out.suffix in PICKLED:
        raise InputError(f"{str(out)!r} would be a pickle; write {str(out.with_suffix('.safetensors'))!r}, or a folder")
    encoder = _encoder(what)
    ours = {"stem=small": "", "attention_window": ", unless its window is lifted (run:FOLDER?window=none)"}
    ours |= {"windows": ""}  # of ViTDet
    for own, unless in ours.items():
        if own in (encoder.architecture or ""):
            raise InputError(f"{encoder.name!r} has {own}, which timm cannot build; only Sightline can use it{unless}")
    config = _configuration(encoder)
    _refuse_what_is_there(out, overwrite)
    difference = _write(encoder, config, out)
    name, options = _call(config, out)
    line = "".join([f"timm.create_model({name!r}", *(f", {key}={value!r}" for key, value in options.items()), ")"])
    return Converted(out, difference, line, tuple(encoder.notes))


def _encoder(what: str | Encoder) -> Encoder:
    """What is there as a file, or does not begin with the name of a source, is a checkpoint."""
    if isinstance(what, Encoder):
        return what
    if Path(what).expanduser().exists():  # a path may have an @ or ? in it, a reference may not
        return load_encoder(checkpoint.load(Reference("checkpoint", what, None, {})))
    return load_encoder(what if re.match(r"[\w-]+:", what) else f"checkpoint:{what}")


def _file(out: Path) -> Path:
    return out if out.suffix == ".safetensors" else out / WEIGHTS_FILE


def _names(out: Path) -> tuple[str, ...]:
    """The files of a conversion: a file alone has its configuration in its header."""
    return (out.name,) if _file(out) == out else (WEIGHTS_FILE, CONFIG)


def _refuse_what_is_there(out: Path, overwrite: bool) -> None:
    """Only what an earlier conversion has written may be replaced."""
    ours = _converted(_file(out))
    for name in _names(out):
        path = _file(out).parent / name
        if not os.path.lexists(path):
            continue
        if name not in ours or path.is_symlink():
            raise InputError(f"{str(path)!r} exists, and `sightline convert` did not write it; choose another name")
        if not overwrite:
            raise InputError(f"{str(path)!r} exists; choose another name, or replace it with --overwrite")


def _converted(file: Path) -> tuple[str, ...]:
    """What a conversion has written: weights with our header, and the configuration if it is the one it tells of."""
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
    return (file.name, CONFIG) if beside else (file.name,)


def _write(encoder: Encoder, config: Mapping[str, Any], out: Path) -> float:
    """Write to a temporary folder on the same disk, check, and only then put the files in place."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = _file(out)
    near = next(parent for parent in file.absolute().parents if parent.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".sightline-", dir=near) as temporary:
            work = Path(temporary)
            state = {key: value.detach().cpu().contiguous() for key, value in encoder.module.state_dict().items()}
            save_file(state, work / file.name, _about(encoder, config))
            if file != out:
                (work / CONFIG).write_text(json.dumps(config, indent=2))
            difference = _check(encoder, config, work / file.name if file == out else work)
            for name in _names(out):  # the weights tell whose the configuration is
                with replacing(file.parent / name) as spot:
                    os.replace(work / name, spot)
    except SafetensorError as error:
        raise InputError(f"Cannot write {str(file)!r}: {first_line(error)}") from error
    except OSError as error:
        raise InputError(explain(error, file)) from error
    return difference


def _about(encoder: Encoder, config: Mapping[str, Any]) -> dict[str, str]:
    """The header of the file: where the weights are from and how the model is built; names of folders stay private."""
    values = (
        re.sub(r"[^:@?]*/", "", encoder.reference),
        encoder.weights,
        encoder.architecture or "",
        json.dumps(asdict(encoder.preprocess)),
        json.dumps(config),
    )
    return {"format": "pt", **dict(zip(HEADER, values, strict=True))}


def _call(config: Mapping[str, Any], out: Path) -> tuple[str, dict[str, Any]]:
    """What `timm.create_model` takes to load a folder or a file."""
    if _file(out) != out:
        return f"local-dir:{out}", {"pretrained": True}
    options = {"num_classes": config["num_classes"], **config["model_args"], "checkpoint_path": str(out)}
    return config["architecture"], options


def _configuration(encoder: Encoder) -> dict[str, Any]:
    """As timm's models on the hub have it."""
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
    return {
        "architecture": reference.id.partition(".")[0],
        "num_classes": module.num_classes,
        "num_features": module.num_features,
        # timm takes None for something that was not said, but not in a configuration.
        "model_args": {k: v for k, v in arguments.items() if k not in ("seed", "num_classes") and v is not None},
        **({} if encoder.classes is None else {"label_names": encoder.classes}),
        "pretrained_cfg": {key: value for key, value in known.items() if value} | _timm_preprocess(encoder.preprocess),
    }


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


# The check


@torch.inference_mode()
def _check(encoder: Encoder, config: Mapping[str, Any], written: Path) -> float:
    """The largest difference of features and outputs for random images; a large one is an error."""
    import timm

    images = torch.randn(2, 3, *encoder.preprocess.size, generator=torch.Generator().manual_seed(0))
    module: Any = encoder.module
    with encoder.evaluating():
        ours = [module.forward_features(images), module(images)]
    name, options = _call(config, written)
    try:
        with torch.random.fork_rng(devices=[]):
            model: Any = timm.create_model(name, **options).eval()
            theirs = [model.forward_features(images), model(images)]
    except Exception as error:  # whatever timm raises
        raise InputError(
            f"timm cannot load {encoder.name!r} as it was written, so nothing was kept: {first_line(error)}"
        ) from error
    difference = max(_difference(*pair) for pair in zip(ours, theirs, strict=True))
    if not difference <= TOLERANCE:
        raise InputError(
            f"{encoder.name!r} does not compute the same in timm, so nothing was kept: outputs differ by "
            f"{difference:.1e} of their scale"
        )
    return difference


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference as a part of the largest value."""
    if ours.shape != theirs.shape:
        return math.inf
    return float((ours - theirs).abs().max() / (float(ours.abs().max()) or 1.0))
