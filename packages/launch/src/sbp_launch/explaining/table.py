"""Print a plan as a table: a line for each module, below it its communication (boxing).

    module                parameters          output          a rank sends
    blocks.* x4
      attention.proj      66,048  (B, S(1))   (S(0), B)             4.7 MB
        after forward: all-reduce output over tensor: P -> B       4.2 MB

Layers with equal plans form one group. If there are too many rows, the modules that send most are
shown, and the others are counted.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from sbp_core.graph import Phase
from sbp_core.placement import Placement
from sbp_core.units import format_bytes, format_ranges
from sbp_launch.planning.moves import ranks_text
from sbp_launch.planning.rows import ModuleMove, ModuleRow

#: A path: the part before the number of its first layer, the number, and the rest.
_LAYER = re.compile(r"(?P<before>(?:.*?\.)??)(?P<number>\d+)(?P<after>(?:\..*)?)")

#: The name of the model itself, as in strategy files.
_ROOT = "(root)"
_OWN_OPS = "(own ops)"
_GAP = "  "
_HEADS = ("module", "parameters", "output", "a rank sends")

#: The names of phases, for one module.
_PHASES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.WEIGHT_GRADIENT: "weight gradient",
    Phase.OPTIMIZER: "update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers with equal plans, or one module that is not a layer.

    Args:
        stage: The stage on which they run.
        name: `blocks.* x4`; empty for a module that is not a layer.
        count: The number of layers.
        rows: Rows in which `module` is the path inside a layer, and bytes and numbers of
            parameters cover all layers.
    """

    stage: int
    name: str
    count: int
    rows: tuple[ModuleRow, ...]


def groups_of(rows: Sequence[ModuleRow]) -> list[Group]:
    """Return the rows in groups, in their order; layers with equal rows share a group.

    before: blocks.0.up, blocks.0.down, blocks.1.up, blocks.1.down, head
    after:  blocks.* x2 (up, down), head
    """
    layers: dict[tuple[int, str, int], list[ModuleRow]] = {}
    parts: list[tuple[int, str, int] | ModuleRow] = []
    for row in rows:
        match = _LAYER.fullmatch(row.module)
        if match is None:
            parts.append(row)
            continue
        key = row.stage, match["before"], int(match["number"])
        if key not in layers:
            layers[key] = []
            parts.append(key)
        layers[key].append(replace(row, module=match["after"].removeprefix(".")))
    alike: dict[tuple[int, str, tuple[ModuleRow, ...]], list[int]] = {}
    for (stage, before, number), own in layers.items():
        still = tuple(replace(row, moves=(), num_parameters=0) for row in own)
        alike.setdefault((stage, before, still), []).append(number)
    numbers_of: dict[str, set[int]] = {}
    for _, before, number in layers:
        numbers_of.setdefault(before, set()).add(number)
    found: list[Group] = []
    for part in parts:
        if isinstance(part, ModuleRow):
            found.append(Group(stage=part.stage, name="", count=1, rows=(part,)))
            continue
        stage, before, number = part
        still = tuple(replace(row, moves=(), num_parameters=0) for row in layers[part])
        numbers = alike[stage, before, still]
        if number == numbers[0]:
            same = [(f"{before}{n}", layers[stage, before, n]) for n in numbers]
            name = layers_name(before, numbers, whole=len(numbers) == len(numbers_of[before]))
            found.append(Group(stage=stage, name=name, count=len(numbers), rows=_fold_layers(same)))
    return found


def _fold_layers(layers: Sequence[tuple[str, Sequence[ModuleRow]]]) -> tuple[ModuleRow, ...]:
    """Return the rows of several named layers as rows of one layer, with the sums of bytes.

    A move of only some layers, such as the transfer to the next stage, names them.
    """
    found = []
    for rows in zip(*(own for _, own in layers), strict=True):
        moves: dict[ModuleMove, list[tuple[str, ModuleMove]]] = {}
        for (name, _), row in zip(layers, rows, strict=True):
            for move in row.moves:
                alike = replace(move, sent_bytes=0, time_s=0.0)
                moves.setdefault(alike, []).append((name, move))
        together = (
            replace(
                move,
                sent_bytes=sum(one.sent_bytes for _, one in having),
                time_s=sum(one.time_s for _, one in having),
                layers="" if len(having) == len(layers) else ", ".join(name for name, _ in having),
            )
            for move, having in moves.items()
        )
        found.append(
            replace(
                rows[0],
                moves=tuple(sorted(together, key=lambda move: move.order)),
                num_parameters=sum(row.num_parameters for row in rows),
            )
        )
    return tuple(found)


def layers_name(before: str, numbers: list[int], *, whole: bool) -> str:
    """Return the name of layers: `blocks.* x4`, or `blocks.{0-2} x3` if these are not all."""
    if len(numbers) == 1:
        return f"{before}{numbers[0]}"
    middle = "*" if whole else f"{{{format_ranges(numbers)}}}"
    return f"{before}{middle} x{len(numbers)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One printed line: of a stage, of a group, of a module, or of boxing around it."""

    text: str = ""
    cells: tuple[str, str] = ("", "")
    number: str = ""
    size: str = ""
    style: str = ""


def plan_table(
    rows: Sequence[ModuleRow],
    stages: Sequence[Placement],
    max_rows: int,
    width: int,
    todo: str = "",
) -> Text:
    """Return the printed plan.

    Args:
        rows: The rows that `module_rows` returned.
        stages: Placement of each stage.
        max_rows: The largest number of modules, with layers of a group as one; others are counted.
            Modules that send most have priority, then modules with parameters.
        width: Characters of a line.
        todo: How to see the omitted rows.
    """
    groups = groups_of(rows)
    order = [(index, row) for index, group in enumerate(groups) for row in group.rows]
    importance = sorted(
        order, key=lambda entry: (-entry[1].bytes_of_a_rank, not entry[1].parameters)
    )
    kept = set(importance[:max_rows])
    lines: list[_Line] = []
    for stage, placement in enumerate(stages):
        if len(stages) > 1:
            size = _bytes(sum(row.bytes_of_a_rank for row in rows if row.stage == stage))
            text = f"stage {stage} ({ranks_text(placement)})"
            lines.append(_Line(text=text, size=size, style="bold"))
        for index, group in enumerate(groups):
            if group.stage == stage:
                shown = [row for row in group.rows if (index, row) in kept]
                lines += _group_lines(group, shown)
    hidden = [entry for entry in order if entry not in kept]
    if len(stages) == 1:
        total = sum(row.bytes_of_a_rank for row in rows)
        lines.append(_Line(text="all modules", size=_bytes(total), style="bold"))
    if not hidden:
        return _draw_table(lines, width, "")
    sent = sum(row.bytes_of_a_rank for _, row in hidden)
    what = f"{len(hidden)} further rows" if len(hidden) > 1 else "1 further row"
    note = f"{what}, which {'send' if len(hidden) > 1 else 'sends'} {_bytes(sent) or 'nothing'}"
    return _draw_table(lines, width, note + (f": {todo}" if todo else ""))


def _group_lines(group: Group, rows: Sequence[ModuleRow]) -> Iterable[_Line]:
    """Yield the lines of a group: its name, then its modules; on one line if it is one module."""
    alone = len(group.rows) == 1
    if rows and not alone:
        yield _Line(text=group.name, style="bold")
    for row in rows:
        indent = "" if alone else _GAP
        name = row.module
        if group.name:
            name = ".".join(filter(None, (group.name.partition(" ")[0], name))) if alone else name
            name += f" x{group.count}" if alone and group.count > 1 else ""
        elif not name:
            name = _ROOT
        if row.is_parent and name != _ROOT:
            name = f"{name} {_OWN_OPS}".strip()
        parameters, *rest = _parameter_cells(row) or ("-",)
        number = f"{row.num_parameters:,}" if row.parameters else ""
        yield _Line(text=indent + name, cells=(parameters, row.output or "-"), number=number)
        for more in rest:
            yield _Line(cells=(more, ""))
        for move in row.moves:
            if move.sent_bytes:
                text = f"{indent}{_GAP}{move_text(move)}"
                yield _Line(text=text, size=_bytes(move.bytes_of_a_rank), style="dim")


def move_text(move: ModuleMove) -> str:
    """Return a move as text: `after forward: all-reduce of output over tensor: P -> B`."""
    change = move.how.replace(" -> ", "\N{NO-BREAK SPACE}->\N{NO-BREAK SPACE}")
    layers = f" (only {move.layers})" if move.layers else ""
    return f"{when_text(move)}: {move.kind} of {move.what} {change}{layers}"


def when_text(move: ModuleMove) -> str:
    """Return the time of a move: `after forward`."""
    return f"{move.when} {_PHASES[move.phase]}"


def _parameter_cells(row: ModuleRow) -> tuple[str, ...]:
    """Return the SBPs of a module's parameters; if one differs from the first, with its name."""
    found: dict[str, list[str]] = {}
    for name, sbp in row.parameters:
        found.setdefault(sbp, []).append(name)
    first, *others = found or ("",)
    if not first:
        return ()
    return (first, *(f"{', '.join(found[sbp])} {sbp}" for sbp in others))


def _bytes(size: float) -> str:
    """Return a size as text; empty for 0."""
    return format_bytes(size) if size else ""


def _draw_table(lines: Sequence[_Line], width: int, note: str) -> Text:
    """Return the lines as a table of at most `width` characters.

    A name or a move that is too long for its columns continues on further lines. If names fit next
    to them, the numbers of parameters stand before their SBPs.
    """
    lines = _with_numbers(lines, width)
    size = max(len(line.size) for line in lines)
    first, second = (
        max(len(head), *(len(line.cells[index]) for line in lines))
        for index, head in enumerate(_HEADS[1:3])
    )
    names = [len(line.text) for line in lines if any(line.cells)]
    rest = width - first - second - 2 * len(_GAP)
    columns = (max(12, min(rest, max([len(_HEADS[0]), *names]))), first)
    # The text of a move may extend over the columns of SBPs, and beyond them if there is room.
    texts = [len(line.text) for line in lines if not any(line.cells)]
    named = sum(columns) + second + 2 * len(_GAP)
    whole = min(max([named, *texts]), width - size - len(_GAP))
    heads = _row(_HEADS[:3], columns)
    total = max(whole + len(_GAP) + size, len(heads) + len(_GAP) + len(_HEADS[3]))
    text = Text(no_wrap=True)
    text.append(heads + _HEADS[3].rjust(total - len(heads)), style="bold")
    text.append("\n" + "─" * total)
    for line in lines:
        text.append("\n")
        text.append(_line_text(line, columns, whole, total), style=line.style)
    for part in textwrap.wrap(note, width):
        text.append(f"\n{part}", style="italic")
    return text


def _with_numbers(lines: Sequence[_Line], width: int) -> Sequence[_Line]:
    """Return the lines with the numbers of parameters in their cells, if there is room for them."""
    digits = max(len(line.number) for line in lines)
    numbered = [
        replace(line, cells=(f"{line.number:>{digits}}{_GAP}{line.cells[0]}", line.cells[1]))
        if any(line.cells) and digits
        else line
        for line in lines
    ]
    columns = ((line.text, *line.cells) for line in numbered if any(line.cells))
    needed = sum(max(map(len, column)) for column in zip(*columns, strict=True)) + 2 * len(_GAP)
    return numbered if needed <= width else lines


def _row(cells: Sequence[str], columns: Sequence[int]) -> str:
    """Return the padded cells of one line; the last cell is not padded."""
    padded = [cell.ljust(column) for cell, column in zip(cells[:-1], columns, strict=True)]
    return _GAP.join([*padded, cells[-1]]).rstrip()


def _line_text(line: _Line, columns: Sequence[int], whole: int, total: int) -> str:
    """Return a line, wrapped to several if needed."""
    if any(line.cells):
        over = len(line.text) > columns[0]
        head = f"{line.text}\n" if over else ""
        return head + _row(("" if over else line.text, *line.cells), columns)
    indent = " " * (len(line.text) - len(line.text.lstrip()))
    first, *more = textwrap.wrap(
        line.text.strip(),
        whole,
        initial_indent=indent,
        subsequent_indent=indent + _GAP,
        break_on_hyphens=False,
    )
    parts = [(first + line.size.rjust(total - len(first))).rstrip(), *more]
    return "\n".join(parts).replace("\N{NO-BREAK SPACE}", " ")


def legend(
    rows: Sequence[ModuleRow], mesh: Mapping[str, int], stages: Sequence[Placement]
) -> list[str]:
    """Return lines that explain the words of the table.

    Args:
        rows: The rows of the table.
        mesh: The axes in the given order, with their sizes.
        stages: Placement of each stage.
    """
    shape = dict(zip(stages[0].axes, stages[0].mesh_shape, strict=True))
    lines = []
    if len(stages) > 1:
        outer = {axis: size for axis, size in mesh.items() if axis not in shape}
        parts = f"each position of {', '.join(outer)} is a stage" if outer else _shapes_text(stages)
        lines.append(f"mesh {mesh_text(mesh)}: {parts}")
    alike = len({stage.mesh_shape for stage in stages}) == 1
    if max(stage.size for stage in stages) > 1:
        axes = mesh_text(shape).replace(" x ", ", ") if alike else ", ".join(shape)
        lines.append(
            f"SBP by axis ({axes}): S(d) split along dim d, B whole on each rank, P parts of a sum"
        )
    else:
        lines.append("each stage is one rank, where every tensor is whole: (B)")
    if any(row.is_parent and row.module for row in rows):
        lines.append("(own ops): what a module computes itself, outside of its submodules")
    if any(move.sent_bytes for row in rows for move in row.moves):
        lines.append("before, within, after: a module's forward, backward or update")
        lines.append(
            "a rank sends: in a training step, in all layers of a row; where ranks differ, the mean"
        )
    return lines


def _shapes_text(stages: Sequence[Placement]) -> str:
    """Return the mesh of each stage: `stages 0, 1 on data 1, stage 2 on data 2`."""
    found: dict[str, list[str]] = {}
    for number, stage in enumerate(stages):
        text = mesh_text(dict(zip(stage.axes, stage.mesh_shape, strict=True)))
        found.setdefault(text, []).append(str(number))
    return ", ".join(
        f"stage{'s' * (len(numbers) > 1)} {', '.join(numbers)} on {text}"
        for text, numbers in found.items()
    )


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return axes and sizes: `data 2 x tensor 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())
