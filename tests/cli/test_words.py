"""What the words of commands mean where they could mean two things, and one sentence where they mean nothing."""

from pathlib import Path

import pytest
from support.evidence import made_run
from typer.testing import CliRunner

from sightline.cli import app
from sightline.cli.contrast import _for_both, parse_choice
from sightline.cli.listing import matching_encoders
from sightline.core.errors import InputError
from sightline.studies import study


def test_a_range_has_two_numbers() -> None:
    assert parse_choice("frequency=0.5..") == {"frequency": slice(0.5, None)}
    with pytest.raises(InputError) as error:
        parse_choice("frequency=0.5..1.2.3")
    assert str(error.value) == (
        "'frequency=0.5..1.2.3' is no range, since '1.2.3' is no number; write frequency=0.5..1"
    )


@pytest.mark.parametrize("word", ["method", "seed", "name", "confidence"])
def test_options_of_the_command_choose_no_numbers(word: str) -> None:
    run = made_run(["a", "b"], {"shape_bias.overall": 0.5})
    with pytest.raises(InputError) as error:
        _for_both(f"{word}=mae", run, "shape_bias.overall")
    assert str(error.value) == (
        f"--where {word}=mae: nothing can be chosen by '{word}'; shape_bias.overall can be chosen by encoder (a, b)"
    )
    assert _for_both("encoder=a", run, "shape_bias.overall") == {"encoder": "a"}


def test_encoders_of_one_source_are_listed() -> None:
    assert "zoo:mae" in matching_encoders("zoo:mae").splitlines()
    assert {line.partition(":")[0] for line in matching_encoders("zoo:mae").splitlines()} == {"zoo"}
    assert {line.partition(":")[0] for line in matching_encoders("mae").splitlines()} > {"zoo"}
    with pytest.raises(InputError, match=r"There is no source 'zo'; did you mean 'zoo'\?"):
        matching_encoders("zo:mae")


@pytest.mark.parametrize(("words", "places"), [(["--jobs", "1"], 1), ([], 2), (["--jobs", "3"], 3)])
def test_a_number_of_jobs_is_kept_on_a_cluster(
    words: list[str], places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, the cluster gets all steps at once."""
    given: list[int] = []

    def queue(name: str, machine: object, places: int, *others: object) -> None:
        given.append(places)
        raise InputError("enough")

    monkeypatch.setattr(study, "on_cluster", queue)
    steps = "".join(f'[step.s{n}]\ncommand = "pretrain mae"\nset = {{ epochs = {n + 1} }}\n' for n in range(2))
    (tmp_path / "two.toml").write_text(f'images = "shapes?size=32&train=32&val=0&test=16"\n{steps}')
    monkeypatch.setattr("sightline.cli.study._show_plan", lambda *_: None)
    CliRunner().invoke(app, ["study", str(tmp_path / "two.toml"), "--on", "slurm", *words, "-o", str(tmp_path / "x")])
    assert given == [places]
