"""The variants of a step that a planner may choose, and what settings they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from sbp_aten.pass_options import PassOptions, Slicing
from sbp_core.errors import SbpError
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import GraphVariant, OperatorSlices, SliceAlong
from sbp_core.passes import RecomputeOptions, recompute_report
from sbp_core.placement import Placement
from sbp_core.plugins import discover
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning.family import StepFamily
from sbp_launch.planning.flow import PlanSettings, capture_step


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


def family(passes: PassOptions | None = None) -> tuple[StepFamily, list[int]]:
    """Return the family of a small step of 16 samples, and the micro-batches it was captured of."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters())
    settings = PlanSettings(
        mesh=Placement.grid((2,), ("data",)),
        cluster=discover().make("cluster", "local")(2),
        compile=CompileConfig(passes=passes or PassOptions()),
    )
    captured: list[int] = []

    def capture(size: int) -> LogicalGraph:
        captured.append(size)
        return capture_step(model, mean_square, torch.ones(size, 8), optimizer, settings)

    found = StepFamily(
        settings=settings, captured=capture, batch_size=16, chooses_micro_batches=True
    )
    return found, captured


def test_micro_batches_are_cut_from_the_whole_batch_that_is_captured_once() -> None:
    found, captured = family()

    graph = found.graph(GraphVariant(num_micro_batches=4))

    assert graph.num_micro_batches == 4
    assert {graph.tensor(e.name).shape for e in graph.inputs if e.kind.name == "BATCH"} == {(4, 8)}
    assert found.graph(GraphVariant(num_micro_batches=4)) is graph
    assert captured == [16]


@pytest.mark.slow
def test_the_graph_that_is_known_is_not_made_again() -> None:
    found, captured = family()
    graph = found.graph(found.variant)

    other = replace(found, known=graph, _graphs={})

    assert other.graph(other.variant) is graph
    assert other.graph(GraphVariant(num_micro_batches=4)) is not graph
    assert other.with_batch(8).graph(other.variant) is not graph
    assert captured == [16, 16, 8]


def test_another_batch_is_captured_at_its_own_size() -> None:
    found, captured = family()

    other = found.with_batch(12)
    graph = other.graph(GraphVariant(num_micro_batches=3))

    assert (found.batch_size, other.batch_size) == (16, 12)
    assert other.micro_batches == (1, 2, 3, 4, 6, 12)
    assert {graph.tensor(e.name).shape for e in graph.inputs if e.kind.name == "BATCH"} == {(4, 8)}
    assert captured == [12]


def test_a_batch_that_settled_micro_batches_do_not_divide_is_refused() -> None:
    found, _ = family()
    settled = replace(
        found, settings=replace(found.settings, micro_batches=4), chooses_micro_batches=False
    )

    assert settled.with_batch(24).micro_batches == (4,)
    with pytest.raises(SbpError, match="30 samples do not divide into 4 micro-batches"):
        settled.with_batch(30)


def test_a_budget_makes_activations_again() -> None:
    found, _ = family()
    whole = found.graph(found.variant)

    graph = found.graph(replace(found.variant, recompute_bytes=2100.0))

    report = recompute_report(graph)
    assert report.saved_after_bytes < recompute_report(whole).saved_after_bytes
    assert report.saved_after_bytes <= 2100


def test_a_budget_that_nothing_keeps_to_is_refused() -> None:
    found, _ = family()

    with pytest.raises(SbpError, match="do not fit"):
        found.graph(replace(found.variant, recompute_bytes=1.0))


def test_slices_run_the_operators_of_a_parameter_in_parts() -> None:
    found, _ = family()
    sliced = OperatorSlices(pattern="1.0.weight", count=4, along=SliceAlong.OUTPUT)

    graph = found.graph(replace(found.variant, slices=(sliced,)))

    assert sum(node.num_slices == 4 for node in graph.nodes) > 4


@pytest.mark.parametrize(
    ("passes", "open_"),
    [
        (PassOptions(), lambda f: f.may_recompute and f.may_slice),
        (PassOptions(recompute=None), lambda f: f.may_slice and not f.may_recompute),
        (
            PassOptions(recompute=RecomputeOptions(memory_bytes=1e6)),
            lambda f: f.may_slice and not f.may_recompute,
        ),
        (
            PassOptions(slices={"1.0.weight": Slicing(count=2)}),
            lambda f: f.may_recompute and not f.may_slice,
        ),
    ],
)
def test_what_the_user_has_set_is_not_left_to_planners(
    passes: PassOptions, open_: Callable[[StepFamily], bool]
) -> None:
    assert open_(family(passes)[0])


def test_the_variant_that_is_asked_for_changes_no_setting() -> None:
    found, _ = family()

    assert found.settings_of(found.variant) == found.settings
