"""Settings that cannot be are refused before the pass, with the nearest valid choice."""

from typing import Any

import pytest

from sightline.core.errors import InputError
from sightline.measure.contract import analysis


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("agreement", {"k": (1, 5)}, "k of at least 2"),
        ("agreement", {"k": ()}, "not none"),
        ("agreement", {"bootstrap": 0}, "at least 1 draw"),
        ("agreement", {"pooling": "max"}, "no pooling 'max'"),
        ("attention", {"viewer_images": -1}, "0 or more"),
        ("cka", {"tokens": ("patch",)}, "did you mean 'patches'"),
        ("cka", {"tokens": ()}, "at least"),
        ("cka", {"bootstrap": 0}, "at least"),
        ("dynamics", {"tokens": ("mena",)}, "no token view 'mena'"),
        ("invariance", {"policies": ("simclrr",)}, "did you mean 'simclr'"),
        ("invariance", {"policies": ("simclr?blurr=1",)}, "did you mean 'blur'"),
        ("invariance", {"policies": ()}, "one policy or several"),
        ("invariance", {"policies": ("dino", "dino")}, "one policy or several"),
        ("invariance", {"tokens": ("patch",)}, "did you mean 'patches'"),
        ("invariance", {"bootstrap": 0}, "at least"),
        ("inversion", {"features": ("mean",)}, "no feature 'mean'"),
        ("inversion", {"features": ()}, "needs a feature"),
        ("inversion", {"size": 1}, "2 to 64 pixels"),
        ("inversion", {"pictures": 0}, "at least 1"),
        ("minibatch", {"layers": 1}, "Two layers and batches of 4 images"),
        ("minibatch", {"batches": ()}, "Two layers and batches of 4 images"),
        ("minibatch", {"batches": (2, 32)}, "Two layers and batches of 4 images"),
        ("noise", {"frequencies": ()}, "Frequencies must be above 0"),
        ("noise", {"frequencies": (0.0, 0.5)}, "Frequencies must be above 0"),
        ("noise", {"frequencies": (2.0,)}, "at most √2"),
        ("noise", {"strength": 0.0}, "strength of the noise must be above 0"),
        ("noise", {"kind": "signs"}, "no noise of kind 'signs'; did you mean 'sign'"),
        ("noise", {"classifier": "svm"}, "no classifier 'svm'"),
        ("orientation", {"features": ("mean",)}, "no feature 'mean'"),
        ("orientation", {"features": ()}, "needs a feature"),
        ("probes", {"kinds": ()}, "at least one kind"),
        ("probes", {"kinds": ("liner",)}, "no kind 'liner'; did you mean 'linear'"),
        ("probes", {"poolings": ("max",)}, "no pooling 'max'"),
        ("probes", {"depths": (1,)}, "depth 2 or 3, not 1"),
        ("probes", {"nonlinear_at": "first"}, "last or every"),
        ("probes", {"more_on": "last"}, "every or first"),
        ("probes", {"lrs": ()}, "at least one of lrs"),
        ("segmentation", {"shrinkages": ()}, "one or more numbers"),
        ("segmentation", {"shrinkages": (0.0,)}, r"in \(0, 1\]"),
        ("segmentation", {"images": 4}, "images=4"),
        ("similarity", {"measures": ("cca",)}, "no measure 'cca'"),
        ("similarity", {"measures": ()}, "needs one measure"),
        ("similarity", {"tokens": ("gap",)}, "no token view 'gap'"),
        ("similarity", {"sample": 2}, "at least 4 images"),
        ("similarity", {"variance": 1.5}, "above 0 and up to 1"),
        ("spectra", {"images": 0}, "at least one image"),
        ("tokens", {"clouds": 5, "images": 4}, "1 to 4 images"),
        ("transformations", {"transformations": ("miror",)}, "did you mean 'mirror'"),
        ("transformations", {"transformations": ("scale:9",)}, "a factor from 0.5 to 4"),
        ("transformations", {"transformations": ()}, "One transformation or several"),
        ("transformations", {"transformations": ("plain",)}, "One transformation or several"),
        ("transformations", {"transformations": ("grey", "grey")}, "One transformation or several"),
        ("transformations", {"crop": "supervized"}, "did you mean 'supervised'"),
        ("transformations", {"features": ("mean",)}, "no feature 'mean'"),
        ("transformations", {"features": ()}, "A feature and a bootstrap sample"),
        ("transformations", {"bootstrap": 0}, "A feature and a bootstrap sample"),
    ],
)
def test_settings_that_cannot_be(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        analysis(name).Config(**settings)
