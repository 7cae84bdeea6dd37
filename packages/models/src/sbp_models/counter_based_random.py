"""Counter-based pseudo-random numbers: number `n` of a key is a pure function of both.

With them, a data set makes any sample without the samples before it.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

#: The increment of SplitMix64: 2^64 divided by the golden ratio, made odd.
_STEP = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: object) -> int:
    """Return the key of a stream, in [0, 2^64), from its purpose and the seed."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def hashes(key: int, counts: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return one pseudo-random number, in [0, 2^64), for each count.

    Source: the finaliser of SplitMix64, in Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014, figure 17, applied to a counter.
    """
    # Arrays of uint64 wrap around silently: this is arithmetic modulo 2**64, as intended.
    z = counts * _STEP + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def below(key: int, counts: npt.NDArray[np.uint64], bound: int) -> npt.NDArray[np.int64]:
    """Return an integer in [0, bound) for each count."""
    return (hashes(key, counts) % np.uint64(bound)).astype(np.int64)


def uniform(key: int, counts: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a number in (0, 1] for each count."""
    return (np.float64(0.5) + (hashes(key, counts) >> np.uint64(11))) * 2.0**-53


def normal(key: int, counts: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a number of mean 0 and variance 1 for each count.

    Source: Box and Muller, "A note on the generation of random normal deviates", 1958.
    """
    radius = np.sqrt(-2 * np.log(uniform(key, counts)))
    turn: npt.NDArray[np.float64] = radius * np.cos(2 * np.pi * uniform(key ^ (1 << 63), counts))
    return turn


def members(counts: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint64]:
    """Return `size` counts for each count, all different: uint64 (*counts.shape, size)."""
    places: npt.NDArray[np.uint64] = np.arange(size, dtype=np.uint64)
    found: npt.NDArray[np.uint64] = np.add(counts[..., None] * np.uint64(size), places)
    return found
