"""What every room stands on; no model, no image.

errors         the one exception that users see as a sentence
files          writing whole files or nothing, locks
folders        what kind of folder one is, and which of its files are Sightline's
run_folder     the folder of a run: request, results
provenance     what decides a number, and what made it
results        words that results share
tables         CSV that no spreadsheet computes with
patterns       of names of sites
selection      which numbers of a result are meant
groups/        sums over groups of images, kept beside a result
contrast       differences of measured numbers, with their interval
contract       what has a page in the report, and how a plugin is held to a contract
plugins        plugins by their name
extras         libraries that a base installation leaves out
notebook       how things show themselves in a notebook
references     `source:id[@weights][?option=value]`
replicates     numbers without each group of images, and the interval of anything computed from them
settings       dataclasses from TOML and `--set`, and back
schedules      progress, warm-up, cosine
lars           LARS, for pre-training and probes
arrays         measures take arrays or tensors, and answer in kind
keyed_random   random numbers that depend on what they are for
processes      who am I among the processes
stopping       Ctrl-C and SIGTERM, granted when a step is whole
progress       cost, bars, time left
bfloat16       whether bf16 works on this CPU, tried in a child process
version        of Sightline, and of its numbers
"""
