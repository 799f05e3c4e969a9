"""P1–P21 on made results: each holds, fails and is unclear where it should, and fails where roles are exchanged.

`sign` is 1 where the numbers are as the paper has them, −1 where they are the other way round, 0 where nothing differs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.evidence import block_sites, made_run, select

from sightline.core.run_folder import Run
from sightline.studies.evidence import Evidence
from sightline.studies.findings import Verdict, all_findings
from sightline.studies.findings.contract import FAILS, HOLDS, NOT_MEASURED, UNCLEAR
from sightline.studies.roles import HYBRID, JE, REC, Role

Numbers = Mapping[str, Any]

ROLES = {
    "je": Role("je", JE, "moco_v3"),
    "rec": Role("rec", REC, "simmim"),
    "mae": Role("mae", REC, "mae"),
    "mix": Role("mix", HYBRID, "hybrid", weight=0.2),
    "near": Role("near", JE, "moco_v3", window=3),
    "je-s": Role("je-s", JE, "moco_v3", size=6),
    "je-l": Role("je-l", JE, "moco_v3", size=300),
    "rec-s": Role("rec-s", REC, "simmim", size=6),
    "rec-l": Role("rec-l", REC, "simmim", size=300),
}
EXCHANGED = {"je": "rec", "je-s": "rec-s", "je-l": "rec-l", "je-tuned": "rec-tuned"}
EXCHANGED |= {other: one for one, other in EXCHANGED.items()}


def roles_of(names: list[str], exchanged: Mapping[str, str] = EXCHANGED) -> tuple[Role, ...]:
    """Roles by name; `X-tuned` was fine-tuned from X. With `exchanged` each has that of another one."""
    found = []
    for name in names:
        start = exchanged.get(name, name).removesuffix("-tuned")
        own = name.removesuffix("-tuned") if name.endswith("-tuned") else None
        found.append(replace(ROLES[start], name=name, tuned_from=own))
    return tuple(found)


def where(**favoured: float) -> Callable[[Any], float]:
    """0.5 and so much more for these encoders; `_` stands for a hyphen."""
    more = {name.replace("_", "-"): amount for name, amount in favoured.items()}
    return lambda at: 0.5 + more.get(at.encoder, 0.0)


def by_half(encoder: str, early: float, late: float, other: Callable[[Any], float] | float = 0.5) -> Any:
    """Numbers of one encoder by half of its depth, and of all others."""

    def number(at: Any) -> float:
        if at.encoder == encoder:
            return early if at.depth < 0.5 else late
        return other(at) if callable(other) else other

    return number


PAIR, TUNED = ["je", "rec"], ["je", "rec", "je-tuned", "rec-tuned"]
SIZES = [name + end for name in ("je-s", "je-l", "rec-s", "rec-l") for end in ("", "-tuned")]
MIXED = [*TUNED, "mix", "mix-tuned"]


def _p11(s: float) -> Callable[[Any], float]:
    values = {"je": (0, 0, 0.4, 0.4), "rec": (0.2, 0.2, 0.1, 0)}
    return lambda at: 0.5 + s * values[at.encoder][int(4 * at.depth)] if at.block >= 0 else 0.5


def _p12(s: float) -> Numbers:
    def nmi(at: Any) -> float:
        if not at.site.endswith("attn_map"):
            return math.nan
        if at.encoder == "rec":
            return 0.5
        return 0.5 + 0.2 * s if at.site.startswith("decoder") else 0.5 - 0.2 * s

    def amplitude(at: Any) -> float:
        if at.site.endswith("attn_map"):
            return math.nan
        return -1 - 0.2 * s if at.site.startswith("decoder") and at.encoder == "mae" else -1

    return {"attention.nmi_mean": nmi, "fourier.high_frequency": amplitude}


def _p14(s: float) -> Callable[[Any], float]:
    ends = {"je": 0.2, "rec": 0.8}
    return lambda at: ends.get(at.encoder, 0.5 + 0.2 * s * (1 if at.depth < 0.5 else -1))


def _p16(s: float) -> Callable[[Any], float]:
    return lambda at: 0.5 + 0.3 * s if (at.encoder, at.head) == ("je", 2) else 0.4 if at.encoder == "je" else 0.5


def _p18(s: float) -> Callable[[Any], float]:
    return lambda at: 1.0 if at.site == "embed" else 1.0 - 0.3 * s * (1 if at.encoder == "je" else -1)


def _p20(s: float) -> Callable[[Any], float]:
    return lambda at: 0.0 if at.n == 0 else 0.5 + 0.2 * s * ((at.encoder, at.end) in {("rec", "first"), ("je", "last")})


# What is measured of whom, as a function of the sign.
MADE: dict[str, tuple[list[str], Callable[[float], Numbers]]] = {
    "P1": (
        TUNED,
        lambda s: {"probes.accuracy": where(je=0.2 * s), "agreement.test_accuracy": where(rec_tuned=0.2 * s)},
    ),
    "P2": (SIZES, lambda s: {"agreement.test_accuracy": where(je_s_tuned=0.1 * s, rec_l_tuned=0.3 * s)}),
    "P3": (PAIR, lambda s: {"attention.distance_relative_mean": by_half("je", 0.1, 0.5 + 0.2 * s)}),
    "P4": (PAIR, lambda s: {"attention.nmi_mean": by_half("je", 0.9, 0.5 - 0.2 * s)}),
    "P5": (PAIR, lambda s: {"diversity.cosine": by_half("je", 0.1, 0.5 + 0.2 * s)}),
    "P6": (PAIR, lambda s: {"spectra.token_delta": by_half("je", 1, 1 - 0.2 * s, by_half("rec", 1, 1 + 0.2 * s))}),
    "P7": (PAIR, lambda s: {"spectra.image_delta": by_half("je", 1, 1 + 0.4 * s, by_half("rec", 1, 1 + 0.1 * s))}),
    "P8": (PAIR, lambda s: {"fourier.high_frequency": where(rec=0.2 * s)}),
    "P9": (PAIR, lambda s: {"shape_bias.overall": where(je=0.2 * s)}),
    "P10": (
        PAIR,
        lambda s: {
            "noise.drop": lambda at: (
                0.9 - 0.8 * (at.encoder == "rec") if at.frequency < 0.55 else where(rec=0.2 * s)(at)
            ),
            "noise.test_accuracy": 0.8,
        },
    ),
    "P11": (PAIR, lambda s: {"probes.accuracy": _p11(s)}),
    "P12": (["mae", "rec"], _p12),
    "P13": (
        MIXED,
        lambda s: {"probes.accuracy": where(mix=0.2 * s), "agreement.test_accuracy": where(mix_tuned=0.2 * s)},
    ),
    "P14": (["je", "rec", "mix"], lambda s: dict.fromkeys(("attention.nmi_mean", "fourier.high_frequency"), _p14(s))),
    "P15": (
        ["je", "near", "je-tuned", "near-tuned"],
        lambda s: {"probes.accuracy": where(je=0.2 * s), "agreement.test_accuracy": where(near_tuned=0.2 * s)},
    ),
    "P16": (PAIR, lambda s: {"attention.nmi_std": where(je=0.2 * s), "attention.nmi": _p16(s)}),
    "P17": (PAIR, lambda s: {"tokens.silhouette_image": lambda at: where(je=0.2 * s)(at) if at.block == 3 else 0.1}),
    "P18": (PAIR, lambda s: {"spectra.token_uncentred_second": _p18(s)}),
    "P19": (
        TUNED,
        lambda s: {
            "attention.nmi_mean": where(rec_tuned=0.2 * s),
            "fourier.high_frequency": where(rec_tuned=0.2 * s),
            "shape_bias.overall": where(je_tuned=0.2 * s),
            "noise.drop": where(rec_tuned=0.2 * s),
        },
    ),
    "P20": (PAIR, lambda s: {"reinit.accuracy_drop": _p20(s)}),
    "P21": (
        ["je", "rec", "mix"],
        lambda s: {"probes.accuracy": where(mix=0.2 * s), "segmenters.miou": where(mix=0.1 * s)},
    ),
}
OTHERS = {  # who changes place with whom, where it is not joint embedding with reconstruction
    "P12": {"mae": "rec", "rec": "mae"},
    "P13": {"mix": "je", "je": "mix", "mix-tuned": "je-tuned", "je-tuned": "mix-tuned"},
    "P15": {"je": "near", "near": "je", "je-tuned": "near-tuned", "near-tuned": "je-tuned"},
    "P21": {"mix": "je", "je": "mix"},
}
SITES = ["embed", *block_sites(4, ("attn_map",), more=()), "norm", "decoder.block.0.attn_map", "decoder.block.0"]


def runs_of(finding: str, sign: float, **more: Any) -> tuple[Run, ...]:
    names, numbers = MADE[finding]
    more = {"sites": SITES, "depth": 4, **more}
    if finding in ("P10", "P19"):  # with both kinds of noise
        return tuple(made_run(names, numbers(sign), attrs={"kind": kind}, **more) for kind in ("gaussian", "sign"))
    if finding == "P21":  # on two sets of images, of which the second one decides
        first = {"probes.accuracy": where(mix=-0.2 * sign)}
        sets = zip(("first", "second"), (first, numbers(sign)), strict=True)
        return tuple(made_run(names, of, request={"images": {"name": name}}, **more) for name, of in sets)
    return (made_run(names, numbers(sign), **more),)


def decided(finding: str, sign: float, *, exchanged: bool = False, **more: Any) -> Verdict:
    names = MADE[finding][0]
    roles = roles_of(names, OTHERS.get(finding, EXCHANGED) if exchanged else {})
    return all_findings()[finding].decide(Evidence(roles, runs_of(finding, sign, **more)))


@pytest.mark.parametrize("finding", list(MADE))
@pytest.mark.parametrize(
    ("sign", "exchanged", "verdict"),
    [(1, False, HOLDS), (-1, False, FAILS), (0, False, UNCLEAR), (1, True, FAILS)],
    ids=["holds", "fails", "unclear", "exchanged"],
)
def test_verdicts_follow_the_numbers(finding: str, sign: float, exchanged: bool, verdict: str) -> None:
    found = decided(finding, sign, exchanged=exchanged)
    assert found.verdict == verdict, found.sentence
    assert found.parts


@pytest.mark.parametrize("finding", list(MADE))
def test_without_results_it_says_what_it_needs(finding: str) -> None:
    found = all_findings()[finding].decide(Evidence(roles_of(MADE[finding][0], {}), ()))
    assert found.verdict == NOT_MEASURED
    assert found.needs
    assert all_findings()[finding].decide(Evidence((), ())).verdict == NOT_MEASURED


def test_all_of_the_paper_is_there() -> None:
    mine = [one for one in all_findings().values() if one.paper == "003"]
    assert [one.id for one in mine] == [f"P{n}" for n in range(1, 22)] == list(MADE)
    assert all(one.claim and one.measure and one.where and one.figure.startswith("003 ") for one in mine)


# Numbers


def test_effects_are_the_differences_that_the_row_names() -> None:
    found = decided("P11", 1)
    values = {part.label: part.value for part in found.parts}
    np.testing.assert_allclose(list(values.values()), [0.2, 0.4 - 0.05, 0.1], atol=1e-12)
    assert all(part.percent for part in found.parts)
    found = decided("P14", 1)
    # NMI 0.7 early and 0.3 late, between 0.2 and 0.8
    np.testing.assert_allclose([part.value for part in found.parts], 4 * [0.4], atol=1e-12)
    found = decided("P6", 1)
    assert [part.value for part in found.parts[:2]] == pytest.approx([-0.2, 0.2])
    assert "As a difference of the two it holds: growth of Δ log σ of tokens at " in found.sentence
    assert "of the ranks: rec − je = +0.4 " in found.sentence


def test_windowed_encoders_stand_for_nobody_else() -> None:
    names = ["je", "near", "rec"]
    run = made_run(names, {"attention.nmi_mean": where(rec=0.2, near=0.4)}, sites=SITES)
    assert all_findings()["P4"].decide(Evidence(roles_of(names, {}), (run,))).verdict == HOLDS


def test_lifted_windows_stand_beside_those_that_stay() -> None:
    names = ["je", "near", "far", "je-tuned", "near-tuned", "far-tuned"]
    lifted = [replace(ROLES["near"], name="far", lifted=True)]
    lifted.append(replace(lifted[0], name="far-tuned", tuned_from="far"))
    numbers = {"probes.accuracy": where(je=0.2), "agreement.test_accuracy": where(near_tuned=0.2, far_tuned=-0.2)}
    roles = (*roles_of([name for name in names if "far" not in name], {}), *lifted)
    found = all_findings()["P15"].decide(Evidence(roles, (made_run(names, numbers, sites=SITES),)))
    assert (found.verdict, len(found.parts)) == (HOLDS, 2)
    assert "With the window lifted afterwards it fails: fine-tuned: far − je = -20.0 points" in found.sentence


def test_sizes_are_paired_with_their_like() -> None:
    names = ["je-s", "je-l", "rec-s", "rec-l"]
    values = {
        "je-s": 0.1,
        "rec-s": 0.3,
        "je-l": 0.5,
        "rec-l": 0.7,
    }  # the small of one and the large of the other differ
    run = made_run(names, {"attention.nmi_mean": lambda at: values[at.encoder]}, sites=SITES)
    found = all_findings()["P4"].decide(Evidence(roles_of(names, {}), (run,)))
    assert (found.verdict, [part.encoders for part in found.parts]) == (HOLDS, [("je-s", "rec-s"), ("je-l", "rec-l")])


def test_one_kind_of_noise_does_not_decide() -> None:
    runs = runs_of("P10", 1)
    found = all_findings()["P10"].decide(Evidence(roles_of(PAIR, {}), runs[:1]))
    assert found.needs == "noise of kind sign for je and rec: compare them with `--set noise.kind=sign`, too"
    tuned = all_findings()["P19"].decide(Evidence(roles_of(TUNED, {}), runs_of("P19", 1)[:1]))
    assert tuned.verdict == HOLDS
    assert tuned.sentence.endswith("Noise of kind sign was not measured after fine-tuning.")


def test_a_decoder_is_asked_for_in_words() -> None:
    run = made_run(["mae", "rec"], _p12(1), sites=[site for site in SITES if "decoder" not in site])
    found = all_findings()["P12"].decide(Evidence(roles_of(["mae", "rec"], {}), (run,)))
    assert found.needs == "the decoder of mae: give its reference with `?decoder=true`"


def test_a_sweep_has_its_own_ends() -> None:
    """Hybrids are held against λ = 0 and 1 of the same sweep, others against encoders of the two families."""
    names = ["je", "rec", "mix", "mix-0", "mix-2", "mix-9"]
    sweep = [replace(ROLES["mix"], name=f"mix-{n}", weight=w, size=1.4) for n, w in ((0, 0.0), (2, 0.3), (9, 1.0))]
    evidence = Evidence((*roles_of(names[:3], {}), *sweep), (made_run(names, _p14_of(names), sites=SITES),))
    found = all_findings()["P14"].decide(evidence)
    assert list(dict.fromkeys(part.encoders for part in found.parts)) == [
        ("mix", "je", "rec"),
        ("mix-2", "mix-9", "mix-0"),
    ]
    assert "mix-2 (λ = 0.3) is from mix-9 than from mix-0" in found.parts[4].label


def _p14_of(names: list[str]) -> Numbers:
    return dict.fromkeys(("attention.nmi_mean", "fourier.high_frequency"), lambda at: 0.1 * names.index(at.encoder))


# Accuracies


def test_a_probe_on_gap_stands_where_there_is_no_cls_token() -> None:
    def accuracy(at: Any) -> float:
        if at.probe != "ridge" or (at.encoder, at.feature) == ("rec", "cls"):
            return math.nan
        return 0.9 if (at.encoder, at.site, at.feature) == ("je", "norm", "cls") else 0.5

    run = made_run(TUNED, {"probes.accuracy": accuracy, "agreement.test_accuracy": where(rec_tuned=0.2)}, sites=SITES)
    found = all_findings()["P1"].decide(Evidence(roles_of(TUNED, {}), (run,)))
    assert found.verdict == HOLDS
    assert found.parts[0].value == pytest.approx(0.4)


def test_fine_tuning_of_all_blocks_is_known_from_the_study_of_re_initialised_ones() -> None:
    run = made_run(PAIR, {"probes.accuracy": where(je=0.2), "reinit.accuracy": where(rec=0.2)}, sites=SITES)
    found = all_findings()["P1"].decide(Evidence(roles_of(PAIR, {}), (run,)))
    assert (found.verdict, len(found.parts)) == (HOLDS, 2)


def test_folders_of_fine_tunings_give_counts() -> None:
    def folder(name: str, accuracy: float) -> Run:
        about = {"kind": "finetune", "encoder": {"name": name, "reference": f"made:{name}"}}
        return Run(None, {**about, "images": {"splits": {"test": 400}}, "results": {"test_accuracy": accuracy}})

    run = made_run(PAIR, {"probes.accuracy": where(je=0.2)}, sites=SITES)
    found = all_findings()["P1"].decide(
        Evidence(roles_of(PAIR, {}), (run, folder("other", 0.1), folder("je", 0.6), folder("rec", 0.8)))
    )
    tuned = found.parts[1]
    assert (found.verdict, round(tuned.value, 9)) == (HOLDS, 0.2)
    error = math.sqrt((0.6 * 0.4 + 0.8 * 0.2) / 399)  # of two proportions
    assert (tuned.high - tuned.low) / 2 == pytest.approx(1.963 * error, rel=1e-3)
    assert "only the counts are known" in tuned.how


@pytest.mark.parametrize("finding", ["P20", "P21"])
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_encoders_may_have_runs_of_their_own(finding: str, sign: float) -> None:
    """To the last digit the same, since the images are."""
    names, together = MADE[finding][0], runs_of(finding, sign)
    apart = [select(run, [name]) for run in together for name in reversed(names)]
    roles = roles_of(names, {})
    one, other = (all_findings()[finding].decide(Evidence(roles, tuple(runs))) for runs in (together, apart))
    assert one.verdict != NOT_MEASURED
    assert repr(one) == repr(other)  # of numbers to the last digit; nan is not equal to nan


def test_fine_tuned_seeds_may_have_runs_of_their_own() -> None:
    from sightline.measure.classifiers import HEAD

    more = (
        replace(ROLES["je"], name="je-1", seed=1),
        replace(ROLES["je"], name="je-tuned-1", tuned_from="je-1", seed=1),
    )
    roles = (*roles_of(TUNED, {}), *more)
    numbers = {"probes.accuracy": where(je=0.2), "agreement.test_accuracy": lambda at: 0.9 - 0.2 * ("je" in at.encoder)}
    runs = [
        made_run(names, numbers, sites=SITES, coords={"classifier": ("encoder", [HEAD] * len(names))})
        for names in (TUNED, ["je-1", "je-tuned-1"])
    ]
    evidence = Evidence(roles, tuple(runs))
    assert evidence.seeds == {"je": ("je", "je-1"), "je-tuned": ("je-tuned", "je-tuned-1")}
    tuned = all_findings()["P1"].decide(evidence).parts[1]
    assert tuned.value == pytest.approx(0.2, abs=1e-12)
    assert "2 seeds of je-tuned" in tuned.how


def test_what_was_trained_otherwise_is_not_compared() -> None:
    for finding, needs in (
        ("P20", "reinit of je and rec with the same settings and images"),
        ("P21", "segmentation by mix and je: add `--steps segment`"),
    ):
        names = MADE[finding][0]
        apart = [select(run, [name]) for run in runs_of(finding, 1) for name in names]
        for run in apart:
            run.request["settings"] = {"lr": 0.1 * len(run.request["encoders"][0]["name"])}
        found = all_findings()[finding].decide(Evidence(roles_of(names, {}), tuple(apart)))
        assert (found.verdict, found.needs) == (NOT_MEASURED, needs)


def test_seeds_may_have_runs_of_their_own() -> None:
    seeds = [replace(ROLES["je"], name=f"je-{n}", seed=n) for n in range(3)]
    runs = [made_run([role.name], {"probes.accuracy": 0.7, "reinit.accuracy": 0.5}, sites=SITES) for role in seeds]
    rec = made_run(["rec"], {"probes.accuracy": 0.5, "reinit.accuracy": 0.7}, sites=SITES)
    found = all_findings()["P1"].decide(Evidence((*seeds, ROLES["rec"]), (*runs, rec)))
    assert (found.verdict, found.parts[0].encoders) == (HOLDS, ("je", "rec"))
    assert "3 seeds of je" in found.parts[0].how


def test_a_head_that_did_not_decide_itself_is_no_fine_tuning_accuracy() -> None:
    numbers = {"probes.accuracy": where(je=0.2), "agreement.test_accuracy": where(rec_tuned=0.2)}
    run = made_run(TUNED, numbers, sites=SITES)
    kinds = ["own head", "own head", "own head", "ridge probe"]
    run.save("agreement", run["agreement"].assign(classifier=("encoder", kinds)), run.measured("agreement").kept)
    assert all_findings()["P1"].decide(Evidence(roles_of(TUNED, {}), (run,))).verdict == NOT_MEASURED


def test_the_weight_of_a_hybrid_is_chosen_on_other_images() -> None:
    """Of two weights the one whose probe is better on the selection split counts, whatever the test images say."""
    names = [*MIXED, "more", "more-tuned"]
    roles = (*roles_of(MIXED, {}), replace(ROLES["mix"], name="more", weight=0.8))
    roles += (replace(ROLES["mix"], name="more-tuned", weight=0.8, tuned_from="more"),)
    numbers = {"probes.accuracy": where(mix=0.2), "agreement.test_accuracy": where(mix_tuned=0.2, more_tuned=0.2)}
    for best, verdict in (("mix", HOLDS), ("more", UNCLEAR)):
        run = made_run(names, numbers, sites=SITES)
        probes = run["probes"]
        selection = probes.accuracy * 0 + (probes.encoder == best)
        probes = probes.assign(selection=selection)
        run.save("probes", probes, run.measured("probes").kept)
        found = all_findings()["P13"].decide(Evidence(roles, (run,)))
        assert (found.verdict, found.parts[0].encoders[0]) == (verdict, best)
    assert "Of 1 other weight 1 beat je and rec in all of it." in found.sentence
