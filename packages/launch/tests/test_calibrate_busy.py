"""How much of a call its rank cannot compute in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from sbp_core.boxing import Communicator
from sbp_launch.calibrate.measuring import Stopwatch, measure_busy

_CALL_S = 3e-3


class Alone:
    """A watch of a rank that waits for nobody."""

    def barrier(self) -> None: ...

    def slowest(self, values: Sequence[float]) -> list[float]:
        return list(values)


class Begun:
    def __init__(self, over_s: float) -> None:
        self.over_s = over_s

    def wait(self) -> None:
        time.sleep(max(0.0, self.over_s - time.perf_counter()))


class Sleeping:
    """A transport whose calls take a while; which another processor moves, or the rank itself."""

    def __init__(self, *, moves_by_itself: bool) -> None:
        self.moves_by_itself = moves_by_itself

    def collective(self, *_: Any, **__: Any) -> None:
        time.sleep(_CALL_S)

    def begin(self, *_: Any, **__: Any) -> Begun:
        if not self.moves_by_itself:
            self.collective()
        return Begun(time.perf_counter() + self.moves_by_itself * _CALL_S)

    def progress(self) -> None: ...


@pytest.mark.parametrize("moves_by_itself", [True, False])
def test_overlap_hides_what_another_processor_moves(
    moves_by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "mm", lambda *_: time.sleep(5e-4))
    transport = cast(Communicator, Sleeping(moves_by_itself=moves_by_itself))

    busy = measure_busy(transport, cast(Stopwatch, Alone()), 2)

    assert 0 <= busy <= 1
    assert busy < 0.5 if moves_by_itself else busy > 0.5
