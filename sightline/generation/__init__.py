"""Pictures from representations: a diffusion model conditioned on frozen encoders (RCDM).

conditions   which feature of an encoder, and that of images and of their mirror images on disk
noise        how pictures become noise and come back: flow matching, DDPM
denoiser     the UNet of diffusers with a Linear for each encoder; its files
training     the training, on the loop of all trainings
gap          likelihood gap: does a representation tell an image from its transformed copy?
samples      pictures of a representation, and which way they face
"""
