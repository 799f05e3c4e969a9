"""Whole studies of tiny encoders: what they leave, that they go on, are shared, and can be moved."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from support.references import SMALL
from typer.testing import CliRunner

import sightline as sl
from sightline.cli import app
from sightline.core.errors import InputError
from sightline.core.folders import begin
from sightline.studies import study as module
from sightline.studies.commands import Machine
from sightline.studies.findings import Verdict, all_findings
from sightline.studies.papers import CNNS, VARIED, groups_of
from sightline.studies.planning import undecided
from sightline.studies.roles import Role
from sightline.studies.study import Study, make_study, run_study
from sightline.training.monitor import read_metrics

IMAGES = "shapes?size=32&train=32&val=0&test=16"
STUDY = f"""
images = "{IMAGES}"
[step.mae]
command = "pretrain mae"
[step.mae.set]
size = 32
depth = 2
width = 24
heads = 2
epochs = 1
batch = 16
decoder_depth = 1
decoder_width = 24
decoder_heads = 2
watch = []
[step.tuned]
command = "finetune step:mae"
set = {{ epochs = 1, batch = 16, keep = 2 }}
[step.all]
command = "compare step:mae step:tuned"
only = ["cka", "fourier"]
set = {{ "cka.bootstrap" = 10 }}
[step.path]
command = "compare step:tuned?step=*"
only = ["dynamics"]
[role]
mae = {{ family = "reconstruction", method = "mae" }}
tuned = {{ family = "reconstruction", method = "mae", tuned_from = "mae" }}
"""
QUIET = Machine("cpu", 0, show_progress=False)
LONG = ("passes", "rcdm", "reinit", "detect")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> sl.Study:
    root = tmp_path_factory.mktemp("study")
    (root / "tiny.toml").write_text(STUDY)
    return sl.study(root / "tiny.toml", out=root / "whole", device="cpu", workers=0, show_progress=False)


def weights(study: sl.Study) -> dict[str, str]:
    found = {placed.step.name: placed.folder for placed in study.steps}
    return {name: sl.load_encoder(f"run:{found[name]}").weights for name in ("mae", "tuned")}


def test_a_study_leaves_run_folders_and_verdicts(made):
    assert [placed.step.name for placed in made.steps] == ["mae", "tuned", "all", "path"]
    assert all(placed.done for placed in made.steps)
    assert set(made.runs["all"]) == {"cka", "fourier"}
    assert made.runs["path"]["dynamics"].training.values.tolist() == ["tuned"] * 2
    table = made.evidence.table("cka", "mae", "tuned")
    assert {"mae", "tuned"} <= set(map(str, table.encoder_a.values))
    rows = json.loads((made.path / "verdicts.json").read_text())
    assert {row["finding"] for row in rows} == set(made.findings)
    assert (made.path / "verdicts.csv").read_text().startswith("finding,paper,where,verdict,effect")
    # Nothing in a run folder depends on where the study lies.
    told = (made.steps[2].folder / "run.json").read_text()
    assert str(made.path) not in told
    assert f"run:{made.steps[1].folder.name}" in told


def test_files_of_yours_in_a_study_stay(made, tmp_path):
    shutil.copytree(made.path.parent, tmp_path / "copy")
    out = tmp_path / "copy" / "whole"
    folder = out / "steps" / made.steps[2].folder.name
    about = json.loads((folder / "run.json").read_text())
    assert about.pop("step")["name"] == "all"  # as if it had not been finished
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "results" / "fourier.nc").unlink()
    mine = [path / "notes.txt" for path in (out, *out.rglob("*")) if path.is_dir()]
    for path in mine:
        path.write_text("mine")
    again = sl.study(tmp_path / "copy" / "tiny.toml", out=out, device="cpu", workers=0, show_progress=False)
    assert all(placed.done for placed in again.steps)
    assert set(again.runs["all"]) == {"cka", "fourier"}
    assert {path.read_text() for path in mine} == {"mine"}


def test_no_spreadsheet_computes_with_verdicts(tmp_path):
    begin(tmp_path, "study")
    study = Study(tmp_path, "papers", (), (), ())
    for sentence in ('=HYPERLINK("http://x") without a window', "+1", "-1", "@SUM(A1)"):
        study.save([Verdict("S1", "holds", 0.5, -0.25, 0.75, 0.01, 0.0, sentence)])
        (row,) = csv.DictReader((tmp_path / "verdicts.csv").read_text().splitlines())
        assert row["sentence"] == f"'{sentence}"
        assert (row["finding"], float(row["low"]), row["p_adjusted"]) == ("S1", -0.25, "")
        assert json.loads((tmp_path / "verdicts.json").read_text())[0]["sentence"] == sentence


def test_the_tables_of_a_study_are_those_of_its_steps(made, tmp_path):
    done = CliRunner().invoke(app, ["export", str(made.path), "-o", str(tmp_path / "tables")], catch_exceptions=False)
    assert done.exit_code == 0
    table = pd.read_csv(tmp_path / "tables" / "all" / "cka.csv")
    assert len(table) == int(made.runs["all"]["cka"].cka.notnull().sum())
    assert (tmp_path / "tables" / "path" / "dynamics.csv").is_file()
    with pytest.raises(InputError, match="is a study, not a run"):
        sl.open_run(made.path)


def test_a_study_that_is_there_is_not_run_again(made, monkeypatch):
    monkeypatch.setattr("sightline.studies.running.perform", lambda *a: pytest.fail("a step was run"))
    again = make_study(made.path.parent / "tiny.toml", out=made.path)
    assert again == made
    outcome = run_study(again, machine=QUIET)
    assert (sorted(outcome.done), outcome.failed) == (["all", "mae", "path", "tuned"], {})


def test_torchrun_is_for_comparisons_and_trainings(made, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="not shared by torchrun; start it without, with --jobs"):
        run_study(made, machine=QUIET)


def test_a_copy_elsewhere_is_complete(made, tmp_path, monkeypatch):
    copy = shutil.copytree(made.path, tmp_path / "elsewhere")
    opened = sl.open_study(copy)
    assert all(placed.done for placed in opened.steps)
    assert [verdict.verdict for verdict in opened.verdicts()] == [verdict.verdict for verdict in made.verdicts()]
    monkeypatch.setattr("sightline.studies.running.perform", lambda *a: pytest.fail("a step was run"))
    run_study(make_study(made.path.parent / "tiny.toml", out=copy), machine=QUIET)


def test_two_studies_share_their_steps(made, tmp_path):
    """Another study, with other names, trains nothing that is there already."""
    text = STUDY.replace("[step.mae", "[step.start").replace("step:mae", "step:start")
    text = text.replace('tuned_from = "mae"', 'tuned_from = "start"').replace("\nmae = {", "\nstart = {")
    (tmp_path / "other.toml").write_text(text)
    other = make_study(tmp_path / "other.toml", out=tmp_path / "other", steps_folder=made.path / "steps")
    states = {placed.step.name: placed.done for placed in other.steps}
    assert states["start"]
    assert not states["all"]  # its encoders have other names in the results


def test_one_that_was_stopped_halfway_goes_on(made, tmp_path):
    """A copy without its last steps, and with a fine-tuning that was not finished, ends in the same weights."""
    copy = shutil.copytree(made.path, tmp_path / "half")
    opened = sl.open_study(copy)
    for placed in opened.steps[2:]:
        shutil.rmtree(placed.folder)
    tuned = opened.steps[1]
    about = json.loads((tuned.folder / "run.json").read_text())
    (tuned.folder / "run.json").write_text(json.dumps({k: v for k, v in about.items() if k != "step"}))
    again = make_study(made.path.parent / "tiny.toml", out=copy)
    assert [placed.done for placed in again.steps] == [True, False, False, False]
    assert run_study(again, machine=QUIET).failed == {}
    assert weights(again) == weights(made)
    assert again.runs["all"]["cka"].cka.equals(made.runs["all"]["cka"].cka)


def test_a_folder_of_something_else_is_refused(tmp_path, made):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(sl.InputError, match="Sightline did not write what is in it"):
        make_study(made.path.parent / "tiny.toml", out=tmp_path)
    with pytest.raises(sl.InputError, match=r"is not a study: it has no study\.json"):
        sl.open_study(tmp_path)
    with pytest.raises(
        sl.InputError,
        match=r"There is no study 'paper', nor is it a file that ends in .toml; did you mean 'papers'.*\?$",
    ):
        make_study("paper", out=tmp_path / "x")


ENCODERS = {"a": SMALL, "b": f"{SMALL}&seed=1", "c": f"{SMALL}&seed=2"}
ROLES = {
    "a": Role("a", "joint-embedding", "moco_v3"),
    "b": Role("b", "joint-embedding", "dino"),
    "c": Role("c", "reconstruction", "mae"),
}


def test_findings_of_anyones_encoders(tmp_path):
    """From references and roles to verdicts, on 32 images; all that is not asked for is left out."""
    made = sl.study(
        "papers",
        ENCODERS,
        roles=ROLES,
        images=IMAGES,
        findings=["P3", "P4"],
        settings={"passes": {"limit": 32}},
        out=tmp_path / "mine",
        device="cpu",
        workers=0,
        show_progress=False,
    )
    assert [(placed.step.name, placed.step.options["only"]) for placed in made.steps] == [("passes", ["attention"])]
    verdicts = made.verdicts()
    assert [verdict.finding for verdict in verdicts] == ["P3", "P4"]
    assert {part.encoders for part in verdicts[0].parts} == {("a", "c"), ("b", "c")}
    assert all(verdict.verdict in ("holds", "fails", "unclear") for verdict in verdicts)


def test_verdicts_are_those_of_the_steps_that_the_command_has_just_run(tmp_path):
    """The plan looks at the study before there is anything to look at."""
    out = tmp_path / "mine"
    given = [f"--je=a={SMALL}", f"--je=b={SMALL}&seed=1", f"--rec=c={SMALL}&seed=2", "--findings=P3", "--workers=0"]
    ended = CliRunner().invoke(app, ["study", "papers", *given, f"--images={IMAGES}", "-o", str(out)])
    assert ended.exit_code == 0, ended.output
    (verdict,) = json.loads((out / "verdicts.json").read_text())
    assert verdict["finding"] == "P3"
    assert verdict["verdict"] in ("holds", "fails", "unclear")


def test_the_papers_need_these_steps():
    made = make_study("papers", ENCODERS, roles=ROLES, images=IMAGES, steps=["finetune", "rcdm", "detect"], out="x")
    names = [placed.step.name for placed in made.steps]
    assert {"finetune-a", "finetune-b", "finetune-c", "tuned", "rcdm", "detect-frozen", "detect-tuned"} <= set(names)
    assert "passes" not in names
    roles = {role.name: role.tuned_from for role in made.roles}
    assert roles == {"a": None, "b": None, "c": None, "a-tuned": "a", "b-tuned": "b", "c-tuned": "c"}
    steps = {placed.step.name: placed.step for placed in made.steps}
    assert steps["rcdm"].encoders["c-tuned"] == "step:finetune-c"
    assert steps["mirrored"].encoders == steps["rcdm"].encoders
    assert steps["mirrored"].options["only"] == ["orientation", "transformations"]
    assert not {"orientation", "transformations"} & set(steps["tuned"].options["only"])
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("findings", "trained"),
    [
        (["P15"], {"moco_v3-large", "moco_v3-large-1", "moco_v3-window"}),
        (["G1", "P15"], {"moco_v3-large", "moco_v3-large-1", "moco_v3-window", *CNNS} - {"mae-cnn"}),
        (["S1"], set()),
        (None, {*VARIED, *CNNS}),
    ],
)
def test_only_what_the_chosen_findings_vary_is_pre_trained(findings, trained):
    steps = ["pretrain"]
    made = make_study("papers", ENCODERS, roles=ROLES, images=IMAGES, steps=steps, findings=findings, out="x")
    assert {placed.step.name for placed in made.steps if placed.step.command == "pretrain"} == trained
    assert any(placed.step.command == "compare" for placed in made.steps) is bool(trained)


def test_every_finding_that_pre_trains_has_something_to_train():
    every = {finding for one in [*VARIED.values(), *CNNS.values()] for finding in one.findings.split()}
    assert every - {"S5"} == {name for name in all_findings() if "pretrain" in groups_of(name)}


@pytest.mark.parametrize("name", ["moco_v3-small", "moco_v3-window", "mae-small", *CNNS])
def test_what_a_study_pre_trains_can_be_trained(name, tmp_path):
    one = {**VARIED, **CNNS}[name]
    short = {"epochs": 1, "evaluate_every": 0, "batch": 4, "limit": 4, "warmup_epochs": 0}
    settings = {**one.settings, **short, "log_every": 1}
    sl.pretrain(one.objective, images="shapes?size=48", out=tmp_path / "x", settings=settings)
    (row,) = read_metrics(tmp_path / "x" / "metrics.csv")
    assert math.isfinite(float(row["loss"]))


def test_the_path_of_what_is_given_fine_tuned_is_that_of_its_start():
    encoders = {"a": SMALL, "c": f"{SMALL}&seed=2", "c-ft": f"{SMALL}&seed=3"}
    roles = {"a": ROLES["a"], "c": ROLES["c"], "c-ft": Role("c-ft", "reconstruction", "mae", tuned_from="c")}
    made = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["dynamics"], out="x")
    steps = {placed.step.name: placed.step for placed in made.steps}
    assert set(steps) == {"finetune-a", "finetune-c", "dynamics"}
    paths = {"c-ft": "step:finetune-c?step=*", "a-tuned": "step:finetune-a?step=*"}
    assert steps["dynamics"].encoders == {**paths, "a": SMALL}
    without = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["finetune"], out="x")
    assert [placed.step.name for placed in without.steps] == [
        "finetune-a",
        "tuned",
        "tuned-noise-gaussian",
        "tuned-noise-sign",
    ]


def test_two_that_are_given_fine_tuned_from_one_share_its_path():
    encoders = {"a": SMALL, "c": f"{SMALL}&seed=2", "c-ft": f"{SMALL}&seed=3", "c-ft-1": f"{SMALL}&seed=4"}
    tuned = {name: Role(name, "reconstruction", "mae", tuned_from="c") for name in ("c-ft", "c-ft-1")}
    roles = {"a": ROLES["a"], "c": ROLES["c"], **tuned}
    made = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["dynamics"], out="x")
    assert [placed.step.name for placed in made.steps] == ["finetune-a", "finetune-c", "dynamics"]
    paths = {"c-ft": "step:finetune-c?step=*", "a-tuned": "step:finetune-a?step=*"}
    assert made.steps[2].step.encoders == {**paths, "a": SMALL}


@pytest.mark.parametrize(
    ("steps", "name", "sentence"),
    [
        (
            ["finetune"],
            "a-tuned",
            "An encoder 'a-tuned' is given, but the step 'finetune-a' trains one of this name; "
            "give yours another name, or say what it is: --role a-tuned:tuned_from=a",
        ),
        (
            ["pretrain"],
            "mae-large",
            "An encoder 'mae-large' is given, but the step 'mae-large' trains one of this "
            "name; give yours another name",
        ),
    ],
)
def test_what_is_given_is_not_replaced_by_what_a_step_trains(steps, name, sentence):
    encoders = {"a": SMALL, name: f"{SMALL}&seed=3"}
    roles = {"a": ROLES["a"], name: replace(ROLES["a"], name=name)}
    with pytest.raises(sl.InputError) as error:
        make_study("papers", encoders, roles=roles, images=IMAGES, steps=steps, out="x")
    assert str(error.value) == sentence
    made = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["passes"], out="x")
    assert [role.name for role in made.roles] == ["a", name]


def test_steps_of_encoders_with_signs_that_folders_do_not_have_lie_beside_the_others(tmp_path):
    encoders = {"mine/a?": SMALL, "c": f"{SMALL}&seed=2"}
    roles = {"mine/a?": replace(ROLES["a"], name="mine/a?"), "c": ROLES["c"]}
    made = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["finetune", "dynamics"], out=tmp_path)
    assert {placed.folder.parent for placed in made.steps} == {tmp_path / "steps"}
    module._begin(made)
    assert [placed.folder for placed in sl.open_study(tmp_path).steps] == [placed.folder for placed in made.steps]


def test_no_fine_tuning_is_asked_for_where_a_fine_tuned_encoder_is_given():
    encoders = {"a": SMALL, "c": f"{SMALL}&seed=2", "c-ft": f"{SMALL}&seed=3"}
    roles = {"a": ROLES["a"], "c": ROLES["c"], "c-ft": Role("c-ft", "reconstruction", "mae", tuned_from="c")}
    given = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["passes"], out="x")
    assert "S15" not in undecided(given)
    assert "dynamics" in undecided(given)["S17"]
    alone = {name: encoders[name] for name in ("a", "c")}
    without = make_study(
        "papers", alone, roles={name: roles[name] for name in alone}, images=IMAGES, steps=["passes"], out="x"
    )
    assert undecided(without)["S15"] == "a fine-tuned c: add `--steps finetune`"
    assert undecided(without)["P1"] == "a fine-tuned a: add `--steps finetune`"
    assert undecided(without)["S5"] == "a joint-embedding CNN: add `--cnn-je NAME=REFERENCE` or `--steps pretrain`"
    tuned = make_study(
        "papers",
        alone,
        roles={name: roles[name] for name in alone},
        images=IMAGES,
        steps=["passes", "finetune"],
        out="x",
    )
    assert "P1" not in undecided(tuned)
    pictures = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["rcdm"], out="x")
    assert not {"S11", "S21"} & set(undecided(pictures))
    assert {"S15", "S17"} <= set(undecided(pictures))  # nothing measures them


def test_a_dino_without_multi_crop_beside_one_with_it_is_for_detectors():
    """S12 alone asks for it; pictures and re-initialised blocks take hours, and noise most of the forward passes."""
    encoders = {"a": SMALL, "b": f"{SMALL}&seed=1", "c": f"{SMALL}&seed=2"}
    roles = {"a": ROLES["a"], "b": replace(ROLES["a"], name="b", multicrop=False), "c": ROLES["c"]}
    for other, taken in ((True, ["a", "c"]), (None, ["a", "b", "c"])):
        roles["a"] = replace(roles["a"], multicrop=other)
        made = make_study("papers", encoders, roles=roles, images=IMAGES, steps=LONG, out="x")
        steps = {placed.step.name: list(placed.step.encoders) for placed in made.steps}
        assert steps["rcdm"] == steps["reinit"] == steps["mirrored"] == taken
        assert steps["passes-noise-gaussian"] == steps["passes-noise-sign"] == taken
        assert steps["detect-frozen"] == steps["passes"] == ["a", "b", "c"]


def test_cue_conflict_images_are_for_the_pass_that_measures_shape_bias():
    conflict = "shapes:conflict?size=32&test=16"
    encoders = {name: ENCODERS[name] for name in ("a", "c")}
    roles = {name: ROLES[name] for name in encoders}
    made = make_study(
        "papers",
        encoders,
        roles=roles,
        images=IMAGES,
        further={"conflict": conflict},
        steps=["passes"],
        findings=["P9", "P10"],
        out="x",
    )
    steps = {placed.step.name: placed.step.options.get("further") for placed in made.steps}
    assert steps == {"passes": {"conflict": conflict}, "passes-noise-gaussian": None, "passes-noise-sign": None}
    without = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["passes"], findings=["P9"], out="x")
    assert without.steps[0].key != made.steps[0].key
    (verdict,) = without.verdicts()  # nothing was run
    assert verdict.needs == (
        "the analysis shape_bias of a: add `--steps passes` and, if your images are not the embedded ones, "
        "`--further conflict=IMAGES`"
    )


def test_a_limit_is_that_of_every_pass_but_of_the_one_that_varies_it():
    given = {name: ENCODERS[name] for name in ("a", "c")}
    roles = {name: ROLES[name] for name in given}
    steps = ["passes", "minibatch", "finetune"]
    made = make_study("papers", given, roles=roles, images=IMAGES, limit=8, steps=steps, out="x")
    limits = {placed.step.name: placed.step.options.get("limit") for placed in made.steps}
    assert limits["passes"] == limits["passes-noise-sign"] == limits["tuned"] == 8
    assert limits["minibatch"] == 0
    assert limits["finetune-c"] is None
    changed = {"passes": {"limit": 4}}
    made = make_study("papers", given, roles=roles, images=IMAGES, limit=8, steps=steps, settings=changed, out="x")
    limits = {placed.step.name: placed.step.options.get("limit") for placed in made.steps}
    assert (limits["passes"], limits["tuned"]) == (4, 8)


def test_sizes_are_known_where_a_method_has_several():
    larger = SMALL.replace("embed_dim=48", "embed_dim=96")
    encoders = {"a": SMALL, "b": larger, "b-ft": f"{larger}&seed=1", "c": f"{SMALL}&seed=2"}
    roles = {"a": ROLES["a"], "b": replace(ROLES["a"], name="b"), "c": ROLES["c"]}
    roles["b-ft"] = replace(roles["b"], name="b-ft", tuned_from="b")
    made = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["passes"], out="x")
    sizes = {role.name: role.size for role in made.roles}
    weights = {name: sl.load_encoder(encoders[name]).module.parameters() for name in ("a", "b")}
    own = {name: round(sum(one.numel() for one in of) / 1e6, 2) for name, of in weights.items()}
    assert own["b"] > 2 * own["a"]
    assert sizes == {"a": own["a"], "b": own["b"], "b-ft": own["b"], "c": own["a"]}
    roles["b"] = replace(roles["b"], size=7.0)  # what the user says stands
    given = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["passes"], out="x")
    assert {role.name: role.size for role in given.roles} == {**sizes, "b": 7.0, "b-ft": 7.0}
    alike = {name: encoders[name] for name in ("a", "c")}
    without = make_study(
        "papers", alike, roles={name: roles[name] for name in alike}, images=IMAGES, steps=["passes"], out="x"
    )
    assert {role.size for role in without.roles} == {None}


def test_passes_measure_what_their_findings_ask_for():
    """Nothing for findings that other steps decide, no token view and no noise that none of them looks at."""
    encoders = {**ENCODERS, "other": f"{SMALL}&seed=7"}
    roles = {**ROLES, "other": Role("other", "supervised")}
    made = make_study("papers", encoders, roles=roles, images=IMAGES, steps=["passes"], out="x")
    steps = {placed.step.name: placed.step for placed in made.steps}
    gaussian, sign = "passes-noise-gaussian", "passes-noise-sign"
    assert list(steps) == ["passes", gaussian, sign]
    asked = {name for finding in all_findings().values() if "passes" in finding.step for name in finding.analyses}
    assert set(steps["passes"].options["only"]) == asked - {"invariance", "noise"}  # of CNNs; of pairs
    probes = {"kinds": ["linear", "nonlinear", "multilayer"], "more_on": "first"}
    assert steps["passes"].options["set"] == {"cka": {"tokens": ["all"]}, "probes": probes}
    high = [0.6, 0.7, 0.8, 0.9]
    assert steps[gaussian].options["set"] == {"noise": {"frequencies": [0.1, 0.3, 0.5, *high]}}
    assert steps[sign].options["set"] == {"noise": {"kind": "sign", "frequencies": high}}
    assert list(steps["passes"].encoders) == [*ENCODERS, "other"]
    assert list(steps[gaussian].encoders) == list(steps[sign].encoders) == list(ENCODERS)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"encoders": {"a": SMALL}, "roles": None}, "It is not known what a="),
        ({"encoders": {"a": "zoo:mee"}, "roles": None}, "The zoo has no encoder 'mee'; did you mean 'mae'?"),
        ({"roles": {**ROLES, "d": replace(ROLES["a"], name="d")}}, "There is no encoder 'd' to have a role"),
        ({"steps": ["finetunes"]}, "There are no steps 'finetunes'; did you mean 'finetune'"),
        ({"findings": ["S77"]}, "There is no finding 'S77'"),
        ({"settings": {"passes": {"limt": 8}}}, "takes the setting passes.limt; did you mean 'limit'?"),
        ({"settings": {"finetune": {"epochs": 1}}}, "No step of this study takes the setting finetune.epochs"),
        ({"images": "folder:/nowhere"}, "/nowhere"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path, change, sentence):
    given = {"encoders": ENCODERS, "roles": ROLES, "images": IMAGES, "findings": ["P3"], "out": tmp_path / "x"}
    with pytest.raises(sl.InputError) as error:
        make_study("papers", **{**given, **change})
    assert sentence in str(error.value)
    assert not (tmp_path / "x").exists()


def test_a_failed_step_is_told_at_the_end(made, tmp_path, monkeypatch):
    monkeypatch.setattr(
        module, "run_steps", lambda steps, executor, tell: type("O", (), {"failed": {"all": "no room"}})()
    )
    with pytest.raises(sl.InputError, match="step all failed: no room"):
        sl.study(made.path.parent / "tiny.toml", out=tmp_path / "x")
    assert (tmp_path / "x" / "verdicts.csv").is_file()


@pytest.mark.parametrize("option", ["--steps", "--findings"])
def test_an_option_that_names_nothing_is_not_all(option, tmp_path):
    ended = CliRunner().invoke(app, ["study", "papers", option, " ,", "-o", str(tmp_path / "x")])
    assert str(ended.exception) == f"{option} ' ,' names nothing; leave it out or write {option} A,B"
