"""Explain to a user which ways to shard an operator call (signatures) are legal, and why.

`explain("aten.mm.default", (4, 6), (6, 8))` prints as a table. The errors about illegal assignments
inside a program are in `signatures.assignment_check`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sbp_core.sbp import NdSbp, Sbp
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import derivation, derive, work_flop
from sbp_core.signatures.library import call_library
from sbp_core.signatures.no_rule import OPAQUE
from sbp_core.signatures.notation import Dims, Notation
from sbp_core.signatures.rule_registry import RuleRegistry, installed_rules
from sbp_core.signatures.signature import Signature1d
from sbp_core.units import format_flop

#: Rows of a table: a column for each tensor, and the reason.
Row = tuple[tuple[Sbp, ...], tuple[Sbp, ...], str]

#: Stands for the notation of an operator without a rule.
NO_RULE = "has no rule: whole on every rank, or as --discover finds"

#: Columns of a terminal, and the least width of the column of reasons.
_WIDTH, _REASON_WIDTH = 100, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The legal signatures of a call along one mesh axis, and why they are legal.

    Args:
        call: The call.
        axis_size: Ranks along the mesh axis.
        notation: The meaning of the operator.
        legal: The legal signatures.
        behind: Signatures that are legal only on an axis after others.
        refused: Candidates that are not legal: (inputs, outputs, why not).
        work_flop: Work of the whole call in floating-point operations.
        described: Whether a rule defines the meaning of the operator.
    """

    call: OpCall
    axis_size: int
    notation: Notation
    legal: tuple[Signature1d, ...]
    behind: tuple[Signature1d, ...]
    refused: tuple[Row, ...]
    work_flop: float
    described: bool = True

    def rows(self) -> tuple[Row, ...]:
        """Return the legal signatures with their origins."""
        return tuple((part.inputs, part.outputs, self.origin_of(part)) for part in self.legal)

    def origin_of(self, part: Signature1d) -> str:
        """Return the origin of a signature, in words."""
        if not part.label:
            return part.origin
        present = [part.label in _names(dims) for dims in self.notation.outputs]
        reductions = {
            self.notation.reduction(part.label, index)
            for index, present in enumerate(present)
            if not present
        } - {"none"}
        if reductions and any(part.label in _names(dims) for dims in self.notation.inputs):
            parts = " or ".join({"sum": "sums"}.get(name, f"{name}ima") for name in reductions)
            return f"{part.origin}, which is reduced away: each rank has parts of {parts}"
        return part.origin

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        call, notation = self.call, self.notation
        yield from _wrapped(f"{call.op}    ", str(notation) if self.described else NO_RULE, 4)
        tensors = [("input", *entry) for entry in zip(call.inputs, notation.inputs, strict=True)]
        tensors += [("output", *e) for e in zip(call.outputs, notation.outputs, strict=True)]
        width = max((len(str(entry)) for _, entry, _ in tensors), default=0)
        count = {"input": 0, "output": 0}
        for side, entry, dims in tensors:
            name, count[side] = f"{side} {count[side]}", count[side] + 1
            labels = _dims_text(dims) if self.described else ""
            yield f"  {name:<8}  {entry!s:<{width}}   {labels}".rstrip()
        yield f"  work      {format_flop(self.work_flop)}"
        yield f"\nlegal on a mesh axis of size {self.axis_size}:"
        yield from self._table(self.rows(), "because")
        if self.behind:
            yield "\nlegal on an axis after earlier axes:"
            yield from self._table(
                [
                    (part.inputs, part.outputs, f"{part.origin}, once {_prerequisite(part)}")
                    for part in self.behind
                ],
                "because",
            )
        if self.refused:
            yield "\nnot legal here:"
            yield from self._table(self.refused, "why not")

    def _table(self, rows: Sequence[Row], reason: str) -> Iterator[str]:
        head = [f"input {index}" for index in range(len(self.call.inputs))]
        head += [f"output {index}" for index in range(len(self.call.outputs))]
        cells = [[str(NdSbp(entry)) for entry in (*ins, *outs)] for ins, outs, _ in rows]
        # The reasons of one table often begin alike: with the operator, which is in the heading.
        reasons = [why.removeprefix(f"{self.call.op} ") for _, _, why in rows]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        if sum(widths) + 2 * len(widths) > _WIDTH - _REASON_WIDTH:
            for (inputs, outputs, _), why in zip(rows, reasons, strict=True):
                text = f"{_entries_text(inputs)} -> {_entries_text(outputs)}"
                yield from _wrapped("  ", text, 4)
                yield from _wrapped("      ", f"{reason}: {why}", 8)
            return
        for line, why in zip([head, *cells], [reason, *reasons], strict=True):
            text = "".join(f"{cell:<{width}}  " for cell, width in zip(line, widths, strict=True))
            yield from _wrapped(f"  {text}", why, len(text) + 2)


def explain(
    op: str, *args: Any, axis_size: int = 2, rules: RuleRegistry | None = None, **kwargs: Any
) -> Explanation:
    """Return the legal signatures of a call along one mesh axis, and why; prints as a table.

    Args:
        op: Operator and overload, such as `aten.mm.default`.
        *args: Its arguments. A tensor may be a tensor on any device, a `TensorType`, or a shape
            (which means float32).
        axis_size: Ranks along the mesh axis.
        rules: The rules to use; the installed rules if omitted.
        **kwargs: Its arguments by name.

    Raises:
        SignatureError: the operator has no rule.
        SbpLookupError: there is no such operator, or no tensor library that knows it.
    """
    return explain_call(call_library().abstract_call(op, args, kwargs), axis_size, rules=rules)


def explain_call(call: OpCall, axis_size: int, *, rules: RuleRegistry | None = None) -> Explanation:
    """Explain the legal signatures of a call along one mesh axis.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    rules = rules or installed_rules()
    found = derivation(call, rules)
    legal = derive(call, axis_size, rules=rules)
    refused: list[Row] = [
        (part.inputs, part.outputs, failure)
        for part in found.legal
        if (failure := next((f for e in part.requires if (f := e.failure(axis_size))), ""))
    ]
    described = rules.rule(call) is not OPAQUE
    if described:
        refused += [(other.inputs, other.outputs, other.reason) for other in found.rejected]
    return Explanation(
        call=call,
        axis_size=axis_size,
        notation=found.notation,
        legal=legal,
        behind=found.behind,
        refused=tuple(refused),
        work_flop=work_flop(call, rules=rules),
        described=described,
    )


def _entries_text(entries: Sequence[Sbp]) -> str:
    return ", ".join(str(NdSbp(entry)) for entry in entries)


def _wrapped(start: str, text: str, indent: int) -> Iterator[str]:
    """Yield `start` and `text` in lines of the terminal's width."""
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _names(dims: Dims) -> set[str]:
    return {name for dim in dims for name in dim}


def _dims_text(dims: Dims) -> str:
    return str(Notation(inputs=(dims,), outputs=())).split(" =>")[0]


def _prerequisite(part: Signature1d) -> str:
    return " and ".join(
        f"earlier axes split label {label} into {extent} parts" for label, extent in part.follows
    )
