"""Which encoder is in a checkpoint file: what the formats share.

layout   what a format finds out, and how the encoder is built from it
vit      the ViT of MAE, MoCo-v3, DINO and MSN
beit     the ViT of BEiT and SimMIM
resnet   the ResNets of DINO and MoCo-v3
timm     state dicts of timm itself
"""
