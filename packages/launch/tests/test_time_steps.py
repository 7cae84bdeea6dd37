"""Sequences that processes would put one behind the other."""

from __future__ import annotations

import pytest
from torch import nn

from sbp_core.errors import ConfigError
from sbp_core.graph import Node
from sbp_launch.step.time_steps import refuse_cut_time

FOUND = Node(name="a", op="aten.unbind.int", args=(), outputs=("a",), module="0", source="x.py:3")


@pytest.mark.parametrize("inner", [nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)])
def test_time_steps_of_several_processes_are_not_joined(inner: nn.Module) -> None:
    with pytest.raises(ConfigError, match="sequences of 2 processes would follow each") as refused:
        refuse_cut_time(FOUND, nn.Sequential(inner), micro_batches=1, processes=2)

    assert "batch_dim=1" in refused.value.todo
    assert "batch_is='global'" in refused.value.todo
    assert refused.value.where[0].startswith("x.py:3")


def test_what_goes_through_no_samples_or_is_whole_is_taken() -> None:
    refuse_cut_time(None, nn.Sequential(nn.LSTM(2, 2)), micro_batches=4, processes=4)
    refuse_cut_time(FOUND, nn.Sequential(nn.LSTM(2, 2)), micro_batches=1, processes=1)
