"""Semantic segmentation on an encoder that is frozen or trained along.

heads        one linear layer, or UperNet
objective    what is learned: the class of every pixel
sliding      decisions on images of any size, window by window, at the resolution of their labels
segment      a training in a folder: settings, images, what is left
"""
