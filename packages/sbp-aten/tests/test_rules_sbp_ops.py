"""The rule of the sums that batch normalisation needs, verified by execution."""

from __future__ import annotations

import pytest
import torch

from sbp_core.signatures import derive
from sbp_torch.ops import arithmetic as _registers  # noqa: F401 - the operator
from sbp_torch.signatures.verification import call_of, verify

OP = "sbp.batch_norm_sums.default"


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (4, 6, 3, 2)])
def test_every_claimed_signature_of_batch_norm_sums_holds_when_it_is_run(
    shape: tuple[int, ...],
) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    report = verify(OP, x, axis_sizes=(2, 3), isolated=False)

    assert report.ok, str(report)


def test_a_part_of_the_batch_or_of_positions_gives_a_part_of_the_sums() -> None:
    call, *_ = call_of(OP, (torch.ones(4, 6, 2),), {})

    assert {str(entry) for entry in derive(call, 2)} == {
        "B -> B",
        "S(0) -> P",
        "S(1) -> S(1)",
        "S(2) -> P",
    }
