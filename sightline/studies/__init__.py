"""Questions that several trainings and passes answer together.

rcdm/    what does a representation keep, seen in pictures that are drawn from it?
reinit   which blocks does fine-tuning build on?
"""
