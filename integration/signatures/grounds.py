"""Measure how many of PyTorch's operators the algebra covers, on the same grounds as for DTensor.

A variant is fully right on a ground if every ATen call of its samples there has a rule, no claim is
wrong, and no signature is missed without a reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from signatures.calls import FORWARD, GRADIENT
from signatures.judge import Verdict
from signatures.store import Calls
from signatures.summary import OpLine, by_op

RIGHT, PARTLY, NO_RULE, WRONG = "fully right", "partly", "no rule", "WRONG"


@dataclass(frozen=True, slots=True)
class Ground:
    """A part of the requirements of a variant.

    Args:
        name: Name in the table.
        use: `forward` or `gradient`.
        shards: Whether even shards count, uneven ones, or both.
        dtensor: DTensor's figures in PyTorch 2.13: testable, fully right, wrong. Source: a run of
            its strategies over the float32 samples of the same database, with one axis of 5 ranks
            (even) or 4 (uneven).
    """

    name: str
    use: str
    shards: tuple[bool, ...]
    dtensor: tuple[int, int, int]


GROUNDS = (
    Ground("forward, even shards", FORWARD, (True,), (484, 437, 3)),
    Ground("forward, uneven shards", FORWARD, (False,), (601, 477, 13)),
    Ground("gradients", GRADIENT, (True, False), (362, 289, 5)),
)

#: Core ATen operators with a strategy of DTensor in PyTorch 2.13, of 193.
_DTENSOR_CORE = 159


def variant_states(
    calls: Calls, verdicts: Sequence[Verdict]
) -> dict[Ground, dict[str, tuple[str, str]]]:
    """Return, for each ground and variant, its state and the responsible operator."""
    by_key = {verdict.key: verdict for verdict in verdicts}
    silent = {
        op for op, listed in by_op(verdicts).items()
        if not any(verdict.useful or verdict.why for verdict in listed)
    }  # fmt: skip
    used: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for op in {verdict.op for verdict in verdicts}:
        for call, uses in calls.of(op):
            for place in {(use.variant, use.ground) for use in uses}:
                if call.key in by_key:
                    used[place].append(by_key[call.key])
    made: dict[Ground, dict[str, tuple[str, str]]] = {}
    for ground in GROUNDS:
        made[ground] = {
            variant: _state(listed, ground, silent)
            for (variant, use), listed in sorted(used.items())
            if use == ground.use
        }
    return made


def _state(verdicts: Iterable[Verdict], ground: Ground, silent: set[str]) -> tuple[str, str]:
    worst, blamed = RIGHT, ""
    order = (RIGHT, PARTLY, NO_RULE, WRONG)
    for verdict in verdicts:
        state = RIGHT
        missed = any(verdict.unexplained(even) for even in ground.shards)
        if any(entry.even in ground.shards for entry in verdict.wrong):
            state = WRONG
        elif not verdict.rule:
            state = NO_RULE
        elif verdict.refused or missed or verdict.op in silent:
            state = PARTLY
        if order.index(state) > order.index(worst):
            worst, blamed = state, verdict.op
    return worst, blamed


def print_grounds(console: Console, states: Mapping[Ground, Mapping[str, tuple[str, str]]]) -> None:
    """Print a line for each ground, and the operators that prevent full coverage."""
    table = Table(title="variants of PyTorch's operator samples", title_justify="left")
    columns = ("ground", "testable", RIGHT, "share", PARTLY, NO_RULE, WRONG, "DTensor")
    for name in columns:
        table.add_column(name, justify="left" if name in ("ground", "DTensor") else "right")
    for ground, variants in states.items():
        counts = Counter(state for state, _ in variants.values())
        testable, right, wrong = ground.dtensor
        share = counts[RIGHT] / max(len(variants), 1)
        table.add_row(
            ground.name, str(len(variants)), str(counts[RIGHT]), f"{share:.1%}",
            *(str(counts[state]) for state in (PARTLY, NO_RULE, WRONG)),
            f"{right} of {testable} ({right / testable:.1%}), {wrong} wrong",
        )  # fmt: skip
    console.print(table)
    blamed = Counter(op for variants in states.values() for _, op in variants.values() if op)
    if blamed:
        listed = ", ".join(f"{op} ({count})" for op, count in blamed.most_common(30))
        console.print(f"in the way, with how many variants: {listed}", highlight=False)


def core_ops() -> list[str]:
    """Return the operators that PyTorch tags as core, such as `aten.mm.default`."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default", None)
            if op is not None and torch.Tag.core in op.tags:
                found.append(str(op))
    return sorted(set(found))


def core_state(op: str, verdicts: Sequence[Verdict]) -> str:
    """Return the state of a core operator: `useful`, a reason, or `nothing`."""
    _, packet, overload = op.split(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
    if any(verdict.useful for verdict in verdicts):
        return "useful"
    if not any("Tensor" in str(entry.type) for entry in schema.returns):
        return "reason: makes no tensor"
    if schema.is_mutable:
        return "reason: mutates its argument, which a captured step never does"
    reasons = [verdict.why for verdict in verdicts if verdict.why]
    return f"reason: {reasons[0]}" if reasons else "nothing"


def print_core(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Print how many core operators have a useful signature, and the states of all others."""
    grouped = by_op(verdicts)
    states = {op: core_state(op, grouped.get(op, ())) for op in core_ops()}
    useful = sum(state == "useful" for state in states.values())
    reasons = {op: state for op, state in states.items() if state.startswith("reason")}
    nothing = [op for op, state in states.items() if state == "nothing"]
    console.print(
        f"core ATen: {useful} of {len(states)} with a useful signature, {len(reasons)} with a "
        f"reason why not, {len(nothing)} with nothing (DTensor: {_DTENSOR_CORE} with a strategy)",
        highlight=False,
    )
    for op, state in reasons.items():
        console.print(f"  {op}: {state.removeprefix('reason: ')}", highlight=False)
    if nothing:
        listed = [f"{op} ({OpLine(op, grouped[op]).state})" if op in grouped
                  else f"{op} (never sampled)" for op in nothing]  # fmt: skip
        console.print(f"  nothing: {', '.join(listed)}", highlight=False)
