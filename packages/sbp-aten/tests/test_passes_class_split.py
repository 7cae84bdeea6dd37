from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from sbp_aten.pass_options import ClassSplit, PassOptions
from sbp_aten.passes import prepare_step, split_classes
from sbp_core.compile import compile_plan
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import SbpValueError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.boxing.execute import shard
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import graph_states

CLASSES, FEATURES = 11, 5
IGNORED = 3
ALWAYS = ClassSplit(when="always", min_classes=1)
LR = {"lr": 0.1}
PINS = {"batch": "B", "head.weight": "S(0)", "head.bias": "S(0)"}

#: Arguments of `cross_entropy`; `weight` stands for the class weights of the model.
LOSSES: Mapping[str, Mapping[str, object]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignoring": {"ignore_index": IGNORED},
    "weights": {"weight": True, "ignore_index": IGNORED},
    "summed weights": {"weight": True, "reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1, "ignore_index": IGNORED},
    "smoothing and weights": {"label_smoothing": 0.1, "weight": True},
}


class Classifier(nn.Module):
    """Linear scores, of samples [n, c] or of places in images [n, c, h, w]."""

    def __init__(self, *, places: bool = False, classes: int = CLASSES) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, classes)
        self.register_buffer("weights", torch.linspace(0.5, 2, classes))
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(x)
        return scores.movedim(-1, 1) if self.places else scores


def _step(
    name: str = "mean",
    *,
    places: bool = False,
    dtype: torch.dtype = torch.float64,
    classes: int = CLASSES,
) -> tuple[LogicalGraph, dict[str, Tensor], dict[str, Tensor]]:
    """Return a captured step, its states, and a batch with three ignored targets."""
    torch.manual_seed(0)
    model = Classifier(places=places, classes=classes).to(dtype)
    given = dict(LOSSES[name])
    weighted = given.pop("weight", False)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        weight = model.weights if weighted else None
        found = F.cross_entropy(model(batch["x"]), batch["y"], weight=weight, **given)
        return found.square().sum() if found.ndim else found

    shape = (4, 3, 2) if places else (7,)
    batch = {
        "x": torch.randn(*shape, FEATURES, dtype=dtype),
        "y": torch.randint(0, classes, shape),
    }
    batch["y"].view(-1)[:3] = IGNORED
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, loss, batch, optimizer), initial_states(model, optimizer), batch


def _plan(graph: LogicalGraph, num_ranks: int) -> PhysicalPlan:
    mesh = Placement.grid((num_ranks,), ("tensor",))
    # Bytes are dear, messages cheap, as they are for logits of useful size.
    machine = cluster(num_devices=num_ranks, bytes_per_s=1e6, latency_s=1e-8)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=machine)
    plan = compile_plan(graph, infer_strategy(request, planner="test", pins=PINS))
    check(plan)
    return plan


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("places", [False, True], ids=["samples", "places"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_split_loss_is_the_loss_and_so_are_its_gradients(name: str, places: bool) -> None:
    graph, states, batch = _step(name, places=places)
    before = prepare_step(graph, options=PassOptions(split_classes=None))
    after = prepare_step(graph, options=PassOptions(split_classes=ALWAYS))

    found, new = run_graph(after, graph_states(after, states), [batch], LR)
    outputs, expected = run_graph(before, graph_states(before, states), [batch], LR)

    assert not any("log_softmax" in node.kind for node in after.nodes)
    torch.testing.assert_close(found["loss"], outputs["loss"], rtol=1e-12, atol=1e-12)
    for state, value in expected.items():
        torch.testing.assert_close(new[state], value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_split_classes_give_the_losses_and_shards_of_one_device(name: str, num_ranks: int) -> None:
    graph, states, batch = _step(name)
    prepared = prepare_step(graph, options=PassOptions(split_classes=ALWAYS))
    plan = _plan(prepared, num_ranks)
    session = ReferenceRuntime(ReferenceConfig()).start(plan, states, None)
    expected = graph_states(graph, states)

    for _ in range(3):
        outputs, expected = run_graph(graph, expected, [batch], LR)
        loss = session.step(batch, LR).loss
        torch.testing.assert_close(loss, outputs["loss"], rtol=1e-12, atol=1e-12)

    for part in plan.ranks:
        for slot in part.slots:
            if slot.sbp is not None and slot.name in expected:
                own = shard(expected[slot.name], plan.stages[slot.stage], slot.sbp)[part.rank]
                held = session.shard(slot.name, part.rank)
                torch.testing.assert_close(held, own, rtol=1e-12, atol=1e-12)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", LOSSES)
def test_no_logits_cross_between_ranks(name: str) -> None:
    classes = 64
    graph, _, batch = _step(name, classes=classes)
    samples = len(batch["y"])

    plan = _plan(prepare_step(graph, options=PassOptions(split_classes=ALWAYS)), 4)
    whole = _plan(prepare_step(graph, options=PassOptions(split_classes=None)), 4)

    sent = [step for step in plan.steps if step.size_bytes]
    assert sent
    assert all(classes not in step.shape for step in sent)
    # An all-reduce of one float64 a sample, over four ranks.
    assert max(step.size_bytes for step in sent) <= 2 * 3 * samples * 8
    assert plan.boxing_bytes < whole.boxing_bytes / 3


def test_low_precision_logits_are_computed_with_in_float32() -> None:
    graph, states, batch = _step(dtype=torch.bfloat16)
    split = verify_graph(split_classes(graph, ALWAYS))

    found, _ = run_graph(split, states, [batch], LR)
    outputs, _ = run_graph(graph, states, [batch], LR)

    (powers,) = (node for node in split.nodes if node.kind == "exp" and not node.forward)
    assert split.tensor(powers.outputs[0]).dtype == "float32"
    torch.testing.assert_close(found["loss"], outputs["loss"], rtol=2**-6, atol=0)


def test_very_large_logits_do_not_overflow() -> None:
    graph, states, batch = _step()
    split = split_classes(graph, ALWAYS)
    states["head.weight"] = states["head.weight"] * 1e5

    found, _ = run_graph(split, states, [batch], LR)
    outputs, _ = run_graph(graph, states, [batch], LR)

    assert torch.isfinite(found["loss"])
    torch.testing.assert_close(found["loss"], outputs["loss"], rtol=1e-12, atol=0)


def test_only_many_classes_of_few_samples_are_split_of_themselves() -> None:
    many, _, _ = _step(classes=1024)
    few, _, _ = _step()

    assert split_classes(few) is few
    assert len(split_classes(many).nodes) > len(many.nodes)
    assert split_classes(many, ClassSplit(min_classes=1025)) is many


def test_a_softmax_without_such_a_loss_stays_as_it_is() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    batch = {"x": torch.randn(4, FEATURES)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(model, lambda m, b: m(b["x"]).log_softmax(1).square().sum(), batch, optimizer)

    assert split_classes(graph, ALWAYS) is graph


@pytest.mark.parametrize("given", [{"when": "sometimes"}, {"min_classes": 0}])
def test_other_settings_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(SbpValueError, match=next(iter(given))):
        ClassSplit(**given)
