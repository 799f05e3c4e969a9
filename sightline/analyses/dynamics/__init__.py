"""How training moves an encoder: how straight its weights go, and how far each block goes from what it was.

    path efficiency at point T = ‖θ_T − θ_0‖₂ / Σ_{t < T} ‖θ_{t+1} − θ_t‖₂

of all weights, of each block, of each type of layer and of both (paths.py); and the CKA (estimators/cka.py) of every
layer at every kept step with the layers of the start and of other encoders, minibatch and unbiased.

Source: Shekhar et al. 2023, "Objectives Matter", Section 2.3, Fig. 4 and 14.

Shapes: n images of a batch, S layers (encoder, site), M of them of steps, O of those that they are compared with, T
token views, G groups of batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr
from torch import Tensor

from sightline.analyses.cka.matching import depths_of, layers_of_same_depth
from sightline.analyses.dynamics.charts import figures as figures
from sightline.analyses.dynamics.charts import headlines as headlines
from sightline.analyses.dynamics.charts import key_numbers as key_numbers
from sightline.analyses.dynamics.paths import Trajectory, paths_of, trainings_of
from sightline.analyses.dynamics.paths import path_efficiency as path_efficiency
from sightline.core.groups import Alignment, Kept
from sightline.core.results import ABSENT
from sightline.images.pipeline import Batch
from sightline.measure.estimators.cka import GROUPS, centre, products
from sightline.measure.gram_sums import GramSums, check_tokens
from sightline.measure.layers import Layers
from sightline.measure.plan import Cost, Key, Plan

TOPIC = "transfer"
TITLE = "Dynamics"
QUESTION = "How straight is the path of the weights during a training, and how much does each block change?"
FORMULA = """\
path efficiency at point T = ‖θ_T − θ_0‖₂ / Σ_{t < T} ‖θ_{t+1} − θ_t‖₂      θ_t the weights at the t-th kept step
CKA as on its own page, of every block of every kept step with the blocks of the start and of the other encoders"""
HOW_TO_READ = """\
Path efficiency is 1 where weights went straight from the start to where they are, and near 0 where they moved a lot and
got nowhere; at the first point it is 1 by definition, since a single step is straight, and noise of any kind makes
it fall. Compare only trainings of the same length and the same learning rates: smaller steps at the end of a schedule
add little to the path. The CKA with the start says how far a block still sees images as it did before: 1 where nothing
but rotation and scale has changed. The CKA with another encoder says whether training leads towards it; compare its
last point with its first. The path is measured over the steps that were given: with fewer of them it looks straighter.
Kept steps are rounded to bfloat16, so that a move of less than 0.2 % of the weights is mostly rounding.
"""
SOURCE = (
    'Shekhar, Bordes, Vincent, Morcos 2023, "Objectives Matter", Section 2.3, Fig. 4 (CKA before and after '
    "fine-tuning) and Fig. 14 (path efficiency); Nguyen, Raghu, Kornblith 2021 (minibatch CKA)"
)
SITES = ("block.*", "decoder.block.*")
SPLITS = ("test",)
ANY_SITE = True
BY_DEFAULT = False
INVARIANT_TO = frozenset({"rotation", "scale", "translation"})


@dataclass(frozen=True)
class DynamicsConfig:
    """`tokens`: token views that CKA compares; `bootstrap` draws for its intervals."""

    tokens: tuple[str, ...] = ("all",)
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_tokens(self.tokens, self.bootstrap)


class DynamicsAnalysis(GramSums):
    """Sums HSIC of the layers of all steps with those of starts and others; the weights are looked at in the end."""

    hsic: Tensor  # (T, G, M, O)
    own: Tensor  # (T, G, S): of each layer with itself

    def __init__(self, config: DynamicsConfig, plan: Plan) -> None:
        super().__init__("dynamics", config, plan)
        self.trainings = trainings_of(plan.encoders)
        self.layers, self.moving, self.others = _layers(plan, self.trainings)
        self.rows, self.columns = ([self.layers.index(*layer) for layer in part] for part in (self.moving, self.others))
        t, s = len(config.tokens), len(self.layers)
        self.add_sums(hsic=(t, GROUPS, len(self.rows), len(self.columns)), own=(t, GROUPS, s), flaws=(t, s, 3))

    def update(self, batch: Batch, reductions: Mapping[Key, dict[str, Tensor]]) -> None:
        """Add the HSIC of this batch; batches count by the images they hold, those of fewer than 4 cannot enter."""
        n, group = len(batch.ids), self.group_of(batch)
        if group is None:
            return
        layers = [reductions[Key(encoder, site, "plain")] for encoder, site in self.layers]
        for t, matrices in self.matrices(layers, n):  # (S, n, n)
            hsic = n * products(centre(matrices))
            self.hsic[t, group] += hsic[self.rows][:, self.columns]
            self.own[t, group] += hsic.diagonal()

    def compute(self) -> xr.Dataset:
        encoders = self.moving.encoders
        places = {name: (training, step) for training in self.trainings for step, name in training.steps.items()}
        result = self._cka().assign_coords(
            training=("encoder", [places[name][0].name for name in encoders]),
            step=("encoder", [places[name][1] for name in encoders]),
            start=("encoder", [places[name][0].start for name in encoders]),
        )
        attrs = {"estimator": "unbiased minibatch", "batch": self.plan.batch, "interval": "95 % bootstrap over batches"}
        paths = paths_of(self.plan.encoders, self.trainings)
        kept = self._kept()
        numbers = [str(name) for name, values in paths.data_vars.items() if values.dtype.kind == "f"]
        kept.nothing("it is a number of a training, and no image changes it; give several seeds", *numbers)
        return kept.beside(result.merge(paths).assign_attrs(attrs))

    def _kept(self) -> Kept:
        kept, there = self.kept_batches(), self.images.numpy(force=True) > 0
        hsic, own = (state.numpy(force=True)[:, there].swapaxes(0, 1) for state in (self.hsic, self.own))
        cross = np.stack([self._spread(group) for group in hsic])
        rows, columns = (
            np.stack([_over(layers, group[:, at], np.nan) for group in own])
            for layers, at in ((self.moving, self.rows), (self.others, self.columns))
        )
        kept.add(
            "cka",
            Alignment("cross", "own", "others"),
            cross=(("batches", "tokens", "encoder", "site", "other", "other_site"), cross),
            own=(("batches", "tokens", "encoder", "site"), rows),
            others=(("batches", "tokens", "other", "other_site"), columns),
        )
        return kept

    def _cka(self) -> xr.Dataset:
        hsic, own, images = (state.numpy(force=True) for state in (self.hsic, self.own, self.images))
        parts = []
        for encoder in self.moving.encoders:  # one step at a time, because all replicates of all would not fit
            mine = [k for k, (name, _) in enumerate(self.moving) if name == encoder]
            both = own[..., np.take(self.rows, mine)], own[..., self.columns]
            parts.append(self.cka("cka", hsic[:, :, mine], images, both))
        values = {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}  # each (T, M, O)
        reason = self.reasons(own.sum(1))
        pair = ("tokens", "encoder", "site", "other", "other_site")
        coords, others = self.moving.coords(), self.others.coords()
        result = xr.Dataset(
            {
                **{name: (pair, self._spread(value)) for name, value in values.items()},
                "reason": (pair[:3], _over(self.moving, reason[:, self.rows])),
                "other_reason": (("tokens", "other", "other_site"), _over(self.others, reason[:, self.columns])),
            },
            coords={
                "tokens": list(self.config.tokens),
                **coords,
                "other": others["encoder"],
                "other_site": others["site"],
            },
        )
        return result.assign(diagonal_site=(pair[1:4], self._same_depth()))

    def _spread(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """(T, M, O) over pairs of layers → (T, encoders, sites, others, sites of others)."""
        rows = self.moving.spread(values.transpose(1, 2, 0))  # (encoders, sites, O, T)
        return self.others.spread(np.moveaxis(rows, 2, 0)).transpose(4, 2, 3, 0, 1)

    def _same_depth(self) -> npt.NDArray[np.str_]:
        """The site of each other encoder that has the type and the relative depth of a site: (encoders, sites, others).

        Empty where there is none.
        """
        sites, names = np.array(self.layers.sites), self.layers.encoders
        has = np.array([[site in own for site in sites] for own in self.layers.of.values()])
        rows, columns = ([names.index(name) for name in part.encoders] for part in (self.moving, self.others))
        own = [list(sites).index(site) for site in self.moving.sites]
        depths = depths_of([self.plan.encoders[name] for name in names])
        matches = layers_of_same_depth(sites, has, depths)[np.ix_(rows, columns, own)]  # (encoders, others, sites)
        return np.where(matches >= 0, sites[matches], "").swapaxes(1, 2)


def _layers(plan: Plan, trainings: Sequence[Trajectory]) -> tuple[Layers, Layers, Layers]:
    """All layers, those of steps, and those that steps are compared with: of the starts and of all other encoders."""
    steps = [name for training in trainings for name in training.steps.values()]
    others = [training.start for training in trainings] + [name for name in plan.sites if name not in steps]
    every, moving, fixed = (
        Layers({name: plan.sites[name] for name in part}, plan.stages) for part in (plan.sites, steps, others)
    )
    return every, moving, fixed


def _over(layers: Layers, values: npt.NDArray[Any], fill: Any = ABSENT) -> npt.NDArray[Any]:
    """(T, S) over layers → (T, encoders, sites)."""
    return np.moveaxis(layers.spread(values.T, fill), -1, 0)


def cost(config: DynamicsConfig, plan: Plan) -> Cost:
    layers, moving, others = map(len, _layers(plan, trainings_of(plan.encoders)))
    return Cost(memory=8 * len(config.tokens) * GROUPS * (moving * others + layers), disk=0)
