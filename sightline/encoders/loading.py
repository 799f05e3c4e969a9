"""Loading encoders by reference: `load_encoder("timm:vit_small_patch16_224.dino")`."""

from dataclasses import replace

from torch import nn

from sightline.core.errors import InputError
from sightline.core.files import naming_files
from sightline.core.references import Reference, parse_reference
from sightline.encoders.contract import source
from sightline.encoders.encoder import Encoder, anatomy, build_encoder
from sightline.encoders.files.weights import check_finite
from sightline.encoders.sites import Tokens
from sightline.images.preprocess import Preprocess, PreprocessError


def load_encoder(
    what: str | nn.Module | Encoder,
    *,
    name: str | None = None,
    preprocess: Preprocess | None = None,
    tokens: Tokens | None = None,
) -> Encoder:
    """An encoder from a reference such as `timm:vit_small_patch16_224.dino`, or around your own module.

    For a module, `preprocess` says what it wants to see and `tokens` how its tokens are laid out; both are worked
    out where the architecture is known. Modules of unknown architecture have their own module names as sites.
    """
    if isinstance(what, nn.Module):
        encoder = build_encoder(what, reference=f"module:{type(what).__name__}", preprocess=preprocess, tokens=tokens)
    else:
        encoder = what if isinstance(what, Encoder) else _load(parse_reference(what))
        if preprocess is not None:
            known = anatomy(encoder.module, preprocess.size).tokens
            encoder = replace(encoder, preprocess=preprocess, tokens=known or encoder.tokens)
        encoder = replace(encoder, tokens=tokens or encoder.tokens)
    encoder = replace(encoder, name=name or encoder.name)
    check_finite(encoder.module, encoder.name)
    return encoder


def _load(reference: Reference) -> Encoder:
    with naming_files(str(reference)):
        try:
            return source(reference.source).load(reference)
        except PreprocessError as error:
            raise InputError(f"{reference}: {error}") from error
