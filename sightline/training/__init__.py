"""Pre-training.

pretrain       recipe + images → a trained encoder in a run folder
recipe         what to train and how: TOML files and `--set`
objective      what an objective is given in each step
backbones      what is trained, by name or by width and depth
launch         where and by which processes it is computed
loop           the training loop: processes, stop and go
folder         the folder of a training
feed           which images a step sees, and their views
optimization   optimisers, schedules, what is not decayed
momentum       momentum encoders, standard deviation of embeddings, Sinkhorn
soft_labels    smoothed and mixed labels, and their loss
collectives    what several processes need in order to compute what one would
checkpoints    written whole or not at all
export         what a checkpoint holds for others to load
monitor        metrics.csv and TensorBoard
watchers       k-NN accuracy and rank during a training, and a word when embeddings collapse
look           one look at an encoder: features, attention, Gram matrices
watch          looks at an encoder while other code trains it
watch_lightning    the same as a callback of Lightning's Trainer
watch_huggingface  the same as a callback of Hugging Face's Trainer
objectives/    one file or folder per objective
"""
