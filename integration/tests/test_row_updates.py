"""Tables are updated by row on every layout: as in PyTorch, in threads and over processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import row_update_ranks
from programs import registry

from sbp_core.boxing import BoxingBackend
from sbp_core.processes import Line, supervise

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

#: Over processes: enough for each way in which gradients and tables are split.
QUICK = ("sharded states, clipped", "pipeline", "rows", "columns")


@cache
def with_threads(layout: str, optimizer: str) -> dict[str, Any]:
    return row_update_ranks.trained(layout, optimizer)


@pytest.mark.parametrize("optimizer", row_update_ranks.OPTIMIZERS)
@pytest.mark.parametrize("layout", row_update_ranks.LAYOUTS | row_update_ranks.WIDER)
def test_every_layout_trains_like_pytorch(layout: str, optimizer: str) -> None:
    found = with_threads(layout, optimizer)

    assert found["by row"] == 2
    assert found["worst"] <= 1e-9


@cache
def ranks_of(optimizer: str) -> Mapping[int, dict[str, Any]]:
    """Run the program as two processes; return what each rank printed."""
    backend: Any = registry().make("boxing", "torch", {})
    assert isinstance(backend, BoxingBackend)
    lines: list[Line] = []
    command = [sys.executable, str(Path(row_update_ranks.__file__)), optimizer, *QUICK]
    ended = supervise(backend.launch_specs(2, command), timeout_s=240, on_line=lines.append)
    assert ended.error() is None, "\n".join(map(str, lines))
    found = [json.loads(line.text) for line in lines if line.text.startswith("{")]
    return {one.pop("rank"): one for one in found}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("optimizer", ["adagrad", "sparse adam"])
def test_processes_train_like_threads_bit_for_bit(optimizer: str) -> None:
    for rank in (0, 1):
        for layout in QUICK:
            found, threads = ranks_of(optimizer)[rank][layout], with_threads(layout, optimizer)
            assert found["worst"] <= 1e-9, layout
            assert found["losses"] == threads["losses"], layout
