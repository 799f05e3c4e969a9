"""From a metric to its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["result_of"]


def result_of(metric: Any) -> xr.Dataset:
    """What an analysis has to say, with the sums of all processes.

    The class's own `compute`: the one that torchmetrics wraps rebuilds mappings, and a Dataset loses its attributes.
    """
    with metric.sync_context():
        result: xr.Dataset = type(metric).compute(metric)
        return result
