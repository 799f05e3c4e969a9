"""How a study ends: conclusions first, in few lines."""

import math

import pytest
from support.verdicts import part, verdict

from sightline.cli.study import study_report
from sightline.cli.verdicts import show_verdicts
from sightline.core.folders import begin
from sightline.studies.findings import all_findings
from sightline.studies.findings.contract import Verdict
from sightline.studies.roles import JE, REC, Role
from sightline.studies.study import KIND, Study

IDS = list(all_findings())
PLACES = 2  # lines that say where verdicts and the report are


def decided(**words: int) -> list[Verdict]:
    """So many findings with each verdict, in the order of the findings; those at the end are surest."""
    kinds = [word.replace("_", " ") for word, number in words.items() for _ in range(number)]
    return [
        verdict(id, kind, math.nan if kind == "not measured" else 0.02 - 0.0003 * place, parts=[part("x", 0.3)])
        for place, (id, kind) in enumerate(zip(IDS, kinds, strict=False))
    ]


def told(verdicts: list[Verdict], capsys: pytest.CaptureFixture[str], verbose: bool = False) -> list[str]:
    capsys.readouterr()
    show_verdicts(verdicts, all_findings(), verbose)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "words",
    [
        {"holds": 11, "fails": 11, "unclear": 8, "not_measured": 19},
        {"holds": 25, "fails": 24},
        {"holds": 49},
        {"fails": 20, "unclear": 29},
        {"holds": 15, "fails": 15, "unclear": 10, "not_measured": 9},
        {"unclear": 49},
    ],
)
def test_all_findings_end_in_forty_lines_and_none_is_left_out(words, capsys, monkeypatch) -> None:
    assert sum(words.values()) == len(IDS)
    monkeypatch.setenv("COLUMNS", "80")
    lines = told(decided(**words), capsys)
    assert len(lines) + PLACES <= 40
    said = " ".join(lines).replace(",", " ").split()
    assert [id for id in IDS if said.count(id) != 1] == []


def test_what_holds_and_fails_comes_with_its_claim_and_p(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = told(decided(holds=12, fails=2, unclear=2, not_measured=2), capsys)
    assert lines[0].split() == ["findings", "of", "hold", "fail", "unclear", "not", "measured"]
    assert lines[1].split() == ["Shekhar", "et", "al.", "2022,", "2023", "12", "2", "2", "2"]
    assert lines[2] == "12 hold:"
    assert lines[3].startswith("  S1   Joint-embedding representations resemble each other more than they")
    assert lines[3].rstrip().endswith("p = 0.020")
    assert "…" in lines[3]  # a claim that is too long is cut, never wrapped
    assert lines[15].startswith("2 fail")
    assert [line.split()[0] for line in lines[16:18]] == ["S13", "S14"]
    assert lines[18] == "2 are unclear: S15 (0.016), S16 (0.015)"
    assert lines[19] == "2 are not measured: S17, S18"
    assert lines[20].startswith("16 findings measured: 12 hold")


def test_findings_are_chosen_by_the_roles_of_encoders_with_several_seeds(tmp_path) -> None:
    """Verdicts name all seeds of an encoder by one name."""
    seeds = tuple(Role(f"mae-{seed}", REC, "mae", seed=seed) for seed in range(2))
    begin(tmp_path, KIND)
    judged = [verdict("S1", "holds", parts=[part("x", 0.3, encoders=("mae", "dino"))])]
    made = Study(tmp_path, "papers", (*seeds, Role("dino", JE, "dino")), (), ("S1",))
    page = study_report(made, judged, made.evidence).read_text("utf-8")
    assert 'data-roles="reconstruction ViT|joint-embedding ViT"' in page


def test_of_too_many_the_surest_are_told_and_the_others_named(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = told(decided(holds=20), capsys)
    assert [line.split()[0] for line in lines[3:21]] == IDS[2:20]
    assert lines[21] == "  and S1 (0.020), S2 (0.020)"


def test_all_of_it_has_effects_claims_and_needs(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = "\n".join(told(decided(holds=20, fails=20, not_measured=9), capsys, verbose=True))
    for id in IDS:
        assert all_findings()[id].claim[:60] in text
    assert "+0.2 … +0.4" in text
    assert "needs a fine-tuned MAE" in text
