"""Image files of every kind as RGB: modes, depths, rotation, damage."""

import ast
import errno
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.image_files import RAMP, plain_png, png, write

import sightline
from sightline.core.errors import InputError
from sightline.generation.imagine import _read
from sightline.images import decoding
from sightline.images.decoding import decode
from sightline.images.loading import load_images
from sightline.images.sources.masks import read_mask, upright_size

# ---- pixel formats


def test_greyscale_palette_rgba_and_one_bit():
    grey = Image.fromarray(RAMP)
    expected = RAMP[..., None].repeat(3, 2)
    rgba = np.dstack([expected, np.full_like(RAMP, 7)])
    for image in (grey, grey.convert("P"), Image.fromarray(rgba), Image.fromarray(rgba[..., 2:]), grey.convert("RGB")):
        assert np.array_equal(decode(png(image)).image, expected), image.mode
    assert np.unique(decode(png(grey.convert("1"))).image).tolist() == [0, 255]


def test_palette_with_transparency_is_silent():
    image = Image.fromarray(RAMP).convert("P")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(png(image, transparency=bytes(range(256)))).image.shape == (8, 8, 3)


@pytest.mark.parametrize("ending", ["png", "tiff"])
def test_16_bits_are_scaled_not_clipped(tmp_path, ending):
    values = np.array([[0, 255, 256, 1000], [32768, 40000, 65000, 65535]], np.uint16)
    path = tmp_path / f"a.{ending}"
    Image.fromarray(values).save(path)
    expected = np.round(values / 65535 * 255).astype(np.uint8)
    assert np.array_equal(decode(path).image, expected[..., None].repeat(3, 2))
    assert np.array(Image.open(path).convert("L")).max() != 128  # PIL alone would not have done it


def test_16_bit_rgb_png():
    rows = b"".join(b"\0" + struct.pack(">6H", 0, 257 * 100, 65535, 257 * 7, 257 * 200, 257 * 50) for _ in range(2))
    assert decode(plain_png(2, 2, 16, 2, rows)).image[0].tolist() == [[0, 100, 255], [7, 200, 50]]


def test_float_tiff(tmp_path):
    Image.fromarray(np.array([[0, 0.5, 1]], np.float32)).save(tmp_path / "a.tiff")
    assert decode(tmp_path / "a.tiff").image[0, :, 0].tolist() == [0, 128, 255]
    Image.fromarray(np.array([[0, 0.5, 1e6]], np.float32)).save(tmp_path / "b.tiff")
    assert "scale is unknown" in decode(tmp_path / "b.tiff").error


def test_cmyk_jpeg(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg")
    red, green, blue = decode(tmp_path / "a.jpg").image[4, 4].astype(int)
    assert (red > 200, green < 60, blue < 60) == (True, True, True)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation):
    upright = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    # How a camera stores an upright image under each orientation: the inverse of what the tag asks for.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: np.rot90(upright, 2).T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode(png(Image.fromarray(stored.copy()), exif=exif)).image[..., 0], upright)


def test_broken_exif_does_not_lose_the_image():
    assert decode(png(Image.fromarray(RAMP), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")).image.shape == (8, 8, 3)


def test_of_an_animation_the_first_frame(tmp_path):
    frames = [Image.new("L", (4, 4), 10), Image.new("L", (4, 4), 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert np.unique(decode(tmp_path / "a.gif").image).tolist() == [10]


# ---- broken files


def test_broken_files_say_why(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = png(Image.fromarray(noise))
    files = {"empty": b"", "text": b"hello", "cut": whole[: len(whole) // 2], "flipped": whole[:60] + b"x" + whole[61:]}
    for name, data in files.items():
        (tmp_path / f"{name}.png").write_bytes(data)
        for item in (decode(data), decode(tmp_path / f"{name}.png")):
            assert item.image is None, name
            assert item.error
            assert "\n" not in item.error
    assert decode(b"").error == decode(tmp_path / "empty.png").error == "the file is empty"
    assert decode(b"hello").error.startswith("it is not an image of a format that is read (JPEG, PNG, ")
    assert "truncated" in decode(files["cut"]).error
    assert decode(tmp_path / "gone.png").error == "no such file or directory"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert "decompression bomb" in decode(whole).error


def test_large_images_below_the_limit_are_silent(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    assert decode(png(Image.fromarray(RAMP))).image.shape == (8, 8, 3)


def test_a_broken_link_is_reported_by_name(tmp_path):
    for i in range(4):
        write(tmp_path / f"cat/{i}.png")
    (tmp_path / "cat/4.png").symlink_to(tmp_path / "gone.png")
    images = load_images(f"folder:{tmp_path}")
    assert [item.error for item in images.source.read(range(5))] == [None] * 4 + ["no such file or directory"]


# ---- files that are not what they seem


POSTSCRIPT = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
0 0 8 8 rectfill
showpage
"""


def test_a_picture_starts_no_program(tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    picture = tmp_path / "picture.png"
    picture.write_bytes(POSTSCRIPT)
    for item in (decode(picture), decode(POSTSCRIPT)):
        assert "not an image of a format that is read" in item.error
    assert upright_size(picture) == (0, 0)
    for read in (read_mask, _read):
        with pytest.raises(InputError, match="not an image of a format that is read"):
            read(picture)
    assert not (tmp_path / "ran").exists()


def test_the_documentation_names_the_formats():
    assert [name for name, module in decoding.READERS.items() if name not in decoding._formats()] == []
    names = {"PPM": "PNM", "WEBP": "WebP", "JPEG2000": "JPEG 2000"}
    words = (Path(__file__).parents[2] / "docs/images.md").read_text()
    assert ", ".join(names.get(name, name) for name in [*decoding.READERS][:-1]) in words
    assert all(names.get(name, name) in words for name in decoding.READERS)


def test_every_picture_is_opened_by_one_function():
    opening = []
    for path in Path(sightline.__file__).parent.rglob("*.py"):
        tree = ast.parse(text if "Image.open" in (text := path.read_text()) else "")
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        opening += [path.name for call in calls if ast.unparse(call).endswith("Image.open")]
    assert opening == ["decoding.py"]


def test_pipes_and_devices_are_refused_before_they_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", Path("/dev/zero")):
        assert decode(path).error == "it is a pipe or a device, not a file"
    assert decode(tmp_path).error == "is a directory"


def test_too_few_file_descriptors_are_not_an_unreadable_image(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(InputError, match="Too many files are open"):
        decode(b"x")


# ---- many pixels


def test_a_bomb_below_the_limit_of_pillow_is_skipped():
    side = 13_000
    data = plain_png(side, side, 1, 0, bytes((side // 8 + 1) * side))
    assert len(data) < 50_000
    why = "it has 13000 × 13000 pixels, but at most 67 million of such a file are decoded; make it smaller"
    assert decode(data).error == why


def smooth(side):
    across = np.linspace(0, 255, side)
    pixels = np.stack([across[:, None] + 0 * across, across + 0 * across[:, None], np.full((side, side), 90.0)], 2)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize("kind", ["jpg", "jp2"])
def test_many_pixels_are_read_reduced_where_the_format_allows_it(tmp_path, monkeypatch, kind):
    path = tmp_path / f"a.{kind}"
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth(64).save(path, **({"exif": exif, "quality": 95} if kind == "jpg" else {}))
    full = decode(path).image.astype(float)
    for most, side in ((4096, 64), (4095, 32), (1023, 16)):
        monkeypatch.setattr(decoding, "LARGEST", most)
        monkeypatch.setattr(decoding, "LARGEST_OF", {})
        found = decode(path).image
        assert found.shape == (side, side, 3)
        means = full.reshape(side, 64 // side, side, 64 // side, 3).mean((1, 3))
        assert np.abs(found - means).mean() < (
            3 if kind == "jpg" else 5
        )  # that of JPEG 2000 begins with each first one
    assert "has 64 × 64 pixels, but at most 0 million" in decode(path, whole=True).error


def test_what_would_be_decoded_whole_all_the_same_is_skipped(tmp_path, monkeypatch):
    smooth(64).save(tmp_path / "a.jpg", progressive=True)
    smooth(64).save(tmp_path / "a.png")
    monkeypatch.setattr(decoding, "LARGEST", 4095)
    for name in ("a.jpg", "a.png"):
        assert "64 × 64 pixels" in decode(tmp_path / name).error


def test_a_tile_that_is_larger_than_its_image_counts(monkeypatch):
    data = zlib.compress(bytes(64 * 64))
    fields = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: 64, 323: 64, 324: 8, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    tiled = struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(fields)) + entries + bytes(4)
    assert decode(tiled).image.shape == (8, 8, 3)
    monkeypatch.setattr(decoding, "LARGEST", 4095)
    assert "at most 0 million" in decode(tiled).error
