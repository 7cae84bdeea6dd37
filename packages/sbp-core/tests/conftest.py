"""Fixtures that several test files share; torch is imported only by tests that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sbp_torch.testing.models import Program

    from sbp_core.graph import LogicalGraph


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the case of an operator that this PyTorch does not have yet."""
    from needed_operators import NEWER, skip_without

    case = getattr(item, "callspec", None)
    names = case.params.values() if case is not None else ()
    for name in names:
        if isinstance(name, str) and name in NEWER:
            skip_without(name)


@pytest.fixture(scope="session")
def gpt() -> Program:
    """The one-device program of a tiny GPT with AdamW."""
    from sbp_torch.testing.models import PROGRAMS

    return PROGRAMS["gpt"]


@pytest.fixture(scope="session")
def gpt_graph(gpt: Program) -> LogicalGraph:
    """The step of the tiny GPT as captured, on batches of four, in float64."""
    import torch

    from sbp_torch.capture import capture

    model, optimizer = gpt.build(torch.float64)
    return capture(model, gpt.loss, gpt.batches(1)[0], optimizer)
