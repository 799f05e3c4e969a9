"""Labelled images and their way to the model.

sets             a labelled set: ids, labels, classes, splits
targets          boxes, masks and segmentation maps, and how views move them
label_maps       segmentation maps and the patch grid of an encoder
contract         what an image source must have
contents         hashes of image files, so that new pixels are noticed
loading          a set by its reference, `load_images("folder:/data/val")`
pipeline         batches for a pass
workers          processes that read ahead
decoding         bytes to pixels
preprocess       resize, crop, normalise
views            transformations of an image within a pass
transformations  mirror image, rotation, grey, … by name
noise            noise of one frequency band
thumbnails       small pictures for the report
augment/         the views of a training
sources/         one file or folder per source of images
"""

from sightline.images.loading import load_images
from sightline.images.pipeline import Batch
from sightline.images.sets import Images

__all__ = ["Batch", "Images", "load_images"]
