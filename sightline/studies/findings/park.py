"""P1–P21: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?" (003).

The paper's contrastive learning (CL) is joint-embedding here, its masked image modelling (MIM) reconstruction. "Later
layers" are the last half of the blocks, "early" ones the first half. What the paper leaves open, and how it is read
here, is in docs/findings.md; the other reading is told beside the verdict.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sightline.core.contrast import Estimate
from sightline.core.errors import counted
from sightline.core.run_folder import Run
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.findings.accuracies import PROBES, last, linear_probe, probed_images, tuned_accuracies
from sightline.studies.findings.contract import Case, Part, findings_of
from sightline.studies.findings.deciding import above, below, cases_of, written
from sightline.studies.roles import HYBRID, JE, REC, Role, of_one_size

Parts = Callable[..., Sequence[Part]]

EARLY, LATE = "first half", "last half"
LEVELS = ("a third", "two thirds")  # of the ranks of a spectrum: 64 and 128 where there are as many
NOISE = ("gaussian", "sign")
HIGH = slice(0.55, None)  # frequencies in the upper half of (0, π)
WEIGHT = 0.2  # λ of the hybrid that the paper looks into


# Encoders


def _plain(evidence: Evidence, family: str, tuned: bool = False) -> list[Role]:
    """Encoders of a family, without those whose attention was restricted."""
    return evidence.need(family, tuned=tuned, window=None)


def _pairs(evidence: Evidence, tuned: bool = False) -> list[tuple[str, str]]:
    """Names of joint-embedding and reconstruction encoders."""
    return _paired_by_size(_plain(evidence, JE, tuned), _plain(evidence, REC, tuned))


def _paired_by_size(roles: Sequence[Role], others: Sequence[Role]) -> list[tuple[str, str]]:
    """Pairs of encoders of about one size, or of unknown ones; all pairs where none of them are."""
    pairs = list(itertools.product(roles, others))
    alike = [(one, other) for one, other in pairs if of_one_size(one.size, other.size)]
    return [(one.name, other.name) for one, other in alike or pairs]


def _of_pairs(
    parts: Parts,
    notes: Callable[..., str] | None = None,
    otherwise: tuple[str, Parts] | None = None,
    tuned: bool = False,
) -> Callable[[Evidence], list[Case]]:
    """A case for each pair of a joint-embedding and a reconstruction encoder."""

    def cases(evidence: Evidence) -> list[Case]:
        return cases_of(evidence, parts, _pairs(evidence, tuned), notes, otherwise)

    return cases


def _of_method(evidence: Evidence, method: str) -> list[Role]:
    """Joint-embedding encoders of a method that a row names, whichever version of it."""
    roles = [role for role in evidence.encoders(JE, window=None) if role.method.startswith(method)]
    if not roles:
        raise Missing(f"a ViT of {method}: add `--je NAME=REFERENCE`")
    return roles


def _between(
    number: str, label: str, *, more: str, percent: bool = False, **where: Any
) -> Callable[[Evidence, str, str], list[Part]]:
    """One part: a number of the joint-embedding encoder minus that of the other (`more=JE`), or the other way round."""

    def parts(evidence: Evidence, je: str, rec: str) -> list[Part]:
        high, low = (je, rec) if more == JE else (rec, je)
        effect = evidence.estimate(number, encoder=high, **where) - evidence.estimate(number, encoder=low, **where)
        return [above(f"{label}: {high} − {low}", effect, percent=percent)]

    return parts


# Probing and fine-tuning: P1, P2, P11, P13, P15, P20, P21


def _probe_and_tuning(evidence: Evidence, probed: str, tuned: str) -> list[Part]:
    """One of two encoders wins linear probing, the other one fine-tuning."""
    probes = linear_probe(evidence, probed) - linear_probe(evidence, tuned)
    first, second = tuned_accuracies(evidence, tuned, probed)
    return [
        above(f"linear probe: {probed} − {tuned}", probes, percent=True),
        above(f"fine-tuned: {tuned} − {probed}", first - second, percent=True),
    ]


def _sizes(evidence: Evidence, family: str) -> dict[str, tuple[Role, Role]]:
    """The smallest and the largest encoder of each method that is there in several sizes."""
    by_method: dict[str, list[Role]] = {}
    for role in evidence.encoders(family, window=None):
        if role.size is not None:
            by_method.setdefault(role.method, []).append(role)
    ends = {
        method: (min(roles, key=lambda role: role.size or 0), max(roles, key=lambda role: role.size or 0))
        for method, roles in by_method.items()
        if len({role.size for role in roles}) > 1
    }
    if not ends:
        raise Missing(f"{family} ViTs of two sizes, with their sizes: add `--steps pretrain,finetune`")
    return ends


def _scaling_cases(evidence: Evidence) -> list[Case]:
    je, rec = _sizes(evidence, JE), _sizes(evidence, REC)
    names = [tuple(role.name for role in (*a, *b)) for a in je.values() for b in rec.values()]
    return cases_of(evidence, _scaling, names, otherwise=("Of the largest ones alone", _largest))


def _scaling(evidence: Evidence, je_small: str, je_large: str, rec_small: str, rec_large: str) -> list[Part]:
    small_je, large_je, small_rec, large_rec = tuned_accuracies(evidence, je_small, je_large, rec_small, rec_large)
    gain = f"gain of size, fine-tuned: ({rec_large} − {rec_small}) − ({je_large} − {je_small})"
    return [
        above(f"small and fine-tuned: {je_small} − {rec_small}", small_je - small_rec, percent=True),
        above(gain, (large_rec - small_rec) - (large_je - small_je), percent=True),
    ]


def _largest(evidence: Evidence, je_small: str, je_large: str, rec_small: str, rec_large: str) -> list[Part]:
    rec, je = tuned_accuracies(evidence, rec_large, je_large)
    return [above(f"large and fine-tuned: {rec_large} − {je_large}", rec - je, percent=True)]


def _blocks(evidence: Evidence, je: str, rec: str) -> list[Part]:
    def probe(encoder: str, depth: str | tuple[float, float]) -> Estimate:
        return linear_probe(evidence, encoder, site="block.*", depth=depth, feature="gap")

    return [
        above(f"linear probe of early blocks: {rec} − {je}", probe(rec, EARLY) - probe(je, EARLY), percent=True),
        above(f"linear probe of late blocks: {je} − {rec}", probe(je, LATE) - probe(rec, LATE), percent=True),
        above(
            f"linear probe of {rec}: third quarter of the blocks − last quarter",
            probe(rec, (0.5, 0.75)) - probe(rec, "last quarter"),
            percent=True,
        ),
    ]


class WeightSweep(NamedTuple):
    """Hybrids that can be held against each other, and pairs of what they mix: joint embedding, reconstruction."""

    hybrids: list[Role]
    ends: list[tuple[str, str]]

    @property
    def nearest(self) -> Role:
        """The hybrid with the weight that is nearest to the paper's."""
        return min(self.hybrids, key=lambda role: abs((role.weight or 0.0) - WEIGHT))


def sweeps(evidence: Evidence) -> list[WeightSweep]:
    """Hybrids of one size each, against λ = 1 and λ = 0, or MoCo and SimMIM, or all encoders of the two families."""
    every = evidence.need(HYBRID)
    mixed: dict[float | None, list[Role]] = {}
    for role in every:
        if role.weight not in (0.0, 1.0):
            mixed.setdefault(role.size, []).append(role)
    if not mixed:
        raise Missing("a hybrid with a weight between 0 and 1: add `--hybrid NAME=REFERENCE`")
    every_sweep = []
    for size, hybrids in mixed.items():
        ends = []
        for family, method, weight in ((JE, "moco_v3", 1.0), (REC, "simmim", 0.0)):
            alike = [role for role in every if role.weight == weight and role.size == size]
            others = (
                alike or [role for role in _plain(evidence, family) if role.size == size] or _plain(evidence, family)
            )
            ends.append([role.name for role in others if role.method == method] or [role.name for role in others])
        every_sweep.append(WeightSweep(hybrids, [(je, rec) for je in ends[0] for rec in ends[1]]))
    return every_sweep


def _nearest(evidence: Evidence) -> list[tuple[str, str, str]]:
    """Of each sweep the hybrid with the weight nearest to the paper's, with the pairs that it is held against."""
    return [(sweep.nearest.name, *pair) for sweep in sweeps(evidence) for pair in sweep.ends]


def _swept(evidence: Evidence) -> list[Case]:
    """The hybrid of a sweep whose linear probe is best on the images that choose settings, not on the test images."""
    cases = []
    for hybrids, ends in sweeps(evidence):
        best = hybrids[0] if len(hybrids) == 1 else max(hybrids, key=lambda role: _selection(evidence, role))
        rest = [role.name for role in hybrids if role is not best]
        names = [(best.name, *pair) for pair in ends]
        cases += cases_of(evidence, _against_both, names, partial(_other_weights, rest))
    return cases


def _other_weights(others: Sequence[str], evidence: Evidence, hybrid: str, je: str, rec: str) -> str:
    told = [_against_both(evidence, other, je, rec) for other in others]
    best = sum(all(part.agrees for part in parts) for parts in told)
    return f"Of {counted(len(others), 'other weight')} {best} beat {je} and {rec} in all of it." if others else ""


def _selection(evidence: Evidence, role: Role) -> float:
    """Accuracy of its linear probe on the selection split; without one, how near its λ is to the paper's."""
    accuracies = []
    for name in evidence.seeds.get(role.name, (role.name,)):
        table = evidence.apart().table("probes", name)
        if "selection" not in table:
            return -abs((role.weight or 0.0) - WEIGHT)
        last_site = str(table.last_site.sel(encoder=name).item())
        probe = next((name for name in PROBES if name in table.probe.values), "")
        if not probe:
            raise Missing(f"linear probes of {name}: add `--steps passes`")
        accuracies.append(
            float(table.selection.sel(encoder=name, site=last_site, probe=probe).max())
        )  # of the poolings
    return float(np.mean(accuracies))


def _against_both(evidence: Evidence, hybrid: str, je: str, rec: str) -> list[Part]:
    hybrid_accuracy, *tuned = tuned_accuracies(evidence, hybrid, je, rec)
    parts = []
    for other, accuracy in zip((je, rec), tuned, strict=True):
        probes = linear_probe(evidence, hybrid) - linear_probe(evidence, other)
        parts += [
            above(f"linear probe: {hybrid} − {other}", probes, percent=True),
            above(f"fine-tuned: {hybrid} − {other}", hybrid_accuracy - accuracy, percent=True),
        ]
    return parts


def _windows(evidence: Evidence) -> list[Case]:
    """Each window, which stays on in probes and fine-tuning, against the same encoder without one."""
    restricted = [role for role in evidence.encoders(JE, lifted=False) if role.window is not None]
    if not restricted:
        raise Missing("a joint-embedding ViT with a window of attention: add `--steps pretrain,finetune`")
    names = [
        (free.name, role.name)
        for role in restricted
        for free in evidence.encoders(JE, method=role.method, size=role.size, window=None)
    ]
    if not names:
        raise Missing(f"{restricted[0].method or restricted[0].name} without a window: add `--je NAME=REFERENCE`")
    return cases_of(evidence, _probe_and_tuning, names, otherwise=("With the window lifted afterwards", _lifted))


def _lifted(evidence: Evidence, free: str, restricted: str) -> Sequence[Part]:
    """The same with encoders that attend to all patches again."""
    with_window = next(role for role in evidence.encoders(JE) if role.name == restricted)
    others = evidence.encoders(
        JE, method=with_window.method, size=with_window.size, window=with_window.window, lifted=True
    )
    if not others:
        raise Missing(f"{restricted} with its window lifted: give its reference with `?window=none`")
    return _probe_and_tuning(evidence, free, others[0].name)


def _reinitialised(evidence: Evidence, je: str, rec: str) -> list[Part]:
    among = evidence.alike("reinit", je, rec)
    every = []
    for member, table in evidence.tables("reinit", je, rec, among=among):
        complete = table.accuracy_drop.sel(encoder=member).notnull().all("end")
        every.append({int(n) for n in table.n.values[complete.values] if n > 0})
    counts = sorted(set.intersection(*every))
    if not counts:
        raise Missing(f"fine-tunings of {je} and {rec} with the same numbers of blocks re-initialised")

    def drop(encoder: str, end: str) -> Estimate:
        return evidence.estimate("reinit.accuracy_drop", encoder=encoder, end=end, n=counts, among=among)

    return [
        above(f"drop without the first blocks: {rec} − {je}", drop(rec, "first") - drop(je, "first"), percent=True),
        above(f"drop without the last blocks: {je} − {rec}", drop(je, "last") - drop(rec, "last"), percent=True),
    ]


def _elsewhere_cases(evidence: Evidence) -> list[Case]:
    return cases_of(evidence, _elsewhere, _nearest(evidence))


def _elsewhere(evidence: Evidence, hybrid: str, je: str, rec: str) -> list[Part]:
    sets = probed_images(evidence)
    if len(sets) < 2:
        raise Missing("probes on a second set of images: compare the encoders on it, too")

    def probe(encoder: str) -> Estimate:
        return linear_probe(evidence, encoder, images=sets[1])

    parts = []
    for other in (je, rec):
        parts += [
            above(f"linear probe on other images: {hybrid} − {other}", probe(hybrid) - probe(other), percent=True),
            above(f"mIoU: {hybrid} − {other}", _miou(evidence, hybrid, other), percent=True),
        ]
    return parts


def _miou(evidence: Evidence, one: str, other: str) -> Estimate:
    """Difference of two trained segmentation heads, or of the linear ones of the pass."""
    for number in ("segmenters.miou", "segmentation.softmax_miou"):
        with contextlib.suppress(Missing):
            among = evidence.alike(number.partition(".")[0], one, other)
            own, others = (evidence.estimate(number, encoder=name, among=among) for name in (one, other))
            return own - others
    raise Missing(f"segmentation by {one} and {other}: add `--steps segment`")


# Volumes: P6, P7, P18


def _growth(evidence: Evidence, cloud: str, encoder: str, level: str) -> Estimate:
    """How much Δ log σ grows from the first half of the blocks to the last."""
    early, late = (
        evidence.estimate(f"spectra.{cloud}_delta", encoder=encoder, depth=depth, level=level)
        for depth in (EARLY, LATE)
    )
    return late - early


def _token_volumes(evidence: Evidence, je: str, rec: str) -> list[Part]:
    parts = []
    for level in LEVELS:
        where = f"growth of Δ log σ of tokens at {level} of the ranks"
        parts += [
            below(f"{where}: {je}", _growth(evidence, "token", je, level)),
            above(f"{where}: {rec}", _growth(evidence, "token", rec, level)),
        ]
    return parts


def _growth_apart(evidence: Evidence, je: str, rec: str) -> list[Part]:
    parts = []
    for level in LEVELS:
        own, other = (_growth(evidence, "token", encoder, level) for encoder in (rec, je))
        parts.append(above(f"growth of Δ log σ of tokens at {level} of the ranks: {rec} − {je}", own - other))
    return parts


def _image_volumes(evidence: Evidence, je: str, rec: str) -> list[Part]:
    parts = []
    for level in LEVELS:
        where = f"growth of Δ log σ of images at {level} of the ranks"
        own, other = (_growth(evidence, "image", encoder, level) for encoder in (je, rec))
        parts += [above(f"{where}: {je}", own), above(f"{where}: {je} − {rec}", own - other)]
    return parts


def _first_layer(evidence: Evidence, encoder: str) -> Part:
    number = "spectra.token_uncentred_second"
    before, after = (evidence.estimate(number, encoder=encoder, site=site) for site in ("embed", "block.0"))
    return above(f"log σ₂ of tokens before − after the first block: {encoder}", before - after)


def _clumping(evidence: Evidence) -> list[Case]:
    names = [(role.name,) for role in _of_method(evidence, "moco")]
    return cases_of(evidence, lambda evidence, moco: [_first_layer(evidence, moco)], names, _other_first_layers)


def _other_first_layers(evidence: Evidence, moco: str) -> str:
    return f"For comparison: {'; '.join(written(_first_layer(evidence, role.name)) for role in _plain(evidence, REC))}."


# Attention, frequencies, decisions: P3–P5, P8–P10, P12, P14, P16, P17, P19


_distance = _between("attention.distance_relative_mean", "attention distance, late", more=JE, depth=LATE)
_nmi = _between("attention.nmi_mean", "NMI, late", more=REC, depth=LATE)
_frequency = _between("fourier.high_frequency", "Δ log amplitude", more=REC, site="block.*")
_shape = _between("shape_bias.overall", "shape bias", more=JE, percent=True)
_silhouette = _between(
    "tokens.silhouette_image", "silhouette by image, last block", more=JE, site="block.*", statistic=last
)


def _cosines(evidence: Evidence, je: str, rec: str) -> list[Part]:
    kinds = ("heads", "depths", "tokens")
    each = [_between("diversity.cosine", f"cosine of {kind}, late", more=JE, kind=kind, depth=LATE) for kind in kinds]
    return [part for parts in each for part in parts(evidence, je, rec)]


_late_frequency = _between("fourier.high_frequency", "Δ log amplitude, late", more=REC, site="block.*", depth=LATE)


def _drops(evidence: Evidence, je: str, rec: str, kinds: Sequence[str] = NOISE) -> list[Part]:
    parts = []
    for kind in kinds:
        if not evidence.holds("noise", je, rec, among=_noise_of(kind)):
            raise Missing(f"noise of kind {kind} for {je} and {rec}: compare them with `--set noise.kind={kind}`, too")
        where = {"frequency": HIGH, "among": _noise_of(kind)}
        parts += _between("noise.drop", f"drop under high {kind} noise", more=REC, percent=True, **where)(
            evidence, je, rec
        )
    return parts


def _noise_of(kind: str) -> Callable[[Run], bool]:
    return lambda run: run["noise"].attrs.get("kind", NOISE[0]) == kind


def _relative_drops(evidence: Evidence, je: str, rec: str) -> list[Part]:
    """One that starts near chance has nothing to lose, so also as a share of the accuracy without noise."""
    parts = []
    for kind in NOISE:
        of = {
            encoder: evidence.estimate("noise.drop", encoder=encoder, frequency=HIGH, among=_noise_of(kind))
            / evidence.estimate("noise.test_accuracy", encoder=encoder, among=_noise_of(kind))
            for encoder in (je, rec)
        }
        parts.append(above(f"relative drop under high {kind} noise: {rec} − {je}", of[rec] - of[je], percent=True))
    return parts


def _decoders(evidence: Evidence) -> list[Case]:
    """Encoders that come with a deep decoder against those that had none."""
    recs = _plain(evidence, REC)
    deep = [role for role in recs if role.method == "mae"]
    shallow = [role for role in recs if role.method in ("simmim", "beit")]
    if not deep:
        raise Missing("MAE with its decoder: add `--rec mae=REFERENCE?decoder=true`")
    if not shallow:
        raise Missing("reconstruction without a deep decoder, such as SimMIM: add `--rec NAME=REFERENCE`")
    names = _paired_by_size(deep, shallow)
    return cases_of(evidence, _decoder, names, otherwise=("As frequencies that the last blocks keep", _kept_frequency))


def _decoder(evidence: Evidence, mae: str, other: str) -> list[Part]:
    def nmi(encoder: str, **where: Any) -> Estimate:
        return evidence.estimate("attention.nmi_mean", encoder=encoder, **where)

    def frequency(**where: Any) -> Estimate:
        return evidence.estimate("fourier.high_frequency", encoder=mae, **where)

    late = nmi(other, depth=LATE)
    try:
        decoder, amplitude = nmi(mae, site="decoder.block.*.attn_map"), frequency(site="decoder.block.*")
    except Missing:
        raise Missing(f"the decoder of {mae}: give its reference with `?decoder=true`") from None
    return [
        above(f"NMI: late blocks of {other} − late blocks of {mae}", late - nmi(mae, depth=LATE)),
        above(f"NMI: decoder of {mae} − late blocks of {other}", decoder - late),
        above(f"Δ log amplitude of {mae}: late blocks − decoder", frequency(site="block.*", depth=LATE) - amplitude),
    ]


def _kept_frequency(evidence: Evidence, mae: str, other: str) -> list[Part]:
    def change(encoder: str) -> Estimate:
        third, fourth = (
            evidence.estimate("fourier.high_frequency", encoder=encoder, site="block.*", depth=depth)
            for depth in ((0.5, 0.75), "last quarter")
        )
        return fourth - third

    label = f"Δ log amplitude, last quarter of the blocks − third quarter: {mae} − {other}"
    return [above(label, change(mae) - change(other))]


def _halves_cases(evidence: Evidence) -> list[Case]:
    return cases_of(evidence, _halves, _nearest(evidence), otherwise=("As a fall from early to late blocks", _falls))


MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "NMI": ("attention.nmi_mean", {}),
    "Δ log amplitude": ("fourier.high_frequency", {"site": "block.*"}),
}


def _halves(evidence: Evidence, hybrid: str, je: str, rec: str) -> list[Part]:
    """Early the hybrid is further from joint embedding than from reconstruction, late the other way round."""
    weights = {role.name: role.weight for role in evidence.encoders(HYBRID)}
    weight = "" if weights[hybrid] is None else f" (λ = {weights[hybrid]:g})"
    parts = []
    for word, (number, where) in MIXED.items():
        for depth, near, far in ((EARLY, rec, je), (LATE, je, rec)):
            own, to_near, to_far = (
                evidence.estimate(number, encoder=encoder, depth=depth, **where) for encoder in (hybrid, near, far)
            )
            label = f"{word}, {depth}: how much further {hybrid}{weight} is from {far} than from {near}"
            parts.append(above(label, _size(own - to_far) - _size(own - to_near)))
    return parts


def _size(effect: Estimate) -> Estimate:
    """Without its sign."""
    return effect * math.copysign(1.0, effect.value)


def _falls(evidence: Evidence, hybrid: str, je: str, rec: str) -> list[Part]:
    parts = []
    for word, (number, where) in MIXED.items():
        early, late = (evidence.estimate(number, encoder=hybrid, depth=depth, **where) for depth in (EARLY, LATE))
        parts.append(above(f"{word} of {hybrid}, first half of the blocks − last half", early - late))
    return parts


def _outlier_cases(evidence: Evidence) -> list[Case]:
    names = _paired_by_size(_of_method(evidence, "moco"), _plain(evidence, REC))
    return cases_of(evidence, _outlier, names, _highest)


def _outlier(evidence: Evidence, moco: str, rec: str) -> list[Part]:
    spread = _between("attention.nmi_std", "std of NMI over heads, first quarter", more=JE, depth="first quarter")
    highest = _between(
        "attention.nmi", "highest NMI of a head, first quarter", more=JE, depth="first quarter", statistic=np.max
    )
    return [*spread(evidence, moco, rec), *highest(evidence, moco, rec)]


def _highest(evidence: Evidence, moco: str, rec: str) -> str:
    nmi = evidence.estimate("attention.nmi", encoder=moco, depth="first quarter", statistic=np.max).contrast()
    return f"The highest head of {moco} has an NMI of {nmi.value:.2f} (95 % {nmi.low:.2f} to {nmi.high:.2f})."


def _inherited(evidence: Evidence, je: str, rec: str) -> list[Part]:
    kinds = _kinds(evidence, je, rec) or NOISE
    properties = [part for parts in (_nmi, _frequency, _shape) for part in parts(evidence, je, rec)]
    return [*properties, *_drops(evidence, je, rec, kinds)]


def _kinds(evidence: Evidence, *encoders: str) -> list[str]:
    """The kinds of noise that these encoders were tested with."""
    return [kind for kind in NOISE if evidence.holds("noise", *encoders, among=_noise_of(kind))]


def _kinds_of_noise(evidence: Evidence, je: str, rec: str) -> str:
    lacking = [kind for kind in NOISE if kind not in _kinds(evidence, je, rec)]
    return f"Noise of kind {lacking[0]} was not measured after fine-tuning." if lacking else ""


FINDINGS = findings_of(
    "park",
    {
        "P1": _of_pairs(_probe_and_tuning),
        "P2": _scaling_cases,
        "P3": _of_pairs(_distance),
        "P4": _of_pairs(_nmi),
        "P5": _of_pairs(_cosines),
        "P6": _of_pairs(_token_volumes, otherwise=("As a difference of the two", _growth_apart)),
        "P7": _of_pairs(_image_volumes),
        "P8": _of_pairs(_frequency, otherwise=("In the last half of the blocks", _late_frequency)),
        "P9": _of_pairs(_shape),
        "P10": _of_pairs(_drops, otherwise=("As a share of the accuracy without noise", _relative_drops)),
        "P11": _of_pairs(_blocks),
        "P12": _decoders,
        "P13": _swept,
        "P14": _halves_cases,
        "P15": _windows,
        "P16": _outlier_cases,
        "P17": _of_pairs(_silhouette),
        "P18": _clumping,
        "P19": _of_pairs(_inherited, _kinds_of_noise, tuned=True),
        "P20": _of_pairs(_reinitialised),
        "P21": _elsewhere_cases,
    },
)
