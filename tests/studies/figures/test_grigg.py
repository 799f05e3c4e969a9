"""Figures of Grigg et al. (004) show the numbers of the results, in the paper's arrangement."""

import numpy as np
import pytest
from support.figures import BLOCKS, drawn_numbers, frames

from sightline.studies.evidence import Evidence
from sightline.studies.figures import draw

EVERY = range(BLOCKS)
ODD, EVEN = ([f"block.{n}{end}" for n in EVERY] for end in (".residual", ""))
ALL = [site for pair in zip(ODD, EVEN, strict=True) for site in pair]


@pytest.mark.parametrize(
    ("name", "who", "order"),
    [
        ("004 Fig 1", ("simclr 0", "simclr 1"), (ALL, ODD, EVEN)),
        ("004 Fig 4", ("resnet 0", "resnet 1"), (ALL, EVEN, ODD)),
    ],
)
def test_two_seeds(evidence: Evidence, name: str, who: tuple[str, str], order: tuple[list[str], ...]) -> None:
    cka = evidence.table("cka", *who).cka.sel(tokens="all", encoder_a=who[0], encoder_b=who[1])
    for table, sites in zip(frames(draw(name, evidence).chart), order, strict=True):
        found = table.pivot_table(index="row", columns="column", values="value").to_numpy()
        np.testing.assert_array_equal(found, cka.sel(site_a=sites, site_b=sites))


def test_a_single_seed_is_compared_with_itself(evidence: Evidence) -> None:
    roles = tuple(role for role in evidence.roles if role.name != "simclr 1")
    figure = draw("004 Fig 1b", Evidence(roles, evidence.runs))
    assert set(figure.table.encoder_b) == {"simclr 0"}
    assert "one seed of simclr 0 only" in figure.caption


def test_across_methods_with_the_closest_layer_marked(evidence: Evidence) -> None:
    cka = evidence.table("cka", "simclr 0").cka.sel(tokens="all", encoder_a="simclr 0", encoder_b="resnet 0")
    odd, even, _ = frames(draw("004 Fig 2", evidence).chart)
    for table, sites in ((odd, ODD), (even, EVEN)):
        found = table.pivot_table(index="row", columns="column", values="value").to_numpy()
        np.testing.assert_array_equal(found, cka.sel(site_a=sites, site_b=sites))
    assert "best" not in odd
    best = even[even.best].sort_values("row").column.tolist()
    assert best == cka.sel(site_a=EVEN, site_b=EVEN).argmax("site_b").values.tolist()


def test_diagonal_and_maximum(evidence: Evidence) -> None:
    figure = draw("004 Fig 2 right", evidence)
    cka = evidence.table("cka", "simclr 0").cka.sel(tokens="all", encoder_a="simclr 0", encoder_b="resnet 0")
    cells = cka.sel(site_a=EVEN, site_b=EVEN).values
    for n in EVERY:
        assert drawn_numbers(figure.chart, series="diag", depth=n) == {round(float(cells[n, n]), 8)}
        assert drawn_numbers(figure.chart, series="max", depth=n) == {round(float(cells[n].max()), 8)}
    starts = figure.table[figure.table.starts].depth.unique().tolist()
    assert starts == [BLOCKS // 2]  # where the second block group begins


def test_what_the_last_layers_learn(evidence: Evidence) -> None:
    probes = evidence.table("probes", "simclr 0").accuracy.sel(probe="linear", feature="gap")
    classes = evidence.table("cka", "simclr 0").class_cka.sel(tokens="all")
    copies = evidence.table("invariance", "simclr 0").invariance.sel(tokens="all")
    linear, invariance, similar = (draw(f"004 Fig 3{letter}", evidence) for letter in "abc")
    for encoder, policy in (("simclr 0", "simclr"), ("resnet 0", "supervised")):
        expected = (
            (linear, probes.sel(encoder=encoder, site=EVEN)),
            (invariance, copies.sel(encoder=encoder, policy=policy, site=[*EVEN, "head.0"])),
            (similar, classes.sel(encoder=encoder, site=[*EVEN, "head.0"])),
        )
        for figure, values in expected:
            own = figure.table[figure.table.series == encoder].sort_values("depth")
            np.testing.assert_array_equal(own.value, values.values)


def test_copies_under_their_own_augmentations(evidence: Evidence) -> None:
    cka = evidence.table("invariance", "simclr 0").cka.isel(tokens=0)
    both = {"resnet 0": "supervised", "simclr 0": "simclr"}
    for table, (encoder, policy) in zip(frames(draw("004 Fig 5", evidence).chart), both.items(), strict=True):
        found = table.pivot_table(index="row", columns="column", values="value").to_numpy()
        np.testing.assert_array_equal(found, cka.sel(encoder=encoder, policy=policy))
