"""The proof by execution: wrong rewrites are refused by name, right ones are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn

from sbp_aten.pass_options import ClassSplit, LossMeaning, MixedPrecision, PassOptions, Slicing
from sbp_aten.passes import prepare_step
from sbp_core.errors import GraphError
from sbp_core.graph import InputKind, LogicalGraph, Node, OutputKind, Phase, Ref, graph_hash
from sbp_core.passes import RecomputeOptions
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.proof import PlannedStep, prove
from sbp_torch.proof.double_precision import graph_to_double, off_by
from sbp_torch.proof.drawing import Draw, Integers, integers_of
from sbp_torch.proof.numbering import Numbering, number_values

ROWS, TOKENS, SIZE = 4, 5, 6
WHOLE = LossMeaning.WHOLE_BATCH


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, SIZE))
        self.head = nn.Linear(SIZE, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embed(x)
        found = found + self.mlp(self.norm(found))
        logits: torch.Tensor = self.head(found)
        return logits


def batch_of(rows: int = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(TOKENS, (rows, 3), generator=generator) for _ in range(2))
    return {"x": x, "y": y}


def loss_of(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["x"]).flatten(0, 1)
    right = (logits.argmax(-1) == batch["y"].flatten()).sum()
    return F.cross_entropy(logits, batch["y"].flatten()), {"right": right}


@cache
def captured(rows: int = ROWS, optimizer: str = "AdamW") -> tuple[LogicalGraph, Any]:
    torch.manual_seed(0)
    model = Model()
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    graph = capture(model, loss_of, batch_of(rows), made)
    return graph, lambda: initial_states(model, made)


def proof_of(graph: LogicalGraph, *, rows: int = ROWS, states: Any = dict, **given: Any) -> Any:
    """Prove the step that `prepare_step` makes of a graph, with other arguments than its own."""
    after = prepare_step(graph, **given)
    step = PlannedStep(before=graph, after=after, example=batch_of(rows))
    return prove(step, states=states, cache=False)


def pass_on(kind: str, phase: Phase, change: Callable[[Node], Node]) -> Any:
    """Return a pass that changes the last operator of a kind in a phase."""

    def broken(graph: LogicalGraph) -> LogicalGraph:
        *_, last = (n for n in graph.nodes if n.kind == kind and n.phase is phase)
        return graph.with_nodes(tuple(change(n) if n is last else n for n in graph.nodes))

    return broken


def scaled_gradient(graph: LogicalGraph) -> LogicalGraph:
    """A pass that multiplies the gradient of one parameter by 1.01."""
    node = next(n for n in graph.nodes if n.kind == "embedding_dense_backward")
    (made,) = node.outputs
    scaled = replace(
        node,
        name="scaled",
        op="aten.mul.Tensor",
        args=(Ref(f"{made}.raw"), 1.01),
        kwargs={},
        tags=("pointwise",),
    )
    raw = replace(node, outputs=(f"{made}.raw",))
    nodes = [part for n in graph.nodes for part in ((raw, scaled) if n is node else (n,))]
    types = {**graph.types, f"{made}.raw": graph.types[made]}
    return graph.with_nodes(tuple(nodes), types=types)


def other_epsilon(node: Node) -> Node:
    return replace(node, args=(*node.args[:-1], 1e-3))


def dropped_state(graph: LogicalGraph) -> LogicalGraph:
    """A pass that forgets a state of the optimizer."""
    out = next(out for out in graph.outputs if out.name == "head.bias.exp_avg")
    changed = replace(out, value="head.bias.exp_avg")
    outputs = tuple(changed if one is out else one for one in graph.outputs)
    return replace(graph, outputs=outputs)


BROKEN = {
    "a gradient times 1.01": (scaled_gradient, "state 'embed.weight"),
    "another epsilon": (pass_on("native_layer_norm", Phase.FORWARD, other_epsilon), "loss 'loss'"),
    "a metric of the wrong dim": (
        pass_on("argmax", Phase.FORWARD, lambda n: replace(n, args=(n.args[0], -1, False))),
        None,
    ),
    "minima, not maxima": (
        pass_on("argmax", Phase.FORWARD, lambda n: replace(n, op="aten.argmin.default")),
        "metric 'right'",
    ),
    "a forgotten state": (dropped_state, "state 'head.bias.exp_avg'"),
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", BROKEN)
def test_a_pass_that_changes_a_result_is_refused_with_the_name_of_the_result(name, micro_batches):
    graph, states = captured()
    broken, told = BROKEN[name]

    def prove_it() -> Any:
        return proof_of(
            graph,
            num_micro_batches=micro_batches,
            loss=WHOLE,
            options=PassOptions(fold_constants=True),
            extra=[broken],
            states=states,
        )

    if told is None:  # it says in another way what holds already
        assert prove_it().is_whole
        return
    with pytest.raises(GraphError, match=told) as caught:
        prove_it()

    assert "test_proof.py" in str(caught.value.where)
    assert "instead of" in caught.value.what


OPTIONS = {
    "default": PassOptions(),
    "none": PassOptions(
        tie_step_counters=False,
        fold_constants=False,
        drop_identities=False,
        fold_views=False,
        share_expressions=False,
        place_casts=None,
        split_classes=None,
        sum_losses=False,
        recompute=None,
    ),
    "recomputation": PassOptions(recompute=RecomputeOptions(modules=("mlp",))),
    "split classes": PassOptions(split_classes=ClassSplit(when="always", min_classes=2)),
    "mixed precision": PassOptions(mixed_precision=MixedPrecision()),
    "slices": PassOptions(slices={"mlp.*": Slicing(count=2)}),
    "addends": PassOptions(accumulate_addends=("*",)),
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("options", OPTIONS)
def test_our_own_passes_are_proved(options, optimizer):
    graph, states = captured(optimizer=optimizer)

    found = proof_of(graph, options=OPTIONS[options], states=states)

    assert found.is_whole, found.lines()
    assert found.operators - found.alike < found.operators // 2


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("options", ["default", "split classes", "mixed precision", "slices"])
def test_micro_batches_are_proved_to_compute_the_whole_batch(options, micro_batches):
    graph, states = captured()

    found = proof_of(
        graph,
        num_micro_batches=micro_batches,
        loss=WHOLE,
        options=OPTIONS[options],
        states=states,
    )

    assert found.draws == ("some", "none", "first", "all"), found.lines()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [LossMeaning.MEAN_OF_MICRO_BATCHES, LossMeaning.EACH_MICRO_BATCH])
def test_micro_batches_with_losses_of_their_own_are_proved_part_by_part(loss):
    graph, _ = captured(rows=2)

    found = proof_of(graph, rows=2, num_micro_batches=2, loss=loss)

    assert found.is_whole
    assert not found.draws


def test_a_wrong_sum_over_micro_batches_is_refused():
    graph, states = captured()
    after = prepare_step(graph, 2, loss=WHOLE)
    (first, *_) = (n for n in after.nodes if n.op == "sbp.accumulate" and n.phase is Phase.BACKWARD)
    wrong = replace(first, args=(first.args[0], 0.25))
    nodes = tuple(wrong if n is first else n for n in after.nodes)
    step = PlannedStep(before=graph, after=after.with_nodes(nodes), example=batch_of())

    with pytest.raises(GraphError, match="micro_batches=1"):
        prove(step, states=states, cache=False)


def test_what_takes_too_long_is_proved_on_fewer_rows_or_not_at_all(monkeypatch):
    graph, states = captured()
    small, _ = captured(rows=2)
    step = PlannedStep(before=graph, after=prepare_step(graph, 2, loss=WHOLE), example=batch_of())
    few = PlannedStep(before=small, after=prepare_step(small, 2, loss=WHOLE), example=batch_of(2))
    monkeypatch.setattr(
        sys.modules["sbp_torch.proof.proofs"],
        "_whole_s",
        lambda step: float(step.before.tensor("x").shape[0]),
    )

    alone = prove(step, states=states, budget_s=3.0, cache=False)
    helped = prove(step, states=states, small=lambda: few, budget_s=3.0, cache=False)

    assert alone.lines() == [
        "not proved that the planned step is the captured one: it would take about 4 s"
    ]
    assert "2 micro-batches of 1 samples" in helped.lines()[0]


def test_parts_that_need_too_much_memory_are_not_run_and_reported(monkeypatch):
    graph, states = captured()
    whole = proof_of(graph, states=states)

    monkeypatch.setattr(sys.modules["sbp_torch.proof.parts"], "MOST_BYTES", 100)
    some = proof_of(graph, states=states)

    assert (whole.num_not_run, whole.parts) == (0, 2)
    assert (some.num_not_run, some.parts) == (2, 0)
    assert "more than 250.0 MB" in some.lines()[1]


def test_states_that_need_too_much_memory_are_not_drawn(monkeypatch):
    graph, states = captured()
    monkeypatch.setattr(sys.modules["sbp_torch.proof.proofs"], "MOST_BYTES", 1000)

    found = proof_of(graph, rows=2, states=states, num_micro_batches=2, loss=WHOLE)

    assert found.lines() == [
        "not proved that the planned step is the captured one: its states have 4560 B in float64"
    ]


def test_a_form_is_proved_once(tmp_path):
    graph, states = captured()
    step = PlannedStep(before=graph, after=prepare_step(graph), example=batch_of())

    first = prove(step, states=states, cache=tmp_path)
    again = prove(step, states=states, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("no proof")
    third = prove(step, states=states, cache=tmp_path)

    assert not first.is_known
    assert again.is_known
    assert "earlier run" in again.lines()[0]
    assert not third.is_known


@pytest.mark.slow
def test_a_refused_form_is_not_kept(tmp_path):
    graph, states = captured()
    after = prepare_step(graph, extra=[scaled_gradient])
    step = PlannedStep(before=graph, after=after, example=batch_of())

    for _ in range(2):
        with pytest.raises(GraphError, match=r"embed\.weight"):
            prove(step, states=states, cache=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_views_of_the_same_numbers_are_the_same_value():
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x.t().t().view(-1).sin().sum(), x.reshape(6).sin().sum()]).sum()

    graph = graph_to_double(capture(Views(), lambda m, b: m(b["x"]), {"x": torch.zeros(2, 3)}))

    values = number_values(graph, Numbering(), lambda name: name)

    sines = {values[n.outputs[0]] for n in graph.nodes if n.kind == "sin"}
    assert len(sines) == 1


def test_integers_are_drawn_in_range_and_ignored_as_the_program_does():
    graph, _ = captured()
    random = Draw(ignored="some").generator()

    known = integers_of(graph)

    assert known["x"].bound == TOKENS
    assert known["y"] == Integers(TOKENS, -100)
    assert set(known["y"].draw((50, 3), Draw(), random, None).unique().tolist()) <= {
        -100,
        *range(5),
    }
    assert (known["y"].draw((50, 3), Draw(ignored="all"), random, None) == -100).all()


def test_graphs_stay_as_they_are():
    graph, states = captured()
    before = graph_hash(graph)

    proof_of(graph, states=states)

    assert graph_hash(replace(graph)) == before
    assert any(out.kind is OutputKind.METRIC for out in graph.outputs)
    assert any(entry.kind is InputKind.BATCH for entry in graph.inputs)


def test_what_cancels_in_one_and_not_quite_in_the_other_is_equal() -> None:
    nothing, rounding = torch.zeros(2).double(), torch.full((2,), 5e-17).double()

    assert off_by(nothing, rounding) == off_by(nothing, nothing) == 0.0
    assert off_by(nothing, torch.tensor([0.0, 1e-12]).double()) == float("inf")


def with_a_rest(model: nn.Module, batch: Any) -> Any:
    """Return a loss, and a metric that is zero but for rounding: a mean less itself."""
    logits = model(batch["x"]).flatten(0, 1)
    rest = logits.mean() - logits.mean(0).mean()
    return F.cross_entropy(logits, batch["y"].flatten()), {"rest": rest}


def captured_with_a_rest() -> LogicalGraph:
    torch.manual_seed(0)
    model = Model()
    return capture(model, with_a_rest, batch_of(), torch.optim.SGD(model.parameters()))


def test_of_an_output_that_is_a_rounding_error_nothing_is_said_and_the_rest_is_proved():
    found = proof_of(captured_with_a_rest(), num_micro_batches=2, loss=WHOLE)

    assert "'rest' is only a rounding error" in found.but
    assert found.draws == ("some", "none", "first", "all")


def test_a_wrong_gradient_beside_a_rounding_error_is_refused():
    graph = captured_with_a_rest()

    with pytest.raises(GraphError, match=r"state 'embed\.weight'"):
        proof_of(graph, num_micro_batches=2, loss=WHOLE, extra=[scaled_gradient])
