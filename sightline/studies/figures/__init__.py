"""The figures and tables of the five documents, drawn from results of a study in the papers' arrangement.

contract          what a figure, its parts and a drawing are
draw              from the name of a figure to its drawing
casting           who of a study's encoders stands where the paper has its own
forms             the few shapes that they share: maps, curves, bars, points, tables, pictures
numbers           accuracies and precisions that come from several kinds of results
shekhar_workshop  Shekhar et al. 2022 (000, 002)
shekhar           Shekhar et al. 2023 (001)
park              Park et al. 2023 (003)
grigg             Grigg et al. 2021 (004)
"""

from sightline.studies.figures.contract import PaperDrawing, PaperFigure
from sightline.studies.figures.draw import all_figures, draw, find_figure

__all__ = ["PaperDrawing", "PaperFigure", "all_figures", "draw", "find_figure"]
