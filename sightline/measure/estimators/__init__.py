"""Measures on arrays alone.

cka             centred kernel alignment
full_batch      CKA of all images at once, as a stream
similarity      other similarities of two representations
attention       distance and mutual information of attention
neighbours      exact nearest neighbours and their votes
rank            effective rank of a spectrum
resampling      the bootstrap of groups of images
intervals       accuracies, ratios and their intervals
ridge           a linear classifier in closed form
lda             linear discriminant analysis from sums over patches
pixels          a softmax trained on pixels
overlap         intersection over union, and its interval
inversion       pixels from features in closed form
probes          classifiers on frozen features, many at once
probe_batches   rows of features in random order
sweep           every combination of settings, and which is chosen
"""
