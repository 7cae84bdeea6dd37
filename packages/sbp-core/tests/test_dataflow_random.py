from __future__ import annotations

import logging
from collections import Counter

import pytest
from random_networks import random_network, verify


def _verified(seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            found[verify(random_network(seed))] += 1
        except Exception as error:
            error.add_note(f"of the network random_network({seed})")
            raise
    return found


def test_analyses_of_random_networks_agree_with_execution() -> None:
    found = _verified(range(300))

    assert min(found[kind] for kind in ("live", "dead", "inconsistent")) > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(20))
def test_analyses_of_10000_random_networks_agree_with_execution(part: int) -> None:
    found = _verified(range(500 * part, 500 * (part + 1)))

    logging.getLogger(__name__).info("%s", dict(found))
    assert found.total() == 500
