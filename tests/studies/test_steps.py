"""The order of steps, and what cannot be."""

import pytest

import sightline as sl
from sightline.studies.steps import Step, in_order, with_needed

pytestmark = pytest.mark.unit


def step(name: str, *needs: str) -> Step:
    return Step(name, "compare", {need: f"step:{need}?step=1" for need in needs})


def test_each_step_comes_after_those_it_needs():
    steps = [step("c", "b", "a"), step("b", "a"), step("a")]
    assert [one.name for one in in_order(steps)] == ["a", "b", "c"]
    assert steps[0].needs == ("b", "a")


def test_a_circle_is_named():
    with pytest.raises(sl.InputError, match=r"steps a → b → c → a|steps b → c → a → b|steps c → a → b → c"):
        in_order([step("a", "b"), step("b", "c"), step("c", "a")])


def test_a_missing_step_is_named():
    with pytest.raises(sl.InputError, match=r"'tuned' needs a step 'mea', which there is not; did you mean 'mae'"):
        in_order([step("mae"), step("tuned", "mea")])


def test_two_steps_of_one_name_are_refused():
    with pytest.raises(sl.InputError, match="Two steps are called 'a'"):
        in_order([step("a"), step("a")])


def test_chosen_steps_bring_what_they_need():
    every = [step("a"), step("b", "a"), step("c", "b"), step("d")]
    assert [one.name for one in with_needed([every[2]], every)] == ["a", "b", "c"]
