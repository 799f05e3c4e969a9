"""Random numbers that depend on what they are for, not on when they are drawn.

A training step needs numbers for its crops, colours and masks. Here each of them is a hash of (seed, epoch, image,
view, slot). So a resumed training, a training in several processes, and one with any number of worker processes draw
the same numbers for the same image, and there is no generator whose state could be lost.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]  # one per image


def fold(keys: Keys, *purpose: int) -> Keys:
    """Keys for another purpose, independent of the given ones.

    >>> keys = np.arange(2, dtype=np.uint64)
    >>> bool((fold(keys, 1) == fold(keys, 2)).any())
    False
    """
    return mix(keys, *purpose)


def uniform(keys: Keys, n: int | Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1), n (or the slots named in n) per key: (len(keys), n).

    >>> uniform(np.arange(2, dtype=np.uint64), 3).round(3)
    array([[0.077, 0.033, 0.684],
           [0.436, 0.85 , 0.253]])
    """
    slots = np.arange(n) if isinstance(n, int) else np.asarray(n)
    # Keys and slots are mixed differently, or key 1 in slot 0 would be key 0 in slot 1.
    table = mix(mix(keys)[:, None] + mix(slots.astype(np.uint64), 1)[None, :])
    result: NDArray[np.float64] = (table >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def mix(keys: np.ndarray, *numbers: int) -> np.ndarray:
    """Mix numbers into uint64 keys; integer arithmetic only, hence the same on every machine.

    The finaliser of splitmix64 (Steele, Lea & Flood 2014), once per number.
    """
    result = keys.astype(np.uint64)
    for number in (*numbers, len(numbers)):
        step = (int(number) + 1) * 0x9E3779B97F4A7C15 % 2**64
        result = result + np.uint64(step)
        result = (result ^ (result >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        result = (result ^ (result >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result = result ^ (result >> np.uint64(31))
    return result


def id_keys(ids: np.ndarray) -> np.ndarray:
    """uint64 keys of ids, from sha256: Python's own hash differs from process to process."""
    digests = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8] for name in ids.tolist()]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
