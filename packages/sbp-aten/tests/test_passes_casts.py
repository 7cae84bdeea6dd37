from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.pass_options import CastPlacement, MixedPrecision, PassOptions
from sbp_aten.passes import place_casts, prepare_step
from sbp_core.compile import compile_plan
from sbp_core.compile.lowering import lower
from sbp_core.errors import SbpValueError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref, Symbol, TensorType
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.signatures import legal_signatures
from sbp_core.testing.graphs import Builder, cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.signatures.verification import verify
from sbp_torch.testing.models import PROGRAMS, Batch, Gpt, token_loss

ZERO3 = {
    "batch": "S(0)",
    "use:batch": "S(0)",
    "activations": "S(0)",
    "parameters": "S(0)",
    "optimizer_states": "S(0)",
    "gradients": "S(0)",
    "updates": "S(0)",
}
NUM_RANKS = 4


def _cast(b: Builder, name: str, value: str, dtype: str, phase: Phase = Phase.FORWARD) -> Ref:
    shape = b.types[value].shape
    b.op(name, "_to_copy.default", (Ref(value),), shape, phase=phase, pointwise=True)
    b.nodes[-1].kwargs["dtype"] = Symbol("dtype", dtype)  # type: ignore[index]  # a dict, as built
    b.types[name] = TensorType(shape, dtype)
    return Ref(name)


def _low(b: Builder, name: str, op: str, args: tuple[object, ...], shape: tuple[int, ...],
         phase: Phase = Phase.FORWARD) -> Ref:  # fmt: skip
    b.op(name, op, args, shape, phase=phase)
    b.types[name] = TensorType(shape, "bfloat16")
    return Ref(name)


def _result(b: Builder, *values: Ref) -> LogicalGraph:
    for ref in values:
        b.outputs.append(GraphOutput(name=ref.name, kind=OutputKind.METRIC, value=ref.name))
    return verify_graph(b.graph())


def _inputs() -> Builder:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2, 3), dtype="bfloat16")
    b.add_input("w", InputKind.PARAMETER, (4, 3))
    return b


def _kinds(graph: LogicalGraph) -> list[tuple[str, str]]:
    return [(node.kind, str(node.args[0])) for node in graph.nodes]


def test_a_conversion_goes_before_the_views_of_what_it_converts() -> None:
    b = _inputs()
    b.op("a", "t.default", (Ref("w"),), (3, 4))
    y = _low(b, "y", "mm.default", (Ref("x"), _cast(b, "c", "a", "bfloat16")), (2, 4))
    graph = _result(b, y)

    placed = verify_graph(place_casts(graph))

    assert [kind for kind, _ in _kinds(placed)] == ["_to_copy", "t", "mm"]
    assert placed.nodes[0].args == (Ref("w"),)
    batch = {"x": torch.randn(2, 3).bfloat16()}
    states = {"w": torch.randn(4, 3)}
    one, other = (run_graph(g, states, [batch], {})[0]["y"] for g in (graph, placed))
    assert torch.equal(one, other)


def test_a_conversion_of_a_part_stays_there() -> None:
    b = _inputs()
    b.op("a", "slice.Tensor", (Ref("w"), 0, 0, 1), (1, 3))
    graph = _result(b, _cast(b, "c", "a", "bfloat16"))

    assert place_casts(graph).nodes == graph.nodes


def test_equal_conversions_are_done_once() -> None:
    b = _inputs()
    b.op("a", "neg.default", (Ref("w"),), (4, 3))
    one, other = _cast(b, "c", "a", "bfloat16"), _cast(b, "d", "a", "bfloat16", Phase.BACKWARD)
    p = _low(b, "p", "neg.default", (one,), (4, 3))
    q = _low(b, "q", "neg.default", (other,), (4, 3), Phase.BACKWARD)

    placed = verify_graph(place_casts(_result(b, p, q)))

    assert Counter(kind for kind, _ in _kinds(placed)) == {"neg": 3, "_to_copy": 1}


@pytest.mark.parametrize(("parameters", "count"), [("each_phase", 2), ("once", 1)])
def test_each_phase_converts_parameters_for_itself_if_asked(parameters: str, count: int) -> None:
    b = _inputs()
    _cast(b, "c", "w", "bfloat16")
    seen = _low(b, "t", "t.default", (Ref("c"),), (3, 4))
    y = _low(b, "y", "mm.default", (Ref("x"), seen), (2, 4))
    back = _low(b, "u", "t.default", (seen,), (4, 3), Phase.BACKWARD)
    z = _low(b, "z", "mm.default", (y, back), (2, 3), Phase.BACKWARD)

    placed = verify_graph(place_casts(_result(b, z), CastPlacement(parameters=parameters)))

    casts = [node for node in placed.nodes if node.kind == "_to_copy"]
    assert [node.args for node in casts] == [(Ref("w"),)] * count
    assert len({node.phase for node in casts}) == count
    if count == 2:
        backward = placed.by_name["z"]
        made = placed.producers[placed.producers[backward.args[1].name].args[0].name]
        assert made.phase is Phase.BACKWARD


def test_widening_conversions_stay_where_they_are() -> None:
    b = _inputs()
    y = _low(b, "y", "t.default", (Ref("x"),), (3, 2))
    graph = _result(b, _cast(b, "c", y.name, "float32"))

    assert place_casts(graph).nodes == graph.nodes


def _gpt_step(num_sequences: int, *, autocast: bool = False) -> LogicalGraph:
    torch.manual_seed(0)
    model = Gpt(32)
    batch = PROGRAMS["gpt"].batches(1, num_sequences)[0]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return token_loss(model, batch)

    return capture(model, loss, batch, torch.optim.SGD(model.parameters(), lr=0.1))


def _moved(graph: LogicalGraph, pins: dict[str, str]) -> tuple[Counter[str], int]:
    """Return the bytes that gathers of parameters and sums of gradients move, and all bytes.

    Links are slow and messages cheap, so that bytes decide, and there are many samples.
    """
    machine = cluster(num_devices=NUM_RANKS, bytes_per_s=1e7, latency_s=1e-8)
    mesh = Placement.grid((NUM_RANKS,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=machine)
    strategy = infer_strategy(request, planner="test", pins=pins)
    lowered = lower(graph, strategy)
    moved: Counter[str] = Counter()
    for item in lowered.items:
        if item.step is not None:
            value = lowered.held[item.outputs[0]].value
            while (node := graph.producers.get(value)) and node.kind in ("_to_copy", "t"):
                value = node.args[0].name
            gathered = value in graph.input_kinds
            moved["parameters" if gathered else "others"] += item.step.size_bytes
    plan = compile_plan(graph, strategy)
    assert plan.boxing_bytes == strategy.report["predicted_boxing_bytes"]
    return moved, plan.boxing_bytes


@pytest.fixture(scope="module")
def many() -> LogicalGraph:
    """The step of a GPT on so many samples that it is cheaper to send parameters."""
    return _gpt_step(256)


@pytest.mark.slow
def test_gathers_of_sharded_parameters_halve(many: LogicalGraph) -> None:
    low = MixedPrecision(lower=("embedding",))
    full, _ = _moved(prepare_step(many), ZERO3)
    half, _ = _moved(prepare_step(many, options=PassOptions(mixed_precision=low)), ZERO3)

    small = sum(
        many.tensor(e.name).size_bytes
        for e in many.inputs
        if e.kind is InputKind.PARAMETER and len(many.tensor(e.name).shape) == 1
    )
    # Norms and their parameters stay in float32.
    extra = 2 * small * (NUM_RANKS - 1)
    assert full["parameters"] > 10 * extra
    assert full["parameters"] / 2 <= half["parameters"] <= full["parameters"] / 2 + extra


@pytest.mark.slow
def test_a_capture_under_autocast_gathers_half_as_well(many: LogicalGraph) -> None:
    cast = _gpt_step(256, autocast=True)
    full, _ = _moved(prepare_step(many), ZERO3)
    half, _ = _moved(prepare_step(cast), ZERO3)

    assert half["parameters"] < 0.65 * full["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_summed_in_the_dtype_that_is_asked(
    autocast: bool, many: LogicalGraph
) -> None:
    graph = _gpt_step(256, autocast=True) if autocast else many
    low = None if autocast else MixedPrecision()
    pins = {**ZERO3, "parameters": "B", "optimizer_states": "B", "gradients": "B", "updates": "B"}
    moved = {}
    for dtype in ("float32", "as_made"):
        options = PassOptions(mixed_precision=low, place_casts=CastPlacement(reduce_dtype=dtype))
        prepared = prepare_step(graph, options=options)
        moved[dtype] = _moved(prepared, pins)[1]
        made = [node.kind for node in prepared.nodes if node.kind == "mm_as"]
        assert len(made) == (9 if dtype == "float32" else 0)

    assert 0.5 * moved["float32"] < moved["as_made"] < 0.65 * moved["float32"]


def test_a_product_that_others_use_is_not_made_wide() -> None:
    b = _inputs()
    g = _low(b, "g", "mm.default", (Ref("x"), _cast(b, "c", "w", "bfloat16")), (2, 4),
             Phase.BACKWARD)  # fmt: skip
    b.nodes[-1] = b.nodes[-1]
    wide = _cast(b, "wide", g.name, "float32", Phase.BACKWARD)
    b.op("new", "neg.default", (wide,), (2, 4), phase=Phase.OPTIMIZER)
    alone = place_casts(_result(b, Ref("new")))
    shared = place_casts(_result(b, g))

    assert "mm_as" in [kind for kind, _ in _kinds(alone)]
    assert "mm_as" not in [kind for kind, _ in _kinds(shared)]


@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_wide_products_are_products_in_value_and_in_signature(op: str) -> None:
    shapes = [(4, 6), (6, 4)] if op == "mm" else [(2, 4, 6), (2, 6, 4)]
    a, b = (torch.randn(shape).bfloat16() for shape in shapes)
    name = f"sbp.{op}_as.default"

    made = getattr(torch.ops.sbp, f"{op}_as")(a, b, torch.float32)
    report = verify(name, a.double(), b.double(), torch.float64)

    assert made.dtype == torch.float32
    assert torch.equal(made, getattr(torch, op)(a, b).float())
    plain = {(s.inputs, s.outputs) for s in legal_signatures(f"aten.{op}.default", a, b)}
    assert {(s.inputs, s.outputs) for s in legal_signatures(name, a, b, torch.float32)} == plain
    assert not report.wrong


@pytest.mark.slow
def test_placing_conversions_changes_no_bit_of_a_capture_under_autocast() -> None:
    graph = _gpt_step(3, autocast=True)
    torch.manual_seed(0)
    model = Gpt(32)
    states = initial_states(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = PROGRAMS["gpt"].batches(1, 3)

    placed = verify_graph(place_casts(graph))

    outputs, expected = run_graph(graph, states, [batch], {"lr": 0.1})
    found, new = run_graph(placed, states, [batch], {"lr": 0.1})
    assert placed != graph
    assert torch.equal(found["loss"], outputs["loss"])
    assert all(torch.equal(new[name], value) for name, value in expected.items())


def _sum_of_gradients(*dtypes: str) -> LogicalGraph:
    """A graph that adds up gradients, those of bfloat16 after a cast; and a use of the sum."""
    b = Builder()
    terms = []
    for at, dtype in enumerate(dtypes):
        b.add_input(f"g{at}", InputKind.BATCH, (2, 3), dtype=dtype)
        b.add_input(f"w{at}", InputKind.BATCH, (3, 3), dtype=dtype)
        factors = (Ref(f"g{at}"), Ref(f"w{at}"))
        b.op(f"n{at}", "mm.default", factors, (2, 3), phase=Phase.BACKWARD)
        b.types[f"n{at}"] = TensorType((2, 3), dtype)
        wide = dtype == "float32"
        terms.append(
            Ref(f"n{at}") if wide else _cast(b, f"c{at}", f"n{at}", "float32", Phase.BACKWARD)
        )
    total = terms[0]
    for at, term in enumerate(terms[1:], 1):
        b.op(f"s{at}", "add.Tensor", (total, term), (2, 3), phase=Phase.BACKWARD)
        total = Ref(f"s{at}")
    b.op("y", "neg.default", (total,), (2, 3), phase=Phase.BACKWARD)
    return _result(b, Ref("y"))


@pytest.mark.parametrize(
    ("dtypes", "added", "casts"),
    [
        (("bfloat16", "bfloat16"), {"bfloat16": 1}, 1),
        (("bfloat16",) * 3, {"bfloat16": 2}, 1),
        (("float32", "bfloat16", "bfloat16", "bfloat16"), {"bfloat16": 2, "float32": 1}, 1),
        (("float32", "bfloat16", "float32", "bfloat16"), {"bfloat16": 1, "float32": 2}, 1),
        (("float32", "bfloat16"), {"float32": 1}, 1),
        (("bfloat16", "float16"), {"float32": 1}, 2),
        (("float16", "float16"), {"float32": 1}, 2),  # whose sum may overflow
    ],
)
def test_gradients_of_an_activation_are_added_before_they_are_cast(
    dtypes: tuple[str, ...], added: dict[str, int], casts: int
) -> None:
    graph = _sum_of_gradients(*dtypes)

    placed = verify_graph(place_casts(graph))

    sums = [node for node in placed.nodes if node.kind == "add"]
    assert Counter(placed.tensor(node.outputs[0]).dtype for node in sums) == added
    assert sum(node.kind == "_to_copy" for node in placed.nodes) == casts
    # Integers are exact in both dtypes.
    batch = {
        f"g{at}": torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)) + at
        for at, dtype in enumerate(dtypes)
    }
    batch |= {f"w{at}": torch.eye(3).to(getattr(torch, dtype)) for at, dtype in enumerate(dtypes)}
    one, other = (run_graph(g, {}, [batch], {})[0]["y"] for g in (graph, placed))
    assert one.dtype == other.dtype == torch.float32
    assert torch.equal(one, other)
    whole = place_casts(graph, CastPlacement(add_dtype="float32"))
    assert whole.nodes == graph.nodes


def test_gradients_that_no_product_makes_are_added_after_their_casts() -> None:
    b = Builder()
    for name in ("g", "h"):
        b.add_input(name, InputKind.BATCH, (2, 3), dtype="bfloat16")
        _low(b, f"n{name}", "neg.default", (Ref(name),), (2, 3), Phase.BACKWARD)
    one, other = (_cast(b, f"c{v}", f"n{v}", "float32", Phase.BACKWARD) for v in ("g", "h"))
    b.op("s", "add.Tensor", (one, other), (2, 3), phase=Phase.BACKWARD)
    b.op("y", "neg.default", (Ref("s"),), (2, 3), phase=Phase.BACKWARD)
    graph = _result(b, Ref("y"))

    assert place_casts(graph).nodes == graph.nodes


def test_a_cast_gradient_that_others_use_is_added_as_it_is() -> None:
    b = Builder()
    for name in ("g", "h"):
        b.add_input(name, InputKind.BATCH, (2, 3), dtype="bfloat16")
    one, other = (_cast(b, f"c{v}", v, "float32", Phase.BACKWARD) for v in ("g", "h"))
    b.op("s", "add.Tensor", (one, other), (2, 3), phase=Phase.BACKWARD)
    b.op("n", "neg.default", (one,), (2, 3), phase=Phase.BACKWARD)
    graph = _result(b, Ref("s"), Ref("n"))

    assert place_casts(graph).nodes == graph.nodes


@pytest.mark.parametrize(
    "given", [{"reduce_dtype": "float64"}, {"add_dtype": "low"}, {"parameters": "twice"}]
)
def test_other_settings_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(SbpValueError, match=next(iter(given))):
        CastPlacement(**given)
