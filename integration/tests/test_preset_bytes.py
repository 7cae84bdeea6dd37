"""No preset sends or holds more than inference with the same storage, without a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))

from preset_bytes import cases, compared, faults

#: What is compared in every run; `python -m preset_bytes` compares all.
FEW = {
    ("class_parallel", "model=resnet", "cluster.mesh=[4]"),
    ("hsdp", "model=gpt", "cluster.mesh=[2,2]"),
    ("zero2", "model=vit", "cluster.mesh=[4]"),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "case", [case for case in cases() if (case[0], case[1][0], case[1][-2]) in FEW]
)
def test_a_preset_is_not_worse_than_no_preset(case: tuple[str, tuple[str, ...]]) -> None:
    found = compared(case)

    assert not isinstance(found, str), found
    assert not faults(case[0], found), found


def test_a_preset_that_sends_more_is_at_fault() -> None:
    assert faults("zero2", {"sends": (1.1, 1.0), "holds": (1.0, 1.0)}) == ["sends"]
    assert not faults("data_parallel", {"sends": (1.0, 1.0), "holds": (1.1, 1.0)})
