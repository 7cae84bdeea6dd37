"""Graphs that packages keep for their tests are what capture gives today.

`python integration/tests/test_stored_graphs.py` writes them anew, after a change that is meant.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from programs import loss_of, make_optimizer, registry

from sbp_aten.passes import prepare_step
from sbp_core.graph import GRAPH, LogicalGraph, graph_hash
from sbp_torch.graph_capture import capture

GPT_STEP = Path(__file__).parents[2] / "packages/planner/tests/data/gpt_step.json"


def captured_gpt_step() -> LogicalGraph:
    settings = {"vocabulary": 32, "context": 8, "num_layers": 1, "num_heads": 4, "hidden": 16}
    torch.manual_seed(0)
    model = registry().make("model", "gpt", settings)
    assert isinstance(model, torch.nn.Module)
    batch = {name: torch.zeros(8, 8, dtype=torch.int64) for name in ("tokens", "targets")}
    return prepare_step(capture(model, loss_of, batch, make_optimizer(model)), 2)


def test_the_step_that_planners_are_tested_on_is_captured_as_it_is_stored() -> None:
    stored = GRAPH.load(json.loads(GPT_STEP.read_text("utf-8")))

    found = captured_gpt_step()

    assert graph_hash(found) == graph_hash(stored)


if __name__ == "__main__":
    GPT_STEP.write_text(json.dumps(GRAPH.dump(captured_gpt_step())) + "\n", "utf-8")
