"""What analyses and studies draw with: the look of every figure, the chart shapes that they share, numbers over depth.

theme     fonts and colours, light and dark
charts    heat maps, curves, and the linked view of the report
depth     from a result to a table and a figure over depth
numbers   headline numbers of each encoder, and how alike encoders are
pictures  maps of classes in colours, pictures in rows and columns, IoU of each class
static    a chart as a specification, as SVG and as PDF
"""

from sightline.report.figures.charts import Figure, Table, curve_over_depth, heatmap, linked_charts
from sightline.report.figures.depth import (
    accuracy_over_depth,
    accuracy_table,
    depth_table,
    interval_of,
    over_depth,
    present,
    with_depth,
)
from sightline.report.figures.numbers import FIRST, KeyNumber, Likeness, key_number, of_encoders
from sightline.report.figures.pictures import class_colours, class_figure, coloured, picture_grid, picture_url
from sightline.report.figures.static import pdf_of, specification, svg_of
from sightline.report.figures.theme import DARK, LIGHT, same_colours, theme

__all__ = [
    "DARK",
    "FIRST",
    "LIGHT",
    "Figure",
    "KeyNumber",
    "Likeness",
    "Table",
    "accuracy_over_depth",
    "accuracy_table",
    "class_colours",
    "class_figure",
    "coloured",
    "curve_over_depth",
    "depth_table",
    "heatmap",
    "interval_of",
    "key_number",
    "linked_charts",
    "of_encoders",
    "over_depth",
    "pdf_of",
    "picture_grid",
    "picture_url",
    "present",
    "same_colours",
    "specification",
    "svg_of",
    "theme",
    "with_depth",
]
