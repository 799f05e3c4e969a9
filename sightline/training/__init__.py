"""Pre-training.

pretrain       recipe + images → a trained encoder in a run folder
recipe         what to train and how: TOML files and `--set`
objective      what an objective is given in each step
backbones      what is trained, by name or by measures
loop           the training loop: processes, stop and go
folder         the folder of a training
feed           which images a step sees, and their views
optimization   optimisers, schedules, what is not decayed
momentum       momentum encoders, spread, Sinkhorn
soft_labels    smoothed and mixed labels, and their loss
collectives    what several processes need in order to compute what one would
checkpoints    written whole or not at all
monitor        metrics.csv, TensorBoard, collapse
knn_monitor    k-NN accuracy on the way
objectives/    one file or folder per objective
"""
