"""`sbp-checkpoint verify` and `prune`: verify checkpoints, and remove older ones.

To verify a checkpoint, every byte is read. The newest intact checkpoint is never removed.
"""

from __future__ import annotations

import time
from argparse import Namespace
from importlib import import_module
from pathlib import Path

from sbp_core.errors import ConfigError, RunError
from sbp_core.plugins import CheckpointStorage
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.checkpoint.command.inspect import print_json
from sbp_launch.checkpoint.formats.distributed_checkpoint import chunk_places
from sbp_launch.checkpoint.formats.index import inner_path
from sbp_launch.checkpoint.formats.torch_file import damaged_record
from sbp_launch.checkpoint.manifest import DamagedError
from sbp_launch.checkpoint.places import (
    ACCEPTED,
    FORMAT,
    FoundTensors,
    checkpoints_of,
    found_in,
    look,
    manifest_of,
    newest_first,
    read_index,
)
from sbp_launch.checkpoint.steps import step_name
from sbp_launch.console import make_console, reading, say
from sbp_launch.exit_codes import FAILED

#: Result for formats without checksums.
_UNCHECKED = "headers, sizes and offsets fit; the format has no checksums"


def verify(options: Namespace) -> int:
    """Verify one checkpoint, or all of a run. Return the exit code: 1 if one is damaged."""
    found = [look(options.path)]
    storage = checkpoints_of(options.path)
    if storage is not None:
        found = [found_in(storage, name) for name in reversed(newest_first(storage))]
    if found[0].format == FORMAT:
        # Imported here: `look` needs no torch. And not below, where the time is measured.
        import_module("sbp_launch.checkpoint.reading")
    console, results, code = make_console(), [], 0
    for one in found:
        began = time.perf_counter()
        what, size, problem = _verify_checkpoint(one)
        seconds = time.perf_counter() - began
        results.append({"path": one.place, "whole": problem is None, "what": what})
        if problem is not None:
            code = FAILED
            results[-1]["what"] = problem.what
        if options.json:
            continue
        lines = [f"{one.place}: {what}: {format_bytes(size)} in {format_seconds(seconds)}"]
        if problem is not None:
            inside = (f"  in {at}" for at in problem.where)
            lines = [f"{one.place}: damaged", f"  {problem.what}", *inside]
        say(console, lines)
    if options.json:
        print_json({"checkpoints": results})
    return code


def is_whole(found: FoundTensors) -> bool:
    """Return whether a checkpoint is intact."""
    return _verify_checkpoint(found)[2] is None


def _verify_checkpoint(found: FoundTensors) -> tuple[str, int, ConfigError | None]:
    """Return the result in words, the number of bytes, and the error if it is damaged."""
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
                folder = Path(found.place)
                for name, file, offset, length in chunk_places(folder):
                    path = inner_path(folder, file, folder)
                    if damaged_record(path, offset, length, f"{path}, {name!r}"):
                        what = f"{name!r} is damaged: its CRC-32 does not match"
                        raise DamagedError(what, where=str(path))
                    tell(length)
            return "whole, by the CRC-32 of every chunk", index.size_bytes, None
        return _UNCHECKED, index.size_bytes, None
    except ConfigError as error:
        return "", 0, error


def prune(options: Namespace) -> int:
    """Remove all checkpoints of a run except the newest intact ones and the best one.

    Returns:
        The exit code.
    """
    if options.keep < 1:
        raise ConfigError(
            f"--keep {options.keep} would leave none", accepted="the number to keep, >= 1"
        )
    storage = checkpoints_of(options.path)
    if storage is None:
        found = look(options.path)
        raise ConfigError(
            f"{found.place} is no folder of checkpoints",
            accepted="a run folder, or its folder of checkpoints",
        )
    kept, damaged, removed = choose(storage, options.keep)
    if not kept:
        raise ConfigError(
            f"no checkpoint in {storage.place()} is whole, so none is removed",
            accepted=ACCEPTED,
            todo="sbp-checkpoint verify says what is wrong with each",
        )
    best = best_of(storage, kept[0])
    removed = [name for name in removed if name != best]
    if options.damaged:
        removed, damaged = sorted([*removed, *damaged]), []
    sizes = {name: sum(storage.sizes(name).values()) for name in removed}
    if options.yes and removed:
        with storage.claim():
            for name in removed:
                try:
                    storage.remove(name)
                except OSError as error:
                    what = f"{storage.place(name)} cannot be removed: {error.strerror or error}"
                    raise RunError(what) from error
    if options.json:
        print_json(
            {
                "kept": kept, "removed": removed if options.yes else [],
                "to_remove": [] if options.yes else removed, "damaged_and_kept": damaged,
                "size_bytes": sum(sizes.values()),
            }
        )  # fmt: skip
        return 0
    lines = [f"stays: {name}" for name in kept]
    if best in storage.names() and best not in (*kept, *damaged, *removed):
        lines.append(f"stays, because its held-out loss is the lowest: {best}")
    lines += [f"stays, although damaged (--damaged removes it): {name}" for name in damaged]
    verb = "removed" if options.yes else "would be removed"
    lines += [f"{verb}: {name}, {format_bytes(sizes[name])}" for name in removed]
    total = format_bytes(sum(sizes.values()))
    lines.append(f"{len(removed)} {verb}, {total}" + ("" if options.yes else "; do it with --yes"))
    say(make_console(), lines if removed else [*lines[:-1], "nothing to remove"])
    return 0


def choose(storage: CheckpointStorage, keep: int) -> tuple[list[str], list[str], list[str]]:
    """Return the newest intact checkpoints, the damaged ones among them, and all older ones.

    Args:
        storage: The storage of the checkpoints.
        keep: Number of intact checkpoints to find, >= 1.
    """
    kept: list[str] = []
    damaged: list[str] = []
    names = newest_first(storage)[::-1]
    while names and len(kept) < keep:
        name = names.pop()
        whole = is_whole(found_in(storage, name))
        (kept if whole else damaged).append(name)
    return kept, damaged, names


def best_of(storage: CheckpointStorage, newest: str) -> str:
    """Return the name of the checkpoint with the lowest held-out loss; empty if it is unknown.

    Args:
        storage: The storage of the checkpoints.
        newest: Name of a checkpoint; the trainer's state in it names the best step.
    """
    trainer = manifest_of(found_in(storage, newest)).metadata.trainer
    step = trainer.get("best_step") if isinstance(trainer, dict) else None
    return step_name(step) if isinstance(step, int) else ""
