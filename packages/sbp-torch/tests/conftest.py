"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sbp_core.graph import LogicalGraph
from sbp_core.testing.holdings import no_thread_is_left
from sbp_torch.graph_capture import capture
from sbp_torch.testing.models import PROGRAMS, Program


@pytest.fixture(autouse=True)
def _leave_no_thread() -> Iterator[None]:
    with no_thread_is_left():
        yield


@pytest.fixture(scope="session")
def gpt() -> Program:
    """The one-device program of a tiny GPT with AdamW."""
    return PROGRAMS["gpt"]


@pytest.fixture(scope="session")
def gpt_graph(gpt: Program) -> LogicalGraph:
    """The step of the tiny GPT as captured, on batches of four, in float64."""
    model, optimizer = gpt.build(torch.float64)
    return capture(model, gpt.loss, gpt.batches(1)[0], optimizer)
