from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from alive_bytes import AliveBytes
from torch import Tensor

from sbp_aten.passes import prepare_step
from sbp_core.boxing import Bounds, bounds_of
from sbp_core.compile import compile_plan
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import SbpLookupError, SbpValueError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.infer.pins import PinValue
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.deferred_init import DeferredModel, DeferredStates, deferred
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.store import StateStore
from sbp_torch.testing.models import PROGRAMS, Program, same_states

_TENSOR = {
    "blocks.*.attention.qkv.weight": "S(0)",
    "blocks.*.attention.out.weight": "S(1)",
    "tokens.weight": "S(1)",
}
_SHARDED = {"batch": "B", "parameters": "S(0)", "optimizer_states": "S(0)"}
_CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], Mapping[str, PinValue]]] = {
    "whole": ((2,), ("data",), {"batch": "S(0)", "parameters": "B"}),
    "sharded": ((2,), ("data",), _SHARDED),
    "sharded unevenly": ((3,), ("data",), _SHARDED),
    "sharded over more than there is": ((7,), ("data",), _SHARDED),
    "tensor, unevenly": ((3,), ("tensor",), {"batch": "B", **_TENSOR}),
    "two axes": (
        (2, 2),
        ("data", "tensor"),
        {
            "batch": {"data": "S(0)", "tensor": "B"},
            **{name: {"data": "S(0)", "tensor": sbp} for name, sbp in _TENSOR.items()},
        },
    ),
    "pipeline": ((2,), ("pipe",), {}),
}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A deferred program and its plan."""

    program: Program
    made: DeferredModel
    optimizer: torch.optim.Optimizer
    plan: PhysicalPlan

    def states(self) -> DeferredStates:
        return self.made.states(self.optimizer)

    def expected(self) -> dict[str, Tensor]:
        return initial_states(*self.program.build())


@cache
def _graph(name: str) -> tuple[DeferredModel, torch.optim.Optimizer, LogicalGraph]:
    program = PROGRAMS[name]
    made = deferred(program.model, 0)
    optimizer = program.optimizer(made.model)
    graph = capture(made.model, program.loss, program.batches(1)[0], optimizer)
    return made, optimizer, graph


@cache
def _run(name: str, case: str) -> _Run:
    made, optimizer, captured = _graph(name)
    graph = prepare_step(captured)
    shape, axes, pins = _CASES[case]
    request = PlanRequest(graph=graph, mesh=Placement.grid(shape, axes), cluster=cluster())
    plan = compile_plan(graph, infer_strategy(request, planner="test", pins=pins))
    return _Run(program=PROGRAMS[name], made=made, optimizer=optimizer, plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "tied gpt", "buffers"])
def test_a_deferred_model_is_captured_as_the_real_one(name: str) -> None:
    program = PROGRAMS[name]
    _, _, graph = _graph(name)

    model, optimizer = program.build()

    assert graph == capture(model, program.loss, program.batches(1)[0], optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES)
def test_every_rank_gets_the_shards_of_the_one_device_initialisation(case: str) -> None:
    run = _run("tied gpt", case)
    expected = run.expected()

    for part in run.plan.ranks:
        store, whole = (StateStore(run.plan, [part.rank]) for _ in range(2))
        store.load(run.states())
        whole.load(expected)

        assert same_states(store.values[part.rank], whole.values[part.rank])
        assert store.values[part.rank].keys() >= {
            slot.name for slot in part.slots if slot.name in expected
        }


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("case", _CASES)
def test_no_rank_ever_holds_more_than_its_shards_and_one_parameter(case: str) -> None:
    run = _run("tied gpt", case)
    largest = max(parameter.nbytes for parameter in run.made.model.parameters())
    whole = sum(value.nbytes for value in run.expected().values())

    for part in run.plan.ranks:
        store, states = StateStore(run.plan, [part.rank]), run.states()
        with AliveBytes() as alive:
            store.load(states)
        held = [v for v in store.values[part.rank].values() if isinstance(v, Tensor)]
        shards = sum(tensor.nbytes for tensor in held)

        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == shards
        assert largest <= alive.peak <= shards + largest + _NUMBERS_BYTES
        assert shards + largest + _NUMBERS_BYTES < whole or case == "whole"


#: One number for each state of the optimizer.
_NUMBERS_BYTES = 1_000


def test_an_eager_mapping_is_loaded_from_and_left_alone() -> None:
    run = _run("tied gpt", "whole")
    states = run.expected()
    store = StateStore(run.plan, [0, 1])

    store.load(states)
    store.values[0]["norm.weight"].zero_()

    assert same_states(states, run.expected())
    assert torch.equal(store.values[1]["norm.weight"], states["norm.weight"])


def test_a_state_is_let_go_of_before_the_next_is_made() -> None:
    run = _run("tied gpt", "sharded")
    held_over: list[str] = []

    class Watched(DeferredStates):
        def each(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
            for name, value in super().each(names):
                box, alive = [value], weakref.ref(value)
                del value
                yield name, box.pop()
                if alive() is not None and name in self._windows:
                    held_over.append(name)

    states = run.states()
    StateStore(run.plan, [0]).load(Watched(states._replay.tape, states._windows, states._real))

    assert held_over == []


def test_states_of_other_stages_are_not_made() -> None:
    run = _run("tied gpt", "pipeline")
    asked: list[str] = []

    class Watched(DeferredStates):
        def each(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
            for name, value in super().each(names):
                asked.append(name)
                yield name, value

    states = run.states()
    StateStore(run.plan, [0]).load(Watched(states._replay.tape, states._windows, states._real))

    own = {slot.name for slot in run.plan.by_rank[0].slots}
    parameters = {name for name, _ in run.made.model.named_parameters()}
    assert parameters & set(asked) == parameters & own
    assert parameters - own


class InParts(dict[str, Tensor]):
    """States of which parts can be read, and the bytes that were read so."""

    num_bytes = 0

    def like(self, name: str) -> Tensor:
        return self[name].to("meta")

    def part(self, name: str, bounds: Bounds) -> Tensor:
        found = self[name][tuple(slice(*dim) for dim in bounds)].clone()
        self.num_bytes += found.nbytes
        return found


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", ["whole", "sharded unevenly", "two axes", "pipeline"])
def test_of_states_that_are_read_in_parts_a_process_reads_what_its_ranks_hold(case: str) -> None:
    run = _run("tied gpt", case)
    wanted, ranks = StateStore(run.plan, run.plan.by_rank), list(run.plan.by_rank)
    wanted.load(run.expected())

    for here in (ranks[:1], ranks[1:]):
        states, store = InParts(run.expected()), StateStore(run.plan, here)
        store.load(states)
        held = [value for rank in here for value in store.values[rank].values()]
        # A slice that several of them hold is read once.
        slices = {
            (slot.name, bounds_of(slot.shape, run.plan.stages[slot.stage], slot.sbp)[rank]): value
            for rank in here
            for slot in run.plan.by_rank[rank].slots
            if slot.sbp is not None and torch.is_tensor(value := store.values[rank].get(slot.name))
        }
        assert states.num_bytes == sum(value.nbytes for value in slices.values())
        for rank in here:
            assert store.values[rank].keys() == wanted.values[rank].keys()
            for name, value in store.values[rank].items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(wanted.values[rank][name])
                )
        storages = [value.data_ptr() for value in held if torch.is_tensor(value) and value.numel()]
        assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_states_that_do_not_fit_are_refused_before_any_is_replaced(change: str) -> None:
    run = _run("tied gpt", "whole")
    store = StateStore(run.plan, [0, 1])
    store.load(run.states())
    before = store.values
    states = {name: value + 1 for name, value in run.expected().items()}
    if change == "missing":
        del states["norm.bias"]
    elif change == "unknown":
        states["extra"] = torch.zeros(1)
    else:
        states["norm.bias"] = torch.zeros(1)

    for given in (states, InParts(states)):
        with pytest.raises(SbpValueError, match=r"norm\.bias|extra"):
            store.load(given)

        assert store.values is before


@pytest.mark.slow
def test_a_shard_of_another_process_or_stage_is_refused() -> None:
    run = _run("gpt", "pipeline")
    store = StateStore(run.plan, [1])
    store.load(run.states())
    (name, *_), (first, *_) = (
        sorted(slot.name for slot in part.slots if slot.name in run.expected())
        for part in (run.plan.by_rank[1], run.plan.by_rank[0])
    )

    assert store.shard(name, 1) is store.values[1][name]
    with pytest.raises(SbpLookupError, match="rank 0 runs in another process") as caught:
        store.shard(first, 0)
    assert caught.value.accepted == "ranks of this process: 1"
    with pytest.raises(SbpLookupError, match="there is no rank 2"):
        store.shard(name, 2)
    with pytest.raises(SbpLookupError, match="is on another stage"):
        store.shard(first, 1)
    with pytest.raises(SbpLookupError, match="no state is called"):
        store.shard("nobody", 1)
