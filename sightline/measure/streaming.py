"""From a metric to its result, and to what is kept beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sightline.core.groups import split

if TYPE_CHECKING:
    import xarray as xr

    from sightline.measure.contract import Analysis


def result_of(metric: Analysis) -> xr.Dataset:
    """What an analysis has to say, with the sums of all processes."""
    return measured_of(metric)[0]


def measured_of(metric: Analysis) -> tuple[xr.Dataset, xr.Dataset | None]:
    """The same, and what it keeps so that contrasts can be computed from it.

    The class's own `compute`: the one that torchmetrics wraps rebuilds mappings, and a Dataset loses its attributes.
    """
    with metric.sync_context():
        return split(type(metric).compute(metric))
