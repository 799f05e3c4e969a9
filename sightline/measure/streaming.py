"""From a metric to its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

    from sightline.measure.contract import Analysis

__all__ = ["result_of"]


def result_of(metric: Analysis) -> xr.Dataset:
    """What an analysis has to say, with the sums of all processes.

    The class's own `compute`: the one that torchmetrics wraps rebuilds mappings, and a Dataset loses its attributes.
    """
    with metric.sync_context():
        return type(metric).compute(metric)
