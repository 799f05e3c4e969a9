"""G1–G7: Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Visual Representations?" (004).

Of a ResNet, even layers are the outputs of blocks (after the addition), odd ones their residual branches, and block
groups are its stages. Layers are compared as the paper does, all positions of a map side by side (tokens=all).
"""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sightline.core.contrast import Contrast, Estimate
from sightline.core.errors import InputError
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.findings.accuracies import last, linear_probe
from sightline.studies.findings.contract import Case, Part, findings_of
from sightline.studies.findings.deciding import DRAWS, LEVEL, above, cases_of, written
from sightline.studies.roles import JE, SUPERVISED

Numbers = npt.NDArray[np.float64]


EVEN, ODD = "block", "residual"  # layer types


# Encoders and layers


def _of_pairs(
    parts: Callable[..., Sequence[Part]],
    notes: Callable[..., str] | None = None,
    otherwise: tuple[str, Callable[..., Sequence[Part]]] | None = None,
) -> Callable[[Evidence], list[Case]]:
    """A case for each pair of a joint-embedding (SimCLR) and a supervised CNN."""

    def cases(evidence: Evidence) -> list[Case]:
        names = [(je.name, sl.name) for je in evidence.need(JE, "cnn") for sl in evidence.need(SUPERVISED, "cnn")]
        return cases_of(evidence, parts, names, notes, otherwise)

    return cases


def _groups(evidence: Evidence, result: str, encoder: str) -> list[list[str]]:
    """The even layers of each block group."""
    one, table = next(evidence.tables(result, encoder))
    stages = table.stage.sel(encoder=one).values if "stage" in table.coords else np.zeros(table.sizes["site"])
    sites = [str(site) for site in table.site.values]
    blocks = [
        (site, int(stage)) for site, stage in zip(sites, stages, strict=True) if re.fullmatch(r"block\.\d+", site)
    ]
    groups = [[site for site, stage in blocks if stage == number] for number in range(1, int(stages.max()) + 1)]
    if len(groups) < 2 or not all(groups):
        raise Missing(f"a CNN with several block groups in place of {encoder}, such as a ResNet")
    return groups


def _flat(groups: Sequence[Sequence[str]]) -> list[str]:
    return [site for group in groups for site in group]


def _first(x: Numbers, axis: int) -> Any:
    """A statistic of numbers in order of depth: that of the first layer."""
    return x.take(0, axis)


# CKA between networks: G1–G4


def _square(x: Numbers) -> Numbers:
    side = math.isqrt(x.shape[-1])
    if side * side != x.shape[-1] or side < 2:
        raise InputError("Some of its layers have no CKA with some others")
    return x.reshape(*x.shape[:-1], side, side)


def _themselves(x: Numbers, axis: int) -> Numbers:
    """Mean CKA of a layer with the same layer of the other network, from that of all pairs."""
    mean: Numbers = _square(x).diagonal(0, -2, -1).mean(axis)
    return mean


def _neighbours(x: Numbers, axis: int) -> Numbers:
    """Mean CKA of a layer with the layers before and behind it."""
    square = _square(x)
    mean: Numbers = np.concatenate([square.diagonal(offset, -2, -1) for offset in (-1, 1)], axis).mean(axis)
    return mean


def _seed_cases(evidence: Evidence) -> list[Case]:
    """Each network of which there are several seeds; every two of them must agree."""
    roles = [role for family in (JE, SUPERVISED) for role in evidence.encoders(family, "cnn")]
    several = [(role.name,) for role in roles if role.name in evidence.seeds]
    if not several:
        raise Missing("a CNN trained with two seeds: add `--steps pretrain`, or give both and `--role NAME:seed=1`")
    return cases_of(evidence, _seeds, several)


def _seeds(evidence: Evidence, encoder: str) -> list[Part]:
    pairs, apart = [], evidence.apart()  # a seed may be called like all of them
    for one, other in itertools.combinations(evidence.seeds[encoder], 2):
        where: dict[str, Any] = {"encoder": one, "other": other, "tokens": "all"}
        odd, even_neighbours, odd_neighbours = (
            apart.estimate("cka.cka", layer_type=kind, statistic=statistic, **where)
            for kind, statistic in ((ODD, _themselves), (EVEN, _neighbours), (ODD, _neighbours))
        )
        pair = f"{one}, {other}"
        pairs += [
            above(f"CKA of neighbours, even − odd layers: {pair}", even_neighbours - odd_neighbours),
            above(f"CKA of odd layers, with themselves − with neighbours: {pair}", odd - odd_neighbours),
        ]
    return pairs


def _residuals(evidence: Evidence, je: str, sl: str) -> list[Part]:
    where: dict[str, Any] = {"encoder": je, "other": sl, "layer_type": ODD, "tokens": "all"}
    early, late = (evidence.estimate("cka.diagonal", depth=depth, **where) for depth in ("first quarter", (0.25, 1)))
    return [above(f"CKA of odd layers, first quarter − the rest: {je}, {sl}", early - late)]


def _last_group(evidence: Evidence, je: str, sl: str) -> list[Part]:
    groups = _groups(evidence, "cka", je)
    parts = []
    for number, words in (("diagonal", "at the same depth"), ("row_max", "with the most similar one")):
        before, late = (
            evidence.estimate(f"cka.{number}", encoder=je, other=sl, tokens="all", site=sites)
            for sites in (_flat(groups[:-1]), groups[-1])
        )
        parts.append(above(f"CKA of even layers {words}, before − in the last group: {je}, {sl}", before - late))
    return parts


def _stalling(evidence: Evidence, je: str, sl: str) -> list[Part]:
    groups = _groups(evidence, "cka", je)
    every, starts = _flat(groups), [group[0] for group in groups[1:]]
    others = [site for site in every if site not in starts]

    def lag(sites: Sequence[str]) -> Estimate:
        """How much earlier in SL the most similar layers are, as a share of the depth."""
        depth = float(np.mean([every.index(site) / len(every) for site in sites]))
        match = evidence.estimate("cka.row_depth", encoder=je, other=sl, tokens="all", site=list(sites), draws=DRAWS)
        return match * -1.0 + depth

    at_starts = lag(starts)
    return [
        above(f"lag at group starts: {je} behind {sl}", at_starts, method="bootstrap"),
        above(f"lag at group starts − elsewhere: {je} behind {sl}", at_starts - lag(others), method="bootstrap"),
    ]


# Along a network: G5–G7


def _separability(evidence: Evidence) -> list[Case]:
    roles = (*evidence.need(JE, "cnn"), *evidence.need(SUPERVISED, "cnn"))
    names = [(role.name,) for role in roles]
    cases = cases_of(evidence, _worst_step, names, otherwise=("From one block group to the next", _by_group))
    return [replace(case, side=role.family) for case, role in zip(cases, roles, strict=True)]


def _worst_step(evidence: Evidence, encoder: str) -> list[Part]:
    """The step from an even layer to the next that speaks most against growth.

    It is the worst of many: its interval and its p are at 0.05 over their number (Bonferroni).
    """
    member, table = next(evidence.tables("probes", encoder))
    probed = table.accuracy.sel(encoder=member).notnull().any(("probe", "feature")).values
    blocks = [str(site) for site in table.site.values[probed] if re.fullmatch(r"block\.\d+", str(site))]
    if len(blocks) < 2:
        raise Missing(f"probes of the blocks of {encoder}: add `--steps passes`")
    accuracy = {site: linear_probe(evidence, encoder, site=site, feature="gap") for site in blocks}
    steps = {f"{before} to {after}": accuracy[after] - accuracy[before] for before, after in itertools.pairwise(blocks)}
    contrasts = {name: step.contrast(1 - LEVEL / len(steps)) for name, step in steps.items()}
    worst = min(contrasts, key=lambda name: _steepness(contrasts[name]))
    one, p = contrasts[worst], min(1.0, len(steps) * contrasts[worst].p)
    part = Part(
        f"linear probe of {encoder}, {worst}",
        one.value,
        one.low,
        one.high,
        p,
        agrees=True if one.low > 0 else False if one.high < 0 else None,
        p_claim=p if one.value > 0 else 1.0,
        p_other=p if one.value < 0 else 1.0,
        percent=True,
        how=f"{one.how}; the worst of {len(steps)} steps, its interval at 0.05 over their number",
    )
    return [part]


def _steepness(step: Contrast) -> float:
    return step.value / step.error if step.error > 0 else math.copysign(math.inf, step.value) if step.value else 0.0


def _by_group(evidence: Evidence, encoder: str) -> list[Part]:
    groups = _groups(evidence, "cka", encoder)
    means = [linear_probe(evidence, encoder, site=sites, feature="gap") for sites in groups]
    return [
        above(f"linear probe of {encoder}, group {number + 1} − group {number}", after - before, percent=True)
        for number, (before, after) in enumerate(itertools.pairwise(means), 1)
    ]


def _policy(evidence: Evidence, encoder: str, kind: str) -> str:
    """The augmentation of that name; with settings of its own, if there is one, since these are the encoder's."""
    _, table = next(evidence.tables("invariance", encoder))
    names = [str(name) for name in table.policy.values]
    policies = [name for name in names if name.partition("?")[0] == kind]
    if not policies:
        raise Missing(f"invariance under the policy {kind}: add `--set 'invariance.policies=[\"{kind}\"]'`")
    return max(policies, key=len)


def _invariance(evidence: Evidence, encoder: str, policy: str, sites: Sequence[str]) -> Estimate:
    return evidence.estimate("invariance.invariance", encoder=encoder, policy=policy, tokens="all", site=list(sites))


def _late_invariance(evidence: Evidence, encoder: str, policy: str) -> Estimate:
    """How much more invariant the last block group is than those before."""
    groups = _groups(evidence, "invariance", encoder)
    late, before = (_invariance(evidence, encoder, policy, sites) for sites in (groups[-1], _flat(groups[:-1])))
    return late - before


def _growing_invariant(evidence: Evidence, je: str, sl: str) -> list[Part]:
    policy = _policy(evidence, je, "simclr")
    own, other = (_late_invariance(evidence, encoder, policy) for encoder in (je, sl))
    late = _invariance(evidence, je, policy, _groups(evidence, "invariance", je)[-1])
    with _head_of(je):
        head = _invariance(evidence, je, policy, ["head.*"])
    return [
        above(f"invariance, last group − before: {je}", own),
        above(f"invariance, head − last group: {je}", head - late),
        above(f"invariance, last group − before: {je} − {sl}", own - other),
    ]


def _under_own_policy(evidence: Evidence, je: str, sl: str) -> str:
    own = _late_invariance(evidence, sl, _policy(evidence, sl, "supervised"))
    return f"Under its own augmentations: {written(above(f'invariance, last group − before: {sl}', own))}."


@contextlib.contextmanager
def _head_of(encoder: str) -> Iterator[None]:
    """Whatever is missing inside is the head of this encoder."""
    try:
        yield
    except Missing:
        raise Missing(f"the projection head of {encoder}: give its reference with `?head=true`") from None


def _class_cka(evidence: Evidence, encoder: str, sites: Sequence[str], **how: Any) -> Estimate:
    return evidence.estimate("cka.class_cka", encoder=encoder, tokens="all", site=list(sites), **how)


def _rise(evidence: Evidence, encoder: str) -> tuple[Estimate, Estimate]:
    """How much the CKA with the classes rises by a block in the last group, and before it."""
    groups = _groups(evidence, "cka", encoder)
    first, middle, end = groups[0][0], groups[-2][-1], groups[-1][-1]
    start, before, late = (_class_cka(evidence, encoder, [site]) for site in (first, middle, end))
    return (late - before) / len(groups[-1]), (before - start) / max(len(_flat(groups[:-1])) - 1, 1)


def _class_structure(evidence: Evidence, je: str, sl: str) -> list[Part]:
    parts = []
    for encoder in (je, sl):
        groups = _groups(evidence, "cka", encoder)
        late, early = (_class_cka(evidence, encoder, sites) for sites in (groups[-1], groups[0]))
        parts.append(above(f"CKA with the classes, last − first group: {encoder}", late - early))
    in_last, before = _rise(evidence, sl)
    with _head_of(je):
        inside = [_class_cka(evidence, je, ["head.*"], statistic=statistic) for statistic in (_first, last)]
    return [
        *parts,
        above(f"rise of the CKA with the classes by a block, in the last group − before: {sl}", in_last - before),
        above(f"CKA with the classes, first − last layer of the head: {je}", inside[0] - inside[1]),
    ]


def _faster(evidence: Evidence, je: str, sl: str) -> list[Part]:
    own, other = (_rise(evidence, encoder)[0] for encoder in (sl, je))
    return [above(f"rise of the CKA with the classes by a block in the last group: {sl} − {je}", own - other)]


FINDINGS = findings_of(
    "grigg",
    {
        "G1": _seed_cases,
        "G2": _of_pairs(_residuals),
        "G3": _of_pairs(_last_group),
        "G4": _of_pairs(_stalling),
        "G5": _separability,
        "G6": _of_pairs(_growing_invariant, _under_own_policy),
        "G7": _of_pairs(_class_structure, otherwise=("As a faster rise than SimCLR's", _faster)),
    },
)
