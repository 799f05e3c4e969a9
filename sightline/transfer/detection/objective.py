"""What a detector learns from: the losses of Mask R-CNN, on the maps of an encoder that is frozen or trained along.

B images, views of S × S pixels, k objects.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import masks_to_boxes

from sightline.core.processes import gathered, rank, world
from sightline.encoders.modules.mode import evaluating
from sightline.images.preprocess import Preprocess
from sightline.images.sets import Images
from sightline.images.targets import Targets
from sightline.training.objective import Views
from sightline.transfer.detection.cached import fitted, whole_image
from sightline.transfer.detection.detector import Detector, FoundObjects
from sightline.transfer.detection.features import FeatureMaps, Standard
from sightline.transfer.detection.masks import paste, run_lengths
from sightline.transfer.detection.objects import Detections
from sightline.transfer.on_encoder import OnEncoder


class DetectionObjective(OnEncoder):
    """A detector on an encoder; see training/objective.py."""

    def __init__(
        self,
        features: FeatureMaps,
        standard: Standard,
        detector: Detector,
        *,
        frozen: bool = True,
        cached: bool = False,
        tight: bool = False,
        layers: Mapping[str, int] | None = None,
        layer_decay: float = 1.0,
    ) -> None:
        """`cached`: views are maps already; `tight`: views cut objects, whose boxes are then those of what is left."""
        super().__init__(features, standard, frozen, layers, layer_decay)
        self.detector, self.cached, self.tight = detector, cached, tight

    def maps(self, images: Tensor) -> list[Tensor]:  # (B, 3, S, S)
        """What the detector sees of images."""
        maps = self.standardised(images)
        # As cached maps are, so that it makes no difference which they are.
        return [x.half().float() for x in maps] if self.frozen else maps

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses, and each of them."""
        maps = [x.float() for x in views.pixels] if self.cached else self.maps(views.pixels[0])
        losses = self.detector.losses(maps, self._features[0].frame, [self._target(one) for one in views.targets[0]])
        total = torch.stack(list(losses.values())).sum()
        return total, {name.removeprefix("loss_"): value.detach() for name, value in losses.items()}

    def _target(self, targets: Targets[Tensor]) -> dict[str, Tensor]:
        """Objects of a view in the frame of the detector, without crowds."""
        features = self._features[0]
        scale = features.frame[0] / features.size
        kept = slice(None) if targets.crowd is None else ~targets.crowd
        boxes, labels = targets.boxes[kept] * scale, targets.labels[kept]
        if not self.detector.heads.masks or targets.masks is None:
            return {"boxes": boxes, "labels": labels}
        masks = targets.masks[kept]
        if self.tight and len(masks):
            boxes = (masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1], device=masks.device)) * scale
        if len(masks):
            masks = F.interpolate(masks[None].float(), features.frame, mode="nearest-exact")[0]
        else:
            masks = masks.new_zeros(0, *features.frame)
        return {"boxes": boxes, "labels": labels, "masks": masks.to(torch.uint8)}

    @torch.no_grad()
    def detect(
        self,
        images: Images,
        split: str,
        *,
        preprocess: Preprocess,
        interpolation: str,
        device: torch.device,
        workers: int | None = None,
    ) -> dict[str, Detections]:
        """What is found in the images of a split, by their ids; the processes of a training share the images.

        Images that cannot be read are not there.
        """
        features, where = self._features[0], images.indices(split)
        policy = whole_image(features.size, interpolation)
        found: dict[str, Detections] = {}
        with evaluating(self):
            for part in fitted(images, where, policy, workers=workers, share=(rank(), world())):
                if not part.rows:
                    continue
                maps = self.maps(preprocess.normalize(part.pixels.to(device)))
                scale = features.frame[0] / features.size
                sizes = [(h * scale, w * scale) for h, w in part.fills]
                told: Sequence[FoundObjects] = self.detector(maps, sizes)
                for row, one, size, fills in zip(part.rows, told, part.sizes, sizes, strict=True):
                    found[str(images.ids[where[row]])] = _in_image(one, size, fills)
        every = {name: one for part in gathered(found) for name, one in part.items()}
        return {name: every[name] for name in map(str, images.ids[where]) if name in every}


def _in_image(found: FoundObjects, size: tuple[int, int], fills: tuple[float, float]) -> Detections:
    """From the frame, of which the image fills so much, to pixels of the image."""
    height, width = size
    scale = torch.tensor([width / fills[1], height / fills[0]] * 2, device=found.boxes.device)
    masks = None
    if found.masks is not None:
        masks = run_lengths(paste(found.masks, found.regions * scale, size).cpu().numpy())
    boxes: NDArray[np.float64] = (found.boxes * scale).double().cpu().numpy()
    return Detections(
        (int(height), int(width)), found.labels.cpu().numpy(), found.scores.double().cpu().numpy(), boxes, masks
    )
