"""Which run holds a number, which encoders have a role, and what is said where nothing is there."""

import math

import numpy as np
import pytest
from support.evidence import made_run

from sightline.core.contrast import Estimate, Factor
from sightline.core.run_folder import Run
from sightline.studies.evidence import Evidence, Missing, evidence_of, over_seeds
from sightline.studies.findings import all_findings
from sightline.studies.findings.contract import FAILS, NOT_MEASURED
from sightline.studies.roles import JE, REC, Role

SEEDS = (
    Role("mae-0", REC, "mae", seed=0),
    Role("mae-1", REC, "mae", seed=1),
    Role("dino", JE, "dino"),
    Role("mae-0-tuned", REC, "mae", tuned_from="mae-0", seed=0),
    Role("mae-1-tuned", REC, "mae", tuned_from="mae-1", seed=1),
)


def test_numbers_come_from_the_run_that_holds_them() -> None:
    knn = made_run(["a", "b"], {"knn.accuracy": 0.5})
    frozen, tuned = (
        made_run(["a"], {"detection.AP": ap}, attrs={"encoders": how})
        for ap, how in ((0.3, "frozen"), (0.4, "trained along"))
    )
    evidence = Evidence((), (knn, frozen, tuned))
    assert evidence.estimate("knn.accuracy", encoder="b", site="norm", feature="cls").value == 0.5
    for how, ap in (("frozen", 0.3), ("trained along", 0.4)):
        found = evidence.estimate(
            "detection.AP",
            encoder="a",
            kind="box",
            area="all",
            among=lambda run, how=how: run["detection"].attrs["encoders"] == how,
        )
        assert found.value == ap
    assert evidence.holds("detection", "a")
    assert not evidence.holds("detection", "b")
    with pytest.raises(Missing, match="detection of b: add `--steps detect`"):
        evidence.estimate("detection.AP", encoder="b", kind="box", area="all")
    with pytest.raises(Missing, match=r"there\D*(feature|gap_without_cls)"):
        evidence.estimate("knn.accuracy", encoder="a", site="norm", feature="gap_without_cls")


def test_seeds_are_one_encoder() -> None:
    run = made_run(
        ["mae-0", "mae-1", "dino"], {"knn.accuracy": lambda at: {"mae-0": 0.4, "mae-1": 0.6}.get(at.encoder, 0.7)}
    )
    evidence = Evidence(SEEDS, (run,))
    assert [role.name for role in evidence.encoders(REC)] == ["mae"]
    assert evidence.seeds == {"mae": ("mae-0", "mae-1"), "mae-tuned": ("mae-0-tuned", "mae-1-tuned")}
    found = evidence.estimate("knn.accuracy", encoder="mae", site="norm", feature="cls").contrast()
    assert (found.value, found.n_seeds) == (0.5, 2)
    assert [role.name for role in evidence.apart().encoders(REC)] == ["mae-0", "mae-1"]


def test_seeds_of_which_two_are_the_same_are_named() -> None:
    twice = (*SEEDS, Role("mae-wide", REC, "mae"))
    assert Evidence(twice, ()).mixed_up == [("mae-0", "mae-1", "mae-wide")]
    assert "mae" not in Evidence(twice, ()).seeds
    told = (*SEEDS, Role("mae-wide", REC, "mae", size=5.5))
    assert Evidence(told, ()).mixed_up == []
    assert Evidence(told, ()).seeds["mae"] == ("mae-0", "mae-1")
    assert Evidence((Role("a", REC, "mae"), Role("b", REC, "mae")), ()).mixed_up == []  # two encoders, not seeds


def test_seeds_may_have_runs_of_their_own_and_the_first_the_name_of_all() -> None:
    roles = (Role("moco_v3", JE, "moco_v3"), Role("moco_v3_1", JE, "moco_v3", seed=1))
    runs = tuple(made_run([name], {"knn.accuracy": value}) for name, value in (("moco_v3", 0.4), ("moco_v3_1", 0.6)))
    evidence = Evidence(roles, runs)
    assert evidence.seeds == {"moco_v3": ("moco_v3", "moco_v3_1")}
    found = evidence.estimate("knn.accuracy", encoder="moco_v3", site="norm", feature="cls").contrast()
    assert (found.value, found.n_seeds) == (0.5, 2)


def test_seeds_in_runs_of_their_own_whose_images_all_agree_have_no_interval() -> None:
    factor = Factor("made", "groups of images")
    perfect = Estimate(1.0, {factor: np.ones(8)}, {factor: np.ones(8, bool)}, None, "x", of_images=True)
    found = over_seeds("mae", {"mae-0": perfect, "mae-1": perfect}).contrast()
    assert math.isnan(perfect.contrast().p)
    assert math.isnan(found.p)
    assert math.isnan(found.low)


def test_encoders_are_compared_on_the_images_that_both_have_seen() -> None:
    roles = (Role("moco", JE, "moco_v3"), Role("mae", REC, "mae"))

    def seen(images: str, nmi: dict[str, float]) -> Run:
        numbers = {"attention.nmi_mean": lambda at: nmi[at.encoder]}
        return made_run(list(nmi), numbers, images=images, request={"images": {"digest": images}})

    other, both = seen("cifar", {"moco": 0.1}), seen("imagenet", {"moco": 0.5, "mae": 0.3})
    for runs in ((other, both), (both, other)):
        found = all_findings()["P4"].decide(Evidence(roles, runs))
        assert (found.verdict, found.effect) == (FAILS, pytest.approx(-0.2, abs=1e-12)), found.sentence
    apart = all_findings()["P4"].decide(Evidence(roles, (other, seen("imagenet", {"mae": 0.3}))))
    assert apart.verdict == NOT_MEASURED
    assert apart.needs.startswith("numbers on the same images")


def test_what_was_fine_tuned_from_an_encoder() -> None:
    evidence = Evidence(SEEDS, ())
    tuned = evidence.need_tuned("mae")
    assert tuned.tuned_from == "mae"
    assert evidence.tuned("mae-1") == tuned
    with pytest.raises(Missing, match="a fine-tuned dino: add `--steps finetune`"):
        evidence.need_tuned("dino")


def test_roles_that_are_missing_are_named_with_what_to_add() -> None:
    evidence = Evidence(SEEDS, ())
    with pytest.raises(Missing, match="1 more joint-embedding ViT: add `--je NAME=REFERENCE`"):
        evidence.need(JE, count=2)
    with pytest.raises(Missing, match="a supervised CNN: add `--cnn-sl NAME=REFERENCE` or `--steps pretrain`"):
        evidence.need("supervised", "cnn")


def test_the_same_seed_twice_are_two_encoders() -> None:
    twice = (Role("small", JE, "dino"), Role("large", JE, "dino"))
    assert [role.name for role in Evidence(twice, ()).encoders(JE)] == ["small", "large"]


def test_roles_of_a_run_come_from_its_references() -> None:
    run = made_run(["d", "x"], {"knn.accuracy": 0.5})
    run.request["encoders"] = [
        {"name": "d", "reference": "timm:vit_base_patch16_224.dino"},
        {"name": "x", "reference": "timm:y@random"},
        {"name": "mine", "reference": "a module that was given in Python"},
        {"name": "old"},
    ]
    assert [(role.name, role.family) for role in evidence_of(run).roles] == [("d", JE)]
