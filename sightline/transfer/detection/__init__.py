"""Detection and instance segmentation: Mask R-CNN on any encoder.

pyramid             maps of several strides from an encoder's
features            the maps of an encoder at any size of image
detector            torchvision's Mask R-CNN in a frame of 16 pixels per patch
masks               masks at their places in the image, with sub-pixel accuracy; run lengths
objects             what is to be found in an image, and what a detector finds
average_precision   AP and AR as COCO defines them, with intervals
cached              the maps of a frozen encoder, computed once
objective           what is minimised
detect              encoder + images with boxes and masks → a detector in a run folder
"""
