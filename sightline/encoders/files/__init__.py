"""Checkpoint files of any kind.

reading              without running anything in them
unpickling           PyTorch's files
pickles              a machine for pickles that makes plain data and can do nothing else
weights              into a module, without hiding what is missing; their hash
inspect              what is in a file, without building a model
convert              an encoder as timm or transformers load it
transformers_names   how transformers names weights
"""
