"""Conformance suite for rules of operators: what a plugin of hook `sbp_signatures` should pass.

    def test_my_operator_can_be_cut_as_its_rule_says():
        check_rule("mylib.myop.default", [sample(x, w), sample(x, w, flag=True)],
                   rules=RuleRegistry({"mylib.myop.default": my_rule}))

Samples should have extents that 2 and 3 do not divide, and some below 7.

Stability: stable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sbp_core.signatures import RuleRegistry

if TYPE_CHECKING:
    from sbp_torch.signatures.verification import Execute, VerifyReport

__all__ = ["check_rule", "sample"]

#: Axis sizes that give even, uneven and empty shards of small samples.
AXIS_SIZES = (2, 1, 3, 7)

#: One call: positional arguments, arguments by name.
Sample = tuple[Sequence[Any], Mapping[str, Any]]


def sample(*args: Any, **kwargs: Any) -> Sample:
    """Return the arguments of one call."""
    return args, kwargs


def check_rule(
    op: str,
    samples: Iterable[Sample],
    *,
    axis_sizes: Sequence[int] = AXIS_SIZES,
    rules: RuleRegistry | None = None,
    execute: Execute | None = None,
) -> tuple[VerifyReport, ...]:
    """Run every signature that the rule of `op` claims for each sample.

    Args:
        op: Operator and overload.
        samples: Real calls; float64 tensors are compared most tightly.
        axis_sizes: Sizes of the mesh axis.
        rules: The rules to go by; the built-in ones if omitted.
        execute: Runs the operator, if it is not PyTorch's.

    Raises:
        AssertionError: no sample was given, or execution refutes a claim.
        SignatureError: the operator has no rule, or the rule does not fit a sample.
    """
    from sbp_torch.signatures.verification import verify  # imports torch

    reports = tuple(
        verify(op, *args, axis_sizes=axis_sizes, rules=rules, execute=execute, **kwargs)
        for args, kwargs in samples
    )
    if not reports:
        raise AssertionError(f"no sample of {op} was given")
    failures = "\n".join(str(report) for report in reports if not report.ok)
    if failures:
        raise AssertionError(f"execution refutes the rule of {op}:\n{failures}")
    return reports
