"""The results of a survey as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from signatures.judge import Verdict


def by_op(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts of each operator."""
    grouped: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        grouped[verdict.op].append(verdict)
    return dict(sorted(grouped.items()))


@dataclass(frozen=True, slots=True)
class OpLine:
    """The summary of one operator."""

    op: str
    verdicts: Sequence[Verdict] = field(repr=False)

    @property
    def state(self) -> str:
        """The state in one word: WRONG, no rule, refused, missed, unexplained, ok."""
        if any(verdict.wrong for verdict in self.verdicts):
            return "WRONG"
        if any(not verdict.rule for verdict in self.verdicts):
            return "no rule"
        if any(verdict.refused for verdict in self.verdicts):
            return "refused"
        if self.missed:
            return "missed"
        if not any(verdict.useful or verdict.why for verdict in self.verdicts):
            return "all B unexplained"
        return "ok"

    @property
    def missed(self) -> int:
        """The number of unexplained missed signatures."""
        return sum(not entry.reason for verdict in self.verdicts for entry in verdict.missed)

    def example(self) -> str:
        """Return the worst finding, with its call."""
        for verdict in self.verdicts:
            for entry in verdict.wrong:
                return f"{verdict.shapes}: {entry.text}: {entry.reason}"
        for verdict in self.verdicts:
            if verdict.refused:
                return f"{verdict.shapes}: {verdict.refused}"
        for verdict in self.verdicts:
            for entry in verdict.missed:
                if not entry.reason:
                    return f"{verdict.shapes}: {entry.text} on {entry.size}"
        return ""


def print_ops(console: Console, verdicts: Iterable[Verdict], *, all_ops: bool) -> None:
    """Print a line for each operator; unless `all_ops`, only for operators with problems."""
    table = Table(title="operators", title_justify="left", show_lines=False)
    for name in ("operator", "calls", "claims", "wrong", "missed", "explained", "s", "state"):
        left = name in ("operator", "state")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    if not all_ops:
        table.add_column("example", overflow="fold", min_width=30)
    for op, listed in by_op(verdicts).items():
        line = OpLine(op, listed)
        if line.state == "ok" and not all_ops:
            continue
        explained = sum(bool(entry.reason) for one in listed for entry in one.missed)
        spent = sum(one.verify_s + one.discover_s for one in listed)
        table.add_row(
            op, str(len(listed)), str(sum(one.claimed for one in listed)),
            str(sum(len(one.wrong) for one in listed)), str(line.missed), str(explained),
            f"{spent:.1f}", line.state, *([] if all_ops else [line.example()]),
        )  # fmt: skip
    if table.row_count:
        console.print(table)


def print_details(console: Console, verdicts: Sequence[Verdict], limit: int = 12) -> None:
    """Print every finding of a few operators, equal ones once."""
    for op, listed in by_op(verdicts).items():
        console.print(f"[bold]{op}[/bold]: {len(listed)} calls, {OpLine(op, listed).state}")
        lines: dict[str, list[str]] = {}
        for verdict in listed:
            if not verdict.rule:
                lines.setdefault("no rule", []).append(verdict.shapes)
            if verdict.refused:
                lines.setdefault(verdict.refused, []).append(verdict.shapes)
            for entry in verdict.wrong:
                lines.setdefault(f"WRONG {entry.text}: {entry.reason}", []).append(verdict.shapes)
            for entry in verdict.missed:
                text = f"missed {entry.text}" + (f" ({entry.reason})" if entry.reason else "")
                lines.setdefault(text, []).append(verdict.shapes)
        for text, where in list(lines.items())[:limit]:
            times = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
            console.print(f"  {text}\n      {where[0]}{times}", markup=False, highlight=False)
        if len(lines) > limit:
            console.print(f"  ... and {len(lines) - limit} kinds more")


def totals(verdicts: Sequence[Verdict]) -> Mapping[str, int]:
    """Return the figures of the whole run."""
    missed = [entry for verdict in verdicts for entry in verdict.missed]
    return {
        "operators": len({verdict.op for verdict in verdicts}),
        "calls": len(verdicts),
        "signatures claimed": sum(verdict.claimed for verdict in verdicts),
        "on even shards": sum(verdict.even for verdict in verdicts),
        "on uneven shards": sum(verdict.uneven for verdict in verdicts),
        "on two mesh axes": sum(verdict.product for verdict in verdicts),
        "WRONG": sum(len(verdict.wrong) for verdict in verdicts),
        "missed without a reason": sum(not entry.reason for entry in missed),
        "missed with a reason": sum(bool(entry.reason) for entry in missed),
        "calls searched": sum(verdict.searched for verdict in verdicts),
        "calls without a rule": sum(not verdict.rule for verdict in verdicts),
        "calls refused": sum(bool(verdict.refused) for verdict in verdicts),
    }


def print_totals(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Print the figures of the whole run."""
    table = Table(title="signatures", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in totals(verdicts).items():
        table.add_row(name, str(count))
    console.print(table)
