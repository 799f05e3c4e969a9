"""Views of images: policies, crops, colours, RandAugment, erasing and mixing."""
