"""Random numbers by key: uniform, independent, and the same for ever."""

import numpy as np
import pytest

from sightline.core.keyed_random import fold, id_keys, uniform

KEYS = id_keys(np.array([f"image {i}" for i in range(20_000)]))


def plain_mix(key: int, *numbers: int) -> int:
    """splitmix64's finaliser in Python's own integers."""
    for number in (*numbers, len(numbers)):
        key = (key + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
    return key


def test_numbers_are_those_of_plain_integers() -> None:
    keys, slots = [0, 1, 2**63, 2**64 - 1], [0, 1, 7]
    plain = [[(plain_mix((plain_mix(k) + plain_mix(s, 1)) % 2**64) >> 11) / 2**53 for s in slots] for k in keys]
    np.testing.assert_array_equal(uniform(np.array(keys, np.uint64), slots), plain)
    assert fold(np.array(keys, np.uint64), 4, 2).tolist() == [plain_mix(key, 4, 2) for key in keys]


def test_numbers_never_change() -> None:
    """A resumed training, or one on another machine, depends on these very numbers."""
    keys = np.array([0, 1, 2**63], np.uint64)
    expected = [
        [0.07705028193585572, 0.03295533825767638],
        [0.4363910311786038, 0.8495050645737872],
        [0.9848729833762859, 0.15334278867321527],
    ]
    np.testing.assert_array_equal(uniform(keys, 2), expected)
    assert fold(keys, 1, 2).tolist() == [0xD34CC25AD4ED6671, 0xC19BF6275876B5B5, 0x0D180F0A3C31BC7A]


def test_numbers_lie_in_the_half_open_interval() -> None:
    u = uniform(KEYS, 16)
    assert u.shape == (len(KEYS), 16)
    assert u.dtype == np.float64
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1


@pytest.mark.parametrize(
    "keys", [KEYS, np.arange(20_000, dtype=np.uint64), np.uint64(2**40) * np.arange(1, 20_001, dtype=np.uint64)]
)
def test_every_slot_is_uniform(keys: np.ndarray) -> None:
    """χ² over 64 bins; 63 degrees of freedom, so 120 is beyond 1 in 10⁵."""
    u = uniform(keys, 8)
    for slot in range(8):
        counts = np.bincount((u[:, slot] * 64).astype(int), minlength=64)
        expected = len(keys) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120


def test_slots_keys_and_purposes_are_independent() -> None:
    """Correlations of 20,000 pairs have a standard deviation of 0.007."""
    u = uniform(KEYS, 8)
    between_slots = np.corrcoef(u.T)[~np.eye(8, dtype=bool)]
    assert np.abs(between_slots).max() < 0.035
    neighbours = uniform(np.arange(20_001, dtype=np.uint64), 4)
    for a in range(4):
        for b in range(4):
            assert abs(np.corrcoef(neighbours[:-1, a], neighbours[1:, b])[0, 1]) < 0.035
    for purpose in [(1,), (2,), (1, 0), (0, 1)]:
        other = uniform(fold(KEYS, *purpose), 8)
        assert abs(np.corrcoef(u[:, 0], other[:, 0])[0, 1]) < 0.035
        assert not np.intersect1d(u, other).size


def test_pairs_of_slots_fill_the_square() -> None:
    u = uniform(KEYS, 2)
    cells = np.bincount((u[:, 0] * 8).astype(int) * 8 + (u[:, 1] * 8).astype(int), minlength=64)
    expected = len(KEYS) / 64
    assert ((cells - expected) ** 2 / expected).sum() < 120


def test_no_two_numbers_are_the_same() -> None:
    """Key 1 in slot 0 must not be key 0 in slot 1, nor anything else like it."""
    u = uniform(np.arange(300, dtype=np.uint64), 300)
    assert len(np.unique(u)) == u.size


def test_slots_can_be_named() -> None:
    u = uniform(KEYS[:100], 6)
    np.testing.assert_array_equal(uniform(KEYS[:100], [5, 0, 3]), u[:, [5, 0, 3]])
    np.testing.assert_array_equal(uniform(KEYS[:100], 3), u[:, :3])


def test_a_number_depends_on_its_own_key_only() -> None:
    np.testing.assert_array_equal(uniform(KEYS[[7, 3]], 4), uniform(KEYS, 4)[[7, 3]])


def test_folds_are_new_keys() -> None:
    made = [KEYS, *(fold(KEYS, *purpose) for purpose in [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0)])]
    assert all(keys.dtype == np.uint64 for keys in made)
    assert len(np.unique(np.concatenate(made))) == sum(map(len, made))
    assert not np.array_equal(fold(fold(KEYS, 1), 2), fold(KEYS, 1, 2))
    np.testing.assert_array_equal(fold(KEYS, 3), fold(KEYS.copy(), 3))
    flipped = np.unpackbits((fold(KEYS, 4) ^ fold(KEYS ^ np.uint64(1), 4)).view(np.uint8)).mean()
    assert abs(flipped - 0.5) < 0.01  # one bit of a key changes half of all bits
