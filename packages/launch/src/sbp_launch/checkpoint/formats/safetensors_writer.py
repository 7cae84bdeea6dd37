"""Tensors as safetensors: one file, or the shards of Hugging Face's libraries.

The header is written first, as shapes and dtypes are known before; then one tensor after the other,
in parts of at most 64 MiB, which is the memory that writing takes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from sbp_core.errors import ConfigError, RunError
from sbp_core.units import format_bytes
from sbp_launch.checkpoint.formats.aside import fresh, writing_aside
from sbp_launch.checkpoint.formats.hugging_face import INDEX, SHARD, SINGLE
from sbp_launch.checkpoint.formats.safetensors_file import CODES, MOST_HEADER_BYTES
from sbp_launch.checkpoint.local import sync
from sbp_launch.checkpoint.tensors import Tensors, bytes_of, dtype_name, size_bytes

#: Says whose tensors they are; `transformers` loads no file without it.
_NOTES = {"format": "pt"}


def write_safetensors(path: Path, tensors: Tensors, names: Iterable[str] | None = None) -> None:
    """Write tensors into one file, which takes the place of a former one when it is whole.

    Args:
        path: Of the file.
        tensors: Each is asked for once.
        names: Which of them; all if None.

    Raises:
        ConfigError: one has a dtype that the format does not have.
        RunError: it cannot be written.
    """
    metas = {name: tensors.like(name) for name in (tensors if names is None else names)}
    # The largest elements first, so that each tensor begins at a multiple of its element.
    order = sorted(metas, key=lambda name: (-metas[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": _NOTES}
    end = 0
    for name in order:
        begin, end = end, end + size_bytes(metas[name])
        header[name] = {
            "dtype": _code(name, metas[name]),
            "shape": list(metas[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:
        raise ConfigError(
            f"{len(metas)} tensors need a header of {format_bytes(len(text))}",
            accepted=f"at most {format_bytes(MOST_HEADER_BYTES)}",
            todo="write several files: --to hf --max-shard-size SIZE",
        )
    with writing_aside(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for part in tensors.parts(name):
                file.write(bytes_of(part))


def write_sharded(folder: Path, tensors: Tensors, max_shard_bytes: int) -> list[str]:
    """Write tensors as Hugging Face's libraries do: `model.safetensors`, or shards and an index.

    Tensors keep their order, and shards are filled one after the other; a tensor that is larger
    than a shard gets one of its own. Other files of the folder stay, such as `config.json`; weights
    of an earlier writing are replaced.

    Args:
        folder: Is made if it is not there.
        tensors: Each is asked for once.
        max_shard_bytes: Bytes of the tensors of a shard, at most.

    Returns:
        The names of the files.

    Raises:
        ConfigError: one has a dtype that the format does not have.
        RunError: they cannot be written.
    """
    shards = _shards(tensors, max_shard_bytes)
    files = [SHARD.format(number, len(shards)) for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    aside = fresh(folder / "weights")
    try:
        aside.mkdir(parents=True)
        for file, names in zip(files, shards, strict=True):
            write_safetensors(aside / file, tensors, names)
        if len(shards) > 1:
            _write_index(aside / INDEX, tensors, dict(zip(files, shards, strict=True)))
            files.append(INDEX)
        _replace_weights(folder, aside, files)
    except OSError as error:
        raise RunError(
            f"{folder} cannot be written: {error.strerror or error}", todo="name another place"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return files


def _write_index(path: Path, tensors: Tensors, shards: Mapping[str, list[str]]) -> None:
    index = {
        "metadata": {"total_size": sum(size_bytes(tensors.like(name)) for name in tensors)},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    with writing_aside(path) as file:
        file.write(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")


def _replace_weights(folder: Path, aside: Path, files: list[str]) -> None:
    """Put files into the place of all weights of a folder.

    What says that all are there, the one file or the index, goes first and comes last.
    """
    for name in (INDEX, SINGLE):
        (folder / name).unlink(missing_ok=True)
    for old in folder.iterdir():
        if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", old.name):
            old.unlink()
    sync(folder)
    for name in files:
        (aside / name).replace(folder / name)
        sync(folder)


def _shards(tensors: Tensors, max_shard_bytes: int) -> list[list[str]]:
    """Return the names of each shard's tensors; one shard without tensors if there are none."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in tensors:
        size = size_bytes(tensors.like(name))
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _code(name: str, meta: Tensor) -> str:
    dtype = dtype_name(meta)
    if dtype not in CODES:
        raise ConfigError(
            f"{name!r} is {dtype}, which safetensors does not have", accepted=", ".join(CODES)
        )
    return CODES[dtype]
