"""The version of Sightline, from the tag that it was built from, and that of its numbers."""

from importlib import metadata

# Part of every fingerprint: what was computed under another one is computed again. It changes when numbers do; the
# version of the package may change with every commit.
NUMBERS = "0.1.0"
FORMAT = 1  # of the folders that Sightline writes and reads again: runs, studies, caches

try:
    __version__ = metadata.version("sightline")
except metadata.PackageNotFoundError:  # a copy of the source that is not installed
    __version__ = NUMBERS
