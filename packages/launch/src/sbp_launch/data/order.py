"""The order of the samples of a run, and the position in it: `SampleOrder`, `DataCursor`.

Positions count the samples that a run takes, over all epochs, from 0. An epoch has as many
positions as there are samples, and each sample is at one of them:

    samples     5, shuffled                       steps of 3
    position    0  1  2  3  4 | 5  6  7  8  9 | 10 ...
    sample      3  0  4  2  1 | 1  3  2  0  4 |  4 ...
    step        0------ 1---------  2------  3---------

A batch may cross the border of two epochs, if the batch size does not divide the number of samples.
So no sample is left out or repeated in an epoch, and one number describes the samples already used,
whatever the batch sizes and the number of ranks were.

The shuffled order needs no memory per sample. A place in the order is encrypted into a sample
number by a Feistel network: rounds on two digits `left` and `right`, each of which shifts one digit
by a keyed hash of the other. So different places give different numbers, for any hash, and each is
computed independently:

    place  ->  (left, right)  ->  left += hash(right)  ->  right += hash(left)  ->  ...  ->  number

Each digit has about the square root of the number of samples, rounded up, so there are a few pairs
too many. A place that is mapped to one of these goes through the network again until it is not
("cycle walking"). It walks along a cycle that contains its start, so it arrives, and two places
never arrive at the same number.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (generalised Feistel
networks on Z_a x Z_b, cycle walking).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from sbp_core import serialize
from sbp_core.errors import ConfigError, SbpValueError

#: Rounds of the network: more than the four that Luby and Rackoff need, because the digits may be
#: small.
ROUNDS = 8

#: The increment of SplitMix64: 2^64 divided by the golden ratio, made odd.
_STEP = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: int) -> int:
    """Return a hash of some integers, in [0, 2^64), as a key."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def permute_indices(places: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """Return the values of a pseudo-random permutation at some places.

    Args:
        places: int64 (n,), each in [0, size).
        size: The permutation is of the numbers in [0, size), 1 <= size <= 2^62.
        key: Selects the permutation: in [0, 2^64).

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
    # Arrays of uint64 wrap around silently: the arithmetic is modulo 2**64.
    z = counts * _STEP + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    # The upper half, so that adding a digit does not wrap around.
    return (z ^ (z >> np.uint64(31))) >> np.uint64(32)


#: `shuffled`: a different order in each epoch; `sequential`: the order of their numbers.
Order = Literal["shuffled", "sequential"]

#: Largest number of samples of a data set.
MOST_SAMPLES = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The order of the samples of a split.

    Args:
        num_samples: Samples of the split, >= 1.
        order: One of `Order`.
        seed: Seed of the shuffling, in 0 to 2^63 - 1.
        fingerprint: Hash of the samples, see `SampleSource.fingerprint`; empty if unknown.

    Raises:
        SbpValueError: one of these is out of its range.
    """

    num_samples: int
    order: str = "shuffled"
    seed: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= MOST_SAMPLES:
            raise SbpValueError(
                f"num_samples is {self.num_samples}", accepted="an integer in 1 to 2^62"
            )
        if self.order not in get_args(Order):
            accepted = ", ".join(get_args(Order))
            raise SbpValueError(f"order is {self.order!r}", accepted=accepted)
        if not 0 <= self.seed < 2**63:
            raise SbpValueError(f"seed is {self.seed}", accepted="an integer in 0 to 2^63 - 1")

    def numbers(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of the sample at each position.

        Args:
            positions: int64 (n,), each >= 0.

        Returns:
            int64 (n,), each in [0, num_samples).
        """
        epochs, places = np.divmod(positions, self.num_samples)
        if self.order == "sequential":
            return places
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = permute_indices(places[here], self.num_samples, key_of(self.seed, epoch))
        return places


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCursor:
    """The position of a run in its data: equal in all processes, and independent of ranks.

    Args:
        position: Samples taken so far, over all epochs, >= 0.
        order: The order of the samples.

    Raises:
        SbpValueError: `position` is negative or beyond 2^62.
    """

    position: int = 0
    order: SampleOrder

    def __post_init__(self) -> None:
        if not 0 <= self.position <= MOST_SAMPLES:
            raise SbpValueError(f"position is {self.position}", accepted="an integer in 0 to 2^62")

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.position // self.order.num_samples

    def advanced(self, count: int) -> DataCursor:
        """Return the cursor after `count` further samples."""
        return replace(self, position=self.position + count)

    def numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of some samples of the batch that begins here.

        Args:
            rows: Rows of the batch, int64 (n,).
        """
        return self.order.numbers(self.position + rows)

    def epochs(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the epoch, from 0, of some samples of the batch that begins here.

        Args:
            rows: Rows of the batch, int64 (n,).
        """
        return (self.position + rows) // self.order.num_samples

    def to_json(self) -> object:
        """Return the cursor as a JSON value, which `from_json` reads."""
        return {"position": self.position, "order": asdict(self.order)}

    @classmethod
    def from_json(cls, value: object, *, where: str = "") -> DataCursor:
        """Return the cursor in a JSON value.

        Args:
            value: The output of `to_json`.
            where: File and key, for messages.

        Raises:
            SbpError: it is not a cursor; the message names the key and accepted values.
        """
        return serialize.load(value, DataCursor, root="the cursor", where=where)

    def check_same_data(self, order: SampleOrder, *, where: str = "") -> None:
        """Check that the data and their order are those of this cursor.

        Raises:
            ConfigError: the next position would be a different sample.
        """
        if told := self.differences(order):
            raise ConfigError(
                f"these are not the data that the run stopped in: {'; '.join(told)}",
                where=where,
                accepted="the data that the run began with, in their order",
                todo="to continue with these data at the same position, set "
                "trainer.allow_other_data=true; or start a new run from its weights: "
                "trainer.init_from=RUN",
            )

    def differences(self, order: SampleOrder) -> list[str]:
        """Return the differences between some data and those of this cursor; empty if none."""
        before, told = self.order, []
        if before.num_samples != order.num_samples:
            told.append(
                f"the train split had {before.num_samples:,} samples, and has {order.num_samples:,}"
            )
        elif "" not in (before.fingerprint, order.fingerprint) and (
            before.fingerprint != order.fingerprint
        ):
            told.append("the samples of the train split have changed")
        for name in ("order", "seed"):
            had, has = getattr(before, name), getattr(order, name)
            if had != has:
                told.append(f"trainer.{name} was {had}, and is {has}")
        return told
