"""The suites of clusters, metric sinks, optimizers and passes: each passed, and each failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from sbp_aten.passes import fold_views, share_expressions, sum_losses
from sbp_core.cluster import Cluster
from sbp_core.errors import CaptureError, GraphError
from sbp_core.graph.ir import LogicalGraph
from sbp_core.plugins.kinds import ClusterFactory, GraphPass, MetricSink, MetricSinkFactory
from sbp_core.testing.cluster_suite import ClusterConformance
from sbp_core.testing.logger import MetricSinkConformance, Records
from sbp_torch.kinds import OptimizerFactory
from sbp_torch.testing.graph_pass import GraphPassConformance
from sbp_torch.testing.optimizer import OptimizerConformance
from sbp_torch.testing.programs import small_cluster

# Clusters.


class TestSmallCluster(ClusterConformance):
    dtypes = ("float32", "float64")

    def make_factory(self) -> ClusterFactory:
        return small_cluster


def cluster_suite(factory: ClusterFactory) -> ClusterConformance:
    class Suite(ClusterConformance):
        def make_factory(self) -> ClusterFactory:
            return factory

    return Suite()


def test_a_cluster_of_another_size_fails_the_suite() -> None:
    suite = cluster_suite(lambda num_devices: small_cluster(num_devices + 1))

    with pytest.raises(AssertionError, match="devices"):
        suite.test_the_cluster_has_as_many_devices_as_asked_for()


def test_a_profile_that_changes_fails_the_suite() -> None:
    numbers = count(1)

    def make(num_devices: int) -> Cluster:
        return replace(small_cluster(num_devices), devices_per_node=next(numbers))

    with pytest.raises(AssertionError):
        cluster_suite(make).test_the_profile_is_the_same_every_time()


def test_a_device_without_a_rate_fails_the_suite() -> None:
    def make(num_devices: int) -> Cluster:
        cluster = small_cluster(num_devices)
        return replace(cluster, device=replace(cluster.device, flop_per_s={"int8": 1.0}))

    with pytest.raises(AssertionError, match="float32"):
        cluster_suite(make).test_devices_have_a_rate_for_every_dtype()


# Metric sinks.


class Lines:
    """One JSON array a line, flushed or not."""

    def __init__(
        self, path: Path, resumed_step: int = 0, *, flush: bool = True, digits: int | None = None
    ) -> None:
        lines = path.read_text("utf-8").splitlines() if resumed_step else []
        kept = [line for line in lines if json.loads(line)[0] <= resumed_step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self.file, self.flush, self.digits = path.open("a", encoding="utf-8"), flush, digits

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.digits is not None:
            metrics = {name: round(value, self.digits) for name, value in metrics.items()}
        self.file.write(json.dumps([step, dict(metrics)]) + "\n")
        if self.flush:
            self.file.flush()

    def close(self) -> None:
        self.file.close()


class LinesSuite(MetricSinkConformance):
    def make_factory(self) -> MetricSinkFactory:
        return self.make

    def make(self, run_folder: Path, *, resumed_step: int = 0) -> MetricSink:
        return Lines(run_folder / "lines", resumed_step)

    def read(self, run_folder: Path) -> Records:
        text = (run_folder / "lines").read_text("utf-8")
        return [(step, metrics) for step, metrics in map(json.loads, text.splitlines())]


class TestLines(LinesSuite):
    pass


def test_a_sink_that_does_not_flush_fails_the_suite(tmp_path: Path) -> None:
    class Suite(LinesSuite):
        def make(self, run_folder: Path, *, resumed_step: int = 0) -> MetricSink:
            self.sink = Lines(run_folder / "lines", flush=False)
            return self.sink

    suite = Suite()

    with pytest.raises(AssertionError, match="steps"):
        suite.test_what_is_logged_survives_without_close(tmp_path)
    suite.sink.close()


def test_a_sink_that_rounds_fails_the_suite(tmp_path: Path) -> None:
    class Suite(LinesSuite):
        def make(self, run_folder: Path, *, resumed_step: int = 0) -> MetricSink:
            return Lines(run_folder / "lines", digits=3)

    with pytest.raises(AssertionError, match="loss of step 2"):
        Suite().test_closing_loses_nothing(tmp_path)


@pytest.mark.parametrize("resumed_step", [0, 9], ids=["forgets the steps", "keeps undone steps"])
def test_a_sink_that_does_not_resume_where_it_should_fails_the_suite(
    tmp_path: Path, resumed_step: int
) -> None:
    class Suite(LinesSuite):
        def make(self, run_folder: Path, **_: int) -> MetricSink:
            has_lines = (run_folder / "lines").exists()
            return Lines(run_folder / "lines", resumed_step if has_lines else 0)

    with pytest.raises(AssertionError, match="steps"):
        Suite().test_a_resumed_run_goes_on_behind_the_step_that_was_saved(tmp_path)


def test_a_sink_that_writes_outside_its_folder_fails_the_suite(tmp_path: Path) -> None:
    class Suite(LinesSuite):
        def make(self, run_folder: Path, *, resumed_step: int = 0) -> MetricSink:
            (run_folder.parent / "stray").touch()
            return Lines(run_folder / "lines")

    with pytest.raises(AssertionError, match="outside"):
        Suite().test_two_runs_do_not_meet(tmp_path)


def test_a_sink_that_says_it_keeps_nothing_may_write_nothing(tmp_path: Path) -> None:
    class Suite(LinesSuite):
        keeps = False

    with pytest.raises(AssertionError, match="keeps nothing"):
        Suite().test_closing_loses_nothing(tmp_path)


# Optimizers.


def adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, foreach=False)


class TestAdam(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return adam


def optimizer_suite(factory: OptimizerFactory) -> OptimizerConformance:
    class Suite(OptimizerConformance):
        def make_factory(self) -> OptimizerFactory:
            return factory

    return Suite()


class DoublesRates(torch.optim.SGD):
    """Changes a learning rate that is a number, which that of a captured step is not."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if isinstance(group["lr"], float):
                group["lr"] *= 2
        super().step()


def test_an_optimizer_that_would_capture_to_another_update_fails_the_suite() -> None:
    suite = optimizer_suite(lambda parameters: DoublesRates(parameters, lr=1e-2))

    with pytest.raises(CaptureError, match="changes the setting 'lr'"):
        suite.test_the_captured_update_equals_the_eager_one()


def test_a_factory_that_makes_another_optimizer_each_time_fails_the_suite() -> None:
    momenta = count(1)
    suite = optimizer_suite(
        lambda parameters: torch.optim.SGD(parameters, 1e-2, 0.1 * next(momenta))
    )

    with pytest.raises(AssertionError, match=r"the loss of step 2 is not bit-equal"):
        suite.test_the_captured_update_equals_the_eager_one()


def test_an_optimizer_that_cannot_be_captured_fails_the_suite() -> None:
    suite = optimizer_suite(lambda parameters: torch.optim.LBFGS(parameters))

    with pytest.raises(CaptureError, match="LBFGS"):
        suite.test_the_captured_update_equals_the_eager_one()


def test_an_optimizer_of_half_the_parameters_fails_the_suite() -> None:
    suite = optimizer_suite(lambda parameters: adam(list(parameters)[1:]))

    with pytest.raises(AssertionError):
        suite.test_it_optimizes_the_parameters_that_it_is_given()


# Passes.


@pytest.mark.parametrize("apply", [fold_views, share_expressions])
def test_a_pass_that_changes_no_bit_passes_the_suite(apply: GraphPass) -> None:
    suite, tests = pass_suite(apply), pass_tests()

    assert len(tests) > 3  # each of them asserts
    for test in tests:
        test(suite)


class TestSumLosses(GraphPassConformance):
    tolerance = 1e-12

    def make_pass(self) -> GraphPass:
        return sum_losses


def pass_suite(apply: GraphPass) -> GraphPassConformance:
    class Suite(GraphPassConformance):
        def make_pass(self) -> GraphPass:
            return apply

    return Suite()


def pass_tests() -> list[Callable[[GraphPassConformance], None]]:
    return [test for name, test in vars(GraphPassConformance).items() if name.startswith("test_")]


def changes_a_number(graph: LogicalGraph) -> LogicalGraph:
    """Replace the first number above zero in an argument of an optimizer node."""
    nodes = list(graph.nodes)
    at, node = next(
        (index, node) for index, node in enumerate(nodes) if node.op == "aten.lerp.Scalar"
    )
    nodes[at] = replace(node, args=(*node.args[:2], 0.5))
    return graph.with_nodes(tuple(nodes))


def drops_a_node(graph: LogicalGraph) -> LogicalGraph:
    return graph.with_nodes(graph.nodes[1:])


def drops_an_output(graph: LogicalGraph) -> LogicalGraph:
    return replace(graph, outputs=graph.outputs[:-1])


@pytest.mark.parametrize(
    ("apply", "test", "error"),
    [
        (drops_a_node, GraphPassConformance.test_the_result_is_a_legal_graph, GraphError),
        (
            changes_a_number,
            GraphPassConformance.test_losses_and_states_stay_what_they_are,
            AssertionError,
        ),
        (
            drops_an_output,
            GraphPassConformance.test_the_door_of_the_graph_stays_as_it_is,
            AssertionError,
        ),
    ],
)
def test_a_broken_pass_fails_the_suite(
    apply: GraphPass, test: Callable[[GraphPassConformance], None], error: type[Exception]
) -> None:
    suite = pass_suite(apply)

    with pytest.raises(error):
        test(suite)


def test_a_pass_that_gives_another_graph_each_time_fails_the_suite() -> None:
    numbers = count()

    def rename(graph: LogicalGraph) -> LogicalGraph:
        return replace(graph, name=f"tiny {next(numbers)}")

    with pytest.raises(AssertionError, match="two graphs"):
        pass_suite(rename).test_the_pass_is_a_pure_function()
