"""What the plugins of a program return is checked, and the plugin named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sbp_core.errors import PluginError
from sbp_core.plugins import Factory, PluginEntry
from sbp_launch.program import Program

ENTRY = PluginEntry(
    kind="data",
    name="mine",
    distribution="my-dist",
    version="1.2",
    api_version=1,
    factory=Factory(build="my_package.data:build"),
)


def batch_of(found: object) -> dict[str, torch.Tensor]:
    """Return the batch of a program whose data set returns `found`."""
    data = SimpleNamespace(batch=lambda index, size, split: found)
    program: Any = SimpleNamespace(data=data, data_plugin=ENTRY, dtype=torch.float64)
    return Program.batch(cast(Program, program), 0, 2)


@pytest.mark.parametrize("found", [None, [1, 2], {"tokens": [1, 2]}])
def test_a_data_set_that_returns_no_tensors_is_named(found: object) -> None:
    with pytest.raises(PluginError) as caught:
        batch_of(found)

    kind = "None" if found is None else type(found).__name__
    assert caught.value.what == (
        f"data 'mine' of my-dist 1.2 returned {kind}, not a mapping name -> tensor"
    )
    assert caught.value.where == ("my_package.data:build, method batch",)


def test_floating_parts_of_a_batch_take_the_dtype_of_the_model() -> None:
    found = batch_of({"x": torch.ones(2), "y": torch.ones(2, dtype=torch.int64)})

    assert (found["x"].dtype, found["y"].dtype) == (torch.float64, torch.int64)
