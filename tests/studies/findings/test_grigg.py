"""G1–G7 on made results of a ResNet with two block groups: each holds, fails, is unclear, and with exchanged roles.

`sign` is 1 where the numbers are as the paper has them, −1 where they are the other way round, 0 where nothing differs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from support.evidence import made_run

from sightline.core.run_folder import Run
from sightline.studies.evidence import Evidence
from sightline.studies.findings import Verdict, all_findings
from sightline.studies.findings.contract import FAILS, HOLDS, NOT_MEASURED, UNCLEAR
from sightline.studies.roles import JE, SUPERVISED, Role

Numbers = Mapping[str, Any]

ROLES = (Role("clr", JE, "simclr", "cnn"), Role("sup", SUPERVISED, "supervised", "cnn"))
SEEDS = tuple(Role(f"clr-{seed}", JE, "simclr", "cnn", seed=seed) for seed in range(3))
BLOCKS = 4
SITES = ["embed", *(f"block.{n}{end}" for n in range(BLOCKS) for end in (".residual", "")), "head.0", "head.1"]
STAGES = [0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]


def _of_seeds(s: float) -> Callable[[Any], float]:
    """Even and odd layers of two seeds: themselves, neighbours, others."""

    def cka(at: Any) -> float:
        apart, odd = abs(at.block_a - at.block_b), at.layer_type_a == "residual"
        return 0.9 if apart == 0 else 0.8 - 0.4 * s * odd if apart == 1 else 0.1

    return cka


def _invariance(s: float) -> Callable[[Any], float]:
    def number(at: Any) -> float:
        more = {2: 0.2, 3: 0.2}.get(at.block, 0.4 if at.site.startswith("head") else 0.0)
        return 0.5 + s * more * (at.encoder.startswith("clr") and at.policy == "simclr")

    return number


def _classes(s: float) -> Callable[[Any], float]:
    rise = {"sup": (0, 0.02, 0.2, 0.6), "clr": (0, 0.1, 0.2, 0.3)}
    head = {"sup": (-0.2, 0.4), "clr": (0.2, 0.0)}

    def number(at: Any) -> float:
        if at.site.startswith("head"):
            return 0.5 + s * head[at.encoder][int(at.site[-1])]
        return 0.2 + s * rise[at.encoder][at.block] if at.block >= 0 else math.nan

    return number


MADE: dict[str, Callable[[float], Numbers]] = {
    "G1": lambda s: {"cka.cka": _of_seeds(s)},
    "G2": lambda s: {"cka.diagonal": lambda at: 0.5 + 0.3 * s * (at.depth < 0.25 and at.layer_type == "residual")},
    "G3": lambda s: dict.fromkeys(("cka.diagonal", "cka.row_max"), lambda at: 0.5 - 0.3 * s * (at.block >= 2)),
    "G4": lambda s: {"cka.row_depth": lambda at: at.depth - 0.25 * s * (at.block == 2)},
    "G5": lambda s: {"probes.accuracy": lambda at: 0.5 + 0.1 * s * at.block, "cka.diagonal": 0.5},
    "G6": lambda s: {"invariance.invariance": _invariance(s)},
    "G7": lambda s: {"cka.class_cka": _classes(s)},
}
SYMMETRIC = {"G1", "G2", "G3", "G5"}  # they say the same of both


def run_of(roles: tuple[Role, ...], numbers: Numbers, **more: Any) -> Run:
    names = [role.name for role in roles]
    coords = {"stage": (("encoder", "site"), [STAGES] * len(names))}
    return made_run(names, numbers, sites=SITES, depth=BLOCKS, coords=coords, **more)


def decided(finding: str, numbers: Numbers, *, exchanged: bool = False, **more: Any) -> Verdict:
    roles = SEEDS[:2] if finding == "G1" else ROLES
    if exchanged:
        other = {JE: SUPERVISED, SUPERVISED: JE}
        after = tuple(replace(role, family=other[role.family]) for role in roles)
    else:
        after = roles
    return all_findings()[finding].decide(Evidence(after, (run_of(roles, numbers, **more),)))


@pytest.mark.parametrize("finding", list(MADE))
@pytest.mark.parametrize(
    ("sign", "exchanged", "verdict"),
    [(1, False, HOLDS), (-1, False, FAILS), (0, False, UNCLEAR), (1, True, FAILS)],
    ids=["holds", "fails", "unclear", "exchanged"],
)
def test_verdicts_follow_the_numbers(finding: str, sign: float, exchanged: bool, verdict: str) -> None:
    numbers = MADE[finding](sign)
    if finding == "G4" and exchanged:  # it lags behind whom it is ahead of
        numbers = {"cka.row_depth": lambda at: at.depth + 0.25 * (1 if at.encoder_a == "sup" else -1) * (at.block == 2)}
    found = decided(finding, numbers, exchanged=exchanged)
    assert found.verdict == (HOLDS if exchanged and finding in SYMMETRIC else verdict), found.sentence


@pytest.mark.parametrize("finding", list(MADE))
def test_without_results_it_says_what_it_needs(finding: str) -> None:
    for roles in ((), ROLES, SEEDS):
        found = all_findings()[finding].decide(Evidence(roles, ()))
        assert (found.verdict, bool(found.needs)) == (NOT_MEASURED, True)


def test_all_of_the_paper_is_there() -> None:
    mine = [one for one in all_findings().values() if one.paper == "004"]
    assert [one.id for one in mine] == [f"G{n}" for n in range(1, 8)] == list(MADE)
    assert all(one.claim and one.measure and one.where and one.figure.startswith("004 ") for one in mine)


# Numbers


def test_every_two_seeds_are_compared() -> None:
    run = run_of(SEEDS, MADE["G1"](1))
    found = all_findings()["G1"].decide(Evidence(SEEDS, (run,)))
    np.testing.assert_allclose([part.value for part in found.parts], 3 * [0.4, 0.5], atol=1e-12)
    assert [part.label.rpartition(": ")[2] for part in found.parts[::2]] == [
        "clr-0, clr-1",
        "clr-0, clr-2",
        "clr-1, clr-2",
    ]
    one = all_findings()["G1"].decide(Evidence(ROLES, (run_of(ROLES, MADE["G1"](1)),)))
    assert (one.verdict, one.needs.startswith("a CNN trained with two seeds")) == (NOT_MEASURED, True)


def test_a_seed_may_be_called_like_all_of_them() -> None:
    numbered = decided("G1", MADE["G1"](1))
    roles = tuple(replace(role, name=name) for role, name in zip(SEEDS[:2], ("clr", "clr-1"), strict=True))
    found = all_findings()["G1"].decide(Evidence(roles, (run_of(roles, MADE["G1"](1)),)))
    assert [(part.value, part.how) for part in found.parts] == [
        (pytest.approx(part.value, abs=1e-12), part.how) for part in numbered.parts
    ]


def test_lag_is_a_share_of_the_depth() -> None:
    found = decided("G4", MADE["G4"](1))
    np.testing.assert_allclose([part.value for part in found.parts], [0.25, 0.25], atol=1e-12)
    assert all("bootstrap" in part.how for part in found.parts)
    everywhere = decided("G4", {"cka.row_depth": lambda at: at.depth - 0.1})  # behind, but no more at group starts
    assert everywhere.verdict == UNCLEAR


def test_the_worst_of_several_steps_has_an_adjusted_interval() -> None:
    """Two of three steps rise; the third one falls by 2.3 standard errors, which the worst of three does by chance."""
    accuracy = [0.5, 0.6, 0.6 - 2.3 * 0.01 * math.sqrt(2), 0.9]
    found = decided("G5", {"probes.accuracy": lambda at: accuracy[max(at.block, 0)], "cka.diagonal": 0.5})
    part = found.parts[0]
    assert (found.verdict, part.agrees) == (UNCLEAR, None)
    assert part.value == pytest.approx(accuracy[2] - 0.6)
    assert "block.1 to block.2" in part.label
    error = (part.high - part.low) / 2 / stats.t.ppf(1 - 0.025 / 3, 31)
    plain = 2 * stats.t.sf(-part.value / error, 31)
    assert part.p_other == pytest.approx(3 * plain)
    assert "From one block group to the next it holds: linear probe of" in found.sentence
    assert "group 2 − group 1 = +18.4 points" in found.sentence
    steep = [0.5, 0.6, 0.5, 0.9]
    fails = decided("G5", {"probes.accuracy": lambda at: steep[max(at.block, 0)], "cka.diagonal": 0.5})
    assert fails.verdict == FAILS


def test_own_augmentations_and_heads() -> None:
    found = decided("G6", MADE["G6"](1))
    np.testing.assert_allclose([part.value for part in found.parts], [0.2, 0.2, 0.2], atol=1e-12)
    assert "Under its own augmentations: invariance, last group − before: sup = +0 " in found.sentence
    policies = {"policy": ("simclr", "simclr?blur=0", "supervised")}
    numbers = {"invariance.invariance": lambda at: _invariance(1 if at.policy == "simclr?blur=0" else -1)(at)}
    assert decided("G6", numbers, labels=policies).verdict == UNCLEAR  # with settings of its own: nothing there
    without = {"invariance.invariance": lambda at: math.nan if "head" in at.site else _invariance(1)(at)}
    assert decided("G6", without).needs == "the projection head of clr: give its reference with `?head=true`"


def test_acceleration_is_by_block() -> None:
    found = decided("G7", MADE["G7"](1))
    values = [part.value for part in found.parts]
    np.testing.assert_allclose(values, [0.2, 0.39, (0.6 - 0.02) / 2 - 0.02, 0.2], atol=1e-12)
    assert "As a faster rise than SimCLR's it holds" in found.sentence
    assert "in the last group: sup − clr = +0.19 " in found.sentence


def test_a_network_without_block_groups_cannot_decide() -> None:
    names = [role.name for role in ROLES]
    run = made_run(names, MADE["G3"](1), sites=SITES, depth=BLOCKS)
    found = all_findings()["G3"].decide(Evidence(ROLES, (run,)))
    assert found.needs == "a CNN with several block groups in place of clr, such as a ResNet"
