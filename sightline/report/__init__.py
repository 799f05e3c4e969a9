"""From a run folder to one HTML file; needs no model.

page               the page, and its figures as files
html               text, data and assets within a page, escaped
explorer           the linked view of all pairs of layers
attention_viewer   attention maps to look at
figures            the look of every figure, and the chart shapes that analyses share
tables             results for other programs
assets/            markup, styles and scripts of the page
"""
