"""Views of images.

policy        how a view is made
policies      those of the objectives, by name
crops         where a view lies, and how it is resized
colours       jitter, grey, blur, solarisation
randaugment   RandAugment of whole batches
erasure       random erasing, and the order of the last steps
mixup         mixup and CutMix
batched       what crops and colours share: whole batches in pieces that stay in the cache
"""
