"""Checkpoint files of any kind.

reading              without running anything in them
torch_files          PyTorch's files and pickles of arrays, as plain data
weights              into a module, without hiding what is missing; their hash
inspect              what is in a file, without building a model
convert              an encoder as timm loads it
"""
