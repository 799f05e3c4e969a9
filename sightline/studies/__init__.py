"""Questions that several trainings and passes answer together, and what the papers' findings make of the answers.

detection   how well are objects found by detectors on these encoders?
evidence    what is known of encoders and their roles, over several run folders
findings/   the published findings, decided by what was measured
rcdm/       what does a representation keep, seen in pictures that are drawn from it?
reinit      which blocks does fine-tuning build on?
roles       what an encoder is in a study: its family, what it was fine-tuned from, its seed
segmenters  how well is the class of every pixel told by heads on these encoders?
"""

PLUGINS = ("detection", "rcdm", "reinit", "segmenters")  # whose results have a page in the report
