"""The contract of an analysis: a file or folder of `analyses/`, or a module of another package.

`AnalysisFile` is what a file must have, `AnalysisPlugin` what the engine sees: with the defaults of `OPTIONAL`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torchmetrics

from sightline.core import plugins
from sightline.core.contract import Reported
from sightline.core.groups import split

if TYPE_CHECKING:
    import xarray as xr

    from sightline.images.pipeline import Batch
    from sightline.measure.plan import Cost, Key, Plan
    from sightline.report.figures import KeyNumber, Likeness, Table


@dataclass(frozen=True)
class FurtherImages:
    """A further set of images that an analysis asks for; the pass shows them as a split, to those that ask alone."""

    title: str  # "Cue-conflict images"
    what: str  # the same within a sentence, and what they are
    labels: tuple[str, ...] = ()  # further labels that they need, see `Images.extras`
    which: str = ""  # a part of a sentence that says which images have these labels


@dataclass(frozen=True)
class NoSettings:
    """The settings of an analysis that has none."""


class Analysis(torchmetrics.Metric):
    """The base of `Analysis` in the file of an analysis: the measure as a stream, whose states are sums."""

    full_state_update = False
    products: ClassVar[bool] = False  # whether attention maps come as encoders.attention.AttentionProduct

    def lacks(self, encoder: str, split: str, view: str) -> bool:
        """Whether it needs a forward pass of these images: not if what it would keep of it is there already."""
        return True

    def unread(self) -> list[tuple[str, str]]:
        """The images that could not be read when features were made that are there already, and why."""
        return []

    def begin(self, batch: Batch) -> None:
        """Before the forward passes of a batch."""

    def reduce(self, key: Key, activation: Any, /) -> Any:
        """Inside the hook: make an activation small."""
        raise NotImplementedError

    def update(self, batch: Batch, reductions: Mapping[Key, Any], /) -> None:
        """Per batch: add up."""
        raise NotImplementedError

    def compute(self) -> xr.Dataset:
        """Named axes; NaN has a `reason`."""
        raise NotImplementedError


class AnalysisFile(Reported, Protocol):
    """What the file of an analysis must have."""

    ANY_SITE: bool  # whether the user may choose what it looks at
    BY_DEFAULT: bool  # only if one forward pass of each image is enough
    INVARIANT_TO: frozenset[str]  # what must not change the result

    @property
    def SITES(self) -> tuple[str, ...]:  # noqa: N802
        """What it looks at, unless the user chooses."""

    @property
    def SPLITS(self) -> tuple[str, ...]:  # noqa: N802
        """Which splits it needs to see, among them those of its `IMAGES`."""

    @property
    def cost(self) -> Callable[[Any, Plan], Cost]:
        """Bytes of memory and disk, told before the pass."""


class AnalysisPlugin(AnalysisFile, Protocol):
    """What the engine sees: also what a file may leave out, with the defaults of `OPTIONAL`."""

    TOPIC: str  # of core.contract.TOPICS: where the report has its page
    TARGETS: bool  # whether it looks at boxes, masks or maps, which are then in `batch.targets`

    @property
    def PROJECTION(self) -> tuple[str, ...]:  # noqa: N802
        """Sites of a projection head, if an encoder comes with one."""

    @property
    def IMAGES(self) -> Mapping[str, FurtherImages]:  # noqa: N802
        """Further sets of images by the split that they become."""

    @property
    def Analysis(self) -> Callable[[Any, Plan], Analysis]:  # noqa: N802
        """The measure as a stream, in the file `class …Analysis`; an InputError says why it cannot be measured."""

    @property
    def Config(self) -> type[Any]:  # noqa: N802
        """Its settings, in the file `class …Config`: a frozen dataclass with defaults."""

    @property
    def views(self) -> Callable[[Any, str], tuple[str, ...]]:
        """Which transformations of the images of a split, see images/views.py."""

    @property
    def precision(self) -> Callable[[Any], str]:
        """In what it computes on the CPU itself, float32 or bf16."""

    @property
    def summary(self) -> Callable[[xr.Dataset], list[str]]:
        """What the result means, in sentences, on top of its page."""

    @property
    def tables(self) -> Callable[[xr.Dataset], list[Table]]:
        """Numbers as a paper prints them, above its figures."""

    @property
    def key_numbers(self) -> Callable[[xr.Dataset], list[KeyNumber]]:
        """Columns of the table that ends a run and begins its report: a number of each encoder."""

    @property
    def likeness(self) -> Callable[[xr.Dataset], Likeness | None]:
        """How alike encoders are, for their map and for who is most alike."""


OPTIONAL: Mapping[str, Any] = {
    **plugins.REPORTED,
    "PROJECTION": (),
    "IMAGES": {},
    "TARGETS": False,
    "Config": NoSettings,
    "views": lambda config, split: ("plain",),
    "precision": lambda config: "float32",
}


def result_of(metric: Analysis) -> xr.Dataset:
    """What an analysis has to say, with the sums of all processes."""
    return measured_of(metric)[0]


def measured_of(metric: Analysis) -> tuple[xr.Dataset, xr.Dataset | None]:
    """The same, and what it keeps so that contrasts can be computed from it.

    The class's own `compute`: the one that torchmetrics wraps rebuilds mappings, and a Dataset loses its attributes.
    """
    with metric.sync_context():
        return split(type(metric).compute(metric))


def analysis(name: str) -> AnalysisPlugin:
    return cast(AnalysisPlugin, plugins.held_to(AnalysisPlugin, "analyses", name, OPTIONAL))
