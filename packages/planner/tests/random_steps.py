"""Random small programs, for which every assignment can be looked at."""

from __future__ import annotations

from random import Random

from sbp_core.cluster import Cluster, Device, Link
from sbp_core.graph import GraphOutput, InputKind, LogicalGraph, OutputKind, Ref
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import Builder

#: Shapes and axes.
Meshes = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]

MESHES: Meshes = (((2,), ("data",)), ((3,), ("data",)), ((2, 2), ("data", "tensor")))
CUBE: Meshes = (((2, 2, 2), ("data", "context", "tensor")),)


def random_graph(random: Random, max_ops: int = 3) -> LogicalGraph:
    """Return a forward pass of a few products, sums and pointwise operators."""
    b = Builder()
    rows = random.choice((6, 8, 64))
    widths = [random.choice((4, 6, 32))]
    values = [(b.add_input("x", InputKind.BATCH, (rows, widths[0])), widths[0])]
    for number in range(random.randint(1, max_ops)):
        value, width = random.choice(values)
        kind = random.choice(("mm", "mm", "relu", "add"))
        same = [name for name, other in values if other == width]
        name = f"op{number}"
        if kind == "mm":
            after = random.choice((4, 6, 32))
            weight = b.add_input(f"w{number}", InputKind.PARAMETER, (width, after))
            b.op(name, "mm.default", (Ref(value), Ref(weight)), (rows, after))
            values.append((name, after))
        elif kind == "relu":
            b.op(name, "relu.default", (Ref(value),), (rows, width), pointwise=True)
            values.append((name, width))
        else:
            other = random.choice(same)
            b.op(name, "add.Tensor", (Ref(value), Ref(other)), (rows, width), pointwise=True)
            values.append((name, width))
    last, _ = values[-1]
    b.op("sum", "sum.default", (Ref(last),), ())
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="sum"))
    return b.graph("random")


def random_request(random: Random, meshes: Meshes = MESHES, max_ops: int = 3) -> PlanRequest:
    """Return a random program on a random mesh of a random machine."""
    shape, axes = random.choice(meshes)
    device = Device(
        memory_bytes=1 << 30,
        flop_per_s={"float32": 10 ** random.uniform(7, 10)},
        memory_bytes_per_s=10 ** random.uniform(7, 10),
        launch_s=random.choice((0.0, 1e-6)),
    )
    link = Link(latency_s=random.choice((0.0, 1e-6)), bytes_per_s=10 ** random.uniform(7, 10))
    mesh = Placement.grid(shape, axes)
    cluster = Cluster(
        name="random",
        num_devices=mesh.size,
        devices_per_node=mesh.size,
        device=device,
        intra_node=link,
    )
    return PlanRequest(graph=random_graph(random, max_ops), mesh=mesh, cluster=cluster)
