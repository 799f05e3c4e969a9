"""Questions that several trainings and passes answer together.

detection   how well are objects found by detectors on these encoders?
rcdm/       what does a representation keep, seen in pictures that are drawn from it?
reinit      which blocks does fine-tuning build on?
segmenters  how well is the class of every pixel told by heads on these encoders?
"""
