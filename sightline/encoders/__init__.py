"""What an encoder is, where it comes from, and how to look into it.

encoder     Encoder, and how one is built from a module
contract    what a source, a format and a family must have
loading     `load_encoder("source:id")`
saved       encoders in folders of ours
sites       named points, the same for every architecture
watching    hooks that leave nothing behind
attention   attention as a layer computes it
families/   one file per family of architectures
sources/    one file per source of encoders
formats/    one file per official checkpoint format
layouts/    what formats share
files/      checkpoint files: read, inspect, convert
modules/    modules that are both loaded and trained
"""
