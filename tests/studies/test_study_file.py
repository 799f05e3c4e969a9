"""Studies as files: matrices, roles, and one sentence for each that cannot be."""

import pytest

import sightline as sl
from sightline.studies.commands import COMMANDS, OPTION_KINDS, command_of
from sightline.studies.study_file import read_study

pytestmark = pytest.mark.unit

STUDY = """
title = "MAE before and after"
images = "shapes?size=32"
[matrix]
seed = [0, 1]
[step.mae]
command = "pretrain mae"
set = { seed = "{seed}", depth = 2 }
[step.tuned]
command = "finetune step:mae"
set = { seed = "{seed}", keep = 2 }
[step.cka]
command = "compare step:mae step:tuned moco=zoo:moco_v3"
only = ["cka", "knn"]
set = { "knn.k" = 10, cka = { bootstrap = 10 } }
[step.one]
command = "compare step:mae-1 zoo:mae"
images = "shapes?size=64"
[step.path]
command = "compare step:tuned?step=*"
only = ["dynamics"]
[role]
mae = { family = "reconstruction", method = "mae", seed = "{seed}" }
tuned = { family = "reconstruction", method = "mae", seed = "{seed}", tuned_from = "mae" }
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def test_a_step_that_mentions_an_axis_becomes_one_for_each_value(write):
    design = read_study(write(STUDY))
    steps = {step.name: step for step in design.steps}
    assert set(steps) == {"mae-0", "mae-1", "tuned-0", "tuned-1", "cka", "one", "path"}
    assert steps["mae-1"].options == {"objective": "mae", "set": {"seed": 1, "depth": 2}}
    assert steps["tuned-1"].encoders == {"mae-1": "step:mae-1"}  # of the same seed
    assert steps["cka"].encoders == {
        "mae-0": "step:mae-0",
        "mae-1": "step:mae-1",
        "tuned-0": "step:tuned-0",
        "tuned-1": "step:tuned-1",
        "moco": "zoo:moco_v3",
    }
    assert steps["cka"].options["set"] == {"knn": {"k": 10}, "cka": {"bootstrap": 10}}
    assert steps["one"].encoders == {"mae-1": "step:mae-1", "mae": "zoo:mae"}
    assert (steps["one"].images, steps["cka"].images) == ("shapes?size=64", "shapes?size=32")
    assert steps["path"].encoders == {"tuned-0": "step:tuned-0?step=*", "tuned-1": "step:tuned-1?step=*"}
    assert steps["path"].options == {"only": ["dynamics"]}
    order = [step.name for step in design.steps]
    assert order.index("mae-0") < order.index("tuned-0") < order.index("cka")


def test_roles_are_given_per_seed_and_known_of_the_zoo(write):
    roles = {role.name: role for role in read_study(write(STUDY)).roles}
    assert (roles["mae-1"].family, roles["mae-1"].seed) == ("reconstruction", 1)
    assert roles["tuned-0"].tuned_from == "mae-0"
    assert (roles["moco"].family, roles["moco"].method) == ("joint-embedding", "moco_v3")


def test_some_steps_are_chosen_with_what_they_need(write):
    assert [step.name for step in read_study(write(STUDY), steps=["tuned-1"]).steps] == ["mae-1", "tuned-1"]
    assert {step.name for step in read_study(write(STUDY), steps=["tuned"]).steps} == {
        "mae-0",
        "mae-1",
        "tuned-0",
        "tuned-1",
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[step.a", "Cannot read the study"),
        ("titel = 'x'", "has no 'titel'; did you mean 'title'"),
        ("title = 'x'", "has no steps"),
        ("[step.a]\nimages = 'shapes'", "'a' has no command, such as"),
        ("[step.a]\ncommand = 'compair zoo:mae'", "'a' has no command 'compair'; did you mean 'compare'"),
        ("[step.a]\ncommand = 'pretrain'", "write pretrain and one objective"),
        ("[step.a]\ncommand = 'compare step:b zoo:mae'", "'a' needs a step 'b', which there is not"),
        ("[step.a]\ncommand = 'finetune step:b'\n[step.b]\ncommand = 'finetune step:a'", "need each other in a circle"),
        ("[matrix]\nseed = 3\n[step.a]\ncommand = 'compare zoo:mae'", "matrix.seed is 3, but a list"),
        ("[step.a]\ncommand = 'compare zoo:mae'\n[role]\nmae = { family = 'masked' }", "'mae' cannot be 'masked'"),
        (
            "[step.a]\ncommand = 'compare zoo:mae'\n[role]\nmae = { famly = 'x' }",
            "has no 'famly'; did you mean 'family'",
        ),
        ("[step.a]\ncommand = 'compare zoo:mae'\n[role]\nmea = { family = 'hybrid' }", "'mea' belongs to no encoder"),
        ("[step.a]\ncommand = 'compare zoo:mae zoo:mae'", "has two encoders 'mae'"),
        ("findings = ['S99']\n[step.a]\ncommand = 'compare zoo:mae'", "There is no finding 'S99'"),
        ("[step.'a b']\ncommand = 'compare zoo:mae'", "a name that cannot be that of a folder"),
        ("matrix = 3\n[step.a]\ncommand = 'compare zoo:mae'", "matrix of "),
        ("matrix.x = [[1]]\n[step.a]\ncommand = 'compare zoo:mae'", "matrix.x is [[1]], but a list of values"),
        ("step = 'a'", "step of "),
        ("role = 3\n[step.a]\ncommand = 'compare zoo:mae'", "role of "),
        ("findings = 'S1'\n[step.a]\ncommand = 'compare zoo:mae'", "but a list of names"),
        ("findings = [['S1']]\n[step.a]\ncommand = 'compare zoo:mae'", "has ['S1'], but a list of names"),
        ("[step.a]\ncommand = 'compare zoo:mae'\nimages = 3", "The images of the step 'a' are 3; write a reference"),
        ("[step.a]\ncommand = 'compare zoo:mae'\nset = 3", "The step 'a' sets 3; write a table"),
        ("[step.a]\ncommand = 'finetune zoo:mae'\nset = ['x']", "The step 'a' sets ['x']; write a table"),
        ("[step.a]\ncommand = 'compare \"zoo:mae'", "of the step 'a' cannot be read: No closing quotation"),
        ("[step.a]\ncommand = 'compare zoo:mae'\nlimit = 2020-01-01", "no dates and times, but 2020-01-01 is one"),
        (
            "[step.a]\ncommand = 'compare zoo:mae'\n[role]\nmae = { family = 'hybrid', tuned_from = 3 }",
            "'mae' is tuned from 3; write the name",
        ),
        (
            "".join(f"matrix.a{i} = [{'0, ' * 10}]\n" for i in range(9))
            + f"[step.a]\ncommand = 'compare zoo:mae'\nset.x = '{''.join(f'{{a{i}}}' for i in range(9))}'",
            "'a' stands for 1000000000 points of the matrix; at most 10000",
        ),
        ("a = " + "[" * 5000, "it is nested too deeply"),
    ],
)
def test_what_cannot_be_is_one_sentence(write, text, sentence):
    with pytest.raises(sl.InputError) as error:
        read_study(write(text))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(sl.InputError, match="There is no study"):
        read_study(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("only = true", "The step 'a': only is True, but a list of names"),
        ("only = [true]", "The step 'a': only is [True], but a list of names"),
        ("only = 'knn'", "The step 'a': only is 'knn', but a list of names"),
        ("only = ['knm']", "There is no analysis 'knm'; did you mean 'knn'"),
        ("only = ['knn']\nset.knn = 3", "The step 'a' sets knn to 3; write knn = { key = value }"),
        ("limit = 'all'", "The step 'a': limit is 'all', but a whole number is expected"),
        ("lenient = 1", "The step 'a': lenient is 1, but true or false is expected"),
        ("further.conflict = 3", "The step 'a': further is {'conflict': 3}, but a table of texts is expected"),
    ],
)
def test_options_of_another_kind(write, options, sentence):
    (step,) = read_study(write(f"[step.a]\ncommand = 'compare zoo:mae'\n{options}")).steps
    with pytest.raises(sl.InputError) as error:
        command_of(step).decisive(step)
    assert sentence in str(error.value)


def test_every_option_of_every_command_has_a_kind():
    for name, command in COMMANDS.items():
        for key, default in command.options.items():
            assert default is None or OPTION_KINDS[key].holds(default), (name, key)
