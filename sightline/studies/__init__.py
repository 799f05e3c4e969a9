"""Questions that several trainings and passes answer together, and what the papers' findings make of the answers.

commands    the commands that steps are made of: what decides their numbers, how they are run
costs       what steps will take, from short trials
detection   how well are objects found by detectors on these encoders?
elsewhere   steps on SLURM and Ray
evidence    what is known of encoders and their roles, over several run folders
figures/    the figures and tables of the papers, drawn from what was measured
findings/   the published findings, decided by what was measured
folders     where steps lie, whether they are done, and doing one
keys        a step as one hash of all that decides it
papers      the built-in studies: which steps the findings need
planning    which findings a step decides, and which none can
rcdm/       what does a representation keep, seen in pictures that are drawn from it?
reinit      which blocks does fine-tuning build on?
roles       what an encoder is in a study: its family, what it was fine-tuned from, its seed
running     steps in their order, here or in processes of their own
segmenters  how well is the class of every pixel told by heads on these encoders?
steps       a step of a study, and the order of steps
study       `sl.study`, `sl.open_study`
study_file  a study as a TOML file
worker      the process that does one step
"""

PLUGINS = ("detection", "rcdm", "reinit", "segmenters")  # whose results have a page in the report
