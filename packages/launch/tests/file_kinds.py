"""The kinds of files that sbp-launch reads, with some that are right: for `sbp_core.testing.fuzz`.

Checkpoints are folders: one of their files is edited, and put beside the others. `python -m fuzz`
in `integration` tries these, too.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from saved_states import STATES, pieces_of, save
from xxhash import xxh3_128_hexdigest

from sbp_core.placement import Placement
from sbp_core.plugins import TrainerState
from sbp_core.sbp import NdSbp
from sbp_core.serialize import dump, load, parse, read_text
from sbp_core.testing.fuzz import FileKind
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.places import look, open_tensors
from sbp_launch.data import DataCursor, SampleOrder
from sbp_launch.run.folder import load_run, save_run
from sbp_launch.settings.catalog import comments, headline, refuse_faults
from sbp_launch.settings.config import ComposedConfig

WEIGHTS = {name: value for name, value in STATES.items() if value.dtype != torch.complex128}

#: The last line of a manifest, which an attacker writes anew.
_CHECKSUM = "xxh3_128"


def _checkpoint(folder: Path) -> None:
    mesh = Placement.grid((2,), ("data",))
    save(LocalStorage(folder), "step-00000001", pieces_of(STATES, mesh, NdSbp.parse("S(0)")))
    for path in (folder / "step-00000001").iterdir():
        path.rename(folder / path.name)
    (folder / "step-00000001").rmdir()


def _safetensors(folder: Path) -> None:
    save_file(dict(WEIGHTS), folder / "model.safetensors", metadata={"format": "pt"})


def _hugging_face(folder: Path) -> None:
    names, weight_map = sorted(WEIGHTS), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: WEIGHTS[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _distributed(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves
        dcp.save(dict(WEIGHTS), checkpoint_id=str(folder), no_dist=True)


@cache
def _files(write: Callable[[Path], None]) -> Mapping[str, bytes]:
    """Return the files of a folder that a function writes."""
    with TemporaryDirectory() as folder:
        write(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _folder_kind(
    name: str,
    write: Callable[[Path], None],
    file: str,
    *,
    suffix: str = ".bin",
    unwrapped: Callable[[bytes], bytes] = bytes,
    wrapped: Callable[[bytes], bytes] = bytes,
    is_verified: bool = False,
) -> FileKind:
    """Return the kind of one file of a folder of tensors.

    Args:
        name: Of the kind.
        write: Writes the folder.
        file: That is edited.
        suffix: What it is edited as.
        unwrapped: Returns what is edited of the file.
        wrapped: The way back.
        is_verified: Whether a checksum sees each byte that is not as it was written.
    """

    def use(path: Path) -> None:
        folder = path.with_name("step-00000001")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for other, data in _files(write).items():
            (folder / other).write_bytes(data)
        (folder / file).write_bytes(wrapped(path.read_bytes()))
        one_file = folder / file if len(_files(write)) == 1 else folder
        with open_tensors(look(one_file)) as tensors:
            for tensor in tensors:
                read = tensors[tensor]
                assert read.shape == tensors.like(tensor).shape
                if is_verified:
                    assert torch.equal(read, STATES[tensor]), f"{tensor} is another one"

    return FileKind(
        name=name, suffix=suffix, originals=lambda: [unwrapped(_files(write)[file])], use=use
    )


def _without_checksum(data: bytes) -> bytes:
    value = json.loads(data)
    del value[_CHECKSUM]
    return json.dumps(value, indent=1).encode()


def _with_checksum(data: bytes) -> bytes:
    """Return a manifest whose checksum is right, whatever it says."""
    body = data.rstrip().removesuffix(b"}").rstrip()
    return body + f',\n"{_CHECKSUM}": "{xxh3_128_hexdigest(body)}"}}\n'.encode()


def _header(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _with_header(data: bytes) -> bytes:
    whole = _files(_safetensors)["model.safetensors"]
    return len(data).to_bytes(8, "little") + data + whole[8 + len(_header(whole)) :]


# What a run keeps beside its states.


def _run_config(folder: Path) -> None:
    values = {
        "model": {"name": "toy", "width": 4, "path": "a: b", "on": True},
        "cluster": {"name": "local", "mesh": [2, 2], "axes": None},
        "trainer": {"steps": 3, "lr": 1e-08, "schedule": {"warmup": 0.1}},
    }
    save_run(ComposedConfig(values=values, files={}, overrides=()), folder)


def _use_run_config(path: Path) -> None:
    path.replace(path.with_name("config.yaml"))
    found = load_run(path.parent)
    assert all(isinstance(name, str) for name in found.values)


_OPTION = """\
# A model of our own. It has a comment.
name: toy
width: 4  # of each layer
schedule:
  # until the rate is reached
  warmup: 0.1
  steps: [1, 2, 3]
"""


def _use_option(path: Path) -> None:
    text = path.read_bytes().decode("utf-8", "replace")
    comments(text)
    headline(text)
    refuse_faults(text, str(path))


def _json_kind(name: str, value: object, use: Callable[[object, str], object]) -> FileKind:
    return FileKind(
        name=name,
        suffix=".json",
        originals=lambda: [json.dumps(value).encode()],
        use=lambda path: use(parse(read_text(path), where=str(path)), str(path)),
    )


_CURSOR = DataCursor(position=12, order=SampleOrder(num_samples=7, seed=3, fingerprint="0a1b"))
_TRAINED = TrainerState(step=3, samples=12, best=1.5, best_step=2, callbacks={"ema": {"rate": 0.9}})


def _use_cursor(value: object, where: str) -> None:
    found = DataCursor.from_json(value, where=where)
    assert 0 <= found.position - found.epoch * found.order.num_samples < found.order.num_samples
    numbers = found.numbers(torch.arange(3).numpy())
    assert ((numbers >= 0) & (numbers < found.order.num_samples)).all()


_SHARD = "model-00001-of-00002.safetensors"

KINDS: Mapping[str, FileKind] = {
    kind.name: kind
    for kind in (
        _folder_kind(
            "manifest",
            _checkpoint,
            "manifest.json",
            suffix=".json",
            unwrapped=_without_checksum,
            wrapped=_with_checksum,
        ),
        _folder_kind("damaged manifest", _checkpoint, "manifest.json", is_verified=True),
        _folder_kind("damaged states", _checkpoint, "rank-00001.safetensors", is_verified=True),
        _folder_kind("safetensors", _safetensors, "model.safetensors"),
        _folder_kind(
            "safetensors header",
            _safetensors,
            "model.safetensors",
            suffix=".json",
            unwrapped=_header,
            wrapped=_with_header,
        ),
        _folder_kind(
            "hugging face index", _hugging_face, "model.safetensors.index.json", suffix=".json"
        ),
        _folder_kind("hugging face shard", _hugging_face, _SHARD),
        _folder_kind("dcp metadata", _distributed, ".metadata"),
        _folder_kind("dcp tensors", _distributed, "__0_0.distcp"),
        FileKind(
            name="config of a run",
            suffix=".yaml",
            originals=lambda: [_files(_run_config)["config.yaml"]],
            use=_use_run_config,
        ),
        FileKind(
            name="option", suffix=".yaml", originals=lambda: [_OPTION.encode()], use=_use_option
        ),
        _json_kind("cursor", _CURSOR.to_json(), _use_cursor),
        _json_kind(
            "trainer state",
            dump(_TRAINED, TrainerState),
            lambda value, where: load(value, TrainerState, where=where),
        ),
    )
}
