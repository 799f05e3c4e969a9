"""Questions that several trainings and passes answer together.

reinit   which blocks does fine-tuning build on?
"""
