"""The attention viewer: the maps that reach the page, and what a reader sees, points at and chooses."""

import base64
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from PIL import Image
from support import browser as browser_support
from support.browser import needs_browser
from support.results import SampleRun, request, vit_sites

from sightline.report.attention_viewer import pack_viewer, relative_depths
from sightline.report.page import write_report

EVIL = '</script><img src=x onerror="window.hacked=1">'
NAMES = ["dino", "resnet", EVIL]
GRIDS = {0: (14, 14), 2: (6, 8)}
HEADS = {0: 3, 2: 2}
LAYERS = {
    0: [f"block.{k}.attn_map" for k in range(12)],
    2: [f"block.{k}.attn_map" for k in range(4)] + [f"decoder.block.{k}.attn_map" for k in range(2)],
}
QUERIES = {0: [r * 14 + c for r in range(1, 14, 2) for c in range(1, 14, 2)], 2: list(range(48))}


def sample(encoders: tuple[int, ...] = (0, 2)) -> xr.Dataset:
    """Random maps of two images, the first one grey: for a ViT and an oblong MAE with its decoder, not for a ResNet."""
    rng = np.random.default_rng(0)
    data: dict[str, Any] = {}
    coords: dict[str, Any] = {
        "encoder": NAMES,
        "viewer_id": ("viewer_image", ["val/1.jpg", EVIL]),
        "viewer_label": ("viewer_image", ["cat", ""]),
    }
    for i in encoders:
        rows, columns = GRIDS[i]
        maps = rng.integers(0, 200, (2, len(LAYERS[i]), 1 + HEADS[i], len(QUERIES[i]), rows * columns), dtype=np.uint8)
        np.put_along_axis(maps, rng.integers(0, rows * columns, (*maps.shape[:-1], 1)), 255, -1)
        maps[:, :, :, 0] = 0  # as of weights that are not finite
        pixels = rng.integers(0, 256, (2, 8 * rows, 8 * columns, 3), dtype=np.uint8)
        pixels[0] = 128
        axes = [f"viewer_{axis}_{i}" for axis in ("layer", "head", "query", "key")]
        data[f"viewer_map_{i}"] = (("viewer_image", *axes), maps, {"grid": [rows, columns], "patch": 16})
        data[f"viewer_pixels_{i}"] = (("viewer_image", f"viewer_y_{i}", f"viewer_x_{i}", "viewer_rgb"), pixels)
        coords |= {axes[0]: LAYERS[i], axes[2]: QUERIES[i]}
    return xr.Dataset(data, coords)


def report_of(path: Path, result: xr.Dataset) -> SampleRun:
    run = SampleRun(path, request(NAMES, {name: vit_sites(2) for name in NAMES}, ["maps"]), {"maps": result})
    write_report(run)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return report_of(tmp_path_factory.mktemp("run"), sample())


def unpacked(text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


# --- packing ----------------------------------------------------------------------------------------------------------


def test_the_packed_maps_and_pictures_are_the_result(tmp_path: Path) -> None:
    result = sample()
    result.to_netcdf(tmp_path / "result.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "result.nc", engine="h5netcdf") as stored:
        packed = pack_viewer(stored.transpose(..., "viewer_image"))  # whatever the order of the axes
    assert packed is not None
    packed = json.loads(json.dumps(packed))
    assert packed["images"] == [{"id": "val/1.jpg", "label": "cat"}, {"id": EVIL, "label": ""}]
    assert [e["name"] for e in packed["encoders"]] == ["dino", EVIL]  # the ResNet has no attention
    for i, encoder in zip((0, 2), packed["encoders"], strict=True):
        assert (encoder["layers"], encoder["queries"]) == (LAYERS[i], QUERIES[i])
        assert (tuple(encoder["grid"]), encoder["heads"]) == (GRIDS[i], HEADS[i])
        levels, maps = unpacked(encoder["maps"]), result[f"viewer_map_{i}"].values.ravel()
        np.testing.assert_allclose(levels / 100, maps / 255, rtol=0, atol=0.005)
        np.testing.assert_array_equal(levels[maps == 255], 100)
        pixels = result[f"viewer_pixels_{i}"].values
        assert tuple(encoder["size"]) == pixels.shape[1:3]
        np.testing.assert_array_equal(unpacked(packed["pixels"][encoder["pixels"]]), pixels.ravel())


def test_pictures_that_several_encoders_see_are_packed_once() -> None:
    own = sample((0,))
    same = own.rename({name: f"{str(name)[:-1]}1" for name in (*own.variables, *own.dims) if str(name).endswith("_0")})
    packed = pack_viewer(xr.merge([own, same, sample()], compat="override"))
    assert packed is not None
    assert [encoder["pixels"] for encoder in packed["encoders"]] == [0, 0, 1]
    assert len(packed["pixels"]) == 2


def test_a_result_without_maps_has_no_viewer(tmp_path: Path) -> None:
    result = xr.Dataset({"rank": ("encoder", [1.0, 2.0])})
    assert pack_viewer(result) is None
    assert pack_viewer(result.assign_coords(encoder=["a", "b"])) is None
    report_of(tmp_path, result)
    assert "data-viewer=" not in (tmp_path / "report.html").read_text().split("<script")[0]


def test_a_decoder_lies_behind_its_encoder() -> None:
    np.testing.assert_allclose(relative_depths(LAYERS[2]), [0, 1 / 3, 2 / 3, 1, 1.5, 2])
    np.testing.assert_allclose(relative_depths(LAYERS[0]), np.arange(12) / 11)
    assert relative_depths(["block.0.attn_map"]) == [0]
    assert relative_depths(["decoder.block.0.attn_map"]) == [2]


def test_texts_of_users_are_escaped(run: SampleRun) -> None:
    text = (run.path / "report.html").read_text()
    assert 'data-viewer="maps"' in text
    assert EVIL not in text


# --- the page ---------------------------------------------------------------------------------------------------------


class Reader(browser_support.Reader):
    """A tab on the page of the maps."""

    def __init__(self, browser: Any, run: SampleRun, **options: Any) -> None:
        super().__init__(browser, run, **options)
        self.open("maps")
        self.until("document.querySelectorAll('.panel[data-query]').length > 0")

    def state(self, panel: int) -> tuple[int, str, int]:
        """Query, layer and head that a panel shows."""
        data = self.tab.evaluate(f"({{...document.querySelectorAll('.panel')[{panel}].dataset}})")
        return int(data["query"]), data["layer"], int(data["head"])

    def on(self, panel: int, row: float, column: float) -> tuple[float, float]:
        """Where a patch is on the screen."""
        rows, columns = GRIDS[(0, 2)[panel]]
        picture = self.tab.locator(".picture").nth(panel)
        picture.scroll_into_view_if_needed()
        box = picture.bounding_box()
        return box["x"] + box["width"] * (column + 0.5) / columns, box["y"] + box["height"] * (row + 0.5) / rows

    def brightness(self, panel: int, place: str = ".picture") -> np.ndarray[Any, Any]:
        """Of each patch as it is drawn, beside its middle, where there may be a dot."""
        rows, columns = GRIDS[(0, 2)[panel]]
        sides = self.tab.evaluate(
            """([panel, place, rows, columns]) => {
                const canvas = document.querySelectorAll(".panel")[panel].querySelector(place);
                const {width, height} = canvas, copy = new OffscreenCanvas(width, height).getContext("2d");
                copy.drawImage(canvas, 0, 0);
                const {data} = copy.getImageData(0, 0, width, height);
                return Array.from({length: rows * columns}, (_, k) => {
                    const x = Math.floor((k % columns + 0.35) * width / columns);
                    const y = Math.floor((Math.floor(k / columns) + 0.35) * height / rows);
                    return [...data.slice(4 * (y * width + x), 4 * (y * width + x) + 3)];
                });
            }""",
            [panel, place, rows, columns],
        )
        return np.array(sides) @ [0.3, 0.59, 0.11]

    def close(self) -> None:
        assert self.problems == []
        assert self.tab.evaluate("window.hacked") is None
        assert [url for url in self.requests if not url.startswith((self.file, "blob:", "data:"))] == []
        self.context.close()


@pytest.fixture
def reader(browser: Any, run: SampleRun) -> Iterator[Reader]:
    reader = Reader(browser, run)
    yield reader
    reader.close()


def map_of(run: SampleRun, reader: Reader, panel: int, image: int = 0) -> np.ndarray[Any, Any]:
    """What the panel should show, 1 the brightest, from the result."""
    i = (0, 2)[panel]
    query, layer, head = reader.state(panel)
    at = run["maps"][f"viewer_map_{i}"].sel({f"viewer_query_{i}": query, f"viewer_layer_{i}": layer})[image]
    values = at.values.astype(float)
    return values[head + 1] / 255  # the mean of the heads comes first


@needs_browser
def test_it_opens_with_the_last_layer_of_both_encoders_and_the_query_in_the_middle(reader: Reader) -> None:
    assert reader.state(0) == (7 * 14 + 7, "block.11.attn_map", -1)
    assert reader.state(1)[1:] == ("block.3.attn_map", -1)  # where the decoder begins
    names = reader.tab.locator("select[name=encoder] option").all_text_contents()
    assert names == ["dino", EVIL] * 2
    assert reader.tab.locator("select[name=encoder]").nth(1).input_value() == "1"


@needs_browser
def test_a_click_asks_the_nearest_query_in_both_panels(reader: Reader) -> None:
    reader.tab.mouse.click(*reader.on(0, 0, 0))
    assert [reader.state(panel)[0] for panel in (0, 1)] == [1 * 14 + 1, 0]
    assert "attends to no patch" in reader.tab.locator(".readout").first.inner_text()
    reader.tab.mouse.click(*reader.on(0, 11, 5))
    assert [reader.state(panel)[0] for panel in (0, 1)] == [
        11 * 14 + 5,
        4 * 8 + 3,
    ]  # 0.82 of the rows, 0.39 of the columns
    assert "row 12 of 14, column 6 of 14 (kept)" in reader.tab.locator(".readout").first.inner_text()
    reader.tab.mouse.click(*reader.on(1, 0, 7))
    assert [reader.state(panel)[0] for panel in (0, 1)] == [1 * 14 + 13, 7]


@needs_browser
def test_brightness_follows_attention_and_the_brightest_key_is_bright(reader: Reader, run: SampleRun) -> None:
    for panel in (0, 1):
        for head in (-1, 1):
            reader.tab.locator(".panel").nth(panel).locator(".heads label").nth(head + 1).click()
            assert reader.state(panel)[2] == head
            wanted, seen = map_of(run, reader, panel), reader.brightness(panel)
            others = np.arange(len(wanted)) != reader.state(panel)[0]  # the frame lies on the query
            order = np.argsort(wanted[others])
            assert np.diff(seen[others][order]).min() > -1.5  # up to the rounding of colours
            assert seen[wanted.argmax()] > 180
            assert seen[others][wanted[others] < 0.05].max(initial=0) < 90


@needs_browser
def test_small_maps_show_every_head_and_the_mean(reader: Reader, run: SampleRun) -> None:
    places = reader.tab.locator(".panel").nth(1).locator(".heads label")
    assert places.all_text_contents() == ["mean", "0", "1"]
    query, layer, _ = reader.state(1)
    maps = run["maps"].viewer_map_2.sel(viewer_query_2=query, viewer_layer_2=layer)[0].values
    for k, values in enumerate(maps):
        seen = reader.brightness(1, f".heads label:nth-child({k + 1}) canvas")
        assert np.corrcoef(values, seen)[0, 1] > 0.9
        assert seen[values.argmax()] > 180


@needs_browser
def test_layers_are_linked_by_relative_depth_until_they_are_not(reader: Reader) -> None:
    sliders, layers = reader.tab.locator("[name=layer]"), lambda: [reader.state(panel)[1] for panel in (0, 1)]
    sliders.nth(0).focus()
    for _ in range(4):
        reader.tab.keyboard.press("ArrowLeft")
    assert layers() == ["block.7.attn_map", "block.2.attn_map"]  # 7/11 is nearest to 2/3
    assert sliders.nth(0).get_attribute("aria-valuetext") == "block.7"
    assert reader.tab.locator("output").all_text_contents() == ["block.7", "block.2"]
    sliders.nth(1).focus()
    reader.tab.keyboard.press("Home")
    assert layers() == ["block.0.attn_map", "block.0.attn_map"]
    reader.tab.keyboard.press("End")
    assert layers() == ["block.11.attn_map", "decoder.block.1.attn_map"]
    reader.tab.click("[name=link]")
    reader.tab.locator("[name=layer]").nth(0).press("Home")
    assert layers() == ["block.0.attn_map", "decoder.block.1.attn_map"]
    reader.tab.click("[name=link]")
    assert layers() == ["block.0.attn_map", "block.0.attn_map"]


@needs_browser
def test_arrow_keys_move_the_query_to_its_neighbour_and_stop_at_the_edge(reader: Reader) -> None:
    reader.tab.mouse.click(*reader.on(0, 1, 11))
    pictures = reader.tab.locator(".picture")
    for key, query in (("ArrowRight", 27), ("ArrowRight", 27), ("ArrowDown", 55), ("ArrowLeft", 53), ("ArrowUp", 25)):
        pictures.nth(0).press(key)
        assert reader.state(0)[0] == query
    pictures.nth(1).press("ArrowDown")
    pictures.nth(1).press("ArrowLeft")
    assert divmod(reader.state(1)[0], 8) == (1, 5)
    assert reader.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@needs_browser
def test_pointing_asks_and_a_kept_query_stays_while_values_are_read(reader: Reader, run: SampleRun) -> None:
    reader.tab.mouse.move(*reader.on(1, 2, 3))
    assert reader.state(1)[0] == 2 * 8 + 3
    reader.tab.mouse.click(*reader.on(1, 4, 6))
    reader.tab.mouse.move(*reader.on(1, 5, 0))
    assert reader.state(1)[0] == 4 * 8 + 6
    readout = reader.tab.locator(".readout").nth(1)
    assert f"Here: row 6 of 6, column 1 of 8: {map_of(run, reader, 1)[40]:.2f}" in readout.inner_text()
    brightest = divmod(int(map_of(run, reader, 1).argmax()), 8)
    assert f"Brightest: row {brightest[0] + 1} of 6, column {brightest[1] + 1} of 8" in readout.inner_text()
    reader.tab.locator(".picture").nth(1).press("Escape")
    reader.tab.mouse.move(*reader.on(1, 5, 1))
    assert reader.state(1)[0] == 5 * 8 + 1


@needs_browser
def test_images_are_chosen_by_mouse_and_keyboard(reader: Reader, run: SampleRun) -> None:
    thumbs = reader.tab.locator(".thumbs label")
    assert [thumb.get_attribute("title") for thumb in thumbs.all()] == ["val/1.jpg · cat", EVIL]
    thumbs.nth(1).click()
    assert reader.tab.locator(".chosen").inner_text() == EVIL
    assert reader.brightness(0)[map_of(run, reader, 0, image=1).argmax()] > 180
    reader.tab.keyboard.press("ArrowLeft")
    assert reader.tab.locator(".chosen").inner_text() == "val/1.jpg · cat"
    outline = "getComputedStyle(document.querySelector('.thumbs canvas')).outlineStyle"
    assert reader.tab.evaluate(outline) == "solid"


@needs_browser
def test_both_panels_may_show_the_same_encoder(reader: Reader) -> None:
    reader.tab.locator(".panel").nth(0).locator(".heads label").nth(3).click()
    reader.tab.locator("select[name=encoder]").nth(0).select_option("1")
    assert reader.state(0)[1:] == ("block.3.attn_map", -1)  # the same depth; it has no head 2
    assert reader.state(0) == reader.state(1)
    assert len(set(reader.tab.evaluate("[...document.querySelectorAll('.picture')].map(c => c.toDataURL())"))) == 1
    assert reader.tab.locator(".panel").nth(0).get_attribute("aria-label") == EVIL


@needs_browser
def test_one_encoder_has_one_panel(browser: Any, tmp_path: Path) -> None:
    reader = Reader(browser, report_of(tmp_path, sample((0,))))
    assert reader.tab.locator(".panel").count() == 1
    assert not reader.tab.locator(".viewer .tick").is_visible()
    reader.tab.locator("[name=layer]").press("Home")
    assert reader.state(0)[1] == "block.0.attn_map"
    reader.close()


@needs_browser
def test_a_phone_shows_sharp_panels_below_each_other(browser: Any, run: SampleRun) -> None:
    options = {"has_touch": True, "device_scale_factor": 2, "color_scheme": "dark"}
    reader = Reader(browser, run, viewport={"width": 390, "height": 844}, **options)
    assert reader.tab.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = [panel.bounding_box() for panel in reader.tab.locator(".panel").all()]
    assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]
    width, shown = reader.tab.evaluate("(c => [c.width, c.clientWidth])(document.querySelector('.picture'))")
    assert width == 2 * shown > 600
    reader.tab.touchscreen.tap(*reader.on(1, 4, 2))
    assert reader.state(1)[0] == 4 * 8 + 2
    reader.close()


@needs_browser
def test_the_picture_can_be_saved(reader: Reader) -> None:
    reader.tab.locator(".heads label").nth(2).click()
    with reader.tab.expect_download() as waiting:
        reader.tab.locator(".panel .downloads button").first.click()
    assert waiting.value.suggested_filename == "dino-block.11.attn_map-head1.png"
    saved = np.asarray(Image.open(io.BytesIO(Path(waiting.value.path()).read_bytes())).convert("RGB"))
    assert saved.shape[:2] == tuple(
        reader.tab.evaluate("(c => [c.height, c.width])(document.querySelector('.picture'))")
    )
    patch = saved.shape[0] / 14
    brightest = reader.brightness(0).argmax()
    r, c = (int((at + 0.35) * patch) for at in divmod(int(brightest), 14))
    assert saved[r, c] @ [0.3, 0.59, 0.11] == pytest.approx(reader.brightness(0)[brightest], abs=1)


@needs_browser
def test_it_is_printed_without_its_controls(reader: Reader) -> None:
    reader.tab.emulate_media(media="print")
    assert reader.tab.locator(".picture:visible").count() == 2
    assert reader.tab.locator(".controls:visible, .thumbs:visible, .downloads:visible").count() == 0
