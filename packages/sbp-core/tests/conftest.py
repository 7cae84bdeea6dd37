"""Fixtures that several test files share; torch is imported only by tests that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from small_models import Program

    from sbp_core.graph import LogicalGraph


@pytest.fixture(scope="session")
def gpt() -> Program:
    """The one-device program of a tiny GPT with AdamW."""
    from small_models import PROGRAMS

    return PROGRAMS["gpt"]


@pytest.fixture(scope="session")
def gpt_graph(gpt: Program) -> LogicalGraph:
    """The step of the tiny GPT as captured, on batches of four, in float64."""
    import torch

    from sbp_core.capture import capture

    model, optimizer = gpt.build(torch.float64)
    return capture(model, gpt.loss, gpt.batches(1)[0], optimizer)
