"""The one streaming pass.

analyze         the pass
contract        what an analysis must have
request         what is asked, and what of it cannot be done
plan            what a pass will see and cost
resume          sums on disk, so that a stopped pass continues
layers          encoders × sites, and where they lie in a result
gram_sums       what the analyses by CKA share
groups          groups of images, for intervals of differences
pooled          pooled features of a pass
feature_cache   features on disk
inversion       pictures from features of images and mirror images
classifiers     who decides: the encoder's head or a probe
class_mappings  fine classes of a head that make up coarse classes of images
mappings/       classes of classifiers by the categories of other images
estimators/     measures on arrays alone
"""
