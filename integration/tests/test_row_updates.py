"""Tables are updated by row on every layout: as in PyTorch, in threads and over processes."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import row_update_ranks
import torch
from programs import registry

from sbp_core.boxing import BoxingBackend
from sbp_core.processes import Line, supervise
from sbp_launch import MicroBatches, parallelize

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


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("per_update", [1, 2])
def test_updates_between_micro_batches_are_by_row(per_update: int, clip: float | None) -> None:
    rows, parts = 7, 4
    torch.manual_seed(0)
    model = row_update_ranks.Wide(sparse=False, rows=rows).double()
    twin = copy.deepcopy(model)
    own, theirs = (torch.optim.Adagrad(one.parameters(), lr=0.3) for one in (model, twin))
    loss_of, size = row_update_ranks.loss_of, row_update_ranks.BATCH // parts

    with parallelize(
        model,
        loss_of,
        row_update_ranks.batch(0, rows),
        own,
        mesh=2,
        planner="manual/zero",
        micro_batches=MicroBatches(parts, loss="each_micro_batch", per_update=per_update),
        update={} if clip is None else {"clip_norm": clip},
        compile={"passes": {"update_rows": {"when": "always"}}},
    ) as step:
        for index in range(2):
            whole = row_update_ranks.batch(index, rows)
            step(whole)
            for first in range(0, parts, per_update):
                theirs.zero_grad()
                for at in range(first, first + per_update):
                    part = {name: value[at * size :][:size] for name, value in whole.items()}
                    (loss_of(twin, part) / per_update).backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
                theirs.step()
        states = step.state_dict()
        assert [node.op for node in step.graph.nodes].count("sbp.row_update") == 2

    for key, value in twin.state_dict().items():
        torch.testing.assert_close(states[key], value, rtol=1e-9, atol=1e-12)
