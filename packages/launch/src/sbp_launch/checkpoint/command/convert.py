"""`sbp-checkpoint convert`: write a checkpoint or weights in another format."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError
from sbp_core.units import format_bytes, parse_bytes
from sbp_core.user_paths import user_path
from sbp_launch.checkpoint.command.inspect import FORMATS, print_json
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.names import (
    common_prefix,
    drop_matching,
    model_names,
    parse_renames,
    rename,
    use_averages,
)
from sbp_launch.checkpoint.places import FORMAT, FoundTensors, look, manifest_of, open_tensors
from sbp_launch.console import make_console, reading, say

if TYPE_CHECKING:
    from sbp_launch.checkpoint.tensors import LazyTensors

#: Formats that can be written; names as in `--to`.
TARGETS = ("safetensors", "hf", "dcp", FORMAT)

_WITHIN = "overlaps with its source: one would be inside of the other"
_NOT_THERE = {
    "accepted": "a path that does not exist yet; with --to hf, also a folder without weights",
    "todo": "name another path, or pass --overwrite",
}


def convert(options: Namespace) -> int:
    """Convert the tensors at one path into another format at another. Return the exit code."""
    renames = parse_renames(options.rename)
    to = _format_of(options)
    shard_bytes = parse_bytes(options.max_shard_size)
    if not shard_bytes:
        raise ConfigError(
            f"--max-shard-size {options.max_shard_size!r} is no size", accepted="such as 5GB, 500MB"
        )
    found = look(options.source)
    place, write = (
        _checkpoint(options, found) if to == FORMAT else _file(options, found, to, shard_bytes)
    )
    with open_tensors(found) as tensors:
        # Imported here: wrong arguments are refused without torch.
        from sbp_launch.checkpoint.tensors import Chosen, size_bytes

        # Names in the target -> names in the source.
        names = {name: name for name in (tensors if options.all else model_names(tensors))}
        if options.ema:
            names = use_averages(tensors)
        chosen = Chosen(tensors, rename(drop_matching(names, options.drop), renames))
        total = sum(size_bytes(chosen.like(name)) for name in chosen)
        with reading("converting", total) as tell:
            files = write(Chosen(tensors, chosen.sources, tell))
        dropped = len(names) - len(chosen)
        left_out = 0 if options.all else len(tensors) - len(model_names(tensors))
    result = {
        "source": found.place, "target": place, "format": to, "tensors": chosen.sources,
        "dropped": dropped, "left_out": left_out, "size_bytes": total, "files": files,
    }  # fmt: skip
    if options.json:
        print_json(result)
        return 0
    lines = [
        f"{found.place}: {FORMATS[found.format]}",
        f"{place}: {FORMATS[to]}, {len(chosen):,} tensors, {format_bytes(total)}"
        + (f" in {len(files)} files" if len(files) > 1 else ""),
    ]
    if options.drop:
        lines.append(f"dropped: {dropped:,} tensors")
    if left_out:
        lines.append(f"left out: {left_out:,} states of the optimizer (--all takes them)")
    beginning = common_prefix(chosen.sources)
    if to == "hf" and beginning and not options.rename:
        lines.append(
            f"all names begin with {beginning!r}: if a wrapper of the model added it, "
            f"--rename {beginning}= removes it"
        )
    say(make_console(), lines)
    return 0


def _format_of(options: Namespace) -> str:
    """Return the format to write.

    Raises:
        ConfigError: no option names it, or it cannot be written at the target.
    """
    target: str = options.target
    is_file = target.endswith(".safetensors")
    to: str = options.to or ("safetensors" if is_file else "")
    if not to:
        raise ConfigError(
            f"the format of {target} is not known",
            accepted=f"--to {', --to '.join(TARGETS)}; or a name that ends in .safetensors",
        )
    if to == "safetensors" and not is_file:
        raise ConfigError(f"{target} does not end in .safetensors", accepted="FILE.safetensors")
    if "://" in target and to != FORMAT:
        raise ConfigError(
            f"{target} is an address, and --to {to} writes on this machine",
            accepted=f"a path; with --to {FORMAT} an address, too",
        )
    return to


def _file(
    options: Namespace, found: FoundTensors, to: str, shard_bytes: int
) -> tuple[str, Callable[[LazyTensors], list[str]]]:
    """Return the target of a foreign format, and a function that writes it and returns its files.

    Raises:
        ConfigError: existing files would be replaced without `--overwrite`.
    """
    target = user_path(options.target)
    _check_apart(target, found)
    if to == "safetensors":
        is_used = target.exists()
    else:
        is_used = target.is_file() or (target.is_dir() and any(target.glob("*.safetensors")))
        is_used = is_used or (to == "dcp" and target.is_dir() and any(target.iterdir()))
    if is_used and not options.overwrite:
        raise ConfigError(f"{target} exists already", **_NOT_THERE)
    if target.is_dir() == (to == "safetensors") and target.exists():
        raise ConfigError(
            f"{target} is a {'folder' if target.is_dir() else 'file'}",
            accepted="a file" if to == "safetensors" else "a folder",
        )

    def write(tensors: LazyTensors) -> list[str]:
        from sbp_launch.checkpoint.formats.writers import (
            write_distributed_checkpoint,
            write_safetensors,
            write_sharded,
        )

        if to == "hf":
            return write_sharded(target, tensors, shard_bytes)
        if to == "dcp":
            write_distributed_checkpoint(target, tensors)
        else:
            write_safetensors(target, tensors)
        return [target.name]

    return str(target), write


def _checkpoint(
    options: Namespace, found: FoundTensors
) -> tuple[str, Callable[[LazyTensors], list[str]]]:
    """Return the target of a checkpoint, and a function that writes it and returns its files.

    The metadata of the run are copied if the source is a checkpoint.

    Raises:
        ConfigError: existing files would be replaced without `--overwrite`.
    """
    from sbp_launch.checkpoint.places import place_of_checkpoint
    from sbp_launch.checkpoint.saving import write_checkpoint

    metadata = manifest_of(found).metadata if found.format == FORMAT else None
    storage, name, step = place_of_checkpoint(options.target, metadata.step if metadata else None)
    place = storage.place(name)
    if "://" not in place:
        _check_apart(Path(place), found)
        is_other = Path(place).exists() and name not in storage.names()
        if is_other:
            raise ConfigError(
                f"{place} exists and is not a checkpoint",
                accepted="a new folder, or a checkpoint",
                todo="name another path",
            )
    elif place == found.place:
        raise ConfigError(f"{place} {_WITHIN}", accepted="another place")
    if name in storage.names() and not options.overwrite:
        raise ConfigError(f"{place} exists already", **_NOT_THERE)

    def write(tensors: LazyTensors) -> list[str]:
        write_checkpoint(storage, name, tensors, metadata or Metadata(step=step, seed=0))
        return sorted(storage.sizes(name))

    return place, write


def _check_apart(target: Path, found: FoundTensors) -> None:
    """Check that neither target nor source contains the other.

    Raises:
        ConfigError: one does.
    """
    real, given = target.resolve(), Path(found.place).resolve()
    if real == given or real in given.parents or given in real.parents:
        raise ConfigError(f"{target} {_WITHIN}", accepted="another place")
