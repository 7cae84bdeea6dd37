"""The long run of `python -m soak` tells what grows from what does not."""

from __future__ import annotations

from typing import Any

import pytest

from soak import NUM_SAMPLES, TOLERATED_BYTES, Growth, Sample, growth, sampled, table_of


def samples(more: dict[str, float]) -> list[Sample]:
    """Return those of a process that holds by so much more in each sample."""
    start: dict[str, Any] = {"memory_bytes": 200 << 20, "threads": 4, "files": 20}
    return [
        Sample(
            rank=0,
            step=index,
            **{name: int(value + index * more.get(name, 0)) for name, value in start.items()},
        )
        for index in range(1, NUM_SAMPLES + 1)
    ]


def test_what_stays_is_flat() -> None:
    assert growth(samples({})) == Growth(rank=0, memory_bytes=0, threads=0, files=0)
    assert table_of("torch", samples({}), 20_000)[1]


@pytest.mark.parametrize(
    ("what", "a_sample"), [("memory_bytes", TOLERATED_BYTES / 10), ("threads", 0.2), ("files", 0.2)]
)
def test_what_grows_slowly_is_not(what: str, a_sample: float) -> None:
    assert not growth(samples({what: a_sample})).is_flat
    assert not table_of("torch", samples({what: a_sample}), 20_000)[1]


def test_what_grows_at_the_start_only_is_a_cache() -> None:
    first, *others = samples({})
    early = Sample(rank=0, step=0, memory_bytes=1 << 20, threads=1, files=3)
    assert growth([early, first, *others[:-1]]).is_flat


def test_a_sample_sees_an_open_file(tmp_path: Any) -> None:
    before = sampled(0, 1)
    with (tmp_path / "file").open("w"):
        assert sampled(0, 1).files == before.files + 1
    assert before.threads >= 1 and before.memory_bytes > 1 << 20
