"""Modules that are both loaded and trained.

vit           a ViT's forward pass in steps, positions and start
positions     for another grid of patches
masking       patches, random masks, tokens put back in their places
vitdet        attention in windows, with relative positions of rows and columns
mae_decoder   MAE's decoder, and an encoder with it
projection    projection heads, and an encoder with one
mode          training and evaluation mode
truncated     models whose classifier was deleted
"""
