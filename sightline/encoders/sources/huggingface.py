"""Encoders of Hugging Face: `huggingface:ORG/NAME`, `huggingface:./folder`, `huggingface:ORG/NAME@random?seed=1`."""

import contextlib
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline.core.errors import InputError, first_line, nearest, some
from sightline.core.references import Reference
from sightline.encoders.encoder import Encoder, build_encoder
from sightline.encoders.families.huggingface import Classified, find_trunk, forward_of, image_size
from sightline.encoders.files.reading import printable
from sightline.encoders.files.weights import left_out, no_larger_than, read_weights
from sightline.images.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

EXAMPLE = "huggingface:facebook/dinov2-small"
KNOWN = (
    "facebook/deit-base-distilled-patch16-224",
    "facebook/dino-vits16",
    "facebook/dinov2-small",
    "facebook/dinov2-with-registers-small",
    "facebook/vit-mae-base",
    "facebook/vit-msn-small",
    "google/siglip-base-patch16-224",
    "google/vit-base-patch16-224",
    "microsoft/beit-base-patch16-224",
    "openai/clip-vit-base-patch32",
)
RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # PIL's numbers
# A size given as one number means the shorter side to these processors, height and width to all others.
SHORTER_SIDE = ("BitImage", "CLIP", "ConvNext")
# Processors that do what is read off their settings here, pixel by pixel; others may resize and crop in other ways.
IMITATED = re.compile(r"(Beit|Bit|CLIP|ConvNext|DeiT|Siglip|ViT)(ImageProcessor(Fast|Pil)?|FeatureExtractor)|")
NOT_IMITATED = (
    "its image processor is {}, which may resize and crop in another way than Sightline reads off its settings; "
    "compare the two, and give a preprocess of your own if they differ"
)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # or their shards, which an index lists
SQUASHED = 384  # pixels from which on ConvNeXt's processor does not crop
OPTIONS = ("num_classes", "seed", "without")
OPTIONAL_PARTS = ("pooler", "classifier", "cls_classifier", "distillation_classifier", "head")


def names() -> list[str]:
    """Some that are known to work; any other ViT of the hub, or a folder, may be named as well."""
    return ["FOLDER", *KNOWN]


def load(reference: Reference) -> Encoder:
    """Build the model from its configuration; weights are its own, or random ones from a seed.

    Option `num_classes` puts a new classifier behind a vision transformer that has none.
    """
    seed, classes, without = _options(reference)
    where, local = _where(reference)
    with _plain_errors(reference), _quiet():
        processor = _read_json(where, local, "preprocessor_config.json")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if reference.weights == "random":
                whole, missing, left_over = _create(_read_config(where, local)), list[str](), list[str]()
            else:
                whole, missing, left_over = _create_with_weights(where, local, str(reference))
    module, prefix = _vision_part(whole)
    absent = _missing_parts(module, [n.removeprefix(prefix) for n in missing if n.startswith(prefix)], reference)
    without |= absent
    _leave_out(module, without)
    preprocess, notes = _preprocess(processor, _size(whole.config), reference)
    _check_size(module, preprocess, reference)
    notes += [f"the file has no {part}, so the encoder has none" for part in sorted(absent)]
    if left_over:
        notes.append(left_out(left_over))
    if classes:
        module = _classified(module, classes, seed, reference)
    options = {key: value for key, value in reference.options.items() if key != "without"}
    options |= {"without": ",".join(sorted(without))} if without else {}
    return build_encoder(
        module.eval(),
        reference=str(reference),
        name=Path(reference.id).name,
        preprocess=preprocess,
        architecture=str(Reference("huggingface", where, "random", options)),
        notes=notes,
        forward=forward_of(module),
    )


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise InputError(
            "Encoders of Hugging Face need the package transformers; pip install 'sightline[huggingface]'"
        ) from error


def _options(reference: Reference) -> tuple[int, int, set[str]]:
    """Seed, number of classes (0: the model's own head, if any), and the parts to leave out."""
    unknown = [key for key in reference.options if key not in OPTIONS]
    if unknown:
        raise InputError(f"{reference} has an unknown option {unknown[0]!r}{nearest(unknown[0], OPTIONS)}")
    if reference.weights not in (None, "random"):
        raise InputError(
            f"{reference} names weights {reference.weights!r}; Hugging Face models come with their own, write "
            f"huggingface:{reference.id}, or huggingface:{reference.id}@random"
        )
    without = {part for part in reference.options.get("without", "").split(",") if part}
    for part in without - set(OPTIONAL_PARTS):
        raise InputError(f"{reference}: {part!r} is not a part that can be left out{nearest(part, OPTIONAL_PARTS)}")
    seed, classes = (reference.options.get(key, "0") for key in ("seed", "num_classes"))
    if not seed.isdecimal() or not classes.isdecimal():
        raise InputError(f"Options seed and num_classes of {reference} must be whole numbers")
    return int(seed), int(classes), without


def _classified(module: nn.Module, classes: int, seed: int, reference: Reference) -> nn.Module:
    if find_trunk(module) is None or hasattr(module, "classifier"):
        raise InputError(f"{reference}: num_classes is for vision transformers without a classifier of their own")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classified(module, classes)


def _where(reference: Reference) -> tuple[str, bool]:
    """Hub name or absolute folder, and whether it is a folder, for which the network is never asked."""
    folder = Path(reference.id).expanduser()
    if folder.is_dir():
        return str(folder.resolve()), True
    if reference.id.startswith(("/", "./", "../", "~")):
        raise InputError(f"There is no folder {reference.id!r}; expected one with config.json and model.safetensors")
    return reference.id, False


@contextlib.contextmanager
def _plain_errors(reference: Reference) -> Iterator[None]:
    """One sentence for all that transformers and the hub client may raise."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"Cannot load {reference}: {first_line(error).rstrip('.')}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no table of missing weights; what matters becomes a note or an error."""
    logging = _transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _read_config(where: str, local: bool) -> Any:
    return _transformers().AutoConfig.from_pretrained(where, local_files_only=local, trust_remote_code=False)


def _file(where: str, local: bool, name: str) -> Path | None:
    """A file of the model; None if there is no such file."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise InputError(f"{where} names a file of weights outside of it, {printable(name, 60)!r}; get it again")
    file = _transformers().utils.cached_file(
        where, name, local_files_only=local, _raise_exceptions_for_missing_entries=False
    )
    return None if file is None else Path(file)


def _read_json(where: str, local: bool, name: str) -> dict[str, Any] | None:
    file = _file(where, local, name)
    content: dict[str, Any] | None = None if file is None else json.loads(file.read_text("utf-8"))
    return content


def _read_state(where: str, local: bool, given: str | None) -> dict[str, Tensor]:
    """All weights of a model, read as any checkpoint, of the file that its configuration names or the usual ones."""
    for name in (given,) if given else WEIGHTS:
        if file := _file(where, local, name):
            return read_weights(file)
        if index := _read_json(where, local, f"{name}.index.json"):
            state: dict[str, Tensor] = {}
            for shard in sorted(set(index["weight_map"].values())):
                state |= read_weights(_file(where, local, shard) or Path(where) / shard)
            return state
    raise FileNotFoundError(f"no weights of it were found ({' or '.join(WEIGHTS)})")


def _create(config: Any) -> Any:
    """The model with random weights."""
    library = _transformers()
    architecture = (getattr(config, "architectures", None) or [""])[0]
    classifies = "ForImageClassification" in architecture
    auto = library.AutoModelForImageClassification if classifies else library.AutoModel
    return auto.from_config(config, dtype=torch.float32, **_attends(config))


def _attends(config: Any) -> dict[str, str]:
    """Without attention there is nothing to implement, and transformers would refuse."""
    attends = hasattr(config, "num_attention_heads") or hasattr(config, "vision_config")
    return {"attn_implementation": "sdpa"} if attends else {}


def _create_with_weights(where: str, local: bool, origin: str) -> tuple[nn.Module, list[str], list[str]]:
    """The model, the names of weights that the file lacks, and of those that the model has no place for."""
    told = _read_json(where, local, "config.json") or _read_config(where, local).to_dict()
    state = _read_state(where, local, told.get("transformers_weights"))
    with no_larger_than(state, origin, told):
        config = _read_config(where, local)
        with torch.device("meta"):  # without memory
            kind: Any = type(_create(config))
        module, info = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True, **_attends(config)
        )
    return module, sorted(info["missing_keys"]), sorted(info["unexpected_keys"])


def _vision_part(module: nn.Module) -> tuple[nn.Module, str]:
    """Of a model with a text tower the vision tower alone, and where it was."""
    trunk = find_trunk(module)
    if trunk is None or not hasattr(module, "text_model"):
        return module, ""
    return trunk.module, f"{trunk.name}."


def _missing_parts(module: nn.Module, missing: list[str], reference: Reference) -> set[str]:
    """Parts that the file lacks: a pooler or classifier may be left out, a weight of the encoder itself may not."""
    trunk = find_trunk(module)
    prefix = f"{trunk.name}." if trunk is not None and trunk.name else ""
    parts = {name: name.removeprefix(prefix).partition(".")[0] for name in missing}
    refused = [name for name, part in parts.items() if part not in OPTIONAL_PARTS]
    if refused:
        raise InputError(
            f"{reference} does not fit {type(module).__name__}: it lacks {len(refused)} of "
            f"{len(module.state_dict())} weights ({some(refused)}); is it a checkpoint of another model?"
        )
    return set(parts.values())


def _leave_out(module: nn.Module, parts: set[str]) -> None:
    """A pooler or head that the file lacks would be random: the models go without where it is None or empty."""
    trunk = find_trunk(module)
    for part in parts:
        for owner in (module, trunk.module if trunk is not None else module):
            if getattr(owner, part, None) is None:
                continue
            if part == "head":
                owner.use_head = False
            setattr(owner, part, None if part in ("pooler", "head") else nn.Identity())


def _size(config: Any) -> tuple[int, int]:
    """The image size of the model's own configuration."""
    size = getattr(getattr(config, "vision_config", config), "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _check_size(module: nn.Module, preprocess: Preprocess, reference: Reference) -> None:
    trunk = find_trunk(module)
    wanted = None if trunk is None else image_size(trunk)
    if wanted is not None and wanted != preprocess.size:
        raise InputError(
            f"{reference}: its preprocessing makes images of {preprocess.size[0]} × {preprocess.size[1]}, but the "
            f"model takes {wanted[0]} × {wanted[1]} only; correct preprocessor_config.json"
        )


def _preprocess(
    fields: Mapping[str, Any] | None, own: tuple[int, int], reference: Reference
) -> tuple[Preprocess, list[str]]:
    """Evaluation preprocessing as the image processor would do it, and notes."""
    if fields is None:
        return Preprocess(own, own), ["there is no preprocessor_config.json; images are normalised as for ImageNet"]
    kind = str(fields.get("image_processor_type") or fields.get("feature_extractor_type") or "")
    resize: int | tuple[int, int] | None = None
    if fields.get("do_resize", True):
        resize = _length(fields.get("size", own), shorter=kind.startswith(SHORTER_SIDE), reference=reference)
    size = resize if isinstance(resize, tuple) else own
    if fields.get("crop_size") is not None and fields.get("do_center_crop") is not False:
        crop = _length(fields["crop_size"], shorter=False, reference=reference)
        size = crop if isinstance(crop, tuple) else (crop, crop)
    elif isinstance(resize, int):  # ConvNeXt's way: enlarge by crop_pct and crop
        size, resize = (resize, resize), _enlarged(resize, fields.get("crop_pct"), kind.startswith("ConvNext"))
    resample = fields.get("resample", 2)
    if resample not in RESAMPLE:
        raise InputError(f"{reference}: resampling {resample} of its image processor is not supported")
    mean, std = _normalisation(fields, reference)
    notes = [] if IMITATED.fullmatch(kind) else [NOT_IMITATED.format(printable(kind, 60))]
    return Preprocess(size, resize, RESAMPLE[resample], mean, std), notes


def _enlarged(side: int, crop_pct: float | None, convnext: bool) -> int | tuple[int, int]:
    """The shorter side before the crop; from 384 pixels on ConvNeXt's processor squashes images instead.

    >>> _enlarged(224, None, True), _enlarged(384, 0.875, True), _enlarged(384, 0.875, False)
    (256, (384, 384), 438)
    """
    if convnext and side >= SQUASHED:
        return side, side
    return int(side / (crop_pct or (224 / 256 if convnext else 1.0)))


def _length(value: Any, shorter: bool, reference: Reference) -> int | tuple[int, int]:
    """`224`, `{"height": …, "width": …}` or `{"shortest_edge": …}` → shorter side, or height and width."""
    match value:
        case int():
            return value if shorter else (value, value)
        case [int(height), int(width)] | {"height": int(height), "width": int(width)}:
            return height, width
        case {"shortest_edge": int(side)}:
            return side
    raise InputError(f"{reference}: image size {value} of its image processor is not supported")


Triple = tuple[float, float, float]


def _normalisation(fields: Mapping[str, Any], reference: Reference) -> tuple[Triple, Triple]:
    """Mean and standard deviation for pixels in [0, 1].

    The processor computes (p·r − mean) / std on bytes p, which is (p/255 − mean/s) / (std/s) with s = 255·r.
    """
    scale = 255 * float(fields.get("rescale_factor", 1 / 255)) if fields.get("do_rescale", True) else 255.0
    mean, std = fields.get("image_mean", IMAGENET_MEAN), fields.get("image_std", IMAGENET_STD)
    if not fields.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if not all(isinstance(v, list | tuple) and len(v) == 3 for v in (mean, std)) or fields.get("rescale_offset"):
        raise InputError(f"{reference}: the normalisation of its image processor is not supported (three channels)")
    return _triple(mean, scale), _triple(std, scale)


def _triple(values: Any, scale: float) -> Triple:
    # 255 · (1/255) may differ from 1 in the last bit, which must not change the published numbers.
    red, green, blue = (float(v) if abs(scale - 1) < 1e-6 else float(v) / scale for v in values)
    return red, green, blue
