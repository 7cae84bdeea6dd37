"""A pseudo-random order of any number of samples that takes no memory for each of them.

The place in the order is encrypted: a Feistel network of keyed rounds on two digits `left` and
`right`, one of which each round shifts by a hash of the other. So no two places meet, whatever the
hash is, and each is found by itself:

    place  ->  (left, right)  ->  left += hash(right)  ->  right += hash(left)  ->  ...  ->  number

The digits have about the square root of the size each, so there are a few pairs too many. A place
that ends on one of these goes through the network again until it does not ("cycle walking"): it
walks along a cycle that holds its beginning, so it arrives, and two places that walk do not meet.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (generalised Feistel
networks on Z_a x Z_b, cycle walking).
"""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

#: Rounds of the network: beyond the four that Luby and Rackoff need, as the digits may be small.
ROUNDS = 8

#: The increment of SplitMix64: 2^64 divided by the golden ratio, made odd.
_STEP = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: int) -> int:
    """Return a key of some integers: in [0, 2^64)."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def permuted(places: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """Return what stands at some places of a permutation.

    Args:
        places: int64 (n,), each in [0, size).
        size: What is permuted: the numbers in [0, size), 1 <= size <= 2^62.
        key: Names the permutation: in [0, 2^64).

    Returns:
        int64 (n,), each in [0, size); different for different places.
    """
    num_left = math.isqrt(size - 1) + 1
    num_right = -(-size // num_left)
    keys = _hashes(np.uint64(key), np.arange(ROUNDS, dtype=np.uint64))
    found = places.astype(np.uint64)
    walking = np.ones(found.shape, dtype=bool)
    while walking.any():
        left, right = np.divmod(found[walking], np.uint64(num_right))
        for index in range(0, ROUNDS, 2):
            left = (left + _hashes(keys[index], right)) % np.uint64(num_left)
            right = (right + _hashes(keys[index + 1], left)) % np.uint64(num_right)
        found[walking] = left * np.uint64(num_right) + right
        walking = found >= np.uint64(size)
    return found.astype(np.int64)


def _hashes(key: np.uint64, counts: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a pseudo-random number in [0, 2^32) for each count.

    Source: the finaliser of SplitMix64, in Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014, figure 17, applied to a counter.
    """
    # Arrays of uint64 wrap around silently, which is the arithmetic modulo 2**64 that is meant.
    z = counts * _STEP + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    # The upper half, so that a digit can be added to it without wrapping around.
    return (z ^ (z >> np.uint64(31))) >> np.uint64(32)
