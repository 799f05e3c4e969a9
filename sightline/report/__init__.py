"""From a run folder to one HTML file; needs no model.

page               the report of a run, and its figures as files
overview           its first page: headline numbers, the map of encoders, small pictures
standing           where the encoders stand: columns, conclusions, distances in the plane
provenance         its last page: what is needed to get the same numbers again
study              the report of a study
verdicts           verdicts on findings, as a table and one by one
shell              the file around the pages: navigation, colours, scripts, data
packing            how numbers travel in a page
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
