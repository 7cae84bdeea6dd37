"""A command: choose the sharding of blocks, and the batch, from measured tables (OSDP's problem).

It is for comparison with the scheduler that was released with the paper. The planner `osdp` does
not use it: that one decides for each parameter, from predicted costs.

    python -m sbp_planner.osdp_tables tables.json --layers 48 --hidden 1536 --limit-mb 8192

A table has seconds t and MB m of one block, by batch row r and mode s (such as: nothing sharded,
attention, MLP, both). A model is L equal blocks; n_s of them take mode s:

    maximise    r / sum_s n_s t_rs            samples per second; row r has r times one batch
    such that   sum_s n_s m_rs + F <= limit,  sum_s n_s = L

For one row that is the knapsack of `sbp_planner.knapsack`, solved exactly; the rows are then
compared by throughput. The released OSDP scheduler compares rows 1 to 3 by seconds, so it always
takes the smallest batch that fits. Its choice is reported, too.

Complexity: O(L f) for a row, where f is the size of a Pareto frontier that equal blocks keep small:
milliseconds for 48 blocks.

Source: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI
2023, section 3; the tables, and the rules for reading them, from
Youhe-Jiang/OptimalShardedDataParallel (cb855cc): memory of a block counts in whole MB, cut off. F
is `overhead_MB` of the file, 800 in the authors' tables; 0 if it is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import floor, isfinite
from pathlib import Path
from typing import Any

from sbp_core.errors import SbpError, SbpValueError
from sbp_core.output import standard_output
from sbp_core.serialize import read_text
from sbp_planner.command_line import Parser, size_bytes
from sbp_planner.knapsack import KnapsackOption, choose

#: Rows that the released scheduler compares.
_RELEASED_ROWS = range(1, 4)

#: The two limits of the authors, and numbers of layers from small models to large ones.
_LIMITS_MB, _LAYERS = (8192.0, 16384.0), (8, 12, 24, 48, 96)

#: Parts of an MB that are counted if MB are not cut off; the tables have eight digits.
_PARTS = 10**8

_MB = 2**20

_FORM = (
    'JSON with "hidden": [H numbers], "time_s" and "mem_MB": [H][rows][modes] numbers >= 0, and '
    '"overhead_MB"'
)

_EPILOG = """
A MB of the tables is 2**20 bytes: --limit 8589934592 is --limit-mb 8192.

With --layers, --hidden and one limit: one setting, with the best modes of every row:
  feasible        whether any row fits
  best_row        the row with most samples per second, and what it is
  rows            row, samples, feasible, modes (how many blocks take each), seconds, memory_mb
                  (with overhead, blocks in whole MB), measured_mb (nothing cut off), throughput
                  (samples per second and rank), relative_throughput (to the best row)
  released_row    what the scheduler that is released with OSDP takes, and the gain over it
Otherwise a grid of settings, each with its best row, and a summary.

Exit status: 0, also if nothing fits; 2 for bad input.
"""


@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """Measured costs of one block.

    Args:
        hidden: Hidden sizes.
        time_s: Seconds, [hidden][row][mode].
        mem_mb: MB, [hidden][row][mode].
        overhead_mb: MB held in addition to all blocks.
    """

    hidden: tuple[int, ...]
    time_s: tuple[tuple[tuple[float, ...], ...], ...]
    mem_mb: tuple[tuple[tuple[float, ...], ...], ...]
    overhead_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """The fastest modes of one batch row.

    Args:
        row: The row r.
        samples: Samples of a rank in a step.
        feasible: Whether anything fits; if not, all further fields are None.
        modes: How many blocks take each mode.
        seconds: Time of a step.
        memory_mb: Overhead and blocks as counted: blocks in whole MB by default.
        measured_mb: Overhead and blocks, nothing cut off.
        throughput: Samples per second and rank.
        relative_throughput: Throughput relative to the best row of the setting.
    """

    row: int
    samples: int
    feasible: bool
    modes: tuple[int, ...] | None = None
    seconds: float | None = None
    memory_mb: float | None = None
    measured_mb: float | None = None
    throughput: float | None = None
    relative_throughput: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingPlan:
    """All rows of one setting.

    Args:
        layers: The number of blocks L.
        hidden: Hidden size of a block.
        limit_mb: Memory of a rank.
        feasible: Whether any row with samples fits; row 0 has none.
        best_row: The row with most samples per second.
        released_row: The row of the released scheduler: of rows 1 to 3 the one of fewest seconds.
        gain: Throughput of the best row over the throughput of the released one.
        rows: All rows, in order.
    """

    layers: int
    hidden: int
    limit_mb: float
    feasible: bool
    best_row: int | None
    released_row: int | None
    gain: float | None
    rows: tuple[RowPlan, ...]


def read_tables(path: str | Path) -> BlockTables:
    """Return the tables of a file.

    Raises:
        SbpValueError: The file cannot be read or has another form.
    """
    try:
        found = json.loads(read_text(Path(path)))
    except (SbpError, json.JSONDecodeError) as error:
        raise SbpValueError(
            f"cannot read the tables: {error}", where=str(path), accepted=_FORM
        ) from error
    try:
        tables = BlockTables(
            hidden=tuple(int(size) for size in found["hidden"]),
            time_s=_table(found["time_s"]),
            mem_mb=_table(found["mem_MB"]),
            overhead_mb=float(found.get("overhead_MB", 0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SbpValueError(
            f"no tables: {type(error).__name__}: {error}", where=str(path), accepted=_FORM
        ) from error
    shapes = [[len(row) for row in own] for own in (*tables.time_s, *tables.mem_mb)]
    sizes = {len(tables.hidden), len(tables.time_s), len(tables.mem_mb)}
    if len(sizes) > 1 or any(shape != shapes[0] for shape in shapes) or not shapes[0]:
        raise SbpValueError("the tables differ in shape", where=str(path), accepted=_FORM)
    if len(set(shapes[0])) > 1 or not shapes[0][0]:
        raise SbpValueError("rows differ in modes", where=str(path), accepted=_FORM)
    return tables


def _table(values: Any) -> tuple[tuple[tuple[float, ...], ...], ...]:
    table = tuple(tuple(tuple(float(v) for v in row) for row in own) for own in values)
    for value in (value for own in table for row in own for value in row):
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{value} is no time or size")
    return table


def plan_setting(
    tables: BlockTables,
    *,
    layers: int,
    hidden: int,
    limit_mb: float,
    row_samples: int = 96,
    whole_mb: bool = True,
) -> SettingPlan:
    """Return the best modes of every row, and the row with most samples per second.

    Row 0 is planned as well. It has no samples, so it is never the best.

    Args:
        tables: Costs of a block.
        layers: The number of blocks L, at least 1.
        hidden: One of the hidden sizes of the tables.
        limit_mb: Memory of a rank.
        row_samples: Samples of row 1; row r has r times as many.
        whole_mb: Whether MB of a block are rounded down to whole ones, as the authors do.

    Raises:
        SbpValueError: The size is not in the tables, or there are no layers.
    """
    if hidden not in tables.hidden:
        raise SbpValueError(
            f"hidden size {hidden} is not in the tables",
            accepted=", ".join(str(size) for size in tables.hidden),
        )
    if layers < 1:
        raise SbpValueError(f"{layers} layers", accepted="at least 1")
    at = tables.hidden.index(hidden)
    pairs = zip(tables.time_s[at], tables.mem_mb[at], strict=True)
    rows = [
        _row_plan(row, row_samples * row, pair, layers, limit_mb, tables.overhead_mb, whole_mb)
        for row, pair in enumerate(pairs)
    ]
    fitting = [plan for plan in rows if plan.throughput]
    best = max(fitting, key=lambda plan: plan.throughput or 0.0, default=None)
    released = min(
        (plan for plan in fitting if plan.row in _RELEASED_ROWS),
        key=lambda plan: plan.seconds or 0.0,
        default=None,
    )
    gain = None
    if best and released and best.throughput and released.throughput:
        gain = best.throughput / released.throughput
    return SettingPlan(
        layers=layers,
        hidden=hidden,
        limit_mb=limit_mb,
        feasible=best is not None,
        best_row=best.row if best else None,
        released_row=released.row if released else None,
        gain=gain,
        rows=tuple(_relative(plan, best) for plan in rows),
    )


def _row_plan(
    row: int,
    samples: int,
    costs: tuple[tuple[float, ...], tuple[float, ...]],
    layers: int,
    limit_mb: float,
    overhead_mb: float,
    whole_mb: bool,
) -> RowPlan:
    seconds, sizes = costs
    parts = 1 if whole_mb else _PARTS
    counted = [floor(size) if whole_mb else round(size * parts) for size in sizes]
    options = tuple(
        KnapsackOption(resident_bytes=size, seconds=one)
        for size, one in zip(counted, seconds, strict=True)
    )
    found = choose([options] * layers, (limit_mb - overhead_mb) * parts)
    if found is None:
        return RowPlan(row=row, samples=samples, feasible=False)
    modes = tuple(found.chosen.count(mode) for mode in range(len(sizes)))
    return RowPlan(
        row=row,
        samples=samples,
        feasible=True,
        modes=modes,
        seconds=found.seconds,
        memory_mb=found.memory_bytes / parts + overhead_mb,
        measured_mb=sum(n * size for n, size in zip(modes, sizes, strict=True)) + overhead_mb,
        throughput=samples / found.seconds if found.seconds else None,
    )


def _relative(plan: RowPlan, best: RowPlan | None) -> RowPlan:
    if best is None or not best.throughput or plan.throughput is None:
        return plan
    return RowPlan(**{**asdict(plan), "relative_throughput": plan.throughput / best.throughput})


@standard_output("python -m sbp_planner.osdp_tables")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; `sys.argv[1:]` if omitted.

    Returns:
        Exit code: 0, also if nothing fits; 2 for bad input.
    """
    try:
        options = _options(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.write(json.dumps(_answer(options), indent=2) + "\n")
    except SbpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m sbp_planner.osdp_tables",
        description="Choose sharding by block, and the batch, from measured tables of a block.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("tables", help="JSON file with the tables")
    parser.add_argument("--layers", type=int, nargs="+", metavar="L", help="numbers of blocks")
    parser.add_argument("--hidden", type=int, nargs="+", metavar="SIZE", help="hidden sizes")
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument(
        "--limit", type=size_bytes, nargs="+", metavar="SIZE", help="memory of a rank: bytes, 16GB"
    )
    limits.add_argument(
        "--limit-mb", type=float, nargs="+", metavar="MB", help="the same in MB of the tables"
    )
    parser.add_argument(
        "--row-samples", type=int, default=96, metavar="N", help="samples of row 1 (default 96)"
    )
    parser.add_argument(
        "--no-truncation",
        action="store_true",
        help="count memory of blocks as measured, not in whole MB as the authors do",
    )
    return parser.parse_args(words)


def _answer(options: argparse.Namespace) -> dict[str, Any]:
    tables = read_tables(options.tables)
    limits = [size / _MB for size in options.limit] if options.limit else options.limit_mb
    settings = list(
        product(options.layers or _LAYERS, options.hidden or tables.hidden, limits or _LIMITS_MB)
    )
    plans = [
        plan_setting(
            tables,
            layers=layers,
            hidden=hidden,
            limit_mb=limit_mb,
            row_samples=options.row_samples,
            whole_mb=not options.no_truncation,
        )
        for layers, hidden, limit_mb in settings
    ]
    if len(plans) == 1:
        return asdict(plans[0])
    gains = [plan.gain for plan in plans if plan.gain is not None]
    return {
        "num_settings": len(plans),
        "num_feasible": sum(plan.feasible for plan in plans),
        "median_gain": statistics.median(gains) if gains else None,
        "largest_gain": max(gains, default=None),
        "settings": list(_short(plans)),
    }


def _short(plans: Sequence[SettingPlan]) -> Iterator[dict[str, Any]]:
    """Yield the settings with only their best rows."""
    for plan in plans:
        own = {key: value for key, value in asdict(plan).items() if key != "rows"}
        best = plan.rows[plan.best_row] if plan.best_row is not None else None
        yield {**own, "best": asdict(best) if best else None}


if __name__ == "__main__":
    sys.exit(main())
