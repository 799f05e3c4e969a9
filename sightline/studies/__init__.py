"""Questions that several trainings and passes answer together.

detection   how well are objects found by detectors on these encoders?
reinit      which blocks does fine-tuning build on?
segmenters  how well is the class of every pixel told by heads on these encoders?
"""
