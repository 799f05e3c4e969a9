"""From a run folder to one HTML file; needs no model.

page               the page, and its figures as files
charts             single figures, and the page, for those who work in Python
html               templates that escape by default, and what goes into them
explorer           the linked view of all pairs of layers
attention_viewer   attention maps to look at
pictures           sheets of small pictures
gallery            pictures of a result, side by side
figures/           the look of every figure, and the chart shapes that analyses share
tables             results for other programs
templates/         markup of the page
assets/            its styles and scripts
"""
