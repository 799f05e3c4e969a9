"""Stages of residual networks on the axes of the charts of pairs of layers."""

import numpy as np
import vl_convert
import xarray as xr
from support.results import cka_result, resnet_sites, vit_sites

from sightline.analyses.cka.charts import figures
from sightline.measure.layers import Layers


def result(stages: tuple[int, ...] = (1, 2, 1)) -> xr.Dataset:
    sites = {"cnn": resnet_sites(4), "vit": vit_sites(3, parts=())}
    found = cka_result(sites)
    layers = Layers(sites, {"cnn": stages})
    return found.assign_coords({name: c for name, c in layers.coords().items() if name == "stage"})


def test_stages_are_numbers_of_each_encoder() -> None:
    stage = result().stage
    assert stage.sel(encoder="cnn", site=[f"block.{n}" for n in range(4)]).values.tolist() == [1, 2, 2, 3]
    assert int(stage.sel(encoder="cnn", site="block.2.residual")) == 2
    assert (stage.sel(encoder="vit") == 0).all()
    assert "stage" not in Layers({"vit": ["block.0"]}, {}).coords()


def test_heat_maps_and_curves_show_where_a_stage_begins() -> None:
    found = {figure.name: figure for figure in figures(result())}
    cells = found["pairs"].table
    own = cells[cells.pair == "cnn × cnn"]
    assert own.groupby("row").row_stage.first().tolist() == own.groupby("column").column_stage.first().tolist()
    assert own.groupby("row").row_stage.first().tolist() == [1, 2, 2, 3]
    assert "White lines" in found["pairs"].caption
    drawn = found["pairs"].chart.to_dict()
    (data,) = [rows for rows in drawn["datasets"].values() if "row_starts" in rows[0]]
    lines = {(row["pair"], row["row"]) for row in data if row["row_starts"]}
    assert lines == {("cnn × cnn", 1), ("cnn × cnn", 3), ("cnn × vit", 1), ("cnn × vit", 3)}
    assert sum(row["row_starts"] for row in data) == 4  # one rule each, not one for every cell
    assert {(row["pair"], row["column"]) for row in data if row["column_starts"]} == {
        ("cnn × cnn", 1),
        ("cnn × cnn", 3),
    }
    curve = found["depth"].table
    assert sorted(curve[curve.encoder_a == "cnn"].query("starts").site) == ["block.1", "block.3"]
    assert not curve[curve.encoder_a == "vit"].starts.any()
    for name in ("pairs", "depth", "closest", "residual"):
        assert vl_convert.vegalite_to_svg(found[name].chart.to_json()).startswith("<svg")


def test_without_stages_nothing_is_drawn() -> None:
    plain = result().drop_vars("stage")
    found = {figure.name: figure for figure in figures(plain)}
    assert "row_stage" not in found["pairs"].table
    assert "starts" not in found["depth"].table
    np.testing.assert_array_equal(
        found["pairs"].table.value, {f.name: f for f in figures(result())}["pairs"].table.value
    )
