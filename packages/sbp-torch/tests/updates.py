"""A small program, every optimizer, and runs of both, for the tests of the update of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn, optim

from sbp_aten.passes import prepare_step
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.graph.ir import InputKind, LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.graph_capture import (
    UpdateOptions,
    capture,
    initial_states,
    scalar_values,
)
from sbp_torch.optim import CombinedOptimizer, Lamb, Lars, Lion, RowWiseAdagrad
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime, ReferenceSession
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import assert_equal, assert_near, small_cluster

Batch = Mapping[str, Tensor]
Maker = Callable[[nn.Module], torch.optim.Optimizer]

#: Micro-batch size, and extents that two and three ranks cannot share evenly.
SAMPLES, WIDE, NARROW = 6, 7, 5


class Net(nn.Module):
    """Matrices, vectors and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NARROW, WIDE)
        self.last = nn.Linear(WIDE, 3)
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.first(x))) * self.gain
        return made


def net_loss(model: nn.Module, batch: Batch) -> Tensor:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def net_batch(index: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(index)
    x = torch.randn(SAMPLES, NARROW, generator=source, dtype=dtype)
    return {"x": x, "y": torch.randn(SAMPLES, 3, generator=source, dtype=dtype)}


def of(kind: Callable[..., torch.optim.Optimizer], **settings: object) -> Maker:
    return lambda model: kind(model.parameters(), **settings)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return CombinedOptimizer([optim.Muon(matrices, lr=0.02), optim.AdamW(others, lr=0.01)])


#: Those whose own code is traced, or that are the same op by op, so that every bit is the same.
TRACED: dict[str, Maker] = {
    "sgd": of(optim.SGD, lr=0.1),
    "momentum": of(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "dampened": of(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "adam": of(optim.Adam, lr=0.01, weight_decay=0.1),
    "amsgrad": of(optim.Adam, lr=0.01, amsgrad=True, maximize=True),
    "adamw": of(optim.AdamW, lr=0.01),
    "foreach": of(optim.AdamW, lr=0.01, foreach=True),
    "adagrad": of(optim.Adagrad, lr=0.01, initial_accumulator_value=0.2, lr_decay=0.1),
    "rmsprop": of(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "adadelta": of(optim.Adadelta, lr=0.5),
    "adamax": of(optim.Adamax, lr=0.01),
    "muon": muon,
    "lion": of(Lion, lr=0.01, weight_decay=0.1),
    "lamb": of(Lamb, lr=0.01, weight_decay=0.1),
    "lars": of(Lars, lr=1.0, weight_decay=0.1),
    "row-wise adagrad": of(RowWiseAdagrad, lr=0.01, initial_accumulator_value=0.2, lr_decay=0.1),
    "fused adamw": of(optim.AdamW, lr=0.01, fused=True),
    "fused amsgrad": of(optim.Adam, lr=0.01, fused=True, amsgrad=True, weight_decay=0.1),
    "fused momentum": of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "fused sgd": of(optim.SGD, lr=0.1, fused=True),
    "fused adagrad": of(optim.Adagrad, lr=0.01, lr_decay=0.1, fused=True),
}

#: Those that are said in other words.
RESTATED: dict[str, Maker] = {
    "nadam": of(optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": of(optim.RAdam, lr=0.01, weight_decay=0.1),
    "radam that never adapts": of(optim.RAdam, lr=0.01, betas=(0.9, 0.6)),
    "adafactor": of(optim.Adafactor, lr=0.01, weight_decay=0.1),
    "rprop": of(optim.Rprop, lr=0.01),
    "asgd": of(optim.ASGD, lr=0.01, t0=3.0),
}

ALL = TRACED | RESTATED


def made(maker: Maker, dtype: torch.dtype = torch.float64) -> tuple[Net, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Net().to(dtype)
    return model, maker(model)


def rates(optimizer: torch.optim.Optimizer, index: int) -> dict[str, float]:
    """Return the learning rates of a step: another one each time."""
    groups = optimizer.param_groups
    names = ["lr"] if len(groups) == 1 else [f"lr.{at}" for at in range(len(groups))]
    first = {name: float(group["lr"]) for name, group in zip(names, groups, strict=True)}
    return {name: rate * (1 + 0.1 * index) for name, rate in first.items()}


def eager(
    maker: Maker, steps: int, between: Callable[[nn.Module], object] = lambda _: None
) -> tuple[Net, torch.optim.Optimizer]:
    """Train in plain PyTorch; `between` runs before every optimizer step."""
    model, optimizer = made(maker)
    schedule = [rates(optimizer, index) for index in range(steps)]
    for index in range(steps):
        for group, rate in zip(optimizer.param_groups, schedule[index].values(), strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        net_loss(model, net_batch(index)).backward()  # type: ignore[no-untyped-call]
        between(model)
        optimizer.step()
    return model, optimizer


def graph_run(
    maker: Maker, steps: int, options: UpdateOptions
) -> tuple[Mapping[str, object], list[dict[str, Tensor]]]:
    """Train by the captured graph, on one device."""
    model, optimizer = made(maker)
    graph = capture(model, net_loss, net_batch(0), optimizer, update=options)
    states: Mapping[str, Tensor | float] = initial_states(model, optimizer, options)
    found: list[dict[str, Tensor]] = []
    for index in range(steps):
        scalars = scalar_values(model, optimizer, options) | rates(optimizer, index)
        with torch.no_grad():
            results, states = run_graph(graph, states, [net_batch(index)], scalars)
        found.append(results)
    return states, found


def compare(states: Mapping[str, object], model: nn.Module, tolerance: float) -> None:
    for name, value in model.named_parameters():
        if tolerance:
            assert_near(name, states[name], value.detach(), tolerance)
        else:
            assert_equal(name, states[name], value.detach())


#: Pins of strategies whose states are sharded.
STRATEGIES = {
    "ZeRO-1": {"batch": "S(0)", "activations": "S(0)", "parameters": "B"},
    "ZeRO-3": dict.fromkeys(("batch", "activations", "parameters", "gradients"), "S(0)"),
    "columns": {"batch": "B", "parameters": "S(1)"},
}


def sharded_plan(
    graph: LogicalGraph, strategy: str, num_ranks: int, *, in_place_states: bool = True
) -> PhysicalPlan:
    kinds = {entry.kind for entry in graph.inputs if graph.is_tensor(entry.name)}
    pins = dict(STRATEGIES[strategy])
    if InputKind.OPTIMIZER_STATE in kinds:
        pins["optimizer_states"] = "S(1)" if strategy == "columns" else "S(0)"
    mesh = Placement.grid((num_ranks,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(num_ranks))
    options = CompileOptions(in_place_states=in_place_states)
    plan = compile_plan(graph, infer_strategy(request, planner="test", pins=pins), options)
    check(plan)
    return plan


def started(plan: PhysicalPlan, states: Mapping[str, Tensor]) -> ReferenceSession:
    return ReferenceRuntime(ReferenceConfig()).start(plan, states, LocalBackend())


def sharded(
    graph: LogicalGraph, strategy: str, num_ranks: int, states: Mapping[str, Tensor]
) -> ReferenceSession:
    return started(sharded_plan(graph, strategy, num_ranks), states)


def compare_sharded(maker: Maker, strategy: str, num_ranks: int, options: UpdateOptions) -> None:
    """Compare whole states, metrics and every rank's shard with one device."""
    model, optimizer = made(maker)
    graph = prepare_step(capture(model, net_loss, net_batch(0), optimizer, update=options))
    first = initial_states(model, optimizer, options)
    wanted, results = graph_run(maker, 3, options)

    with sharded(graph, strategy, num_ranks, first) as session:
        for index in range(3):
            scalars = scalar_values(model, optimizer, options) | rates(optimizer, index)
            found = session.step(net_batch(index), scalars).outputs
            for key, value in results[index].items():
                assert_near(key, found[key], value, 1e-11)
        whole = session.state_dict()
        for name, value in wanted.items():
            assert_near(name, whole[name], value, 1e-11)
        shards = [session.shard("first.weight", rank) for rank in range(num_ranks)]

    at = 1 if strategy == "columns" else 0
    if strategy == "ZeRO-1":
        assert all(torch.equal(shard, whole["first.weight"]) for shard in shards)
    else:
        assert torch.equal(torch.cat(shards, at), whole["first.weight"])


class Counting(optim.Optimizer):
    """Counts its steps in Python, as many optimizers outside of torch do."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["slow"] = p.clone()
                    state["drift"] = torch.full_like(p, 2.0)
                state["count"] += 1
                state["drift"] = state["drift"] * 0.5
                state["slow"].lerp_(p, 0.5)
                p.sub_(p.grad * (group["lr"] / state["count"]) + state["drift"] * 0.01)
