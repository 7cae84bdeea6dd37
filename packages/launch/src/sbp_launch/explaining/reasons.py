"""What makes one plan slower, larger or impossible next to another, in a sentence.

    slower by 12%: needs in each of 4 blocks.*.up, after forward: all-gather of output over data ...
    does not fit 1.0 GB: rank 0 at its peak, in firing 0 of forward.0.0, ...: 1.2 GB activations ...

What decides is what takes most of the time by which they differ: computing, boxing, or waits. What
travels in one plan and not in the other is found by module, layers that differ alike as one:

    before                                    after
    up: nothing                               up: after forward, all-gather of output, 2 MB
    down: before update, all-reduce, 1 MB     down: before update, all-reduce, 1 MB

Here, the all-gather of `up` appears, and nothing goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sbp_core.errors import SbpError
from sbp_core.memory import peak_text
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.compare import Figures
from sbp_launch.explaining.table import groups_of, layers_name, move_text
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.rows import ModuleMove, ModuleRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedModule:
    """What travels around one module, or around one of several equal layers.

    Args:
        module: `blocks.*.mlp.up`.
        count: How many modules that is.
        move: What travels, in all of them together.
    """

    module: str
    count: int
    move: ModuleMove


def appears(before: Sequence[ModuleRow], after: Sequence[ModuleRow]) -> list[MovedModule]:
    """Return what travels after a change and did not before it, what takes longest first."""
    had = Counter((row.stage, row.module, move) for row in before for move in row.moves)
    rows = []
    for row in after:
        new = []
        for move in row.moves:
            if had[row.stage, row.module, move]:
                had[row.stage, row.module, move] -= 1
            elif move.sent_bytes:
                new.append(move)
        # Rows of layers are one where all but their moves are equal.
        rows.append(replace(row, parameters=(), output="", moves=tuple(new)))
    moved = []
    every = ((of, one, move) for of in groups_of(rows) for one in of.rows for move in one.moves)
    for group, inside, move in every:
        name, count = group.name, group.count
        if move.layers:  # some of several layers
            layers = move.layers.split(", ")
            numbers = [int(layer.rpartition(".")[2]) for layer in layers]
            start = layers[0].removesuffix(str(numbers[0]))
            name, count = layers_name(start, numbers, whole=False), len(layers)
        module = ".".join(filter(None, (name.partition(" ")[0], inside.module))) or "(root)"
        moved.append(MovedModule(module=module, count=count, move=replace(move, layers="")))
    return sorted(moved, key=lambda one: -one.move.time_s)


#: Times that differ by less than this share are the same.
_SAME = 5e-4


def reason(now: Planned, then: Planned, before: Figures, after: Figures) -> str:
    """Return in one sentence how another plan compares, and what of it decides that.

    `now` is the plan as it is, which costs `before`; `then` is the other one, which costs `after`.
    """
    if after.fullest is not None and not after.fits:
        return f"does not fit {format_bytes(after.limit_bytes)}: {peak_text(after.fullest)}"
    change = after.step_s / before.step_s - 1 if before.step_s else 0.0
    if abs(change) < _SAME:
        if before.fullest is None or after.fullest is None:
            return "as fast"
        more = after.fullest.peak - before.fullest.peak
        if not more:
            return "as fast, and in as much memory"
        word = "more" if more > 0 else "less"
        return f"as fast, and with {format_bytes(abs(more))} {word} on the fullest rank"
    rows = (now.module_rows, then.module_rows)
    moved = appears(*rows) if change > 0 else appears(*reversed(rows))
    word = "slower" if change > 0 else "faster"
    return f"{word} by {percent(abs(change))}: {_cause(moved, before, after)}"


def _cause(moved: Sequence[MovedModule], before: Figures, after: Figures) -> str:
    """Return what takes the time that one of two plans takes and the other does not.

    Args:
        moved: What travels in the slower one alone, what takes longest first.
        before: What the plan as it is costs.
        after: What the other one costs.
    """
    is_slower = after.step_s > before.step_s
    sign = 1 if is_slower else -1
    computing_s = sign * (after.computing_s - before.computing_s)
    boxing_s = sign * (after.boxing_s - before.boxing_s)
    if computing_s > max(boxing_s, 0.0):
        more = "more" if is_slower else "less"
        return (
            f"a rank computes for {format_seconds(after.computing_s)} in place of "
            f"{format_seconds(before.computing_s)}, as {more} is done alike on several ranks"
        )
    if not moved or boxing_s <= 0:
        return f"threads wait {'longer' if is_slower else 'less'} for each other"
    verb = "needs" if is_slower else "saves"
    others = f", and {len(moved) - 1} more" if len(moved) > 1 else ""
    return f"{verb} {moved_text(moved[0])}{others}"


def moved_text(one: MovedModule) -> str:
    """Return what travels where: `in each of 4 blocks.*.up, after forward: ... (4.2 MB, 1 ms)`."""
    where = f"in each of {one.count} {one.module}" if one.count > 1 else f"in {one.module}"
    size = format_bytes(one.move.bytes_of_a_rank / one.count)
    time = format_seconds(one.move.time_s / one.count)
    return f"{where}, {move_text(one.move)} ({size} from a rank, {time})"


def refusal(error: SbpError) -> str:
    """Return why there is no plan, and what would be accepted, on one line."""
    accepted = f"; accepted here: {error.accepted}" if error.accepted else ""
    return f"not legal: {error.what}{accepted}"


def percent(share: float) -> str:
    """Return a share as people read it: `12%`, `0.4%`, `230%`."""
    number = 100 * share
    return f"{number:.0f}%" if number >= 10 else f"{number:.2g}%"
