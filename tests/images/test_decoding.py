"""Image files of every kind as RGB: modes, depths, rotation, damage."""

import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image
from support.image_files import RAMP, png, write

from sightline.images.decoding import decode
from sightline.images.loading import load_images

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
    chunks = [(b"IHDR", struct.pack(">2I5B", 2, 2, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    assert decode(data).image[0].tolist() == [[0, 100, 255], [7, 200, 50]]


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
    assert decode(b"hello").error == "it is not an image that PIL can identify"
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
