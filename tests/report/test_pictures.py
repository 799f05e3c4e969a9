"""Sheets of pictures: what the page shows of them, and the files."""

import base64
import io
import re

import numpy as np
import xarray as xr
from PIL import Image

from sightline.report.html import render
from sightline.report.pictures import pack_pictures, png, sheet_png

DIMS = ("picture_sheet", "picture_row", "picture_column")


def result() -> xr.Dataset:
    pixels = np.random.default_rng(0).integers(0, 255, (2, 3, 2, 8, 8, 3), np.uint8)
    notes = np.full((2, 3, 2), '"><script>alert(1)</script>', object)
    notes[1, 2, 1] = ""
    about = {"title": "Pictures", "caption": "What <they> show."}
    return xr.Dataset(
        {
            "pictures": ((*DIMS, "picture_y", "picture_x", "picture_rgb"), pixels, about),
            "picture_note": (DIMS, notes.astype(str)),
        },
        {"picture_sheet": ["<a>", "b"], "picture_column": ["image", "block.0"]},
    )


def test_pixels_travel_unchanged() -> None:
    found = pack_pictures(result())
    assert found is not None
    assert (found.side, found.columns, [sheet.name for sheet in found.sheets]) == (
        64,
        ["image", "block.0"],
        ["<a>", "b"],
    )
    source = found.sheets[0].rows[1][1].source.partition(",")[2]
    with Image.open(io.BytesIO(base64.b64decode(source))) as picture:
        np.testing.assert_array_equal(np.asarray(picture), result().pictures.values[0, 1, 1])
    assert found.sheets[1].rows[2][1].source == ""


def test_the_markup_is_escaped_and_has_no_picture_where_there_is_none() -> None:
    class Page:
        pictures = pack_pictures(result())

    markup = render("pictures.html", page=Page())
    assert "<script>" not in markup
    assert "What &lt;they&gt; show." in markup
    assert markup.count("<img ") == 11
    assert '<option value="1">b</option>' in markup


def test_of_many_sheets_the_first_is_shown() -> None:
    three = xr.concat([result(), result().isel(picture_sheet=[1]).assign_coords(picture_sheet=["c"])], "picture_sheet")

    class Page:
        pictures = pack_pictures(three)

    markup = render("pictures.html", page=Page())
    assert '<option value="0" selected>&lt;a&gt;</option><option value="1">b</option>' in markup
    assert re.findall(r'<div class="sheet"( hidden)?>\s*<h3 class="long">(.*?)</h3>', markup) == [
        ("", "&lt;a&gt;"),
        (" hidden", "b"),
        (" hidden", "c"),
    ]


def test_results_without_pictures_have_none() -> None:
    assert pack_pictures(xr.Dataset({"cka": ("x", [1.0])})) is None


def test_a_sheet_is_one_file() -> None:
    pixels = result().pictures.values[0]
    with Image.open(io.BytesIO(sheet_png(pixels))) as picture:
        whole = np.asarray(picture)
    assert whole.shape == (3 * 66 - 2, 2 * 66 - 2, 3)
    np.testing.assert_array_equal(whole[66:130:8, 66:130:8], pixels[1, 1])
    assert (whole[64:66] == 255).all()
    assert png(pixels[0, 0])[:8] == b"\x89PNG\r\n\x1a\n"
