"""A command is what its function's signature says, and the same thing has the same name in every one, and in Python."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from support.references import SMALL

import sightline as sl
from sightline import cli
from sightline.api import Encoders
from sightline.cli import command as module
from sightline.cli.application import run
from sightline.core.errors import InputError
from sightline.core.stopping import Stopped

COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
Called = dict[str, Any]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """What the function was called with, whose command is `sightline draw`."""
    app, found = typer.Typer(), Called()

    @app.callback()
    def _common() -> None:
        """Several commands."""

    monkeypatch.setattr(module, "app", app)
    monkeypatch.setattr("sightline.cli.application.app", app)

    def show(result: str, *, loud: Annotated[bool, "Say more."] = False) -> None:
        found.update(result=result, loud=loud)

    @module.command("Pictures", then=show)
    def draw(
        what: Annotated[str, "What to draw."],
        images: Annotated[str | None, "Images."] = None,
        out: Annotated[str | Path, "Folder."] = "runs/draw",
        *,
        size: Annotated[int | None, "Pixels."] = None,
        share: Annotated[float, "A share."] = 0.5,
        form: Annotated[Literal["round", "square"], "round or square."] = "round",
        colours: Annotated[Sequence[str], "Colours."] = ("red", "blue"),
        counts: Annotated[Sequence[int] | None, "Numbers."] = None,
        role: Annotated[list[str] | None, "Roles."] = None,
        settings: Annotated[Mapping[str, Any] | None, "Settings."] = None,
        names: Annotated[Mapping[str, str] | None, "Names."] = None,
        steps_folder: Annotated[Path | None, "Another folder."] = None,
        overwrite: Annotated[bool, "Start over."] = False,
        show_progress: Annotated[bool, "Show progress."] = True,
    ) -> str:
        """Draw something. `sightline draw cat`."""
        found.update({key: value for key, value in locals().items() if key != "found"})
        if what == "stop":
            raise Stopped(15, "Stopped and saved after step 3 of 5")
        if what == "interrupt":
            raise KeyboardInterrupt
        return f"drawn {what}"

    return found


def test_defaults_are_those_of_the_function(called: Called) -> None:
    run(["draw", "cat"])
    assert called == {
        "what": "cat",
        "images": None,
        "out": Path("runs/draw"),
        "size": None,
        "share": 0.5,
        "form": "round",
        "colours": ["red", "blue"],
        "counts": None,
        "role": None,
        "settings": None,
        "names": None,
        "steps_folder": None,
        "overwrite": False,
        "show_progress": True,
        "result": "drawn cat",
        "loud": False,
    }


def test_words_are_values_of_the_types_of_the_function(called: Called) -> None:
    words = "draw cat --images shapes -o x --size 12 --share 1e-3 --form square --colours red,green --colours blue"
    words += " --counts 1,2 --role a:b=1,c=2 --role d --set lr=1e-3 --set knn.k=3 --names a=zoo:x?y=1 --names b=2"
    run([*words.split(), "--steps-folder", "y", "--overwrite", "--no-show-progress", "--loud"])
    assert called == {
        "what": "cat",
        "images": "shapes",
        "out": Path("x"),
        "size": 12,
        "share": 0.001,
        "form": "square",
        "colours": ["red", "green", "blue"],
        "counts": [1, 2],
        "role": ["a:b=1,c=2", "d"],
        "settings": {"lr": 0.001, "knn": {"k": 3}},
        "names": {"a": "zoo:x?y=1", "b": "2"},
        "steps_folder": Path("y"),
        "overwrite": True,
        "show_progress": False,
        "result": "drawn cat",
        "loud": True,
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("draww", "There is no command 'draww'; did you mean 'draw'?"),
        (
            "draw cat --colour red",
            "`sightline draw` has no option '--colour'; did you mean '--colours' or '--loud' or '--counts'?",
        ),
        ("draw", "Missing argument 'WHAT'; see `sightline draw --help`"),
        ("draw cat --size", "Option '--size' requires an argument; see `sightline --help`"),
        ("draw cat --size many", "--size is 'many', but a whole number is expected"),
        ("draw cat --share half", "--share is 'half', but a number is expected"),
        ("draw cat --form rund", "--form is 'rund'; did you mean 'round'?"),
        ("draw cat --counts 1;2", "--counts is '1;2', but a whole number is expected, such as --counts 1,2,4"),
        ("draw cat --colours ,", "--colours ',' names nothing; leave it out or write --colours A,B"),
        ("draw cat --set lr", "--set 'lr': settings are written key=value, such as --set lr=1e-3"),
        ("draw cat --set size=3", "--set size=…: size is an argument of its own; write --size"),
        ("draw cat --names a", "--names a: write name=value"),
        ("draw cat --names a=1 --names a=2", "--names a=2: a is given twice; give one of them another name"),
    ],
)
def test_a_wrong_word_is_one_sentence(words: str, sentence: str, called: Called) -> None:
    with pytest.raises(InputError) as error:
        run(words.split())
    assert str(error.value) == sentence
    assert not called


def test_what_stops_says_how_to_go_on(called: Called, capsys: pytest.CaptureFixture[str]) -> None:
    for word, status in (("stop", 128 + 15), ("interrupt", 130)):
        with pytest.raises(SystemExit) as stop:
            run(["draw", word])
        assert stop.value.code == status
        out, err = capsys.readouterr()
        assert "run the same command again to continue" in out + err
        assert "--resume" not in out + err
        assert "result" not in called


def test_encoders_are_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Mapping[str, Any]] = []
    app = typer.Typer()
    app.callback()(lambda: None)
    monkeypatch.setattr(module, "app", app)
    monkeypatch.setattr("sightline.cli.application.app", app)

    @module.command("Measure")
    def look(encoders: Encoders) -> None:
        """Look."""
        found.append(encoders)

    run(["look", f"mine={SMALL}", SMALL])
    assert list(found[0]) == ["mine", "vit_tiny_patch16_224"]
    assert isinstance(found[0]["mine"], sl.Encoder)


# ---------------------------------------------------------------------------------------------------------------
# Names


def test_there_are_seventeen_commands() -> None:
    assert len(COMMANDS) == 17


def test_the_same_name_takes_the_same_words_in_every_command() -> None:
    seen: dict[str, tuple[str, Any]] = {}
    for command, about in COMMANDS.items():
        for parameter in about.params:
            form = (tuple(parameter.opts[:1]), parameter.metavar) if parameter.opts[0].startswith("-") else None
            if form is not None and parameter.name != "help":
                first, before = seen.setdefault(parameter.name, (command, form))
                assert form == before, f"--{parameter.name} of {command} and {first}"
    assert {"images", "out", "limit", "batch", "seed", "precision", "device", "overwrite"} <= set(seen)


OWN = {  # of a command alone, and of its function alone
    "compare": ({"settings", "verbose"}, {"cache", "lenient"}),
    "imagine": ({"out"}, set()),
    "pretrain": (set(), set()),
    "finetune": (set(), set()),
    **dict.fromkeys(("reinit", "detect", "segment", "rcdm"), ({"verbose"}, set())),
}


@pytest.mark.parametrize("name", OWN)
def test_a_command_has_the_names_of_its_function(name: str) -> None:
    function = inspect.signature(getattr(sl, "analyze" if name == "compare" else name)).parameters
    options = {parameter.name for parameter in COMMANDS[name].params} - {"help"}
    assert (options - set(function), set(function) - options) == OWN[name]


@pytest.mark.parametrize("name", ["pretrain", "finetune", "reinit", "detect", "segment", "rcdm"])
def test_limit_batch_seed_and_precision_are_settings_of_the_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie over those of `settings`, and what is not given is not there."""
    home = {"pretrain": "training.pretrain", "finetune": "transfer.finetune", "detect": "studies.detection"}
    where = home.get(name, f"studies.{'segmenters' if name == 'segment' else name}")
    given: list[Any] = []
    monkeypatch.setattr(f"sightline.{where}.{name}", lambda *words, **more: given.append(words))
    train = getattr(sl, name)
    train("mae", seed=3, limit=0, settings={"seed": 1, "epochs": 2}, device="cpu", overwrite=True)
    train("mae", "shapes", "x", recipe="r", batch=8, precision="bf16", workers=0, show_progress=False)
    assert [words[:4] for words in given] == [("mae", None, f"runs/{name}", None), ("mae", "shapes", "x", "r")]
    assert [words[4] for words in given] == [{"seed": 3, "epochs": 2, "limit": 0}, {"batch": 8, "precision": "bf16"}]
    first, second = (words[5] for words in given)
    assert (first.device, first.overwrite, first.workers, first.show_progress) == ("cpu", True, None, True)
    assert (second.device, second.overwrite, second.workers, second.show_progress) == ("auto", False, 0, False)
