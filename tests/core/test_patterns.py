"""Patterns of sites: what a wildcard stands for."""

import pytest

from sightline.core.patterns import site_pattern

SITES = ("block.0", "block.0.qkv", "block.11.norm1", "decoder.block.0", "norm")


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("block.*", {"block.0"}),
        ("block.**", {"block.0", "block.0.qkv", "block.11.norm1"}),
        ("block.?.*", {"block.0.qkv"}),
        ("**.norm?", {"block.11.norm1"}),
        ("*", {"norm"}),
        ("***", set(SITES)),
        ("*.*.*", {"block.0.qkv", "block.11.norm1", "decoder.block.0"}),
        ("block.0", {"block.0"}),
        ("block.0.", set()),
    ],
)
def test_a_star_stays_between_two_dots_and_two_stars_do_not(pattern: str, matched: set[str]) -> None:
    assert {site for site in SITES if site_pattern(pattern).fullmatch(site)} == matched
