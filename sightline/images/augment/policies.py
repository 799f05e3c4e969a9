"""The policies of the papers, by name."""

from collections.abc import Callable
from dataclasses import replace

from sightline.core.errors import InputError, nearest
from sightline.images.augment.policy import Policy, Range


def sigma_at(size: int, sigma: Range = (0.1, 2.0)) -> Range:
    """A blur that was chosen for views of 224 pixels, at another size: sigma · size/224, reaching at least ½ pixel.

    >>> sigma_at(224), sigma_at(112), sigma_at(48)
    ((0.1, 2.0), (0.1, 1.0), (0.1, 0.5))

    A sigma below 0.1 pixels changes nothing, and one below ½ next to nothing: the floors keep a blur that can be seen.
    """
    low, high = (value * size / 224 for value in sigma)
    return max(low, min(sigma[0], 0.1)), max(high, min(sigma[1], 0.5))


def simclr(size: int, crop: Range = (0.08, 1.0), blur_sigma: Range | None = None) -> tuple[Policy, ...]:
    """Two views alike, colours of strength 1 (Chen et al. 2020, appendix A).

    >>> simclr(224)[0].jitter, simclr(224)[1].blur_sigma
    ((0.8, 0.8, 0.8, 0.2), (0.1, 2.0))
    """
    sigma = blur_sigma or sigma_at(size)
    view = Policy(size, crop, jitter=(0.8, 0.8, 0.8, 0.2), gray=0.2, blur=0.5, blur_sigma=sigma)
    return view, view


def moco_v3(size: int, crop: Range = (0.08, 1.0), blur_sigma: Range | None = None) -> tuple[Policy, ...]:
    """Two views as in BYOL: one always blurred, one seldom blurred but sometimes solarised (Chen et al. 2021).

    Crops are those of its vision transformers; its ResNets have (0.2, 1).
    """
    return _asymmetric(Policy(size, crop, interpolation="bilinear", blur_sigma=blur_sigma or sigma_at(size)))


def dino(
    size: int,
    local_size: int = 96,
    local_crops: int = 0,
    crop: Range = (0.4, 1.0),
    local_crop: Range = (0.05, 0.4),
    blur_sigma: Range | None = None,
) -> tuple[Policy, ...]:
    """Two global views as in BYOL, then the local ones: small crops, half of them blurred (Caron et al. 2021).

    The paper has 8 local crops of 96 pixels beside global ones of 224.

    >>> [(view.size, view.crop) for view in dino(224, 96, 2)]
    [(224, (0.4, 1.0)), (224, (0.4, 1.0)), (96, (0.05, 0.4)), (96, (0.05, 0.4))]
    """
    views = _asymmetric(Policy(size, crop, blur_sigma=blur_sigma or sigma_at(size)))
    # Sigma, in pixels, is the same for both, as in the paper.
    return views + (replace(views[0], size=local_size, crop=local_crop, blur=0.5),) * local_crops


def reconstruction(size: int, crop: Range = (0.2, 1.0)) -> tuple[Policy, ...]:
    """Crop and flip, which is all that masked image modelling needs (He et al. 2022)."""
    return (Policy(size, crop),)


def supervised(size: int, crop: Range = (0.08, 1.0)) -> tuple[Policy, ...]:
    """Crop and flip, as images have been classified since Inception (Szegedy et al. 2015)."""
    return (Policy(size, crop),)


POLICIES: dict[str, Callable[[int], tuple[Policy, ...]]] = {
    "simclr": simclr,
    "moco_v3": moco_v3,
    "dino": dino,
    "mae": reconstruction,
    "supervised": supervised,
}


def policies(name: str, size: int) -> tuple[Policy, ...]:
    """The policies known by a name, for views of this size; DINO's without local crops.

    >>> [view.solarize for view in policies("moco_v3", 64)]
    [0.0, 0.2]
    """
    if name not in POLICIES:
        raise InputError(f"There is no augmentation {name!r}{nearest(name, POLICIES)}")
    return POLICIES[name](size)


def _asymmetric(base: Policy) -> tuple[Policy, Policy]:
    view = replace(base, jitter=(0.4, 0.4, 0.2, 0.1), gray=0.2, blur=1.0)
    return view, replace(view, blur=0.1, solarize=0.2)
