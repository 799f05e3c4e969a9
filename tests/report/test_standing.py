"""Headline numbers, conclusions and the map: what a run ends in and a report begins with."""

import io
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.results import cka_result, knn_result, vit_sites
from support.verdicts import finding, verdict

from sightline.cli import ending
from sightline.cli.ending import number_table
from sightline.core import plugins
from sightline.core.results import ABSENT
from sightline.report.figures import KeyNumber, Likeness, key_number, of_encoders
from sightline.report.overview import map_figure
from sightline.report.shell import shown_encoders
from sightline.report.standing import COLUMNS, Column, Standing, classical_mds, conclusions, extremes, stand

NAMES = ("beit", "dino", "hybrid", "mae", "moco_v3", "msn", "simclr", "simmim", "supervised")


def result() -> xr.Dataset:
    """Two encoders of six and of three blocks, and a decoder, which does not count."""
    sites = [*(f"block.{i}" for i in range(6)), "norm", "decoder.block.0"]
    values = np.full((2, 8, 2), np.nan)
    values[0, :, 0] = [0.1, 0.2, 0.3, 0.6, 0.4, 0.5, 0.2, 9]
    values[1, :3, 1] = [0.3, 0.1, 0.2]
    return xr.Dataset(
        {f"score{end}": (("encoder", "site", "feature"), values + shift) for end, shift in ENDS.items()},
        {
            "encoder": ["a", "b"],
            "site": sites,
            "feature": ["cls", "gap"],
            "layer_type": ("site", ["block"] * 6 + ["norm", "block"]),
        },
    )


ENDS = {"": 0.0, "_low": -0.05, "_high": 0.05}


def test_a_number_is_that_of_the_last_block_the_highest_or_the_last_third() -> None:
    words: dict[str, Any] = {"title": "score", "about": "a score"}
    (last,) = key_number(result(), "score", at="last", **words)
    assert last.values == {"a": 0.5, "b": 0.2}  # the feature that the encoder has
    assert last.ends["b"] == pytest.approx((0.15, 0.25))
    assert last.curves["a"] == [0.1, 0.2, 0.3, 0.6, 0.4, 0.5]
    assert last.curves["b"] == [0.3, 0.1, 0.2]
    (highest,) = key_number(result(), "score", at="highest", **words)
    assert highest.values == {"a": 0.6, "b": 0.3}
    (third,) = key_number(result(), "score", at="last third", **words)
    assert third.values == pytest.approx({"a": 0.45, "b": 0.2})  # of its own blocks
    assert key_number(result() * np.nan, "score", at="last", **words) == []


def test_the_last_blocks_are_those_of_the_encoder() -> None:
    """Twelve blocks beside 24, of which one has no number: the place of each block in its encoder counts."""
    values = np.full((3, 24), np.nan)
    values[0], values[1:, :12] = np.arange(24), np.arange(12)
    reason = np.where(np.isfinite(values), "", ABSENT).astype("U40")
    values[2, 11], reason[2, 11] = np.nan, "not finite"
    table = xr.Dataset(
        {"score": (("encoder", "site"), values), "reason": (("encoder", "site"), reason)},
        {"encoder": list("abc"), "site": [f"block.{i}" for i in range(24)], "layer_type": ("site", ["block"] * 24)},
    )
    words: dict[str, Any] = {"title": "score", "about": "score"}
    (third,) = key_number(table, "score", at="last third", **words)
    assert third.values == {"a": 19.5, "b": 9.5, "c": 9.0}  # means of 16…23, of 8…11 and of 8…10
    (last,) = key_number(table, "score", at="last", **words)
    assert last.values == {"a": 23.0, "b": 11.0}


def test_a_number_of_encoders_alone_is_taken_as_it_is() -> None:
    table = xr.Dataset(
        {
            "bias": ("encoder", [0.5, np.nan]),
            "bias_low": ("encoder", [0.4, np.nan]),
            "bias_high": ("encoder", [0.6, 1]),
        },
        {"encoder": ["a", "b"]},
    )
    (found,) = of_encoders(table, "bias", title="bias", about="bias", style=".0%")
    assert (found.values, found.ends) == ({"a": 0.5}, {"a": (0.4, 0.6)})
    assert (found.write("a"), found.write_ends("a"), found.write("b")) == ("50%", "40–60", "")


def test_cka_says_who_is_alike() -> None:
    sites = {name: vit_sites(4) for name in "abc"}
    found = cka_result(sites)
    module: Any = plugins.module_of("cka")
    like = module.likeness(found)
    blocks = [f"block.{i}" for i in range(4)]
    for (a, first), (b, second) in itertools.product(enumerate("abc"), repeat=2):
        pair = found.cka.sel(tokens="all", encoder_a=first, encoder_b=second)
        mean = np.mean([float(pair.sel(site_a=site, site_b=site)) for site in blocks])
        assert like.values[a, b] == pytest.approx(1.0 if a == b else mean)
    (number,) = module.key_numbers(found)
    assert number.values["a"] == pytest.approx(like.values[0, 1:].mean())


def numbers(count: int, **more: Any) -> list[KeyNumber]:
    values = {name: 0.1 + 0.05 * i for i, name in enumerate(NAMES)}
    ends = {name: (value - 0.01, value + 0.01) for name, value in values.items()}
    words: dict[str, Any] = {"style": ".1%", "best": "highest"} | more
    return [
        KeyNumber(f"number {i}", f"number {i}", values, ends, place=1 + i // COLUMNS, **words) for i in range(count)
    ]


def likeness(size: int = 9) -> Likeness:
    rng = np.random.default_rng(0)
    values = rng.uniform(0.2, 0.9, (size, size))
    values = (values + values.T) / 2
    np.fill_diagonal(values, 1)
    return Likeness("CKA", "mean CKA of blocks at the same depth", NAMES[:size], values)


def standing(count: int = COLUMNS) -> Standing:
    columns = [Column("knn", number) for number in numbers(count)]
    return Standing(NAMES, tuple(columns[:COLUMNS]), tuple(columns[COLUMNS:]), likeness())


@pytest.mark.parametrize("width", [80, 100, 200])
def test_nine_encoders_end_in_forty_lines(width: int) -> None:
    text = io.StringIO()
    terminal = Console(file=text, width=width, force_terminal=False)
    terminal.print(number_table(standing(), width))
    for sentence in conclusions(standing()):
        terminal.print(f"• {sentence}")
    lines = text.getvalue().splitlines()
    assert len(lines) <= 38  # and two more: what the mark means, and where the report is
    assert all(len(line) <= width for line in lines)
    for name in NAMES:
        assert any(line.startswith(name) for line in lines)
    assert text.getvalue().count("50.0%*") == COLUMNS  # the best of each column
    assert ("50.0%* 49.0–51.0" in text.getvalue()) == (width == 200)  # beside it, where there is room
    below = sum(line.split() == ["49.0–51.0"] * COLUMNS for line in lines)  # where there is room for it, or not at all
    assert below == {80: 0, 100: 1, 200: 0}[width]
    assert "…" not in text.getvalue()


def test_the_legend_says_what_the_table_has() -> None:
    (plain, *_), tied = (
        numbers(1),
        KeyNumber("tied", "tied", {"a": 0.7, "b": 0.5, "c": 0.7}, style=".1%", best="highest"),
    )
    same = replace(tied, values=dict.fromkeys("abc", 0.5))
    for number, encoders, legend in (
        (plain, NAMES, "* best of its column; dimmed: 95 % intervals"),
        (tied, tuple("abc"), "* best of its column"),
        (same, tuple("abc"), ""),
    ):
        found = Standing(encoders, (Column("knn", number),), (), None)
        assert ending._legend(found, 80) == legend
    text = io.StringIO()
    both = Standing(tuple("abc"), (Column("knn", tied), Column("knn", same)), (), None)
    Console(file=text, width=80, force_terminal=False).print(number_table(both, 80))
    assert [line.split() for line in text.getvalue().splitlines()[1:]] == [
        ["a", "70.0%*", "50.0%"],
        ["b", "50.0%", "50.0%"],
        ["c", "70.0%*", "50.0%"],
    ]
    assert ending._legend(standing(), 80) == "* best of its column; 95 % intervals: in the report"


def test_intervals_are_dimmed_and_the_best_is_marked() -> None:
    text = io.StringIO()
    Console(file=text, width=200, force_terminal=True, color_system="standard").print(number_table(standing(), 200))
    (line,) = (line for line in text.getvalue().splitlines() if "supervised" in line)
    assert "\x1b[1;32m50.0%*\x1b[0m" in line
    assert "\x1b[2;32m 49.0–51.0\x1b[0m" in line


def test_columns_are_chosen_by_their_place_and_shown_by_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = {"late": numbers(2, style=".2f"), "early": [numbers(9)[8], *numbers(7)]}
    topics = {"late": "robust", "early": "alike"}
    modules = {
        name: SimpleNamespace(TOPIC=topics[name], key_numbers=lambda _, n=name: declared[n], likeness=lambda _: None)
        for name in declared
    }
    monkeypatch.setattr(plugins, "module_of", lambda name: modules[name])
    run = type("Results", (dict,), {"names": lambda self: list(self), "request": {}})({"late": 0, "early": 0})
    found = stand(run)
    assert [column.analysis for column in found.columns] == ["early"] * 7 + ["late"]
    assert [(column.analysis, column.number.place) for column in found.others] == [("early", 2), ("late", 1)]


def test_an_analysis_that_cannot_tell_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: xr.Dataset) -> list[KeyNumber]:
        raise KeyError("accuracy")

    modules = {
        "knn": plugins.module_of("knn"),
        "odd": SimpleNamespace(TOPIC="other", key_numbers=fails, likeness=lambda _: None),
    }
    monkeypatch.setattr(plugins, "module_of", lambda name: modules[name])
    run = type("Results", (dict,), {"names": lambda self: list(self), "request": {}})
    with pytest.warns(UserWarning, match="'odd' has no headline numbers: KeyError"):
        found = stand(run({"odd": xr.Dataset(), "knn": knn_result({"a": vit_sites(2)})}))
    assert [column.analysis for column in found.columns] == ["knn"]


def test_conclusions_are_the_strongest_contrasts_whose_intervals_do_not_meet() -> None:
    sure = KeyNumber("rank", "effective rank", {"a": 10.0, "b": 2.0}, {"a": (9, 11), "b": (1, 3)}, style=".1f")
    surer = KeyNumber("NMI", "NMI; more: more", {"a": 0.1, "b": 0.9}, {"a": (0.09, 0.11), "b": (0.89, 0.91)})
    open_ = KeyNumber("bias", "shape bias", {"a": 0.5, "b": 0.6}, {"a": (0.3, 0.7), "b": (0.4, 0.8)})
    drop = KeyNumber(
        "noise", "accuracy lost", {"a": 0.5, "b": 0.1}, {"a": (0.4, 0.6), "b": (0, 0.2)}, style=".0%", best="lowest"
    )
    columns = tuple(Column("x", number) for number in (sure, open_, surer, drop))
    assert conclusions(Standing(("a", "b"), columns, (), None)) == [
        "b has the lowest accuracy lost (10%, 95 % 0–20), a the highest (50%, 95 % 40–60).",
        "b has the highest NMI (0.90, 95 % 0.89–0.91), a the lowest (0.10, 95 % 0.09–0.11).",
        "a has the highest effective rank (10.0, 95 % 9.0–11.0), b the lowest (2.0, 95 % 1.0–3.0).",
    ]


def test_conclusions_are_five_at_most_and_pairs_only_the_extremes() -> None:
    found = conclusions(standing())
    assert len(found) == 5
    most, least = extremes(likeness())
    assert most[2] == likeness().values[~np.eye(9, dtype=bool)].max()
    assert least[2] == likeness().values.min()
    assert found[-1].startswith(f"Most alike are {most[0]} and {most[1]} (CKA {most[2]:.2f}), least alike {least[0]}")


def test_verdicts_come_before_contrasts() -> None:
    judged = [
        verdict("S1", "holds", p=0.01, sentence="MoCo is more like DINO than like MAE"),
        verdict("S2", "fails", p=0.001, sentence="Accuracy of MAE peaks at the end."),
        verdict("S3", "unclear", p=0.2),
        verdict("S4", "not measured", p=np.nan),
    ]
    found = conclusions(standing(), judged, {"S1": finding("S1")})
    assert found[:3] == [
        "Of 3 findings that these encoders can decide, 1 holds, 1 fails and 1 is unclear.",
        "S1 holds: Claim of S1: +0.3 (95 % +0.2 to +0.4).",
        "S2 fails: Accuracy of MAE peaks at the end.",  # whose claim nobody gave
    ]
    assert found[3].startswith("Most alike")


# The map


@given(st.integers(3, 9), st.integers(0, 1000))
def test_points_of_a_plane_are_found_again(count: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(count, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    found, share = classical_mds(distances)
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found[None], axis=-1), distances, atol=1e-6)
    assert share == pytest.approx(1)
    turned, _ = classical_mds(distances)
    np.testing.assert_array_equal(found, turned)  # drawn the same way each time


def test_the_map_is_that_of_principal_components() -> None:
    """Of Euclidean distances, classical scaling is principal component analysis."""
    from sklearn.decomposition import PCA

    points = np.random.default_rng(0).normal(size=(8, 5)) * [5, 3, 1, 1, 1]
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    found, share = classical_mds(distances)
    model = PCA(2)
    expected = model.fit_transform(points)
    np.testing.assert_allclose(abs(found), abs(expected), atol=1e-9)
    assert share == pytest.approx(model.explained_variance_ratio_.sum())


def test_the_map_has_each_encoder_once_and_names_that_fit() -> None:
    shown = shown_encoders(NAMES, dict.fromkeys(NAMES, "joint-embedding"))
    figure = map_figure(likeness(), shown)
    assert figure is not None
    assert list(figure.table.encoder) == list(NAMES)
    assert set(figure.table.kind) == {"joint-embedding"}
    angles = np.arccos(likeness().values)
    np.testing.assert_allclose(figure.table[["x", "y"]], classical_mds(angles)[0])
    assert map_figure(likeness(2), shown) is None
    assert map_figure(None, shown) is None


def test_encoders_of_a_kind_share_a_hue() -> None:
    import colorsys

    kinds = dict(zip(NAMES, "rjhrjmjrs", strict=True))
    shown = shown_encoders(NAMES, kinds)
    assert len({encoder.light for encoder in shown}) == len(NAMES)

    def hue(colour: str) -> float:
        return colorsys.rgb_to_hls(*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0]

    for a, b in itertools.combinations(shown, 2):
        apart = abs(hue(a.light) - hue(b.light))
        assert (min(apart, 1 - apart) < 0.05) == (a.kind == b.kind)
