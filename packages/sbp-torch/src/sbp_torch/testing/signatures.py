"""Tests of sharding rules of operators, for plugins of the hook `sbp_signatures`.

A rule declares how an operator may be split. `check_rule` executes the operator on shards.

    def test_my_operator_can_be_cut_as_its_rule_says():
        check_rule("mylib.myop.default", [sample(x, w), sample(x, w, flag=True)],
                   rules=RuleRegistry({"mylib.myop.default": my_rule}))

Samples should have extents that 2 and 3 do not divide, and some below 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from math import prod
from typing import TYPE_CHECKING, Any

from sbp_core.signatures import RuleRegistry, parse_notation

if TYPE_CHECKING:
    from sbp_torch.signatures.verification import Execute, VerifyReport

__all__ = ["check_notation", "check_rule", "sample"]

#: Axis sizes that give even, uneven and empty shards of small samples.
AXIS_SIZES = (2, 1, 3, 7)

#: One call: positional and keyword arguments.
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
    """Execute every signature that the rule of `op` claims, for each sample.

    Args:
        op: Operator and overload.
        samples: Calls; float64 tensors have the smallest tolerance.
        axis_sizes: Sizes of the mesh axis.
        rules: The rules; the built-in ones if omitted.
        execute: Function that runs the operator; PyTorch's operator if omitted.

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


def check_notation(op: str, notation: str | None) -> None:
    """Check that an operator exists, and check its notation on samples made from its labels.

    An operator is not executed if it needs arguments that are no tensors, or refuses float64.

    Args:
        op: Operator and overload, `lib.op.default`; the module that registers it is imported.
        notation: The notation (labels of dims, one line); None to check only the operator.

    Raises:
        AssertionError: the operator is not registered, or has other tensor arguments than the
            notation, or execution refutes a claim.
    """
    import torch

    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    assert found is not None, f"no operator {op} is registered with torch.library"
    if notation is None:
        return
    meaning = parse_notation(notation)
    needed = [one for one in found._schema.arguments if not one.has_default_value()]
    tensors = [one for one in needed if "Tensor" in str(one.type)]
    if len(tensors) < len(needed):
        return
    assert len(tensors) == len(meaning.inputs), (
        f"{op} takes {len(tensors)} tensors, the notation {notation!r} has {len(meaning.inputs)}"
    )
    sizes = dict(meaning.sizes)
    samples = []
    for extents in ((5, 7, 2, 3, 4), (4, 6, 8, 2, 6)):
        size = dict(zip(sorted(meaning.labels), cycle(extents), strict=False)) | sizes
        generator = torch.Generator().manual_seed(0)
        shapes = [[prod(size[one] for one in dim) for dim in dims] for dims in meaning.inputs]
        parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        samples.append(sample(*parts))
    try:
        for args, _ in samples:
            found(*args)
    except RuntimeError:
        return  # it needs other values, such as indices, which only the author knows
    check_rule(op, samples, rules=RuleRegistry({op: notation}))
