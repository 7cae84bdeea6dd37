"""From a checkpoint, or weights of others, to a file or folder that other programs read."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbp_core.errors import ConfigError
from sbp_core.units import format_bytes, parse_bytes
from sbp_launch.checkpoint.command.inspect import FORMATS, print_json
from sbp_launch.checkpoint.command.table import make_console
from sbp_launch.checkpoint.names import (
    averaged,
    model_names,
    parse_renames,
    renamed,
    without,
)
from sbp_launch.checkpoint.opening import look, open_tensors
from sbp_launch.console import say

if TYPE_CHECKING:
    from sbp_launch.checkpoint.formats.indexed import Tensors

#: Formats that can be written.
TARGETS = ("safetensors", "hf", "dcp")


def convert(options: Namespace) -> int:
    """Write what lies at one path to another, in another format. Returns the exit code."""
    renames = parse_renames(options.rename)
    size = parse_bytes(options.max_shard_size)
    if not size:
        raise ConfigError(
            f"--max-shard-size {options.max_shard_size!r} is no size", accepted="such as 5GB, 500MB"
        )
    target: Path = options.target
    to = options.to or ("safetensors" if target.suffix == ".safetensors" else "")
    if not to:
        raise ConfigError(
            f"{target} does not say its format",
            accepted=f"--to {', --to '.join(TARGETS)}; or a name that ends in .safetensors",
        )
    if to == "safetensors" and target.suffix != ".safetensors":
        raise ConfigError(f"{target} is no name of such a file", accepted="FILE.safetensors")
    found = look(options.source)
    _check_target(target, Path(found.place), to, overwrite=options.overwrite)
    with open_tensors(found) as tensors:
        result = _write(tensors, target, to, renames, size, options)
    if options.json:
        print_json({"source": found.place, "target": str(target), "format": to, **result})
        return 0
    written, files = result["tensors"], result["files"]
    lines = [
        f"{found.place}: {FORMATS[found.format]}",
        f"{target}: {FORMATS[to]}, {len(written):,} tensors, {format_bytes(result['size_bytes'])}"
        + (f" in {len(files)} files" if len(files) > 1 else ""),
    ]
    if options.drop:
        lines.append(f"dropped: {result['dropped']:,} tensors")
    if result["left_out"]:
        lines.append(f"left out: {result['left_out']:,} states of the optimizer (--all takes them)")
    prefix = _common_prefix(list(written))
    if to == "hf" and prefix and not options.rename:
        lines.append(
            f"all names begin with {prefix!r}: if that is no name of the model's own, "
            f"--rename {prefix}= removes it"
        )
    say(make_console(), lines)
    return 0


def _write(
    tensors: Tensors,
    target: Path,
    to: str,
    renames: list[tuple[str, str]],
    max_shard_bytes: int,
    options: Namespace,
) -> dict[str, Any]:
    """Write what was chosen of tensors; return what was written, as for JSON."""
    # Here and not above: what is refused takes no torch.
    from sbp_launch.checkpoint.formats.distributed_writer import write_distributed_checkpoint
    from sbp_launch.checkpoint.formats.indexed import Chosen
    from sbp_launch.checkpoint.formats.safetensors_writer import write_safetensors, write_sharded

    if options.ema:
        names = averaged(tensors)
    else:
        names = {name: name for name in (tensors if options.all else model_names(tensors))}
    chosen = Chosen(tensors, renamed(without(names, options.drop), renames))
    files = [target.name]
    target.parent.mkdir(parents=True, exist_ok=True)
    if to == "safetensors":
        write_safetensors(target, chosen)
    elif to == "hf":
        files = write_sharded(target, chosen, max_shard_bytes)
    else:
        write_distributed_checkpoint(target, chosen)
    return {
        "tensors": chosen.sources,
        "dropped": len(names) - len(chosen),
        "left_out": 0 if options.all else len(tensors) - len(model_names(tensors)),
        "size_bytes": sum(like.numel() * like.element_size() for like in map(chosen.like, chosen)),
        "files": files,
    }


def _check_target(target: Path, source: Path, to: str, *, overwrite: bool) -> None:
    """Check that nothing is replaced that was not meant.

    Raises:
        ConfigError: it is the source, or holds something.
    """
    real, given = target.resolve(), source.resolve()
    if real == given or real in given.parents or given in real.parents:
        raise ConfigError(
            f"{target} would lie in what it is made of, or the other way round",
            accepted="another place",
        )
    if to == "safetensors":
        is_used = target.exists()
    else:
        is_used = target.is_file() or (target.is_dir() and any(target.glob("*.safetensors")))
        is_used = is_used or (to == "dcp" and target.is_dir() and any(target.iterdir()))
    if is_used and not overwrite:
        raise ConfigError(
            f"{target} is there already",
            accepted="a new file or folder; of Hugging Face's layout, a folder without weights",
            todo="name another one, or pass --overwrite",
        )
    if target.is_dir() == (to == "safetensors") and target.exists():
        raise ConfigError(
            f"{target} is a {'folder' if target.is_dir() else 'file'}",
            accepted="a file" if to == "safetensors" else "a folder",
        )


def _common_prefix(names: list[str]) -> str:
    """Return the first part of all names, with its dot, if they share it."""
    firsts = {name.partition(".")[0] for name in names}
    return f"{firsts.pop()}." if len(firsts) == 1 and all("." in name for name in names) else ""
