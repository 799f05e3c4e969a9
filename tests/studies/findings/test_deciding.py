"""From contrasts to verdicts: sides, cases, chance, Holm."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from support.evidence import made_run

from sightline.core.contrast import Estimate, Factor
from sightline.core.errors import InputError
from sightline.studies.evidence import Evidence, Missing
from sightline.studies.findings import Case, Part, decide_all
from sightline.studies.findings.contract import FAILS, HOLDS, NOT_MEASURED, UNCLEAR, Finding
from sightline.studies.findings.deciding import above, adjusted, by_chance, holm, judge, within

GROUPS = 32


def number(value: float, error: float, groups: int = GROUPS) -> Estimate:
    """An estimate with this standard error."""
    rest = np.resize([1.0, -1.0], groups) * error / math.sqrt(groups - 1)
    factor = Factor("made", "groups of images")
    return Estimate(value, {factor: value + rest}, {factor: np.ones(groups, bool)}, None, "made")


def verdict_of(*cases: Sequence[Part]) -> str:
    return judge("S1", [Case((f"e{n}",), lambda parts=parts: parts) for n, parts in enumerate(cases)]).verdict


# Parts


@pytest.mark.parametrize(("value", "agrees"), [(0.5, True), (-0.5, False), (0.1, None), (-0.1, None)])
def test_a_part_agrees_where_its_interval_lies_on_the_claimed_side(value: float, agrees: bool | None) -> None:
    part = above("x", number(value, 0.1))
    assert part.agrees is agrees
    half = stats.t.ppf(0.975, GROUPS - 1) * 0.1
    np.testing.assert_allclose([part.value, part.low, part.high], [value, value - half, value + half], rtol=1e-12)
    two_sided = 2 * stats.t.sf(abs(value) / 0.1, GROUPS - 1)
    np.testing.assert_allclose(part.p, two_sided, rtol=1e-10)
    np.testing.assert_allclose(
        [part.p_claim, part.p_other], [two_sided, 1] if value > 0 else [1, two_sided], rtol=1e-10
    )


def test_thresholds_move_what_is_claimed_and_not_the_number() -> None:
    part = above("x", number(0.5, 0.1), 0.45)
    assert (part.value, part.agrees, part.threshold) == (0.5, None, 0.45)
    assert part.low < 0.45 < part.high
    np.testing.assert_allclose(part.p_claim, 2 * stats.t.sf(0.5, GROUPS - 1), rtol=1e-9)


@pytest.mark.parametrize(
    ("value", "agrees"), [(0.0, True), (0.75, True), (-0.9, None), (1.1, None), (1.5, False), (-1.5, False)]
)
def test_within_a_margin_are_two_one_sided_tests(value: float, agrees: bool | None) -> None:
    part = within("x", number(value, 0.1), 1.0)
    assert part.agrees is agrees
    t = [(1.0 - value) / 0.1, (value + 1.0) / 0.1]
    known = min(1.0, 2 * max(stats.t.sf(t, GROUPS - 1)))
    np.testing.assert_allclose(part.p_claim, known, rtol=1e-9)
    assert (part.p_claim < 0.05) == (agrees is True)


def test_without_an_interval_nothing_is_claimed() -> None:
    part = above("x", Estimate(0.5, {}, {}, None, "made", "it is a number of a training"))
    assert (part.agrees, part.p_claim, part.p_other) == (None, 1.0, 1.0)
    found = judge("S1", [Case(("a",), lambda: [part])])
    assert found.verdict == UNCLEAR
    assert "it is a number of a training" in found.sentence


# Verdicts

GOOD, BAD, OPEN = (above(name, number(value, 0.1)) for name, value in (("good", 0.5), ("bad", -0.5), ("open", 0.1)))


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        ([[GOOD]], HOLDS),
        ([[BAD]], FAILS),
        ([[OPEN]], UNCLEAR),
        ([[GOOD], [GOOD]], HOLDS),
        ([[GOOD], [OPEN]], UNCLEAR),
        ([[GOOD], [BAD]], UNCLEAR),
        ([[OPEN], [BAD]], FAILS),
        ([[GOOD, BAD]], FAILS),
        ([[GOOD, OPEN]], UNCLEAR),
        ([[GOOD, BAD], [GOOD, GOOD]], UNCLEAR),
        ([[OPEN, GOOD], [GOOD, BAD]], FAILS),
    ],
)
def test_all_parts_of_a_case_and_all_cases_must_agree(cases: list[list[Part]], verdict: str) -> None:
    assert verdict_of(*cases) == verdict


def test_the_weakest_part_is_the_effect_and_the_sentence_names_who_disagrees() -> None:
    parts = [above(f"of {n}", number(value, 0.1)) for n, value in (("a", 0.9), ("b", 0.4), ("c", 0.6))]
    found = judge("S1", [Case((p.label[-1],), lambda p=p: [p]) for p in parts])
    assert (found.effect, found.p) == (0.4, parts[1].p)
    assert found.sentence == "of b = +0.4 (95 % +0.196 to +0.604) is above 0, the weakest of 3 that all agree."
    against = judge("S1", [Case((p.label,), lambda p=p: [p]) for p in (GOOD, BAD)])
    assert "bad = -0.5 (95 % -0.704 to -0.296) is on the other side" in against.sentence
    assert against.parts[1].encoders == ("bad",)


def test_what_fails_is_told_of_a_part_on_the_other_side() -> None:
    """A bootstrap's interval may be wider to one side, so that another part is nearer to the claim in half widths."""
    against = replace(above("against", number(-0.45, 0.1)), low=-0.8, high=-0.01)
    unclear = replace(OPEN, label="unclear", value=-0.3, low=-0.305, high=0.06)
    found = judge("S1", [Case(("a",), lambda: [against, unclear])])
    assert (found.verdict, found.effect) == (FAILS, -0.45)
    assert found.sentence.startswith("against = -0.45 (95 % -0.8 to -0.01) is on the other side")


def test_p_of_several_parts() -> None:
    """Holding needs all of them, failing one of them."""
    parts = [above(f"{n}", number(value, 0.1)) for n, value in enumerate((-0.3, -0.4))]
    found = judge("S1", [Case(("a",), lambda: parts[:1]), Case(("b",), lambda: parts[1:])])
    np.testing.assert_allclose(found.p, 2 * 2 * stats.t.sf(4, GROUPS - 1), rtol=1e-9)
    holding = judge("S1", [Case(("a",), lambda: [above("x", number(0.3, 0.1)), above("y", number(0.4, 0.1))])])
    np.testing.assert_allclose(holding.p, 2 * stats.t.sf(3, GROUPS - 1), rtol=1e-9)


def test_what_is_missing_is_left_to_the_others_and_told() -> None:
    def missing() -> Sequence[Part]:
        raise Missing("a fine-tuned mae: add `--steps finetune`")

    found = judge("S1", [Case(("a",), lambda: [GOOD]), Case(("b",), missing)])
    assert found.verdict == HOLDS
    assert found.sentence.endswith("Not measured of b: a fine-tuned mae: add `--steps finetune`.")
    finding = Finding("S1", "001", "", "", "", "", "passes", (), lambda evidence: [Case(("b",), missing)])
    nothing = finding.decide(Evidence((), ()))
    assert (nothing.verdict, nothing.needs) == (NOT_MEASURED, "a fine-tuned mae: add `--steps finetune`")


def test_of_several_sides_each_has_to_be_measured() -> None:
    def missing() -> Sequence[Part]:
        raise Missing("a reconstruction CNN")

    def verdict(*cases: Case) -> str:
        finding = Finding("S5", "001", "", "", "", "", "passes", (), lambda evidence: cases)
        found = finding.decide(Evidence((), ()))
        assert found.needs in ("", "a reconstruction CNN")
        return found.verdict

    one = Case(("a",), lambda: [GOOD], side="one")
    assert verdict(one, Case(("b",), missing, side="other")) == NOT_MEASURED
    assert verdict(one, Case(("b",), missing, side="other"), Case(("c",), lambda: [GOOD], side="other")) == HOLDS
    assert verdict(Case(("b",), missing, side="one"), one) == HOLDS


def test_a_case_without_any_part_was_not_measured() -> None:
    """Nothing at all would agree with everything."""
    finding = Finding("S7", "001", "", "", "", "", "passes", (), lambda evidence: [Case(("a", "b"), list)])
    found = finding.decide(Evidence((), ()))
    assert (found.verdict, found.needs) == (NOT_MEASURED, "numbers of a and b that it could be decided by")


def test_notes_are_those_of_the_weakest_case_and_warnings_those_of_all() -> None:
    def case(part: Part) -> Case:
        return Case((part.label,), lambda: [part], lambda: f"Note {part.label}.", lambda: "Mind this.")

    assert judge("S1", [case(GOOD), case(OPEN)]).sentence.endswith("(1 of 2 agree). Note open. Mind this.")


# Many at once


def test_holm_by_hand() -> None:
    """m = 5: 5·0.001, 4·0.01, 3·0.015 = 0.045, 2·0.02 = 0.04 → 0.045, 0.9."""
    np.testing.assert_allclose(holm([0.02, 0.9, 0.001, 0.01, 0.015]), [0.045, 0.9, 0.005, 0.04, 0.045], rtol=1e-12)
    assert holm([0.4, 0.5]) == [0.8, 0.8]
    assert holm([]) == []


def test_how_many_would_hold_by_chance() -> None:
    finding = [
        judge(f"S{n}", [Case(("a",), lambda part=part: [part])]) for n, part in enumerate((GOOD, GOOD, OPEN, BAD))
    ]
    missing = Finding("S9", "001", "", "", "", "", "passes", (), lambda evidence: []).decide(Evidence((), ()))
    verdicts = adjusted([*finding, missing])
    assert math.isnan(verdicts[-1].p_adjusted)
    assert verdicts[0].p_adjusted == pytest.approx(4 * GOOD.p)
    found = by_chance(verdicts)
    assert (found.measured, found.holding, found.failing) == (4, 2, 1)
    assert (found.holding_by_chance, found.failing_by_chance) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (found.holding_adjusted, found.failing_adjusted) == (2, 1)
    assert found.sentence.startswith("4 findings measured: 2 hold, of which chance alone would give at most 0.1")
    assert by_chance([missing]).sentence == "No finding was measured."


def test_an_unknown_finding_is_told() -> None:
    with pytest.raises(InputError, match="There is no finding 'S99'"):
        decide_all(Evidence((), ()), ["S99"])


def test_made_runs_have_the_numbers_and_errors_that_were_chosen() -> None:
    run = made_run(["a", "b"], {"knn.accuracy": lambda at: 0.5 + 0.1 * (at.encoder == "a") + at.depth}, noise=0.02)
    found = run.contrast("knn.accuracy", {"encoder": "a"}, 0.0, site="block.2", feature="cls")
    assert (found.value, found.error) == (pytest.approx(1.1), pytest.approx(0.02))
