"""S1–S21: Shekhar et al. 2022 (documents 000 and 002) and 2023, "Objectives Matter" (001).

Joint-embedding (JE) against reconstruction (REC). What the papers show of MoCo-v3, DINO and MAE is asked of all
encoders of these roles. Each function gives the cases of one finding, one for each choice of encoders.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from sightline.core.contrast import Estimate
from sightline.core.run_folder import Run
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.findings.accuracies import intermediate, last
from sightline.studies.findings.contract import Case, Part, findings_of
from sightline.studies.findings.deciding import DRAWS, above, below, within, written
from sightline.studies.roles import JE, MASKED_JE, REC, Role

# What "small", "not" and "≈ 0" mean, where the papers print no number. They were fixed before anything was measured.
# The words of S6 and S20 name SMALL and UNNOTICED.
NOTHING = 0.01  # accuracy: a gain of less than one point is none; the smallest gain that 001 speaks of is 1.03 points
SMALL = 0.05  # accuracy: what k-NN may lack to the probe and still nearly equal it
UNNOTICED = 0.05  # CKA: what is not seen in a figure
LARGER = 0.5  # relative distance of two layers from which on it is "larger"
SAMPLES = 1024  # images from which on their number must not matter
KINDS = ("box", "mask")


def _main(evidence: Evidence, family: str, count: int = 1) -> list[Role]:
    """ViTs of a role, before fine-tuning, without those that a study adds to vary window or size."""
    every = evidence.need(family, count=count, window=None)
    of_one_size = [role for role in every if role.size is None]
    return of_one_size if len(of_one_size) >= count else every


def _named(evidence: Evidence, family: str, count: int = 1) -> list[str]:
    return [role.name for role in _main(evidence, family, count)]


def _numbers(table: xr.Dataset, number: str, **where: Any) -> xr.DataArray:
    """Numbers of a table; one that was measured with other settings may lack them."""
    try:
        return table[number.partition(".")[2]].sel(where)
    except KeyError:
        chosen = ", ".join(f"{word}={value}" for word, value in where.items())
        raise Missing(f"{number} of {chosen}, which the settings of the run left out") from None


def _first_pair(evidence: Evidence, number: str, a: str, b: str, **where: Any) -> xr.DataArray:
    """Numbers of two encoders, or of the first seeds of both."""
    one, other = (evidence.seeds.get(name, (name,))[0] for name in (a, b))
    table = evidence.apart().table(number.partition(".")[0], one, other)
    return _numbers(table, number, encoder_a=one, encoder_b=other, **where)


# Representations


def _diagonal(evidence: Evidence, encoder: str, other: str, layer_type: str = "block", **where: Any) -> Estimate:
    return evidence.estimate("cka.diagonal", encoder=encoder, other=other, layer_type=layer_type, tokens="all", **where)


def _alike(evidence: Evidence) -> Sequence[Case]:
    je, rec = _named(evidence, JE, 2), _named(evidence, REC)

    def parts(a: str, b: str, r: str) -> list[Part]:
        return [
            above(f"CKA({a}, {b}) − CKA({one}, {r})", _diagonal(evidence, a, b) - _diagonal(evidence, one, r))
            for one in (a, b)
        ]

    return [Case((a, b, r), partial(parts, a, b, r)) for a, b in itertools.combinations(je, 2) for r in rec]


def _weaker_at_the_end(evidence: Evidence) -> Sequence[Case]:
    def parts(a: str, b: str) -> list[Part]:
        before, after = (_diagonal(evidence, a, b, depth=depth) for depth in ((0, 0.75), "last quarter"))
        return [above(f"CKA({a}, {b}) before the last quarter − in it", before - after)]

    return [Case(pair, partial(parts, *pair)) for pair in itertools.combinations(_named(evidence, JE, 2), 2)]


def _early_match(evidence: Evidence) -> Sequence[Case]:
    def matches(a: str, r: str, half: str, number: Callable[..., Any], **more: Any) -> Estimate:
        """A number of the depths in `r` that blocks of `a` match best; the decoder behind an encoder takes no part."""
        statistic = partial(_of_matches, blocks=_blocks(evidence, a, r), number=number)
        return evidence.estimate(
            "cka.cka",
            encoder=a,
            other=r,
            tokens="all",
            depth_a=half,
            site_a="block.*",
            site_b="block.*",
            statistic=statistic,
            **more,
        )

    def parts(a: str, r: str) -> list[Part]:
        depth = matches(a, r, "first half", np.mean, draws=DRAWS)
        return [below(f"depth in {r} that the first half of {a} matches", depth, 0.25, method="bootstrap")]

    def notes(a: str, r: str) -> str:
        early, late = (matches(a, r, half, _in_first_quarter).value for half in ("first half", "last half"))
        return (
            f"{early:.0%} of the first half of {a} match the first quarter of {r}, {1 - late:.0%} of the last half "
            "what follows it."
        )

    pairs = itertools.product(_named(evidence, JE), _named(evidence, REC))
    return [Case(pair, partial(parts, *pair), partial(notes, *pair)) for pair in pairs]


def _blocks(evidence: Evidence, a: str, b: str) -> int:
    """How many blocks of an encoder have a CKA with those of another."""
    values = _first_pair(evidence, "cka.cka", a, b, tokens="all", site_a="block.0")
    finite = np.isfinite(values.values)
    return sum(bool(re.fullmatch(r"block\.\d+", str(site))) for site in values.site_b.values[finite])


def _of_matches(values: npt.NDArray[np.float64], axis: int, blocks: int, number: Callable[..., Any]) -> Any:
    """A number of the relative depths of the largest CKA in each row; values (…, rows · blocks), rows one by one."""
    rows = np.moveaxis(values, axis, -1)
    return number(rows.reshape(*rows.shape[:-1], -1, blocks).argmax(-1) / blocks, axis=-1)


def _in_first_quarter(depths: npt.NDArray[np.float64], axis: int) -> Any:
    return (depths < 0.25).mean(axis)


def _layer_types(evidence: Evidence) -> Sequence[Case]:
    def parts(a: str, r: str) -> list[Part]:
        return [
            above(f"CKA({a}, {r}) of fc1 − {kind}", _diagonal(evidence, a, r, "fc1") - _diagonal(evidence, a, r, kind))
            for kind in ("qkv", "norm1")
        ]

    pairs = itertools.product(_named(evidence, JE), _named(evidence, REC))
    return [Case(pair, partial(parts, *pair)) for pair in pairs]


def _objective_over_architecture(evidence: Evidence) -> Sequence[Case]:
    vits = {family: _named(evidence, family) for family in (JE, REC)}
    cases = []
    for family, other, least in ((JE, REC, 0.0), (REC, JE, LARGER)):
        cnns = [role.name for role in evidence.need(family, "cnn")]
        for cnn, own, foreign in itertools.product(cnns, vits[family], vits[other]):
            parts = partial(_curve_above, evidence, cnn, own, foreign, least)
            cases.append(Case((cnn, own, foreign), parts, side=family))
    return cases


def _curve_above(evidence: Evidence, cnn: str, own: str, foreign: str, least: float) -> list[Part]:
    """CKA(CNN, ViT) − CKA(ViT, ViT of the other kind) at each distance, matched by the share of the depth."""
    first, second = _distances(evidence, cnn, own), _distances(evidence, own, foreign)
    parts = []
    for distance, share in first.items():
        if share >= least:
            near = min(second, key=lambda other: abs(second[other] - share))
            curves = [
                evidence.estimate("cka.distance_cka", encoder=a, other=b, tokens="all", distance=at)
                for a, b, at in ((cnn, own, distance), (own, foreign, near))
            ]
            label = f"CKA({cnn}, {own}) − CKA({own}, {foreign}) at distance {share:.2f}"
            parts.append(above(label, curves[0] - curves[1]))
    return parts


def _distances(evidence: Evidence, a: str, b: str) -> dict[int, float]:
    """The distances of layers that two encoders have, and which share of the depth they are."""
    values = _first_pair(evidence, "cka.distance_cka", a, b, tokens="all")
    finite = np.isfinite(values.values)
    shares = zip(values.distance.values[finite], values.relative_distance.values[finite], strict=True)
    return {int(distance): float(share) for distance, share in shares}


# Classes


def _class_separability(evidence: Evidence) -> Sequence[Case]:
    def accuracy(encoder: str, feature: str, **where: Any) -> Estimate:
        return evidence.estimate("knn.accuracy", encoder=encoder, feature=feature, layer_type="block", **where)

    def parts(a: str, r: str) -> list[Part]:
        growths = []
        for feature in _features(evidence, "knn", a, r):
            early, late = (
                accuracy(a, feature, depth=depth) - accuracy(r, feature, depth=depth)
                for depth in ("first quarter", (0.25, 1))
            )
            label = f"growth of 20-NN accuracy {a} − {r} after the first quarter, {feature}"
            growths.append(above(label, late - early, percent=True))
        probe = evidence.estimate(
            "probes.accuracy", encoder=a, probe="linear", feature="cls", layer_type="block", statistic=last
        )
        missing = probe - accuracy(a, "cls", statistic=last)
        return [*growths, within(f"linear probe − 20-NN of {a}, last block", missing, SMALL, percent=True)]

    pairs = itertools.product(_named(evidence, JE), _named(evidence, REC))
    return [Case(pair, partial(parts, *pair)) for pair in pairs]


def _features(evidence: Evidence, result: str, *encoders: str) -> list[str]:
    """The poolings that all of these encoders have."""
    every = []
    for member, table in evidence.tables(result, *encoders):
        values = table.accuracy.sel(encoder=member)
        measured = np.isfinite(values).any([str(dim) for dim in values.dims if dim != "feature"])
        every.append([str(feature) for feature in values.feature.values[measured.values]])
    return [feature for feature in every[0] if all(feature in features for features in every)]


def _rankings(evidence: Evidence) -> Sequence[Case]:
    def tau(a: str, b: str, images: str, k: int) -> Estimate:
        return evidence.estimate("agreement.tau", encoder=a, other=b, images=images, k=k)

    def parts(a: str, b: str, r: str) -> list[Part]:
        table = evidence.table("agreement", a, b, r)
        every = itertools.product(table.images.values, [k for k in table.k.values if k in (5, 10, 100)])
        return [
            above(f"τ@{k}({a}, {b}) − τ@{k}({a}, {r}), {images}", tau(a, b, images, k) - tau(a, r, images, k))
            for images, k in every
        ]

    return _je_je_rec(evidence, parts)


def _choices(evidence: Evidence) -> Sequence[Case]:
    def f1(a: str, b: str) -> Estimate:
        return evidence.estimate("agreement.f1", encoder=a, other=b)

    def parts(a: str, b: str, r: str) -> list[Part]:
        return [above(f"F1({a}, {b}) − F1({a}, {r})", f1(a, b) - f1(a, r))]

    return _je_je_rec(evidence, parts)


def _je_je_rec(evidence: Evidence, parts: Callable[[str, str, str], Sequence[Part]]) -> list[Case]:
    """A case for each ordered pair of joint-embedding encoders and each reconstruction."""
    je, rec = _named(evidence, JE, 2), _named(evidence, REC)
    return [Case((a, b, r), partial(parts, a, b, r)) for a, b in itertools.permutations(je, 2) for r in rec]


def _deeper_probe(evidence: Evidence) -> Sequence[Case]:
    def gain(encoder: str) -> Estimate:
        where: dict[str, Any] = {"encoder": encoder, "site": _last_site(evidence, encoder), "feature": "cls"}
        deep, plain = (evidence.estimate("probes.accuracy", probe=probe, **where) for probe in ("depth 3", "linear"))
        return deep - plain

    return _helps_rec_not_je(evidence, gain, "gain of a probe of depth 3 on {}")


def _intermediate(evidence: Evidence) -> Sequence[Case]:
    return _helps_rec_not_je(evidence, partial(_added_layer, evidence), "gain of a second layer for the probe of {}")


def _helps_rec_not_je(evidence: Evidence, gain: Callable[[str], Estimate], label: str) -> list[Case]:
    def parts(a: str, r: str) -> list[Part]:
        return [above(label.format(r), gain(r), percent=True), below(label.format(a), gain(a), NOTHING, percent=True)]

    pairs = itertools.product(_named(evidence, JE), _named(evidence, REC))
    return [Case(pair, partial(parts, *pair)) for pair in pairs]


def _added_layer(evidence: Evidence, encoder: str) -> Estimate:
    """What one more block gives to the linear probe of the last layer; the block is chosen on the selection split."""
    where = {"probe": "multilayer", "feature": "cls"}
    selections = [
        _numbers(table, "probes.selection", encoder=member, **where).drop_vars("encoder")
        for member, table in evidence.tables("probes", encoder)
    ]
    chosen = sum(selections[1:], selections[0]) / len(selections)
    last_site = _last_site(evidence, encoder)
    chosen = intermediate(chosen, last_site)
    if not chosen.size:
        raise Missing(f"probes of two layers of {encoder}: add `--steps passes`")
    site = str(chosen.site.values[int(np.argmax(chosen.values))])
    both, alone = (
        evidence.estimate("probes.accuracy", encoder=encoder, feature="cls", probe=probe, site=at)
        for probe, at in (("multilayer", site), ("linear", last_site))
    )
    return both - alone


def _last_site(evidence: Evidence, encoder: str) -> str:
    member, table = next(evidence.tables("probes", encoder))
    return str(table.last_site.sel(encoder=member).item())


# Invariances

# What stands beside the likelihood gap, each larger where orientation is kept: a number, and what chooses it.
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "samples that face as their source": ("rcdm.orientation", {}),
    "distance of mirror images": (
        "transformations.distance",
        {"transformation": "mirror", "feature": "cls", "layer_type": "block", "statistic": last},
    ),
    "inversion": ("rcdm.nearer", {}),
    "probe of orientation": ("orientation.accuracy", {"feature": "cls", "layer_type": "block", "statistic": last}),
}


def _keeps_orientation(evidence: Evidence, keeps: str, forgets: str) -> list[Part]:
    share = [evidence.estimate("rcdm.share", encoder=name, transformation="mirror") for name in (keeps, forgets)]
    label = f"images whose orientation the representation tells, {keeps} − {forgets}"
    return [above(label, share[0] - share[1], percent=True)]


def _other_measures(evidence: Evidence, keeps: str, forgets: str) -> tuple[list[Part], list[Part]]:
    """What the other measures say: those that do not contradict, and those that do."""
    decided = _keeps_orientation(evidence, keeps, forgets)[0]
    said: list[Part] = []
    against: list[Part] = []
    for name, (number, where) in BESIDE.items():
        try:
            one, other = (evidence.estimate(number, encoder=encoder, **where) for encoder in (keeps, forgets))
            part = above(name, one - other)
        except Missing:
            continue
        differs = part.agrees is not None and decided.agrees is not None and part.agrees is not decided.agrees
        (against if differs else said).append(part)
    return said, against


def _by_gap(evidence: Evidence, keeps: str, forgets: str) -> Case:
    """The likelihood gap decides; the other measures stand beside it, and where they disagree it is said."""

    def notes() -> str:
        said, _ = _other_measures(evidence, keeps, forgets)
        return f"Beside it, {keeps} − {forgets}: {'; '.join(map(written, said))}." if said else ""

    def warns() -> str:
        _, against = _other_measures(evidence, keeps, forgets)
        return f"Of {keeps} − {forgets} other measures disagree: {'; '.join(map(written, against))}." if against else ""

    return Case((keeps, forgets), partial(_keeps_orientation, evidence, keeps, forgets), notes, warns)


def _orientation(evidence: Evidence) -> Sequence[Case]:
    return [_by_gap(evidence, *pair) for pair in itertools.product(_named(evidence, REC), _named(evidence, JE))]


def _orientation_after(evidence: Evidence) -> Sequence[Case]:
    evidence = evidence.of_tuned_seeds(REC)
    return [_by_gap(evidence, *pair) for pair in _before_and_after(evidence, REC)]


def _before_and_after(evidence: Evidence, family: str) -> list[tuple[str, str]]:
    """Encoders of a family with what was fine-tuned from them; those without are left out, unless all are."""
    before = _named(evidence, family)
    pairs = [(name, tuned.name) for name in before if (tuned := evidence.tuned(name)) is not None]
    return pairs or [(name, evidence.need_tuned(name).name) for name in before]


# Objects


def _detectors(how: str, several: bool = False) -> Callable[[Run], bool]:
    """Runs with detectors on encoders that are frozen or trained along, of the last block or of several."""

    def fits(run: Run) -> bool:
        blocks = str(run.request.get("settings", {}).get("blocks", "last"))
        return run["detection"].attrs.get("encoders") == how and (blocks != "last") == several

    return fits


def _ap(evidence: Evidence, encoder: str, kind: str, area: str, among: Callable[[Run], bool]) -> Estimate:
    return evidence.estimate("detection.AP", encoder=encoder, kind=kind, area=area, among=among)


def _kinds(evidence: Evidence, among: Callable[[Run], bool], *encoders: str) -> list[str]:
    """Boxes, and masks where all of these were trained with them."""
    kinds_of = [set(table.kind.values) for _, table in evidence.tables("detection", *encoders, among=among)]
    return [kind for kind in KINDS if all(kind in kinds for kinds in kinds_of)]


def _frozen_detection(evidence: Evidence) -> Sequence[Case]:
    plain = [role.name for role in _main(evidence, JE) if not role.multicrop]
    if not plain:
        raise Missing("a joint-embedding ViT without multi-crop: add `--je NAME=REFERENCE`")

    def parts(r: str, a: str) -> list[Part]:
        among = evidence.alike("detection", r, a, among=_detectors("frozen"))
        of_kinds = []
        for kind, (area, claims) in itertools.product(
            _kinds(evidence, among, r, a), {"all": above, "small": above, "large": below}.items()
        ):
            difference = _ap(evidence, r, kind, area, among) - _ap(evidence, a, kind, area, among)
            of_kinds.append(claims(f"AP of {r} − {a}, {kind}, {area}", difference, percent=True))
        return of_kinds

    return [Case(pair, partial(parts, *pair)) for pair in itertools.product(_named(evidence, REC), plain)]


def _trained_detection(evidence: Evidence) -> Sequence[Case]:
    def parts(r: str, a: str) -> list[Part]:
        among = evidence.alike("detection", r, a, among=_detectors("trained along"))
        every = itertools.product(_kinds(evidence, among, r, a), ("all", "small", "medium", "large"))
        return [
            above(
                f"AP of {r} − {a}, {kind}, {area}",
                _ap(evidence, r, kind, area, among) - _ap(evidence, a, kind, area, among),
                percent=True,
            )
            for kind, area in every
        ]

    pairs = itertools.product(_named(evidence, REC), _named(evidence, JE))
    return [Case(pair, partial(parts, *pair)) for pair in pairs]


def _more_blocks(evidence: Evidence) -> Sequence[Case]:
    one, several = _detectors("frozen"), _detectors("frozen", several=True)

    def parts(name: str) -> list[Part]:
        missing: list[Missing] = []
        for alike in evidence.trained_alike("detection", but=["blocks"]):
            try:
                return [
                    above(
                        f"AP of {name} with four blocks − the last one, {kind}",
                        _ap(alike, name, kind, "all", several) - _ap(alike, name, kind, "all", one),
                        percent=True,
                    )
                    for kind in _kinds(alike, one, name)
                    if kind in _kinds(alike, several, name)
                ]
            except Missing as error:
                missing.append(error)
        raise missing[0] if missing else Missing(f"detection of {name}: add `--steps detect`")

    return [
        Case((name,), partial(parts, name), side=family) for family in (JE, REC) for name in _named(evidence, family)
    ]


# Fine-tuning


def _towards_je(evidence: Evidence) -> Sequence[Case]:
    def parts(before: str, after: str, a: str) -> list[Part]:
        return [
            above(
                f"CKA({after}, {a}) − CKA({before}, {a})",
                _diagonal(evidence, after, a) - _diagonal(evidence, before, a),
            )
        ]

    evidence = evidence.of_tuned_seeds(REC)
    je = _named(evidence, JE)
    return [
        Case((before, after, a), partial(parts, before, after, a))
        for (before, after), a in itertools.product(_before_and_after(evidence, REC), je)
    ]


def _layers_after(evidence: Evidence) -> Sequence[Case]:
    def change(je: tuple[str, str], rec: tuple[str, str], kind: str, **where: Any) -> Estimate:
        before, after = (_diagonal(evidence, a, r, kind, **where) for a, r in zip(je, rec, strict=True))
        return after - before

    def parts(je: tuple[str, str], rec: tuple[str, str]) -> list[Part]:
        pair = f"CKA({je[0]}, {rec[0]})"
        more = [
            part
            for kind in ("qkv", "norm1")
            for part in (
                above(f"change of {pair} in {kind}", change(je, rec, kind)),
                above(f"change of {pair} in {kind} − in fc1", change(je, rec, kind) - change(je, rec, "fc1")),
            )
        ]
        early, late = (change(je, rec, "fc1", depth=half) for half in ("first half", "last half"))
        return [
            *more,
            above(f"change of {pair} in fc1, first half", early),
            below(f"change of {pair} in fc1, last half", late),
        ]

    evidence = evidence.of_tuned_seeds(JE, REC)
    pairs = itertools.product(_before_and_after(evidence, JE), _before_and_after(evidence, REC))
    return [Case((*je, *rec), partial(parts, je, rec)) for je, rec in pairs]


def _straighter(evidence: Evidence) -> Sequence[Case]:
    def efficiency(name: str) -> Estimate:
        return evidence.after_training("dynamics.efficiency", name, place="all", weights="attention")

    def parts(r: str, a: str) -> list[Part]:
        difference = efficiency(r) - efficiency(a)
        return [above(f"path efficiency of attention, {r} − {a}", difference)]

    pairs = itertools.product(_named(evidence, REC), _named(evidence, JE))
    return [Case(pair, partial(parts, *pair)) for pair in pairs]


def _nothing_added(evidence: Evidence) -> Sequence[Case]:
    label = "gain of a second layer for the probe of {}"

    def parts(after: str) -> list[Part]:
        return [within(label.format(after), _added_layer(evidence, after), NOTHING, percent=True)]

    def notes(before: str) -> str:
        return f"Before: {written(above(label.format(before), _added_layer(evidence, before), percent=True))}."

    pairs = _before_and_after(evidence, REC)
    return [Case((before, after), partial(parts, after), partial(notes, before)) for before, after in pairs]


def _masked(evidence: Evidence) -> Sequence[Case]:
    def parts(m: tuple[str, str], a: str, r: str) -> list[Part]:
        return [
            above(f"CKA({one}, {a}) − CKA({one}, {r})", _diagonal(evidence, one, a) - _diagonal(evidence, one, r))
            for one in m
        ]

    every = itertools.product(_before_and_after(evidence, MASKED_JE), _named(evidence, JE), _named(evidence, REC))
    return [Case((*m, a, r), partial(parts, m, a, r)) for m, a, r in every]


# Method


def _minibatches(evidence: Evidence) -> Sequence[Case]:
    evidence = evidence.apart()  # one seed of an encoder is enough

    def parts(name: str) -> list[Part]:
        table = evidence.table("minibatch", name)
        batches = [int(n) for n in table.batch.values]
        if len(batches) < 2:
            raise Missing("minibatches of several sizes: a larger `--batch`")
        one, *more = (int(n) for n in table["count"].values)  # first the images of one batch, which have no interval
        counts = [n for n in more if n >= SAMPLES]
        if len(counts) < 2:
            enough, there = max(SAMPLES, 2 * one), [one, *more][-1]
            smaller = f", or `--set minibatch.batch={SAMPLES // 2}`" if one > SAMPLES // 2 else ""
            raise Missing(f"minibatch CKA of more than {enough} images, not {there}{smaller}")
        spread = evidence.estimate(
            "minibatch.cka",
            encoder=name,
            tokens="all",
            count=counts,
            batch=batches,
            layer_a=slice(None),
            layer_b=slice(None),
            statistic=partial(_spread, settings=len(counts) * len(batches)),
        )
        return [below(f"spread of CKA over batches and images, {name}", spread, UNNOTICED)]

    every = [role.name for role in evidence.encoders(None, None, None) if evidence.holds("minibatch", role.name)]
    if not every:
        raise Missing("minibatch CKA of any encoder: add `--steps minibatch`")
    return [Case((name,), partial(parts, name)) for name in every]


def _spread(values: npt.NDArray[np.float64], axis: int, settings: int) -> Any:
    """Range over settings, the mean over pairs of different layers; values (…, settings · L · L)."""
    every = np.moveaxis(values, axis, -1)
    every = every.reshape(*every.shape[:-1], settings, -1)
    side = round(every.shape[-1] ** 0.5)
    if side * side != every.shape[-1]:
        raise Missing("CKA of all pairs of the layers that were drawn")
    different = ~np.eye(side, dtype=bool).ravel()
    return np.ptp(every, axis=-2)[..., different].mean(-1)


FINDINGS = findings_of(
    "shekhar",
    {
        "S1": _alike,
        "S2": _weaker_at_the_end,
        "S3": _early_match,
        "S4": _layer_types,
        "S5": _objective_over_architecture,
        "S6": _class_separability,
        "S7": _rankings,
        "S8": _choices,
        "S9": _deeper_probe,
        "S10": _intermediate,
        "S11": _orientation,
        "S21": _orientation_after,
        "S12": _frozen_detection,
        "S13": _trained_detection,
        "S14": _more_blocks,
        "S15": _towards_je,
        "S16": _layers_after,
        "S17": _straighter,
        "S18": _nothing_added,
        "S19": _masked,
        "S20": _minibatches,
    },
)
