"""Figures of Shekhar et al. (000, 001, 002) show the numbers of the results, in the paper's arrangement."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.figures import BLOCKS, drawn_numbers, frames, run_of

from sightline.studies.evidence import Evidence
from sightline.studies.figures import draw
from sightline.studies.figures.contract import PaperDrawing

EVERY = range(BLOCKS)
MAPS = {  # figure → (upwards, to the right, layer type) of its maps, in the paper's order
    "000 Fig 1": [("dino", "moco", "block"), ("mae", "moco", "block"), ("mae", "dino", "block")],
    "000 Fig 2": [("mae", "moco", layer) for layer in ("qkv", "norm1", "fc1")],
    "000 Fig 5": [
        *[(r, j, "block") for r, j in itertools.product(("mae", "mae ft"), ("moco", "moco ft"))],
        ("mae", "moco", "qkv"),
        ("mae ft", "moco ft", "qkv"),
    ],
    "000 Fig 6": [(f"mae{end}", f"moco{end}", layer) for end in ("", " ft") for layer in ("fc1", "norm1", "qkv")],
    "001 Fig 1": [
        ("dino", "moco", "block"),
        ("mae", "moco", "block"),
        ("mae", "dino", "block"),
        *[("mae", "moco", layer) for layer in ("norm1", "qkv", "fc1")],
    ],
    "001 Fig 8": [(r, j, "block") for r, j in itertools.product(("mae", "mae ft"), ("dino", "dino ft"))],
    "001 Fig 9": [(f"mae{end}", f"{j}{end}", "qkv") for j in ("moco", "dino") for end in ("", " ft")],
    "001 Fig 15": [("msn", f"{other}{end}", "block") for end in ("", " ft") for other in ("moco", "dino", "mae")],
    "001 Fig 16": [("msn ft", f"{other}{end}", "block") for end in ("", " ft") for other in ("moco", "dino", "mae")],
}


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_layers_are_those_of_cka(evidence: Evidence, name: str) -> None:
    figure = draw(name, evidence)
    cka = evidence.table("cka", "mae").cka.sel(tokens="all")
    tables = frames(figure.chart)
    assert len(tables) == len(MAPS[name])
    assert not figure.missing
    for table, (row, column, layer) in zip(tables, MAPS[name], strict=True):
        sites = [f"block.{n}" + ("" if layer == "block" else f".{layer}") for n in EVERY]
        expected = cka.sel(encoder_a=row, encoder_b=column, site_a=sites, site_b=sites).values
        found = table.pivot_table(index="row", columns="column", values="value").to_numpy()
        np.testing.assert_array_equal(found, expected)
        assert set(table.encoder_a) == {row}
        assert set(table.encoder_b) == {column}


def test_fine_tuned_maps_share_their_parts(evidence: Evidence) -> None:
    """Figure 4 is 5a–d of the workshop paper, 10 is its figure 6: the same parts under the same letters."""
    from sightline.studies.figures import all_figures

    known = all_figures()
    for ours, theirs in (("001 Fig 4", "000 Fig 5"), ("001 Fig 10", "000 Fig 6")):
        for letter, part in known[ours].parts.items():
            assert part.title == known[theirs].parts[letter].title
    table = draw("001 Fig 4c", evidence).table
    assert (set(table.encoder_a), set(table.encoder_b)) == ({"mae ft"}, {"moco"})
    assert set(draw("001 Fig 10f", evidence).table.site_a) == {f"block.{n}.qkv" for n in EVERY}


@pytest.mark.parametrize(
    ("name", "features", "who"),
    [
        ("000 Fig 3", ("cls", "gap", "gap_without_cls"), ("moco", "mae")),
        ("001 Fig 12", ("cls", "gap_without_cls"), ("moco", "dino", "mae")),
    ],
)
def test_neighbours_and_the_probe_behind_them(
    evidence: Evidence, name: str, features: tuple[str, ...], who: tuple[str, ...]
) -> None:
    figure = draw(name, evidence)
    knn, probes = evidence.table("knn", *who), evidence.table("probes", *who)
    parts = frames(figure.chart)
    assert len(parts) == len(features)
    for part, feature in zip(parts, features, strict=True):
        for encoder in who:
            own = part[part.series == encoder].sort_values("depth").value.to_numpy()
            expected = knn.accuracy.sel(encoder=encoder, feature=feature).values
            if feature in probes.feature.values:
                at = {"encoder": encoder, "probe": "linear", "site": "norm", "feature": feature}
                expected = np.append(expected, probes.accuracy.sel(at))
            np.testing.assert_array_equal(own, expected)
    assert "No linear probe was trained on GAP without CLS of mae." in figure.caption


@pytest.mark.parametrize("name", ["000 Fig 4", "001 Fig 13"])
def test_agreement_of_ranks(evidence: Evidence, name: str) -> None:
    figure, result = draw(name, evidence), evidence.table("agreement", "moco", "mae")
    subsets = ("all images", "both right", "both wrong")
    pairs = [("moco", "dino"), ("moco", "mae"), ("dino", "mae")]
    for part, images in zip(frames(figure.chart)[::1], subsets, strict=True):
        for k, (a, b) in itertools.product((5, 10), pairs):
            row = part[(part.group == f"top {k}") & (part.series == f"{a} and {b}")].iloc[0]
            at = {"images": images, "k": k, "encoder_a": a, "encoder_b": b}
            assert [row.value, row.low, row.high] == [
                float(result[f"tau{end}"].sel(at)) for end in ("", "_low", "_high")
            ]
    assert figure.paper is not None
    assert figure.paper["in the paper"].tolist() == ["0.9341 (DINO and MoCo v3)", "0.88 (MAE and MoCo v3)"]
    f1 = [float(result.f1.sel(encoder_a="moco", encoder_b=other)) for other in ("dino", "mae")]
    assert figure.paper.here.tolist() == [f"{value:.4f}" for value in f1]


# Probes


def _of_probe(evidence: Evidence, variable: str, **at: Any) -> float:
    return float(evidence.table("probes", "mae")[variable].sel({"feature": "cls", "site": "norm", **at}))


def test_the_depth_of_probes_with_the_papers_gain(evidence: Evidence) -> None:
    figure = draw("001 Fig 2a", evidence)
    for encoder, (probe, depth) in itertools.product(
        ("moco", "dino", "mae"), {"linear": 1, "depth 2": 2, "depth 3": 3}.items()
    ):
        mean, std = (_of_probe(evidence, f"{n}_of_best", encoder=encoder, probe=probe) for n in ("mean", "std"))
        at = {"series": encoder, "depth": depth}
        assert drawn_numbers(figure.chart, **at) == {round(mean, 8)}
        assert drawn_numbers(figure.chart, "high", **at) == {round(mean + std, 8)}
    first, third = (_of_probe(evidence, "mean_of_best", encoder="mae", probe=p) for p in ("linear", "depth 3"))
    assert figure.paper is not None
    assert figure.paper.values.tolist()[0] == [
        "gain of depth 3, mae, points",
        "+1.03 (MAE)",
        f"{100 * (third - first):+.2f}",
    ]


def test_the_table_of_two_layers_has_the_papers_numbers_beside_ours(evidence: Evidence) -> None:
    figure = draw("001 Table 2b", evidence)
    table = figure.table.set_index(["row", "column"])
    both = evidence.table("probes", "mae").sel(encoder="mae", probe="multilayer", feature="cls")
    blocks = both.site.values[np.char.startswith(both.site.values.astype(str), "block.")]
    best = list(both.site.values).index(blocks[int(both.selection.sel(site=blocks[:-1]).argmax("site"))])
    mean, std = (100 * float(both[f"{n}_of_best"][best]) for n in ("mean", "std"))
    alone = 100 * _of_probe(evidence, "mean_of_best", encoder="mae", probe="linear")
    block = int(both.block[best])
    assert table.ours["mae", "last and another"] == f"{mean:.2f} ± {std:.2f} (block {block})"
    assert table.ours["mae", "gain"] == f"{mean - alone:+.2f}".replace("-", "−")
    assert table.paper["mae", "last block"] == "67.73 ± 0.10"
    assert table.paper["moco", "last block"] == ""
    assert list(dict.fromkeys(figure.table.row)) == ["mae", "moco", "dino"]
    assert draw("001 Fig 2b", evidence).table.equals(figure.table)
    without = replace(evidence, roles=tuple(role for role in evidence.roles if role.method != "mae"))
    assert set(draw("001 Table 2b", without).table.paper) == {""}  # the paper's numbers are those of MAE


def test_the_table_of_two_layers_without_a_final_norm(evidence: Evidence) -> None:
    """The block before the last one is an intermediate one, and the best of them."""
    probes = evidence.runs[0]["probes"].drop_sel(site="norm").copy(deep=True)
    probes["last_site"] = ("encoder", [f"block.{BLOCKS - 1}"] * probes.sizes["encoder"])
    probes.selection.loc[{"probe": "multilayer", "site": f"block.{BLOCKS - 1}"}] = np.nan
    probes.selection.loc[{"probe": "multilayer", "site": f"block.{BLOCKS - 2}"}] = 0.99
    figure = draw("001 Table 2b", replace(evidence, runs=(run_of({"probes": probes}),)))
    ours = figure.table.set_index(["row", "column"]).ours
    assert ours["mae", "last and another"].endswith(f"(block {BLOCKS - 2})")


@pytest.mark.parametrize(("name", "who"), [("001 Fig 2c", ("moco", "dino", "mae")), ("001 Fig 5", ("mae", "mae ft"))])
def test_the_gain_of_another_block(evidence: Evidence, name: str, who: tuple[str, ...]) -> None:
    figure = draw(name, evidence)
    for encoder, n in itertools.product(who, EVERY):
        expected = _of_probe(evidence, "gain", encoder=encoder, probe="multilayer", site=f"block.{n}")
        assert drawn_numbers(figure.chart, series=encoder, depth=n) == {round(expected, 8)}


# Others


def test_distance_in_depth_across_architectures(evidence: Evidence) -> None:
    cka = evidence.table("cka", "mae").distance_cka.sel(tokens="all")
    for letter, pairs in {
        "a": [("simclr 0", "moco"), ("moco", "mae")],
        "b": [("convnext", "mae"), ("moco", "mae")],
    }.items():
        figure = draw(f"001 Fig 11{letter}", evidence)
        for a, b in pairs:
            own = figure.table[figure.table.series == f"{a} and {b}"]
            np.testing.assert_allclose(own.depth, np.arange(BLOCKS) / (BLOCKS - 1))
            np.testing.assert_array_equal(own.value, cka.sel(encoder_a=a, encoder_b=b))


def test_the_path_of_attention_parameters(evidence: Evidence) -> None:
    """The start of a path is its first epoch, as `dynamics` has it, not the encoder that was fine-tuned."""
    figure, result = draw("001 Fig 14b", evidence), evidence.table("dynamics", "mae ft, step 0")
    assert result.start.values[1] == "mae ft, step 0"
    for start, epoch in itertools.product(("mae", "moco", "dino"), range(3)):
        expected = float(result.efficiency.sel(encoder=f"{start} ft, step {epoch}", place="all", weights="attention"))
        assert drawn_numbers(figure.chart, series=start, depth=epoch) == {round(expected, 8)}


def test_minibatch_against_batch_size_and_images(evidence: Evidence) -> None:
    figure, result = draw("001 Fig 6", evidence), evidence.table("minibatch", "moco").isel(tokens=0, encoder=0)
    others = result.cka.where(result.layer_a != result.layer_b).mean("layer_b")
    for layer in range(3):
        at = {"series": f"block.{layer}"}
        assert drawn_numbers(figure.chart, **at, batch=64) == {round(float(others[-1, 1, layer]), 8)}
        assert drawn_numbers(figure.chart, **at, count=1024) == {round(float(others[0, 0, layer]), 8)}


def test_minibatches_of_one_seed_are_drawn(evidence: Evidence) -> None:
    (first,) = (role for role in evidence.roles if role.name == "moco")
    seeds = replace(evidence, roles=(*evidence.roles, replace(first, name="moco-1", seed=1)))
    assert seeds.seeds["moco"] == ("moco", "moco-1")
    assert draw("001 Fig 6", seeds).table.equals(draw("001 Fig 6", evidence).table)


@pytest.mark.parametrize(
    ("name", "run", "paper"),
    [
        ("001 Table 6", 2, {("mae", "detection AP"): "30.25", ("single dino", "segmentation AP small"): "12.99"}),
        ("001 Table 7", 4, {("moco", "detection AP large"): "64.83", ("dino", "segmentation AP"): "30.04"}),
    ],
)
def test_precisions_stand_beside_the_papers(
    evidence: Evidence, name: str, run: int, paper: dict[tuple[str, str], str]
) -> None:
    figure, result = draw(name, evidence), evidence.runs[run]["detection"]
    assert list(dict.fromkeys(figure.table.row)) == ["mae", "moco", "dino", *(["single dino"] if run == 2 else [])]
    table = figure.table.set_index(["row", "column"])
    for (row, column), printed in paper.items():
        what, _, size = column.split(maxsplit=2) if column.count(" ") == 2 else (*column.split(), "all")
        at = {"encoder": row, "kind": {"detection": "box", "segmentation": "mask"}[what], "area": size}
        assert table.ours[row, column] == f"{100 * float(result.AP.sel(at)):.2f}"
        assert table.paper[row, column] == printed
    assert figure.paper is not None
    assert len(figure.paper) == len(figure.table)


def test_detectors_that_see_several_blocks(evidence: Evidence) -> None:
    figure = draw("001 Fig 7", evidence)
    for words, run in (("last block", 2), ("last blocks side by side", 3)):
        expected = evidence.runs[run]["detection"].AP.sel(encoder="mae", kind="box", area="all")
        assert drawn_numbers(figure.chart, series=words, group="mae") == {round(float(expected), 8)}


@pytest.mark.parametrize("name", ["001 Table 6", "001 Fig 7"])
def test_detectors_that_were_trained_otherwise_are_not_drawn_together(evidence: Evidence, name: str) -> None:
    """One encoder was also trained upon for longer: the first that holds it, but of no use beside the others."""
    from sightline.studies.evidence import Missing

    plain, several = evidence.runs[2]["detection"], evidence.runs[3]["detection"]
    longer = run_of({"detection": plain.sel(encoder=["mae"]) + 0.05}, blocks="last", steps=99)
    longer["detection"].attrs["encoders"] = "frozen"
    figure = draw(name, replace(evidence, runs=(longer, *evidence.runs)))
    assert figure.table.equals(draw(name, evidence).table)
    rest = [encoder for encoder in plain.encoder.values if encoder != "mae"]
    others = [
        run_of({"detection": table.sel(encoder=rest)}, blocks=blocks)
        for blocks, table in (("last", plain), ("last-1,last", several))
    ]
    with pytest.raises(Missing):
        draw(name, replace(evidence, runs=(longer, *others)))


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("001 Fig 3", ["mae", "moco", "dino"]),
        ("001 Fig 17", ["mae", "mae ft"]),
        ("001 Fig 18", ["mae", "moco", "mae ft", "dino"]),
    ],
)
def test_pictures_are_the_sheets_of_rcdm(evidence: Evidence, name: str, who: list[str]) -> None:
    import base64
    import io

    from PIL import Image

    figure, result = draw(name, evidence), evidence.table("rcdm", "mae")
    sheets = frames(figure.chart)
    assert [sheet.encoder.iloc[0] for sheet in sheets] == who
    for sheet, encoder in zip(sheets, who, strict=True):
        url = sheet[(sheet.row == "image 1.png") & (sheet.column == "2")].url.item()
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
        expected = result.pictures.sel(picture_sheet=encoder)[1, 2].values
        np.testing.assert_array_equal(pixels[:: len(pixels) // 4, :: len(pixels) // 4], expected)


def test_roles_decide_who_is_drawn_not_names(evidence: Evidence) -> None:
    """With the roles of MAE and MoCo v3 exchanged, MAE stands where the paper has MoCo v3."""
    from dataclasses import replace

    turned = {"mae": "moco", "moco": "mae", "mae ft": "moco ft", "moco ft": "mae ft"}
    roles = tuple(
        replace(
            role, name=turned.get(role.name, role.name), tuned_from=turned.get(role.tuned_from or "", role.tuned_from)
        )
        for role in evidence.roles
    )
    figure: PaperDrawing = draw("000 Fig 2", Evidence(roles, evidence.runs))
    assert set(figure.table.encoder_a) == {"moco"}
    assert set(figure.table.encoder_b) == {"mae"}


@pytest.mark.parametrize(
    ("je", "parts"),
    [
        (["moco"], {"b": [("mae", "moco")]}),
        (
            ["dino", "moco", "sup"],
            {
                "a": [("moco", "dino"), ("sup", "dino"), ("sup", "moco")],
                "b": [("mae", "dino")],
                "c": [("mae", "moco"), ("mae", "sup")],
            },
        ),
    ],
)
def test_parts_show_what_their_titles_say_however_many_there_are(
    evidence: Evidence, je: list[str], parts: dict[str, list[tuple[str, str]]]
) -> None:
    from sightline.studies.roles import JE, REC, Role

    some = Evidence((*(Role(name, JE) for name in je), Role("mae", REC)), evidence.runs)
    assert set("abc") - set(draw("000 Fig 1", some).missing) == set(parts)
    for letter, pairs in parts.items():
        tables = frames(draw(f"000 Fig 1{letter}", some).chart)
        assert [(table.encoder_a.iloc[0], table.encoder_b.iloc[0]) for table in tables] == pairs


def test_titles_name_no_method_where_another_may_be_drawn(evidence: Evidence) -> None:
    from sightline.studies.figures import all_figures

    for name in ("001 Fig 4", "001 Fig 8", "001 Fig 9", "001 Fig 17", "001 Fig 18"):
        figure = all_figures()[name]
        words = " ".join([figure.title, *(part.title for part in figure.parts.values())])
        assert not {"MoCo", "DINO", "MAE"} & set(words.replace(",", " ").split()), name


def test_other_methods_are_all_drawn(evidence: Evidence) -> None:
    """Without the paper's methods every encoder of the family has its place."""
    from sightline.studies.roles import JE, REC, Role

    roles = (Role("dino", JE, "x"), Role("moco", JE, ""), Role("mae", REC), Role("simmim", REC))
    pairs = [
        (table.encoder_a.iloc[0], table.encoder_b.iloc[0])
        for table in frames(draw("001 Fig 1a", Evidence(roles, evidence.runs)).chart)
    ]
    assert pairs == [("moco", "dino"), ("mae", "dino"), ("mae", "moco"), ("simmim", "dino"), ("simmim", "moco")]
