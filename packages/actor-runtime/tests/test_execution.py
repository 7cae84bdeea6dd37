"""Segments that are compiled or recorded, on the threads of workers."""

from __future__ import annotations

import pytest
import torch
from actor_plans import DATA, PIPELINE, THREADS

from sbp_actor_runtime import runtime as runtime_module
from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_core.compile import Compute
from sbp_core.errors import ConfigError
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.segments import inductor
from sbp_torch.segments.inductor import InductorSegments
from sbp_torch.testing.cases import CASES, compile_case, reference_run


@pytest.mark.parametrize("case", [DATA, PIPELINE, THREADS])
def test_traced_segments_train_as_eager_ones(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "cpp_compiler_problem", lambda: "")
    maker = InductorSegments(compiler=lambda module, inputs: module)
    monkeypatch.setattr(runtime_module, "segment_maker", lambda *_, **__: maker)
    step, plan = CASES[case].step, compile_case(case)
    expected, _ = reference_run(case)
    runtime = ActorRuntime(ActorConfig(compile="inductor"))

    with runtime.start(plan, step.states, LocalBackend()) as session:
        losses = [session.step(batch, step.scalars).loss for batch in step.batches]

    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(losses, expected, strict=True))
    assert maker.num_compiled > 0


def test_ranks_in_equal_positions_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "cpp_compiler_problem", lambda: "")
    maker = InductorSegments(compiler=lambda module, inputs: module)
    monkeypatch.setattr(runtime_module, "segment_maker", lambda *_, **__: maker)
    step, plan = CASES["data parallel"].step, compile_case("data parallel")
    segments = {a.name for part in plan.ranks for a in part.actors if isinstance(a, Compute)}

    runtime = ActorRuntime(ActorConfig(compile="inductor"))
    with runtime.start(plan, step.states, LocalBackend()) as session:
        for batch in step.batches:
            session.step(batch, step.scalars)

    assert 0 < maker.num_compiled <= len(segments)


def test_a_machine_without_a_gpu_is_refused_before_the_backend_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigError, match="compile=cudagraph needs a GPU"):
        ActorRuntime(ActorConfig(compile="cudagraph"))
