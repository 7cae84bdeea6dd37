"""Whether checkpoints are what was written: every byte of them is read."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rich.console import Console

from sbp_core.errors import ConfigError
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.checkpoint.command.inspect import print_json
from sbp_launch.checkpoint.command.progress import reading
from sbp_launch.checkpoint.formats.distributed_checkpoint import chunk_places
from sbp_launch.checkpoint.formats.index import inner_path
from sbp_launch.checkpoint.formats.torch_file import damaged_record
from sbp_launch.checkpoint.manifest import DamagedError
from sbp_launch.checkpoint.opening import (
    FORMAT,
    Found,
    checkpoints_of,
    found_in,
    look,
    read_index,
)
from sbp_launch.checkpoint.places import newest_first
from sbp_launch.console import make_console, say
from sbp_launch.exit_codes import FAILED

#: What is known of formats that have no checksums.
_UNCHECKED = "headers, sizes and offsets fit; the format has no checksums"


def verify(options: Namespace) -> int:
    """Verify one checkpoint, or all of a run. Returns the exit code: 1 if one is damaged."""
    found = [look(options.path)]
    storage = checkpoints_of(options.path)
    if storage is not None:
        found = [found_in(storage, name) for name in reversed(newest_first(storage))]
    if found[0].format == FORMAT:
        # Here and not above: what only looks takes no torch. And not below, where time counts.
        import_module("sbp_launch.checkpoint.reading")
    console, results, code = make_console(), [], 0
    for one in found:
        began = time.perf_counter()
        what, size, problem = _verified(one)
        seconds = time.perf_counter() - began
        results.append({"path": one.place, "whole": problem is None, "what": what})
        if problem is not None:
            code = FAILED
            results[-1]["what"] = problem.what
        if not options.json:
            _show(console, one.place, what, size, seconds, problem)
    if options.json:
        print_json({"checkpoints": results})
    return code


def is_whole(found: Found) -> bool:
    """Return whether a checkpoint is what was written."""
    return _verified(found)[2] is None


def _show(
    console: Console, place: str, what: str, size: int, seconds: float, problem: ConfigError | None
) -> None:
    if problem is None:
        say(console, [f"{place}: {what}: {format_bytes(size)} in {format_seconds(seconds)}"])
        return
    say(
        console, [f"{place}: damaged", f"  {problem.what}", *(f"  in {at}" for at in problem.where)]
    )


def _verified(found: Found) -> tuple[str, int, ConfigError | None]:
    """Return what is known of it, its bytes, and what is wrong."""
    try:
        if found.storage is not None:
            from sbp_launch.checkpoint.reading import Checkpoint

            with Checkpoint(found.storage, found.name) as checkpoint:
                with reading(f"verifying {found.name}", checkpoint.manifest.size_bytes) as tell:
                    checkpoint.verify(tell)
                return "whole, by its checksums", checkpoint.manifest.size_bytes, None
        index = read_index(found)
        if found.format == "dcp":
            with reading("verifying", index.size_bytes) as tell:
                _verify_chunks(Path(found.place), tell)
            return "whole, by the CRC-32 of every chunk", index.size_bytes, None
        return _UNCHECKED, index.size_bytes, None
    except ConfigError as error:
        return "", 0, error


def _verify_chunks(folder: Path, tell: Callable[[int], None]) -> None:
    """Read all chunks of a `torch.distributed.checkpoint`.

    Raises:
        DamagedError: one is not what was written.
    """
    for name, file, offset, length in chunk_places(folder):
        path = inner_path(folder, file, folder)
        if damaged_record(path, offset, length, f"{path}, {name!r}"):
            raise DamagedError(f"{name!r} is damaged: its CRC-32 is another", where=str(path))
        tell(length)
