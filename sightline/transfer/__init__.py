"""What an encoder is good for.

recipe               settings of what is trained on top of an encoder
finetune             encoder + labelled images → a classifier in a run folder
relative_positions   an encoder with a table of them in each block
classifier_head      an encoder with a classifier of its own
classification       its loss, and the learning rates of its layers
evaluate             a classifier's decisions on a split
trainings            runs that are made of trainings
on_encoder           a head on an encoder that is frozen or trained along
head_training        its training in a folder
detection/           Mask R-CNN on any encoder
segmentation/        a linear layer or UperNet on any encoder
"""
