"""References: one grammar, what each reader takes from it, and that what is written is read as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.core.errors import InputError
from sightline.core.references import Reference, parse_reference, take_apart


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("shapes", ("shapes", "", {})),
        ("shapes?", ("shapes", "", {})),
        ("shapes:conflict?size=32&seed=3", ("shapes", "conflict", {"size": "32", "seed": "3"})),
        ("folder:/data/a b/val", ("folder", "/data/a b/val", {})),
        ("folder:/what?/val", ("folder", "/what?/val", {})),
        ("folder:/what?/val?names=shape-texture", ("folder", "/what?/val", {"names": "shape-texture"})),
        ("folder:/a=b&c/d", ("folder", "/a=b&c/d", {})),
        ("folder:/two\nlines", ("folder", "/two\nlines", {})),
        ("parquet:x?label=a=b&image=", ("parquet", "x", {"label": "a=b", "image": ""})),
        ("run:a?model=timm:b@random?img_size=3", ("run", "a", {"model": "timm:b@random?img_size=3"})),
        ("simclr?blur=0&jitter=[0.4, 0.1]", ("simclr", "", {"blur": "0", "jitter": "[0.4, 0.1]"})),
        ("folder:x?split=1+1%20", ("folder", "x", {"split": "1+1%20"})),
        ("simclr?blur", None),
        ("/data/val", None),
        ("", None),
    ],
)
def test_the_grammar(text: str, parts: tuple[str, str, dict[str, str]] | None) -> None:
    assert take_apart(text) == parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timm:resnet18", Reference("timm", "resnet18", None, {})),
        ("timm:resnet18@random?seed=1", Reference("timm", "resnet18", "random", {"seed": "1"})),
        ("timm:a@/x@y.pth", Reference("timm", "a", "/x@y.pth", {})),
        ("run:runs/a b?step=3", Reference("run", "runs/a b", None, {"step": "3"})),
        ("mae:f?a=1+2%2B%26", Reference("mae", "f", None, {"a": "1 2+&"})),
    ],
)
def test_encoders(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize("text", ["resnet18", "timm:", "timm:@random", "timm?a=b", ""])
def test_no_encoder(text: str) -> None:
    with pytest.raises(InputError, match="is not an encoder reference"):
        parse_reference(text)


@pytest.mark.parametrize("text", ["timm:a?b", "timm:a?b&c=d", "timm:a@random?=1"])
def test_no_options(text: str) -> None:
    with pytest.raises(InputError, match="option=value&option=value"):
        parse_reference(text)


names = st.text(st.characters(exclude_characters="@?"), min_size=1)


@given(names, st.none() | names, st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), st.text()))
def test_what_is_written_is_read_as_it_was(name: str, weights: str | None, options: dict[str, str]) -> None:
    reference = Reference("timm", name, weights, options)
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("timm:resnet18", ("timm", "resnet18", None, {})),
        ("timm:vit_small_patch16_224.dino", ("timm", "vit_small_patch16_224.dino", None, {})),
        ("timm:a@random", ("timm", "a", "random", {})),
        ("timm:a@/data/x.pth?img_size=(32,48)", ("timm", "a", "/data/x.pth", {"img_size": "(32,48)"})),
        ("huggingface:org/name@random?seed=3", ("huggingface", "org/name", "random", {"seed": "3"})),
        ("run:../runs/mine", ("run", "../runs/mine", None, {})),
        ("timm:a?x=1&y=", ("timm", "a", None, {"x": "1", "y": ""})),
    ],
)
def test_references(text, parts):
    reference = parse_reference(text)
    assert (reference.source, reference.id, reference.weights, reference.options) == parts
    assert str(reference) == text


@pytest.mark.parametrize("text", ["", "resnet18", "timm:", ":x", "timm:x@", "timm: @"])
def test_text_that_is_no_reference(text):
    if text == "timm: @":
        text = "timm:a@?"
    with pytest.raises(InputError, match="is not an encoder reference"):
        parse_reference(text)


def test_options_without_a_value():
    with pytest.raises(InputError, match="option=value"):
        parse_reference("timm:a?seed")
