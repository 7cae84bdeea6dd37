"""`osdp` inside of what other axes split, and inside the stages of a pipeline."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from step_family import MlpFamily, family_request

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError
from sbp_core.infer import pipelined
from sbp_core.memory import predict_memory
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, S
from sbp_core.simulation import simulate
from sbp_core.testing.planner import PlannerConformance
from sbp_planner.configs import OsdpConfig
from sbp_planner.guide import parameter_options
from sbp_planner.knapsack import choose, evaluate
from sbp_planner.osdp import OsdpPlanner
from sbp_planner.sharding import ends_of, mixed, shard_dim
from sbp_planner.storage_search import StorageSearch
from sbp_torch.testing.planner import PlannerRunConformance

STEP = MlpFamily(sizes=(16, 64, 2, 16), batch_size=16, micro_batches=(2,))

#: Columns and rows of the two layers of a block.
MEGATRON = {
    "*.up.weight": {"tensor": "S(0)"},
    "use:*.up.weight": {"tensor": "S(0)"},
    "*.down.weight": {"tensor": "S(1)"},
    "use:*.down.weight": {"tensor": "S(1)"},
    "blocks.*.down": {"tensor": "B"},
}


@cache
def asked(axes=("data", "tensor")):
    """The request on 2 x 2 ranks, with links that make every gather dear."""
    request = family_request(STEP, 4, bytes_per_s=1e7)
    return replace(request, mesh=Placement.grid((2, 2), axes), family=None)


@cache
def plan(axes=("data", "tensor"), memory_bytes=None):
    pins = MEGATRON if "tensor" in axes else {}
    return OsdpPlanner(OsdpConfig(memory_bytes=memory_bytes, pins=pins)).plan(asked(axes))


@cache
def ends(axes=("data", "tensor")):
    request = asked(axes)
    stages = pipelined(request.mesh, "1f1b", 2)
    pins = MEGATRON if "tensor" in axes else {}
    return ends_of(request, "data", stages=stages, pins=pins)


def needed(strategy, which="chosen"):
    return strategy.report["osdp"][which]["plan_memory_bytes_per_rank"]


def between(axes):
    """A limit that something has to be sharded for."""
    strategy = plan(axes)
    return (needed(strategy, "all_dp") + 2 * needed(strategy, "all_zdp")) / 3


def modes(strategy):
    return strategy.report["osdp"]["modes"]


@pytest.mark.exhaustive
class TestOsdpInCells(PlannerRunConformance):
    """It trains as one device does; the limit is one that some parameters are sharded for."""

    meshes = (((2, 2), ("data", "tensor")),)
    micro_batches = (2,)

    def make_planner(self):
        return OsdpPlanner(OsdpConfig(memory_bytes=5950))

    def test_some_parameters_are_sharded(self) -> None:
        for mesh in self.meshes:
            assert "ZDP" in modes(self.plan(mesh, 2)).values()


@pytest.mark.exhaustive
class TestOsdpInStages(PlannerConformance):
    meshes = (((2, 2), ("pipe", "data")),)
    micro_batches = (2,)

    def make_planner(self):
        return OsdpPlanner(OsdpConfig())


@pytest.mark.slow
def test_what_another_axis_splits_stays_and_the_axis_of_the_data_shards_inside():
    strategy = plan(memory_bytes=between(("data", "tensor")))

    assert set(modes(strategy).values()) == {"DP", "ZDP"}
    inner = {"up": S(0), "down": S(1)}
    for name, mode in modes(strategy).items():
        data, tensor = strategy.storage[name].sbp
        assert (data != B) == (mode == "ZDP")
        layer = name.split(".")[-2]
        if layer in inner:
            assert tensor == inner[layer]
    assert needed(strategy) <= between(("data", "tensor"))


@pytest.mark.slow
def test_a_parameter_is_sharded_along_a_dim_that_no_later_axis_splits():
    for axes, up, down in (
        (("data", "tensor"), 1, 0),
        (("tensor", "data"), 0, 0),
    ):
        replicated = ends(axes).replicated
        dims = [
            shard_dim(asked(axes).graph, replicated, f"blocks.0.{layer}.weight", "data")
            for layer in ("up", "down")
        ]
        assert dims == [up, down]
    assert ends().sharded.storage["blocks.0.up.weight"].sbp == NdSbp(S(1), S(0))


def test_bytes_in_the_guide_are_those_that_another_axis_leaves():
    found = ends()

    (options,) = parameter_options(
        asked().graph,
        ["blocks.0.up.weight"],
        asked().cluster,
        replicated=found.replicated,
        sharded=found.sharded,
    )

    half = 64 * 16 * 4 // 2  # of two ranks along 'tensor'
    assert options[0].resident_bytes == 4 * half
    assert options[1].resident_bytes == 4 * half // 2
    assert options[1].transient_bytes == 2 * half


@pytest.mark.slow
def test_each_stage_of_a_pipeline_has_a_limit_of_its_own(monkeypatch):
    axes = ("pipe", "data")
    (one, other) = plan(axes).report["osdp"]["cells"]
    assert [one["ranks"], other["ranks"]] == [[0, 1], [2, 3]]
    # The second stage holds more: the limit is between the two.
    held = [cell["plan_memory_bytes_per_rank"] for cell in (one, other)]
    assert held[0] < 0.95 * held[1]
    looked_at = []
    monkeypatch.setattr(StorageSearch, "fits", lambda self, choice: looked_at.append(choice))
    search = StorageSearch(request=asked(axes), ends=ends(axes), limit_bytes=sum(held) / 2)

    search.follow()

    # Of the guide's choices the first stage shards nothing, the second more and more until it fits.
    guided = looked_at[1:-2]
    first, second = (cell.parameters for cell in search.cells)
    assert not any(choice[at] for choice in guided for at in first)
    assert all(any(choice[at] for at in second) for choice in guided)
    assert search.memory(guided[-1]) <= sum(held) / 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [("data", "tensor"), ("pipe", "data")])
def test_no_change_of_one_parameter_fits_and_is_faster(axes):
    limit = between(axes)
    strategy, request = plan(axes, limit), asked(axes)
    pipe = "pipe" in axes
    found = ends(axes)
    if not pipe:
        found = replace(
            found,
            replicated=replace(found.replicated, in_flight=(1,)),
            sharded=replace(found.sharded, in_flight=(1,)),
        )
    sharded = {name for name, mode in modes(strategy).items() if mode == "ZDP"}
    step_s = strategy.report["osdp"]["chosen"]["plan_step_s"]

    for name in modes(strategy):
        changed = mixed(request.graph, found, sharded ^ {name})
        compiled = compile_plan(request.graph, changed, CompileOptions(cluster=request.cluster))
        is_slower = simulate(compiled).step_s >= (1 - 1e-9) * step_s
        assert is_slower or predict_memory(compiled).peak > limit, name


@pytest.mark.parametrize("axes", [("data", "tensor"), ("pipe", "data")])
def test_the_guide_is_solved_exactly(axes):
    found = ends(axes)
    items = parameter_options(
        asked(axes).graph,
        found.names,
        asked(axes).cluster,
        replicated=found.replicated,
        sharded=found.sharded,
    )
    everything = [evaluate(items, chosen) for chosen in product((0, 1), repeat=len(items))]
    sizes = sorted(one.memory_bytes for one in everything)

    for limit in sizes[:: len(sizes) // 12]:
        best = min(one.seconds for one in everything if one.memory_bytes <= limit)
        solution = choose(items, limit)
        assert solution.memory_bytes <= limit
        assert solution.seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.exhaustive
def test_the_axis_is_found_by_its_name_or_as_the_only_one():
    for axes, shape in ((("rows",), (4,)), (("one", "rows"), (1, 4)), (("rows", "pipe"), (4, 1))):
        request = replace(asked(), mesh=Placement.grid(shape, axes))
        strategy = OsdpPlanner(OsdpConfig(memory_bytes=60_000)).plan(request)
        assert "ZDP" in modes(strategy).values()


def test_the_axis_of_stages_is_refused():
    with pytest.raises(ConfigError, match="'pipe', which is of stages"):
        OsdpPlanner(OsdpConfig(axis="pipe")).plan(asked(("pipe", "data")))
