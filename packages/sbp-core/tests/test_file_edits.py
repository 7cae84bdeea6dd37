"""Plans, graphs, clusters, calibrations with random edits: used, or refused with an error of ours.

Strategies are edited in the tests of sbp-planner, whose planner `file` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from time import process_time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cluster import measured

from sbp_core.boxing import route
from sbp_core.calibration import CALL_KINDS, Calibration
from sbp_core.check import check
from sbp_core.cluster import CLUSTER
from sbp_core.compile import physical
from sbp_core.errors import SbpError
from sbp_core.graph import from_json, graph_hash, to_json
from sbp_core.graph.spec import verify_graph
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.serialize import dump, load, parse
from sbp_core.testing.edits import edited, edited_text
from sbp_core.testing.graphs import chain, mlp
from sbp_core.testing.plans import data_parallel_plan, pipeline_plan

#: Seconds of the processor that no file of this size may take.
MOST_S = 20.0


def use_plan(value: Any) -> None:
    plan = physical.from_json(value)
    check(plan)
    assert plan.hash
    assert plan.boxing_bytes >= 0


def use_graph(value: Any) -> None:
    graph = verify_graph(from_json(value))
    assert graph_hash(graph)
    for node in graph.nodes:
        assert node.where()
    assert graph.users
    assert sum(graph.tensor(name).size_bytes for name in graph.types if graph.is_tensor(name)) >= 0


def use_calibration(value: Any) -> None:
    _predict(load(value, Calibration))


def _predict(calibration: Calibration) -> None:
    for kind in CALL_KINDS:
        for group_size, size_bytes in ((2, 1 << 20), (2 if kind == "transfer" else 8, 1)):
            time_s = calibration.time_s(kind, group_size, 1, size_bytes)
            assert time_s is None or time_s >= 0
    assert all(str(error) for error in calibration.errors)


def use_cluster(value: Any) -> None:
    cluster = CLUSTER.load(value)
    for mesh in (Placement.grid((2,), ("data",)), Placement([1, 300], ("data",))):
        found = route((8, 6), "float32", (mesh, NdSbp.parse("P")), (mesh, NdSbp.parse("S(0)")))
        assert found.time_s(cluster) >= 0
        assert found.explain(cluster)
    for calibration in cluster.calibrations.values():
        _predict(calibration)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file: some that are right, and what is done with one."""

    files: Callable[[], Mapping[str, Any]]
    use: Callable[[Any], None]


KINDS_OF_FILES = {
    "plan": Kind(
        files=lambda: {
            "data parallel": physical.to_json(data_parallel_plan()),
            "pipeline": physical.to_json(pipeline_plan(3, (2, 1))),
            "both": physical.to_json(
                pipeline_plan(2, (2, 2), mesh=Placement.grid((2, 2), ("pipe", "data")))
            ),
        },
        use=use_plan,
    ),
    "graph": Kind(
        files=lambda: {"chain": to_json(chain()), "mlp": to_json(mlp(num_micro_batches=2))},
        use=use_graph,
    ),
    "cluster": Kind(files=lambda: {"desk": CLUSTER.dump(measured())}, use=use_cluster),
    "calibration": Kind(
        files=lambda: {"desk": dump(measured().calibrations["torch"], Calibration)},
        use=use_calibration,
    ),
}


@cache
def texts(kind: str) -> tuple[str, ...]:
    return tuple(json.dumps(value) for value in KINDS_OF_FILES[kind].files().values())


def take(kind: str, random: Random) -> str:
    """Edit a file and use it; return what came of it."""
    text = random.choice(texts(kind))
    if random.random() < 0.2:
        text = edited_text(text, random)
    else:
        value = json.loads(text)
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            value = edited(value, random)
        text = json.dumps(value)
    begin = process_time()
    try:
        KINDS_OF_FILES[kind].use(parse(text))
    except SbpError as error:
        assert error.what
        str(error).encode()  # it can be printed
        return type(error).__name__
    finally:
        assert process_time() - begin < MOST_S, text[:2000]
    return "accepted"


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_file_that_nobody_edited_is_used(kind: str) -> None:
    for text in texts(kind):
        KINDS_OF_FILES[kind].use(parse(text))


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(random=st.randoms(use_true_random=False))
def test_an_edited_file_is_used_or_refused(kind: str, random: Random) -> None:
    take(kind, random)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_many_edited_files_are_used_or_refused(kind: str) -> None:
    outcomes = {take(kind, Random(seed)) for seed in range(5000)}

    assert len(outcomes) > 1
    assert "accepted" in outcomes
