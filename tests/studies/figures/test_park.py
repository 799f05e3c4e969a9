"""Figures of Park et al. (003) show the numbers of the results, in the paper's arrangement."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.evidence import made_run
from support.figures import BLOCKS, TUNED_ACCURACY, drawn_numbers, frames, run_of

from sightline.studies.evidence import Evidence, Missing
from sightline.studies.figures import draw
from sightline.studies.roles import HYBRID, JE, REC, Role

PAIR = ("moco", "simmim")
TUNED = ("moco ft", "simmim ft")
SIZES = ("small moco", "moco", "small simmim", "simmim")
EVERYBODY = ("dino", "moco", "mae", "simmim")
DEPTH_CURVES = [  # figure, result, variable, selection, encoders
    ("003 Fig 3", "attention", "distance_mean", {}, PAIR),
    ("003 Fig 4", "attention", "nmi_mean", {}, PAIR),
    ("003 Fig 5a", "diversity", "cosine", {"kind": "heads"}, SIZES),
    ("003 Fig 5b", "diversity", "cosine", {"kind": "depths"}, SIZES),
    ("003 Fig 5c", "diversity", "cosine", {"kind": "tokens"}, SIZES),
    ("003 Fig 9", "fourier", "high_frequency", {}, PAIR),
    ("003 Fig 10a", "attention", "nmi_mean", {}, ("mae", "simmim")),
    ("003 Fig 10b", "fourier", "high_frequency", {}, ("mae", "simmim")),
    ("003 Fig 11", "probes", "accuracy", {"probe": "linear", "feature": "gap"}, PAIR),
    ("003 Fig 12b", "attention", "nmi_mean", {}, (*PAIR, "mix")),
    ("003 Fig 12c", "fourier", "high_frequency", {}, (*PAIR, "mix")),
    ("003 Fig C.1a", "attention", "distance_mean", {}, EVERYBODY),
    ("003 Fig C.1b", "attention", "nmi_mean", {}, EVERYBODY),
    ("003 Fig C.2a", "attention", "distance_mean", {}, SIZES),
    ("003 Fig C.2b", "attention", "nmi_mean", {}, SIZES),
    ("003 Fig E.1a", "attention", "nmi_std", {}, PAIR),
    ("003 Fig E.3b", "spectra", "token_uncentred_second", {}, PAIR),
    ("003 Fig E.3c", "spectra", "image_uncentred_second", {}, PAIR),
    ("003 Fig F.1a", "attention", "nmi_mean", {}, TUNED),
    ("003 Fig F.1b", "fourier", "high_frequency", {}, TUNED),
]


@pytest.mark.parametrize(("name", "result", "variable", "at", "who"), DEPTH_CURVES, ids=[c[0] for c in DEPTH_CURVES])
def test_curves_over_depth(
    evidence: Evidence, name: str, result: str, variable: str, at: dict[str, str], who: tuple[str, ...]
) -> None:
    figure = draw(name, evidence)
    values = evidence.table(result, *who)[variable].sel(at)
    assert set(figure.table.series) == set(who)
    for encoder in who:
        known = values.sel(encoder=encoder).dropna("site")
        left_out = ("norm",) if "Fig 10" in name else ("norm", "decoder.")
        known = known.sel(site=[site for site in known.site.values if not str(site).startswith(left_out)])
        own = figure.table[figure.table.series == encoder].sort_values("depth")
        np.testing.assert_array_equal(own.value, known.values)
        assert drawn_numbers(figure.chart, series=encoder) == {round(float(value), 8) for value in known}


def test_a_decoder_is_drawn_where_it_is_asked_for_alone(evidence: Evidence) -> None:
    with_decoder, without = (draw(name, evidence).table for name in ("003 Fig 10a", "003 Fig C.1b"))
    assert set(with_decoder[with_decoder.site.str.startswith("decoder.")].series) == {"mae"}
    assert not without.site.str.startswith("decoder.").any()


def test_linear_probing_against_fine_tuning(evidence: Evidence) -> None:
    figure, probes = draw("003 Fig 1a", evidence), evidence.table("probes", "mae").accuracy
    for encoder in EVERYBODY:
        linear = float(probes.sel(encoder=encoder, probe="linear", site="norm", feature="cls"))
        assert drawn_numbers(figure.chart, "x", series=encoder) == {round(linear, 8)}
        assert drawn_numbers(figure.chart, "y", series=encoder) == {round(TUNED_ACCURACY[f"{encoder} ft"], 8)}
    assert figure.table.set_index("series").family[["dino", "mae"]].tolist() == [
        "joint-embedding (CL)",
        "reconstruction (MIM)",
    ]


def test_probes_of_one_figure_are_on_the_images_of_the_study(evidence: Evidence) -> None:
    """Of an encoder that was probed on other images alone nothing is drawn beside those of the study."""
    probes = evidence.runs[0]["probes"]
    runs = (run_of({"probes": probes.drop_sel(encoder="mae")}), evidence.runs[1], *evidence.runs[2:])
    with pytest.raises(Missing):
        draw("003 Fig 1a", replace(evidence, runs=runs))


def test_both_accuracies_are_over_seeds() -> None:
    seeds = [Role(f"moco-{n}", JE, "moco_v3", seed=n) for n in range(2)]
    starts = (*seeds, Role("mae", REC, "mae"))
    roles = (*starts, *(replace(role, name=f"{role.name} ft", tuned_from=role.name) for role in starts))
    by_seed = {"moco-0": 0.4, "moco-1": 0.6, "mae": 0.7}
    probes = made_run(list(by_seed), {"probes.accuracy": lambda at: by_seed[at.encoder]})
    table = probes["probes"]
    probes._results["probes"] = table.assign(
        accuracy_low=table.accuracy - 0.1, accuracy_high=table.accuracy + 0.1, last_site=("encoder", ["norm"] * 3)
    )
    tuned = made_run(
        [f"{name} ft" for name in by_seed], {"agreement.test_accuracy": lambda at: by_seed[at.encoder[:-3]] + 0.1}
    )
    figure = draw("003 Fig 1a", Evidence(roles, (probes, tuned)))
    assert drawn_numbers(figure.chart, "x", series="moco-0") == {0.5}
    assert drawn_numbers(figure.chart, "y", series="moco-0") == {0.6}
    assert drawn_numbers(figure.chart, "x", series="mae") == {0.7}


def test_fine_tuning_over_size(evidence: Evidence) -> None:
    figure = draw("003 Fig 1b", evidence)
    for family, (small, large) in {"joint-embedding (CL)": SIZES[:2], "reconstruction (MIM)": SIZES[2:]}.items():
        for size, encoder in ((5, small), (20, large)):
            expected = {round(TUNED_ACCURACY[f"{encoder} ft"], 8)}
            assert drawn_numbers(figure.chart, series=family, depth=size) == expected


def test_dense_prediction(evidence: Evidence) -> None:
    figure, result = draw("003 Fig 1 right", evidence), evidence.runs[4]["detection"].AP.sel(area="all")
    for encoder, (axis, kind) in itertools.product(EVERYBODY, (("x", "box"), ("y", "mask"))):
        expected = round(float(result.sel(encoder=encoder, kind=kind)), 8)
        assert drawn_numbers(figure.chart, axis, series=encoder) == {expected}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("003 Fig 12a", {0.0: "simmim", 0.2: "mix", 0.5: "even mix", 1.0: "moco"}),
        ("003 Fig D.1", {3: "windowed", 4: "moco"}),
    ],
)
def test_accuracies_over_what_is_varied(evidence: Evidence, name: str, where: dict[float, str]) -> None:
    figure, probes = draw(name, evidence), evidence.table("probes", "mae").accuracy
    for place, encoder in where.items():
        linear = float(probes.sel(encoder=encoder, probe="linear", site="norm", feature="cls"))
        assert drawn_numbers(figure.chart, what="linear probing", depth=place) == {round(linear, 8)}
        tuned = TUNED_ACCURACY[f"{encoder} ft"]
        assert drawn_numbers(figure.chart, what="fine-tuning", depth=place) == {round(tuned, 8)}


def test_attention_maps_of_two_queries(evidence: Evidence) -> None:
    figure, result = draw("003 Fig 2", evidence), evidence.table("attention", *PAIR)
    assert len(frames(figure.chart)) == 2
    names = [str(name) for name in result.encoder.values]
    for encoder in PAIR:
        maps = result[f"viewer_map_{names.index(encoder)}"].values[0, :, 0]  # (layers, queries, keys), mean of heads
        own = figure.table[figure.table.encoder == encoder]
        assert own.column.tolist()[:5] == ["image", "block 0", "block 1", "block 2", "block 3"]
        for query, row in ((1, "patch 0, 1"), (3, "patch 1, 1")):
            found = own[(own.row == row) & (own.column != "image")]["mean"]
            np.testing.assert_allclose(found, maps[:BLOCKS, query].mean(-1) / 255)


def test_pictures_are_lit_by_the_map() -> None:
    from sightline.studies.figures.forms import _lit, _marked

    pixels = np.full((4, 4, 3), 200, np.uint8)
    lit = _lit(pixels, np.array([[255, 0], [51, 102]], np.uint8))
    assert lit[::2, ::2, 0].tolist() == [[200, 30], [round(200 * 0.32), round(200 * 0.49)]]
    assert (lit[1, 1] == lit[0, 0]).all()
    framed = _marked(np.zeros((6, 6, 3), np.uint8), (2, 2), (0, 1))[..., 0] > 0
    assert framed.tolist()[:3] == [
        [False] * 3 + [True] * 3,
        [False] * 3 + [True, False, True],
        [False] * 3 + [True] * 3,
    ]
    assert not framed[3:].any()


@pytest.mark.parametrize(
    ("name", "encoder", "site", "variable"),
    [
        ("003 Fig 6a", "moco", f"block.{BLOCKS - 1}", "cloud"),
        ("003 Fig 6b", "moco", f"block.{BLOCKS - 1}", "cloud_joint"),
        ("003 Fig 6c", "simmim", "block.0", "cloud"),
        ("003 Fig E.3a", "moco", "block.0", "cloud"),
    ],
)
def test_clouds_of_tokens(evidence: Evidence, name: str, encoder: str, site: str, variable: str) -> None:
    figure = draw(name, evidence)
    cloud = evidence.table("tokens", encoder)[variable].sel(encoder=encoder, site=site)
    images = ["one.png", "two.png"] if variable == "cloud_joint" else ["one.png"]
    assert set(figure.table.cloud_image) == set(images)
    for image, moment in itertools.product(images, ("before", "after")):
        at = {"cloud_image": image, "moment": moment}
        for place, axis in (("x", 1), ("y", 2)):
            expected = {round(float(value), 8) for value in cloud.sel({**at, "axis": axis})}
            assert drawn_numbers(figure.chart, place, **at) == expected


def test_spectra_whole_and_at_two_ranks(evidence: Evidence) -> None:
    result = evidence.table("spectra", *PAIR)
    for letter, cloud in (("a", "token"), ("b", "image")):
        figure = draw(f"003 Fig 7{letter}", evidence)
        for encoder in PAIR:
            at = {"encoder": encoder, "site": "block.1"}
            whole = {round(float(value), 8) for value in result[f"{cloud}_spectrum"].sel(at)}
            assert drawn_numbers(figure.chart, **at) == whole
            for rank, level in (("rank 2", 0), ("rank 4", 1)):
                expected = float(result[f"{cloud}_delta"].sel(at)[level])
                found = drawn_numbers(figure.chart, series=encoder, site="block.1", what=rank)
                assert found == {round(expected, 8)}


@pytest.mark.parametrize(
    ("name", "biased", "noisy"), [("003 Fig 8", (*PAIR, "sup"), PAIR), ("003 Fig F.2", TUNED, TUNED)]
)
def test_shape_and_noise(evidence: Evidence, name: str, biased: tuple[str, ...], noisy: tuple[str, ...]) -> None:
    figure = draw(name, evidence)
    shape, noise = evidence.table("shape_bias", *biased).shape_bias, evidence.table("noise", *noisy)["drop"]
    for encoder in biased:
        expected = round(float(shape.sel({"encoder": encoder, "class": "dog"})), 8)
        assert drawn_numbers(figure.chart, "shape_bias", **{"encoder": encoder, "class": "dog"}) == {expected}
    for encoder in noisy:
        expected = round(float(noise.sel(encoder=encoder, frequency=0.9)), 8)
        assert drawn_numbers(figure.chart, series=encoder, depth=0.9) == {expected}
    assert set(frames(figure.chart)[0].encoder) == set(biased)


def test_the_layer_whose_heads_differ_most(evidence: Evidence) -> None:
    figure, result = draw("003 Fig E.1b", evidence), evidence.table("attention", *PAIR)
    early = result.nmi_std.sel(encoder="moco", site=result.block.values < BLOCKS // 2)
    site = str(early.site[int(early.argmax("site"))].item())
    for encoder in PAIR:
        expected = {round(float(value), 8) for value in result.nmi.sel(encoder=encoder, site=site)}
        assert expected <= drawn_numbers(figure.chart, encoder=encoder, site=site)


def test_tokens_of_several_images(evidence: Evidence) -> None:
    figure, result = draw("003 Fig E.2", evidence), evidence.table("tokens", *PAIR).tsne
    for encoder, image in itertools.product(PAIR, ("a.png", "c.png")):
        expected = {round(float(value), 8) for value in result.sel(encoder=encoder, image=image, tsne_axis=0)}
        assert drawn_numbers(figure.chart, "x", encoder=encoder, image=image) == expected


def test_what_re_initialised_blocks_cost(evidence: Evidence) -> None:
    result = evidence.table("reinit", *PAIR).accuracy_drop
    for letter, end in (("a", "first"), ("b", "last")):
        figure = draw(f"003 Fig F.3{letter}", evidence)
        assert set(figure.table.end) == {end}
        for encoder in PAIR:
            expected = round(float(result.sel(encoder=encoder, end=end, n=2)), 8)
            assert drawn_numbers(figure.chart, series=encoder, depth=2) == {expected}


def test_other_images_and_segmentation_beside_the_papers(evidence: Evidence) -> None:
    table = draw("003 Table G.1", evidence).table.set_index(["row", "column"])
    probes = evidence.runs[1]["probes"].accuracy.sel(probe="linear", site="norm", feature="cls")
    miou = evidence.table("segmenters", "mix").miou
    rows = {
        "0.0 (simmim)": ("simmim", "62.1", "35.4"),
        "0.2 (mix)": ("mix", "68.8", "42.2"),
        "1.0 (moco)": ("moco", "66.2", "39.7"),
    }
    for row, (encoder, *printed) in rows.items():
        ours = [f"{100 * float(values.sel(encoder=encoder)):.1f}" for values in (probes, miou)]
        assert table.ours[row].tolist() == ours
        assert table.paper[row].tolist() == printed


def test_the_papers_hybrid_stands_beside_its_own_weight_alone(evidence: Evidence) -> None:
    roles = tuple(replace(role, weight=0.3) if role.method == "hybrid" else role for role in evidence.roles)
    table = draw("003 Table G.1", replace(evidence, roles=roles)).table.set_index("row")
    assert table.paper["0.3 (mix)"].tolist() == ["", ""]
    assert table.paper["1.0 (moco)"].tolist() == ["66.2", "39.7"]


def test_a_sweep_is_drawn_with_its_own_ends(evidence: Evidence) -> None:
    """As findings hold hybrids against each other: of one size and budget, not with encoders of another one."""
    other = {"dino": 0.0, "mae": 0.3, "msn": 0.5, "sup": 1.0}
    sweep = [Role(name, HYBRID, "hybrid", weight=weight, size=1.4) for name, weight in other.items()]
    roles = (*(role for role in evidence.roles if role.name not in other and role.tuned_from not in other), *sweep)
    figure = draw("003 Fig 12b", replace(evidence, roles=roles))
    assert list(dict.fromkeys(figure.table.series)) == ["sup", "dino", "mae"]
