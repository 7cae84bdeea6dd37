"""What travels in one plan and not in another, by module, layers that differ alike as one.

    before                                    after
    up: nothing                               up: after forward, all-gather of output, 2 MB
    down: before update, all-reduce, 1 MB     down: before update, all-reduce, 1 MB

Here, the all-gather of `up` appears, and nothing goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sbp_launch.planning.rows import ModuleMove, ModuleRow
from sbp_launch.planning.table import groups_of, layers_name


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
    """Return what travels after a change and did not before it, what takes longest first.

    Args:
        before: The rows of one plan.
        after: Those of another one of the same model.
    """
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
    return sorted(_moved(rows), key=lambda one: -one.move.time_s)


def _moved(rows: Sequence[ModuleRow]) -> Iterator[MovedModule]:
    for group in groups_of(rows):
        for row in group.rows:
            for move in row.moves:
                name, count = group.name.partition(" ")[0], group.count
                if move.layers:
                    name, count = _named(move.layers.split(", "))
                module = ".".join(filter(None, (name, row.module))) or "(root)"
                yield MovedModule(module=module, count=count, move=replace(move, layers=""))


def _named(layers: Sequence[str]) -> tuple[str, int]:
    """Return what some of several layers are called together, and how many they are."""
    numbers = [int(layer.rpartition(".")[2]) for layer in layers]
    before = layers[0].removesuffix(str(numbers[0]))
    return layers_name(before, numbers, whole=False).partition(" ")[0], len(layers)
