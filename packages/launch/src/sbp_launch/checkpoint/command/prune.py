"""Remove older checkpoints; never the newest one that verifies."""

from __future__ import annotations

from argparse import Namespace

from sbp_core.errors import ConfigError, RunError
from sbp_core.plugins import Storage
from sbp_core.units import format_bytes
from sbp_launch.checkpoint.command.inspect import print_json
from sbp_launch.checkpoint.command.verify import is_whole
from sbp_launch.checkpoint.opening import ACCEPTED, checkpoints_of, found_in, look, manifest_of
from sbp_launch.checkpoint.places import newest_first, step_name
from sbp_launch.console import make_console, say


def prune(options: Namespace) -> int:
    """Remove all checkpoints of a run but the newest whole ones, and the best one.

    Returns:
        The exit code.
    """
    if options.keep < 1:
        raise ConfigError(
            f"--keep {options.keep} would leave none", accepted="how many are to stay, >= 1"
        )
    storage = checkpoints_of(options.path)
    if storage is None:
        found = look(options.path)
        raise ConfigError(
            f"{found.place} is no folder of checkpoints",
            accepted="a run folder, or its folder of checkpoints",
        )
    kept, damaged, removed = chosen(storage, options.keep)
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
                _remove(storage, name)
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
        lines.append(f"stays, as its held-out loss is the lowest: {best}")
    lines += [f"stays, though it is damaged (--damaged removes it): {name}" for name in damaged]
    verb = "removed" if options.yes else "would be removed"
    lines += [f"{verb}: {name}, {format_bytes(sizes[name])}" for name in removed]
    total = format_bytes(sum(sizes.values()))
    lines.append(f"{len(removed)} {verb}, {total}" + ("" if options.yes else "; --yes does it"))
    say(make_console(), lines if removed else [*lines[:-1], "nothing to remove"])
    return 0


def chosen(storage: Storage, keep: int) -> tuple[list[str], list[str], list[str]]:
    """Return the newest whole checkpoints, the damaged ones among them, and all older ones.

    Args:
        storage: Where they are.
        keep: How many whole ones are wanted, >= 1.
    """
    kept: list[str] = []
    damaged: list[str] = []
    names = newest_first(storage)[::-1]
    while names and len(kept) < keep:
        name = names.pop()
        whole = is_whole(found_in(storage, name))
        (kept if whole else damaged).append(name)
    return kept, damaged, names


def best_of(storage: Storage, newest: str) -> str:
    """Return the name of the checkpoint with the lowest held-out loss; empty if none is known.

    Args:
        storage: Where they are.
        newest: Name of one; what the trainer keeps in it says which was the best step.
    """
    trainer = manifest_of(found_in(storage, newest)).metadata.trainer
    step = trainer.get("best_step") if isinstance(trainer, dict) else None
    return step_name(step) if isinstance(step, int) else ""


def _remove(storage: Storage, name: str) -> None:
    try:
        storage.remove(name)
    except OSError as error:
        raise RunError(
            f"{storage.place(name)} cannot be removed: {error.strerror or error}"
        ) from error
