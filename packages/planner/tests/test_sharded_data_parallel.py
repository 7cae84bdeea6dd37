"""Names of other systems for our presets, and HSDP: what ranks hold and send, by its formulas.

With Psi bytes of parameters, s ranks that shard and r replicas, a rank sends in a step

    all-gathers within a group       Psi (s - 1) / s   in forward, and again in backward
    reduce-scatter within a group    Psi (s - 1) / s
    all-reduce over the replicas     2 (Psi / s) (r - 1) / r

Source: Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2; Zhang et al., "MiCS", VLDB 2022.
"""

from collections import Counter
from dataclasses import replace
from importlib.resources import files

import pytest
import yaml
from small_steps import captured, draws, entries, machine, run_beside_one_device
from test_manual import preset
from torch import nn

from sbp_core.compile import COMMIT, BoxingActor, compile_plan
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.sbp import B, NdSbp, S

REPLICAS, SHARDS = 2, 4
WIDTH, DEPTH = 16, 5
PSI = DEPTH * WIDTH * WIDTH * 8


class Stack(nn.Module):
    """Matrices without biases, each of which is needed in the backward phase but for the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def loss(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def planned(name, mesh=(REPLICAS, SHARDS), axes=("replica", "shard"), rows=4096, micro_batches=1):
    batch = lambda n, seed: {"x": draws(seed, rows * n, WIDTH)}  # noqa: E731
    step = captured(Stack(), batch, micro_batches)
    placement = Placement.grid(mesh, axes)
    cluster = machine(1e9, num_ranks=placement.size)
    request = PlanRequest(graph=step.graph, mesh=placement, cluster=cluster)
    return step, preset(name).plan(request)


def sent(step, strategy, regather):
    """Return the bytes that a rank sends for matrices in a step, by kind of boxing."""
    plan = compile_plan(step.graph, replace(strategy, regather=("*",) if regather else ()))
    steps = {
        actor.step: actor.num_firings(plan.repetitions)
        for part in plan.ranks
        for actor in part.actors
        if isinstance(actor, BoxingActor) and actor.name != COMMIT
    }
    found = Counter()
    for index, firings in steps.items():
        bytes_of_a_rank = firings * plan.steps[index].size_bytes / (REPLICAS * SHARDS)
        if bytes_of_a_rank > 100:  # not the loss
            found[plan.steps[index].kind.value] += bytes_of_a_rank
    return found


@pytest.mark.parametrize("regather", [True, False])
def test_hsdp_holds_all_states_in_each_group_and_sends_what_its_formula_says(regather):
    step, strategy = planned("hsdp")

    for name in ("layers.0.weight", "layers.4.weight.exp_avg"):
        assert strategy.storage[name].sbp == NdSbp(B, S(0))
    found = sent(step, strategy, regather)
    # The backward phase needs no first matrix, because the batch has no gradient.
    gathers = PSI * (SHARDS - 1) / SHARDS * (2 - 1 / DEPTH if regather else 1)
    scatters = PSI * (SHARDS - 1) / SHARDS
    reduces = 2 * PSI / SHARDS * (REPLICAS - 1) / REPLICAS
    assert sum(found.values()) == gathers + scatters + reduces
    # The router may reduce over the replicas first, and gather over them: half of it each.
    assert gathers <= found["all-gather"] <= gathers + reduces / 2


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_hsdp_trains_as_one_device(micro_batches):
    step, strategy = planned("hsdp", mesh=(2, 2), rows=8, micro_batches=micro_batches)

    run_beside_one_device(step, strategy)


def test_hsdp_on_shards_alone_is_zero():
    _, hsdp = planned("hsdp", mesh=(4,), axes=("shard",))
    _, zero = planned("zero", mesh=(4,), axes=("shard",))

    assert (hsdp.nodes, hsdp.storage) == (zero.nodes, zero.storage)
    assert entries(hsdp, "layers.0.weight") == {S(0)}


@pytest.mark.parametrize(
    ("name", "ours", "changes"),
    [
        ("oss", "zero1", {}),
        ("sdp", "zero2", {}),
        ("fsdp", "zero", {}),
        ("pipe", "pipeline", {"pipeline": "gpipe"}),
    ],
)
def test_a_name_of_another_system_is_a_preset_of_ours(name, ours, changes):
    text = files("sbp_planner.conf").joinpath("planner", "manual", f"{name}.yaml").read_text()
    found = yaml.safe_load(text)

    assert found.pop("defaults")[0] == f"manual/{ours}@_here_"
    assert found == changes
    preset(ours)  # is there
