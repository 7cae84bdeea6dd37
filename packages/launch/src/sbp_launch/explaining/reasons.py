"""Explain in one sentence why a plan is slower, larger or impossible, compared with another plan.

    slower by 12%: needs in each of 4 blocks.*.up, after forward: all-gather of output over data ...
    does not fit 1.0 GB: rank 0 at its peak, in firing 0 of forward.0.0, ...: 1.2 GB activations ...

The sentence names the largest part of the difference in time: computing, boxing (communication) or
waiting. Communication that only one plan has is found by module; equal layers count as one module:

    before                                    after
    up: nothing                               up: after forward, all-gather of output, 2 MB
    down: before update, all-reduce, 1 MB     down: before update, all-reduce, 1 MB

Here, the all-gather of `up` is new, and nothing is removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sbp_core.errors import SbpError
from sbp_core.memory import peak_text
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.plan_figures import Figures
from sbp_launch.explaining.table import groups_of, layers_name, move_text
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.rows import ModuleMove, ModuleRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedModule:
    """Communication of one module, or of equal layers, that one plan has and the other has not.

    Args:
        module: Name of the module, such as `blocks.*.mlp.up`.
        count: Number of modules that the name stands for.
        move: The communication of all of them together.
    """

    module: str
    count: int
    move: ModuleMove


def appears(before: Sequence[ModuleRow], after: Sequence[ModuleRow]) -> list[MovedModule]:
    """Return the communication after a change that was not there before it, the longest first."""
    had = Counter((row.stage, row.module, move) for row in before for move in row.moves)
    rows = []
    for row in after:
        new = []
        for move in row.moves:
            if had[row.stage, row.module, move]:
                had[row.stage, row.module, move] -= 1
            elif move.sent_bytes:
                new.append(move)
        # `groups_of` merges rows of layers that are equal except for their moves.
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


#: Relative differences of times below this count as none.
_SAME = 5e-4


def reason(now: Planned, then: Planned, before: Figures, after: Figures) -> str:
    """Return in one sentence how another plan compares with the present one, and why.

    `now` is the present plan, with costs `before`; `then` is the other plan, with costs `after`.
    """
    if after.fullest is not None and not after.fits:
        return f"does not fit {format_bytes(after.limit_bytes)}: {peak_text(after.fullest)}"
    change = after.step_s / before.step_s - 1 if before.step_s else 0.0
    if abs(change) < _SAME:
        if before.fullest is None or after.fullest is None:
            return "as fast"
        more = after.fullest.peak - before.fullest.peak
        if not more:
            return "as fast, with the same memory"
        word = "more" if more > 0 else "less"
        return f"as fast, and with {format_bytes(abs(more))} {word} on the fullest rank"
    rows = (now.module_rows, then.module_rows)
    moved = appears(*rows) if change > 0 else appears(*reversed(rows))
    word = "slower" if change > 0 else "faster"
    return f"{word} by {percent(abs(change))}: {_cause(moved, before, after)}"


def _cause(moved: Sequence[MovedModule], before: Figures, after: Figures) -> str:
    """Return the main cause of the difference in time between two plans.

    Args:
        moved: Communication of the slower plan only, the longest first.
        before: Costs of the present plan.
        after: Costs of the other plan.
    """
    is_slower = after.step_s > before.step_s
    sign = 1 if is_slower else -1
    computing_s = sign * (after.computing_s - before.computing_s)
    boxing_s = sign * (after.boxing_s - before.boxing_s)
    if computing_s > max(boxing_s, 0.0):
        more = "more" if is_slower else "less"
        return (
            f"a rank computes for {format_seconds(after.computing_s)} in place of "
            f"{format_seconds(before.computing_s)}, because {more} is repeated on several ranks"
        )
    if not moved or boxing_s <= 0:
        return f"threads wait {'longer' if is_slower else 'less'} for each other"
    verb = "needs" if is_slower else "saves"
    others = f", and {len(moved) - 1} more" if len(moved) > 1 else ""
    return f"{verb} {moved_text(moved[0])}{others}"


def moved_text(one: MovedModule) -> str:
    """Describe communication: `in each of 4 blocks.*.up, after forward: ... (4.2 MB, 1 ms)`."""
    where = f"in each of {one.count} {one.module}" if one.count > 1 else f"in {one.module}"
    size = format_bytes(one.move.bytes_of_a_rank / one.count)
    time = format_seconds(one.move.time_s / one.count)
    return f"{where}, {move_text(one.move)} ({size} from a rank, {time})"


def refusal(error: SbpError) -> str:
    """Return the reason why there is no plan, and what would be accepted, on one line."""
    accepted = f"; accepted here: {error.accepted}" if error.accepted else ""
    return f"not legal: {error.what}{accepted}"


def percent(share: float) -> str:
    """Return a fraction as a percentage: `12%`, `0.4%`, `230%`."""
    number = 100 * share
    return f"{number:.0f}%" if number >= 10 else f"{number:.2g}%"
