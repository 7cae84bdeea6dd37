"""The kinds of files that the core reads, each with valid examples, for `sbp_core.testing.fuzz`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from sbp_core import strategy_yaml
from sbp_core.boxing import route
from sbp_core.calibration import CALL_KINDS, Calibration, Measurement, calibrate
from sbp_core.cluster import Cluster, Device, Link, LinkLevel
from sbp_core.compile import check_strategy, compile_plan
from sbp_core.compile.physical import PLAN
from sbp_core.graph import LogicalGraph, graph_hash
from sbp_core.graph.serialize import GRAPH
from sbp_core.graph.spec import verify_graph
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.plan_request import PlanRequest
from sbp_core.sbp import NdSbp
from sbp_core.serialize import Lines
from sbp_core.strategy import Strategy
from sbp_core.testing.fuzz import FileKind
from sbp_core.testing.graphs import chain, cluster, mlp
from sbp_core.testing.plans import LINE, data_parallel_plan, pipeline_plan, strategy_of

__all__ = ["KINDS", "measured_cluster"]


def measured_cluster() -> Cluster:
    """Return a machine of two ranks with a calibration."""
    samples = [
        Measurement(
            backend="torch",
            kind=kind,
            group_size=2,
            shared_bytes=2**power,
            times_s=(1e-5 + 1e-9 * 2**power, 2e-5 + 1e-9 * 2**power),
        )
        for kind in ("all-reduce", "all-gather")
        for power in range(10, 16)
    ]
    return Cluster(
        name="desk",
        num_devices=2,
        devices_per_node=2,
        device=Device(
            memory_bytes=10, flop_per_s={"float32": 1e9}, memory_bytes_per_s=1e9, launch_s=1e-6
        ),
        intra_node=Link(latency_s=1e-6, bytes_per_s=1e9),
        intra_node_shared=True,
        inter_node_shared=False,
        calibrations={"torch": calibrate(samples)},
        backend="torch",
        machine={"processor": "two cores"},
    )


def _written(write: Callable[[Path], object]) -> bytes:
    """Return the bytes that a function writes into a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        return path.read_bytes()


# Plans.


def _plans() -> Sequence[bytes]:
    both = pipeline_plan(2, (2, 2), mesh=Placement.grid((2, 2), ("pipe", "data")))
    return [
        json.dumps(PLAN.dump(data_parallel_plan())).encode(),
        _written(lambda path: PLAN.write(pipeline_plan(3, (2, 1)), path)),
        _written(lambda path: PLAN.write(both, path)),
    ]


def _use_plan(path: Path) -> None:
    plan = PLAN.read(path)
    check(plan)
    assert plan.hash
    assert plan.boxing_bytes >= 0


# Graphs.


def _graphs() -> Sequence[bytes]:
    return [
        _written(lambda path: GRAPH.write(chain(), path)),
        _written(lambda path: GRAPH.write(mlp(num_micro_batches=2), path)),
    ]


def _use_graph(path: Path) -> None:
    graph = verify_graph(GRAPH.read(path))
    assert graph_hash(graph)
    for node in graph.nodes:
        assert node.where()
    assert graph.users
    assert sum(graph.tensor(name).size_bytes for name in graph.types if graph.is_tensor(name)) >= 0


# Clusters.


def _racks() -> Cluster:
    """Return a machine of GPUs in racks, with host memory."""
    link = Link(latency_s=1e-5, bytes_per_s=1e8)
    desk = replace(measured_cluster(), calibrations={}, backend="", machine={})
    device = replace(desk.device, kind="cuda", host_memory_bytes=100, host_link=link)
    rack = LinkLevel(name="rack", num_ranks=4, link=link, shared=True)
    return replace(desk, num_devices=8, device=device, groups=(rack,))


def _use_cluster(path: Path) -> None:
    read = Cluster.load(path)
    for mesh in (Placement.grid((2,), ("data",)), Placement([1, 300], ("data",))):
        found = route((8, 6), "float32", (mesh, NdSbp.parse("P")), (mesh, NdSbp.parse("S(0)")))
        assert found.time_s(read) >= 0
        assert found.explain(read)
    for calibration in read.calibrations.values():
        _predict(calibration)


def _predict(calibration: Calibration) -> None:
    for kind in CALL_KINDS:
        for group_size, size_bytes in ((2, 1 << 20), (2 if kind == "transfer" else 8, 1)):
            time_s = calibration.time_s(kind, group_size, 1, size_bytes)
            assert time_s is None or time_s >= 0
    assert all(str(error) for error in calibration.errors)


# Strategies.


def _strategies(write: Callable[[Strategy, Path], object]) -> Sequence[bytes]:
    graph = mlp()
    request = PlanRequest(graph=graph, mesh=LINE, cluster=cluster())
    pins = {"batch": "S(0)", "parameters": "B"}
    split = infer_strategy(request, planner="test", pins=pins)
    return [
        _written(lambda path: write(strategy_of(graph), path)),
        _written(lambda path: write(split, path)),
    ]


def _take(strategy: Strategy, lines: Lines, graph: LogicalGraph) -> None:
    """Compile a strategy for a graph, and check the plan."""
    check_strategy(graph, strategy, lines)
    if strategy.num_micro_batches == graph.num_micro_batches:
        check(compile_plan(graph, strategy))


def _use_strategy_json(path: Path) -> None:
    _take(*Strategy.load_with_lines(path), mlp())


def _use_strategy_yaml(path: Path) -> None:
    strategy_yaml.load_form(path)
    graph = mlp()
    _take(*strategy_yaml.load_with_lines(path, graph), graph)


#: The kinds of files by name.
KINDS = {
    kind.name: kind
    for kind in (
        FileKind(name="plan", suffix=".json", originals=_plans, use=_use_plan),
        FileKind(
            name="graph", suffix=".json", originals=_graphs, use=_use_graph, names_place=False
        ),
        FileKind(
            name="cluster",
            suffix=".json",
            originals=lambda: [_written(measured_cluster().save), _written(_racks().save)],
            use=_use_cluster,
        ),
        FileKind(
            name="strategy",
            suffix=".json",
            originals=lambda: _strategies(Strategy.save),
            use=_use_strategy_json,
        ),
        FileKind(
            name="strategy in yaml",
            suffix=".yaml",
            originals=lambda: _strategies(strategy_yaml.save),
            use=_use_strategy_yaml,
        ),
    )
}
