"""S1–S21 on made results: where each holds, fails and is unclear, and where the roles are exchanged."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.evidence import block_sites, made_run, renamed, select

from sightline.core.run_folder import Run
from sightline.studies.evidence import Evidence
from sightline.studies.findings import all_findings, decide_all
from sightline.studies.findings.contract import FAILS, HOLDS, NOT_MEASURED, UNCLEAR
from sightline.studies.findings.shekhar import FINDINGS
from sightline.studies.roles import JE, MASKED_JE, REC, Role

BASE = {
    "moco": Role("moco", JE, "moco_v3"),
    "dino": Role("dino", JE, "dino", multicrop=False),
    "mae": Role("mae", REC, "mae"),
    "simmim": Role("simmim", REC, "simmim"),
    "msn": Role("msn", MASKED_JE, "msn"),
    "resnet": Role("resnet", JE, "moco_v3", "cnn"),
    "convnext": Role("convnext", REC, "fcmae", "cnn"),
}
ROLES = (
    *BASE.values(),
    *(replace(BASE[name], name=f"{name}-ft", tuned_from=name) for name in ("moco", "dino", "mae", "simmim", "msn")),
)
VITS = ["moco", "dino", "mae", "simmim"]
TUNED = [f"{name}-ft" for name in VITS]
JES, RECS = {"moco", "dino", "resnet"}, {"mae", "simmim", "convnext"}


def exchanged(roles: Sequence[Role]) -> tuple[Role, ...]:
    """Joint-embedding and reconstruction have changed places."""
    other = {JE: REC, REC: JE, MASKED_JE: MASKED_JE}
    return tuple(replace(role, family=other[role.family]) for role in roles)


def base(name: str) -> str:
    return name.removesuffix("-ft")


def within(at: Any, family: set[str]) -> bool:
    return {base(at.encoder_a), base(at.encoder_b)} <= family


# Worlds: runs in which the claim holds (s = 1), its opposite does (s = −1), or nothing does (s = 0)


def cka(number: Callable[[Any], float], encoders: Sequence[str] = VITS, variable: str = "diagonal") -> list[Run]:
    return [made_run(encoders, {f"cka.{variable}": number}, labels={"tokens": ("all",)})]


def alike(s: int) -> list[Run]:
    return cka(lambda at: 0.6 + 0.2 * s if within(at, JES) else 0.4 if within(at, RECS) else 0.6)


def weaker_at_the_end(s: int) -> list[Run]:
    return cka(lambda at: 0.6 + (1 if within(at, JES) else -1) * 0.2 * s * (at.depth < 0.75))


def early_match(s: int) -> list[Run]:
    def number(at: Any) -> float:
        """Where the largest CKA of each block is: in block 0, in block 2, or in one of them each."""
        late = at.block_a % 2 if s == 0 else (s == -1) == (at.encoder_a in JES)
        return 0.5 + 0.2 * (at.block_b == 2 * late) + 0.4 * at.site_b.startswith("decoder")

    sites = [*block_sites(parts=(), more=()), "decoder.block.0"]
    return [made_run(VITS, {"cka.cka": number}, labels={"tokens": ("all",)}, sites=sites)]


def layer_types(s: int) -> list[Run]:
    return cka(lambda at: 0.5 + 0.2 * s * (at.layer_type == "fc1"))


def architectures(s: int) -> list[Run]:
    def number(at: Any) -> float:
        if within(at, JES):
            return 0.6 + 0.2 * s
        return 0.6 + (0.2 * s if at.distance > 1 else -0.2) if within(at, RECS) else 0.6

    return cka(number, [*VITS, "resnet", "convnext"], "distance_cka")


def separability(s: int) -> list[Run]:
    def accuracy(at: Any) -> float:
        return 0.5 - 0.2 * s * (at.encoder in RECS) * (at.depth >= 0.25)

    features = {"feature": ("cls", "gap", "gap_without_cls")}
    return [
        made_run(VITS, {"knn.accuracy": accuracy, "probes.accuracy": lambda at: accuracy(at) + 0.01}, labels=features)
    ]


def agreement(variable: str) -> Callable[[int], list[Run]]:
    def number(at: Any, s: int) -> float:
        return 0.5 + 0.2 * s if within(at, JES) else 0.3 if within(at, RECS) else 0.5

    return lambda s: [made_run(VITS, {f"agreement.{variable}": lambda at: number(at, s)})]


def probes(probe: str) -> Callable[[int], list[Run]]:
    def accuracy(at: Any, s: int) -> float:
        where = at.site == "block.1" if probe == "multilayer" else True
        return 0.5 + 0.05 * s * (at.encoder in RECS and at.probe == probe and where)

    def make(s: int) -> list[Run]:
        run = made_run(VITS, {"probes.accuracy": lambda at: accuracy(at, s)}, noise=0.001)
        return [with_selection(run)]

    return make


def with_selection(run: Run) -> Run:
    """Block 1 is best on the selection split, but for the last block, which is no intermediate one."""
    table = run["probes"]
    run._results["probes"] = table.assign(
        selection=0.1 + 0.2 * (table.block == 1) + 0.3 * (table.block == 3) + 0 * table.accuracy
    )
    return run


def added_after(s: int) -> list[Run]:
    gain = {1: 0.0, 0: 0.01, -1: 0.05}[s]

    def accuracy(at: Any) -> float:
        own = 0.05 if at.encoder in ("moco-ft", "dino-ft") else gain if at.encoder.endswith("-ft") else 0.03
        return 0.5 + own * (at.probe == "multilayer" and at.site == "block.1")

    return [with_selection(made_run([*VITS, *TUNED], {"probes.accuracy": accuracy}, noise=0.001))]


def mirrored(s: int) -> list[Run]:
    numbers = {
        "rcdm.share": lambda at: 0.5 + 0.3 * s * (at.encoder in RECS),
        "rcdm.orientation": lambda at: 0.5 - 0.3 * s * (at.encoder in RECS),
    }
    return [made_run([*VITS, *TUNED], numbers)]


def detection(how: str, signs: dict[str, int]) -> Callable[[int], list[Run]]:
    def number(at: Any, s: int) -> float:
        return 0.4 + 0.05 * s * signs.get(at.area, 0) * (at.encoder in RECS)

    return lambda s: [made_run(VITS, {"detection.AP": lambda at: number(at, s)}, attrs={"encoders": how}, noise=0.002)]


def more_blocks(s: int) -> list[Run]:
    return [
        made_run(
            VITS, {"detection.AP": 0.4 + gain}, attrs={"encoders": "frozen"}, request={"settings": {"blocks": blocks}}
        )
        for blocks, gain in (("last", 0.0), ("last-3,last-2,last-1,last", 0.1 * s))
    ]


def towards(s: int) -> list[Run]:
    def number(at: Any) -> float:
        both = {at.encoder_a, at.encoder_b}
        if both & {"mae-ft", "simmim-ft"} and both & {"moco", "dino"}:
            return 0.5 + 0.2 * s
        return 0.4 if both & {"moco-ft", "dino-ft"} and both & {"mae", "simmim"} else 0.5

    return cka(number, [*VITS, *TUNED])


def layers_after(s: int) -> list[Run]:
    def number(at: Any) -> float:
        change = {"qkv": 0.3, "norm1": 0.3}.get(at.layer_type, 0.1 if at.depth < 0.5 else -0.1)
        return 0.5 + s * change * (at.encoder_a.endswith("-ft") and at.encoder_b.endswith("-ft"))

    return cka(number, [*VITS, *TUNED])


def straighter(s: int) -> list[Run]:
    """Two trainings of each, in runs of their own."""
    runs = []
    for seed in (0, 1):
        epochs = [f"{name}-ft, step {n}" for name in VITS for n in range(3)]

        def number(at: Any, seed: int = seed) -> float:
            name, epoch = at.encoder.split("-ft, step ")
            straight = 0.6 + 0.2 * s * (name in RECS) + 0.001 * (seed - 0.5) * (1 if name in RECS else 2)
            return straight if epoch == "2" else 0.9

        trainings = [f"{name.split(',')[0]}{'-1' if seed else ''}" for name in epochs]
        coords = {"training": ("encoder", trainings), "step": ("encoder", [int(name[-1]) for name in epochs])}
        runs.append(made_run(epochs, {"dynamics.efficiency": number}, noise=None, coords=coords))
    return runs


def masked(s: int) -> list[Run]:
    return cka(
        lambda at: 0.5 + 0.2 * s * ({base(at.encoder_a), base(at.encoder_b)} <= {"msn", *JES}), [*VITS, "msn", "msn-ft"]
    )


def minibatches(s: int) -> list[Run]:
    by_batch = {1: 0.0, 0: 0.05, -1: 0.2}[s]
    number = {"minibatch.cka": lambda at: 0.5 + by_batch * (at.batch == 64)}
    counts = {"count": (128, 1024, 2048)}
    return [made_run(["moco"], number, noise={1: 0.001, 0: 0.02, -1: 0.001}[s], labels=counts)]


def mirrored_after(s: int) -> list[Run]:
    def share(at: Any) -> float:
        if at.encoder in ("moco", "moco-ft", "dino", "dino-ft"):
            return 0.5 + 0.1 * at.encoder.endswith("-ft")
        return 0.5 + 0.3 * s * (not at.encoder.endswith("-ft"))

    return [made_run([*VITS, *TUNED], {"rcdm.share": share})]


SIZES = {"all": 1, "small": 1, "large": -1}
WORLDS: dict[str, tuple[Callable[[int], list[Run]], str]] = {  # and the verdict where it holds and roles are exchanged
    "S1": (alike, FAILS),
    "S2": (weaker_at_the_end, FAILS),
    "S3": (early_match, FAILS),
    "S4": (layer_types, HOLDS),
    "S5": (architectures, UNCLEAR),
    "S6": (separability, FAILS),
    "S7": (agreement("tau"), FAILS),
    "S8": (agreement("f1"), FAILS),
    "S9": (probes("depth 3"), FAILS),
    "S10": (probes("multilayer"), FAILS),
    "S11": (mirrored, FAILS),
    "S12": (detection("frozen", SIZES), FAILS),
    "S13": (detection("trained along", dict.fromkeys(("all", "small", "medium", "large"), 1)), FAILS),
    "S14": (more_blocks, HOLDS),
    "S15": (towards, FAILS),
    "S16": (layers_after, HOLDS),
    "S17": (straighter, FAILS),
    "S18": (added_after, FAILS),
    "S19": (masked, FAILS),
    "S20": (minibatches, HOLDS),
    "S21": (mirrored_after, FAILS),
}
SECOND = tuple(
    Role(f"{name}-ft-1", BASE[name].family, BASE[name].method, tuned_from=name, seed=1, multicrop=BASE[name].multicrop)
    for name in VITS
)


@functools.cache
def runs_of(finding: str, s: int) -> tuple[Run, ...]:
    return tuple(WORLDS[finding][0](s))


def evidence_for(finding: str, s: int, swap: bool = False) -> Evidence:
    roles = (*ROLES, *SECOND) if finding == "S17" else ROLES
    return Evidence(exchanged(roles) if swap else roles, runs_of(finding, s))


def test_all_of_them_are_here() -> None:
    assert {finding.id for finding in FINDINGS} == {f"S{n}" for n in range(1, 22)} == set(WORLDS)
    assert [name for name in all_findings() if name.startswith("S")] == [f"S{n}" for n in range(1, 22)]


@pytest.mark.parametrize("finding", WORLDS)
@pytest.mark.parametrize(("s", "verdict"), [(1, HOLDS), (-1, FAILS), (0, UNCLEAR)])
def test_verdict(finding: str, s: int, verdict: str) -> None:
    found = all_findings()[finding].decide(evidence_for(finding, s))
    assert found.verdict == verdict, found.sentence
    assert found.parts
    assert (found.p < 0.05) == (verdict != UNCLEAR), found
    assert found.sentence.endswith(".")


@pytest.mark.parametrize("finding", WORLDS)
def test_exchanged_roles(finding: str) -> None:
    found = all_findings()[finding].decide(evidence_for(finding, 1, swap=True))
    assert found.verdict == WORLDS[finding][1], found.sentence


@pytest.mark.parametrize("finding", WORLDS)
def test_without_results_it_says_what_it_needs(finding: str) -> None:
    for evidence in (Evidence((), ()), Evidence(ROLES, ())):
        found = all_findings()[finding].decide(evidence)
        assert found.verdict == NOT_MEASURED
        assert "add `--" in found.needs, found.needs


def test_one_encoder_that_disagrees_is_named() -> None:
    number = {
        "agreement.f1": lambda at: 0.7 if within(at, JES) else 0.9 if "simmim" in (at.encoder_a, at.encoder_b) else 0.5
    }
    found = all_findings()["S8"].decide(Evidence(ROLES, (made_run(VITS, number),)))
    assert found.verdict == UNCLEAR
    assert "F1(dino, moco) − F1(dino, simmim) = -0.2" in found.sentence
    assert "is on the other side, and so is F1(moco, dino) − F1(moco, simmim); agreeing: " in found.sentence


def test_what_a_study_varies_is_not_asked() -> None:
    varied = (Role("windowed", JE, "moco_v3", window=3), Role("small", REC, "mae", size=0.3))
    found = all_findings()["S1"].decide(Evidence((*ROLES, *varied), runs_of("S1", 1)))
    assert found.verdict == HOLDS
    assert {name for part in found.parts for name in part.encoders} == set(VITS)
    assert "Not measured" not in found.sentence


def test_measures_that_disagree_with_the_gap_are_told() -> None:
    found = all_findings()["S11"].decide(evidence_for("S11", 1))
    assert found.verdict == HOLDS
    assert "Of mae − moco other measures disagree: samples that face as their source = -0.3" in found.sentence


def test_a_measure_on_other_images_does_not_silence_the_others() -> None:
    """Probes of orientation that are not paired say nothing; the samples that disagree are told all the same."""
    numbers = {"orientation.accuracy": 0.5}
    apart = tuple(made_run([name], numbers, images=f"images of {name}") for name in VITS)
    evidence = evidence_for("S11", 1)
    found = all_findings()["S11"].decide(replace(evidence, runs=(*evidence.runs, *apart)))
    assert "Of mae − moco other measures disagree: samples that face as their source = -0.3" in found.sentence
    assert "probe of orientation" not in found.sentence


def test_multi_crop_is_left_out_of_frozen_detection() -> None:
    roles = tuple(replace(role, multicrop=True) if role.method == "dino" else role for role in ROLES)
    found = all_findings()["S12"].decide(Evidence(roles, runs_of("S12", 1)))
    assert {part.encoders for part in found.parts} == {("mae", "moco"), ("simmim", "moco")}


def test_one_training_each_has_no_interval() -> None:
    found = all_findings()["S17"].decide(Evidence(ROLES, runs_of("S17", 1)[:1]))
    assert found.verdict == UNCLEAR
    assert "no interval" in found.sentence


def test_layers_drawn_by_the_selection_split() -> None:
    """Block 3, the last one, would be best of all there, but is no intermediate block."""
    found = all_findings()["S10"].decide(evidence_for("S10", 1))
    assert found.effect == pytest.approx(0.0, abs=1e-12)  # of joint-embedding, against one point
    assert found.below
    assert {round(part.value, 6) for part in found.parts} == {0.0, 0.05}


def test_without_a_final_norm_the_block_before_the_last_is_an_intermediate_one() -> None:
    def accuracy(at: Any) -> float:
        return 0.5 + 0.05 * (at.encoder in RECS and at.probe == "multilayer" and at.site == "block.2")

    run = made_run(VITS, {"probes.accuracy": accuracy}, noise=0.001, sites=block_sites(parts=(), more=()))
    table = run["probes"]
    selection = 0.1 + 0.2 * (table.block == 2) + 0 * table.accuracy
    selection = selection.where((table.probe != "multilayer") | (table.block != 3))
    run._results["probes"] = table.assign(selection=selection, last_site=("encoder", ["block.3"] * len(VITS)))
    found = all_findings()["S10"].decide(Evidence(ROLES, (run,)))
    assert {round(part.value, 6) for part in found.parts} == {0.0, 0.05}


@pytest.mark.parametrize(
    ("finding", "number", "labels"),
    [
        ("S1", "cka.diagonal", {"tokens": ("cls",)}),
        ("S3", "cka.cka", {"tokens": ("cls",)}),
        ("S5", "cka.distance_cka", {"tokens": ("cls",)}),
        ("S7", "agreement.tau", {"k": (3,)}),
        ("S10", "probes.accuracy", {"probe": ("ridge", "linear")}),
        ("S10", "probes.accuracy", {"feature": ("gap",)}),
        ("S18", "probes.accuracy", {"probe": ("ridge", "linear")}),
    ],
)
def test_what_other_settings_left_out_was_not_measured(finding: str, number: str, labels: dict[str, Any]) -> None:
    run = made_run([*VITS, *TUNED, "resnet", "convnext"], {number: 0.5}, labels=labels)
    found = all_findings()[finding].decide(
        Evidence(ROLES, (with_selection(run) if number.startswith("probes") else run,))
    )
    assert found.verdict == NOT_MEASURED


def test_a_claim_about_two_kinds_of_encoders_needs_both() -> None:
    without = tuple(role for role in ROLES if role.name != "convnext")
    found = all_findings()["S5"].decide(Evidence(without, runs_of("S5", 1)))
    assert found.needs == "a reconstruction CNN: add `--cnn-rec NAME=REFERENCE` or `--steps pretrain`"
    of_je = [select(run, ["moco", "dino"]) for run in runs_of("S14", 1)]
    assert all_findings()["S14"].decide(Evidence(ROLES, tuple(of_je))).needs == "detection of mae: add `--steps detect`"
    untuned = tuple(role for role in ROLES if role.name != "msn-ft")
    found = all_findings()["S19"].decide(Evidence(untuned, runs_of("S19", 1)))
    assert found.needs == "a fine-tuned msn: add `--steps finetune`"


@pytest.mark.parametrize("finding", ["S12", "S13", "S14"])
@pytest.mark.parametrize("s", [1, -1, 0])
def test_detectors_may_have_runs_of_their_own(finding: str, s: int) -> None:
    """To the last digit the same, since the parts of the images are."""
    together = runs_of(finding, s)
    apart = [select(run, [name]) for name in reversed(VITS) for run in together]
    one, other = (all_findings()[finding].decide(Evidence(ROLES, tuple(runs))) for runs in (together, apart))
    assert one.verdict != NOT_MEASURED
    assert repr(one) == repr(other)  # of numbers to the last digit; nan is not equal to nan


def test_detectors_that_were_trained_otherwise_are_not_compared() -> None:
    (run,) = runs_of("S12", 1)

    def trained(epochs: int, *names: str) -> Run:
        found = select(run, names)
        found.request["settings"] = {"epochs": epochs, "log_every": epochs}
        return found

    roles = tuple(role for role in ROLES if role.name in ("moco", "mae"))
    apart = (trained(3, "mae"), trained(12, "moco"))
    found = all_findings()["S12"].decide(Evidence(roles, apart))
    assert found.needs == "detection of mae and moco with the same settings and images"
    short = trained(3, "mae")
    short._results["detection"] = short["detection"].assign(AP=short["detection"].AP - 0.3)
    found = all_findings()["S12"].decide(Evidence(roles, (short, trained(12, "mae", "moco"))))
    assert found.verdict == HOLDS  # by the two that were trained alike


def test_blocks_are_compared_on_the_same_images() -> None:
    def trained(images: str, blocks: str, ap: float) -> Run:
        about = {"settings": {"blocks": blocks, "epochs": 3}, "images": {"name": images}}
        return made_run(VITS, {"detection.AP": ap}, attrs={"encoders": "frozen"}, images=images, request=about)

    several = "last-3,last-2,last-1,last"
    scenes = (trained("scenes", "last", 0.5), trained("scenes", several, 0.45))
    found = all_findings()["S14"].decide(Evidence(ROLES, (trained("coco", "last", 0.3), *scenes)))
    assert found.verdict == FAILS
    assert [part.value for part in found.parts] == pytest.approx([-0.05] * len(found.parts), abs=1e-12)
    apart = Evidence(ROLES, (trained("coco", "last", 0.3), scenes[1]))
    assert all_findings()["S14"].decide(apart).verdict == NOT_MEASURED


@pytest.mark.parametrize("finding", ["S1", "S3", "S6", "S10"])
def test_seeds_may_have_runs_of_their_own(finding: str) -> None:
    """Also where the interval is by bootstrap (S3)."""
    roles = (*(role for role in ROLES if not role.tuned), Role("moco-1", JE, "moco_v3", seed=1))
    (run,) = runs_of(finding, 1)
    second = {"moco": "moco-1"}
    both = Evidence(roles, (run, renamed(run, second)))
    assert both.seeds == {"moco": ("moco", "moco-1")}
    found = all_findings()[finding].decide(both)
    assert found.verdict == HOLDS, found.sentence
    assert any("2 seeds of moco" in part.how for part in found.parts)


def test_minibatches_of_one_seed_are_enough() -> None:
    roles = (*ROLES, Role("moco-1", JE, "moco_v3", seed=1))
    assert all_findings()["S20"].decide(Evidence(roles, tuple(minibatches(1)))).verdict == HOLDS


@pytest.mark.parametrize(
    ("counts", "needs"),
    [
        ((1024,), "minibatch CKA of more than 2048 images, not 1024, or `--set minibatch.batch=512`"),
        ((1000, 2000), "minibatch CKA of more than 2000 images, not 2000, or `--set minibatch.batch=512`"),
        ((512, 1024), "minibatch CKA of more than 1024 images, not 1024"),
        ((512, 1024, 1500), None),
        ((1000, 2000, 3000), None),
    ],
)
def test_the_number_of_images_is_varied_or_named_as_missing(counts: tuple[int, ...], needs: str | None) -> None:
    """The images of a single batch have no interval, so their number is none of those that are compared."""
    number = {"minibatch.cka": lambda at: 0.5 + 0.2 * (at.count == max(counts))}
    by_count = made_run(["moco"], number, noise=0.001, labels={"count": counts})
    found = all_findings()["S20"].decide(Evidence(ROLES, (by_count,)))
    if needs is None:
        assert (found.verdict, found.effect) == (FAILS, pytest.approx(0.2))
    else:
        assert (found.verdict, found.needs) == (NOT_MEASURED, needs)


@pytest.mark.parametrize("finding", ["S15", "S16", "S21"])
def test_before_and_after_are_one_encoder(finding: str) -> None:
    """Another seed, from which nothing was fine-tuned, is no start of what was."""
    (run,) = runs_of(finding, 1)
    other = Evidence((*ROLES, Role("mae-1", REC, "mae", seed=1)), (run, renamed(run, {"mae": "mae-1"})))
    assert other.seeds == {"mae": ("mae", "mae-1")}
    alone = all_findings()[finding].decide(evidence_for(finding, 1))
    assert all_findings()[finding].decide(other) == alone
    assert alone.verdict == HOLDS


def test_layers_that_grow_less_alike_are_not_alike() -> None:
    """Not even if fully connected layers do so even more."""

    def number(at: Any) -> float:
        change = {"qkv": -0.1, "norm1": -0.1}.get(at.layer_type, 0.1 if at.depth < 0.5 else -0.9)
        return 0.5 + change * (at.encoder_a.endswith("-ft") and at.encoder_b.endswith("-ft"))

    found = all_findings()["S16"].decide(Evidence(ROLES, tuple(cka(number, [*VITS, *TUNED]))))
    assert found.verdict == FAILS
    assert {part.agrees for part in found.parts if part.label.endswith((" in qkv", " in norm1"))} == {False}
    assert {part.agrees for part in found.parts if part.label.endswith("− in fc1")} == {True}


def test_all_at_once() -> None:
    verdicts = decide_all(evidence_for("S1", 1), [f"S{n}" for n in range(1, 22)])
    by_name = {verdict.finding: verdict for verdict in verdicts}
    assert by_name["S1"].verdict == HOLDS
    assert by_name["S2"].verdict == UNCLEAR
    assert by_name["S7"].needs == "the analysis agreement of moco and dino and mae: add `--steps passes`"
    assert by_name["S1"].p_adjusted >= by_name["S1"].p
