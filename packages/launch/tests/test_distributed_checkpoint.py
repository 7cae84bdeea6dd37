"""Checkpoints of torch.distributed.checkpoint are read without unpickling, and written for it."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import warnings
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from held import Held, same, values
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from sbp_core.errors import ConfigError
from sbp_launch.checkpoint.formats import writers
from sbp_launch.checkpoint.formats.distributed_checkpoint import read_distributed_checkpoint
from sbp_launch.checkpoint.formats.index import ITEMSIZE
from sbp_launch.checkpoint.formats.indexed import IndexedTensors
from sbp_launch.checkpoint.formats.pickles import read_pickle
from sbp_launch.checkpoint.formats.writers import write_distributed_checkpoint

SHAPES = ((), (0, 3), (5,), (4, 3, 2))

#: Saves sharded tensors by two processes, the second of which is a copy of the first.
SAVING = """
import os, sys
import torch
from torch.distributed import checkpoint, init_process_group
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

rank = 0 if os.fork() else 1
init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
rows = torch.arange(35.0).reshape(7, 5)
states = {
    "model": {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows, mesh, [Shard(1)]),
        "everywhere": distribute_tensor(rows, mesh, [Replicate()]),
        "plain": torch.arange(3),
        "short": distribute_tensor(torch.ones(1), mesh, [Shard(0)]),
    },
    "step": 5,
}
checkpoint.save(states, checkpoint_id=f"{sys.argv[1]}/saved")
if rank == 0:
    os.wait()
else:
    os._exit(0)
"""


#: Two processes that load them, and compare what each has.
LOADING = (
    SAVING.partition("checkpoint.save")[0].replace("torch.arange(35.0)", "torch.zeros(35)")
    + """
del states["model"]["plain"], states["model"]["short"], states["step"]
checkpoint.load(states, checkpoint_id=f"{sys.argv[1]}/saved")
for value in states["model"].values():
    assert torch.equal(value.full_tensor(), torch.arange(35.0).reshape(7, 5))
if rank == 0:
    assert os.wait()[1] == 0
else:
    os._exit(0)
"""
)


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def saved(folder: Path, states: dict[str, Any]) -> Path:
    """Return a folder that PyTorch has written, alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(states, checkpoint_id=folder, no_dist=True)
    return folder


def loaded(folder: Path, states: dict[str, Any]) -> dict[str, Any]:
    """Return what PyTorch reads into states."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(states, checkpoint_id=folder, no_dist=True)
    return states


def every_dtype() -> dict[str, Tensor]:
    return {
        f"{dtype}.{number}": values(shape, dtype)
        for dtype in ITEMSIZE
        for number, shape in enumerate(SHAPES)
    }


def test_what_one_process_saves_is_read_with_every_dtype(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", {"model": every_dtype(), "lr": 0.1, "betas": (0.9, 0.99)})

    found = IndexedTensors(read_distributed_checkpoint(folder))

    assert set(found) == {f"model.{name}" for name in every_dtype()}
    assert all(same(found[f"model.{name}"], value) for name, value in every_dtype().items())
    assert found.index.others == {"lr": "0.1", "betas": "(0.9, 0.99)"}


@pytest.mark.slow
def test_what_two_processes_save_of_sharded_tensors_is_read(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVING, str(tmp_path)], check=True, timeout=200)

    found = IndexedTensors(read_distributed_checkpoint(tmp_path / "saved"))

    rows = torch.arange(35.0).reshape(7, 5)
    assert len(found.index.files) == 2
    assert [len(found.index.tensors[f"model.{name}"].pieces) for name in ("rows", "plain")] == [
        2,
        1,
    ]
    for name in ("rows", "columns", "everywhere"):
        assert torch.equal(found[f"model.{name}"], rows)
        assert torch.equal(found.part(f"model.{name}", [(2, 6), (1, 4)]), rows[2:6, 1:4])
    assert torch.equal(found["model.plain"], torch.arange(3))
    assert torch.equal(found["model.short"], torch.ones(1))
    assert found.index.others == {"step": "5"}


def test_tensors_that_do_not_lie_in_rows_are_read(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    states = {"turned": whole.T, "strided": whole[1:, ::2], "part": whole[2:], "same": whole[:1]}
    folder = saved(tmp_path / "saved", dict(states))

    found = IndexedTensors(read_distributed_checkpoint(folder))

    for name, value in states.items():
        assert same(found[name], value.contiguous())
        assert torch.equal(found.part(name, [(0, 1), (1, 3)]), value[:1, 1:3])


def test_pytorch_loads_what_is_written_with_every_dtype(tmp_path: Path) -> None:
    folder = tmp_path / "written"

    write_distributed_checkpoint(folder, Held({f"model.{k}": v for k, v in every_dtype().items()}))

    found = loaded(folder, {"model": {k: torch.zeros_like(v) for k, v in every_dtype().items()}})
    assert all(same(found["model"][name], value) for name, value in every_dtype().items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["written"]


def test_one_part_at_a_time_is_held_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: list[weakref.ref[Any]] = []
    most = 0

    class Made(Held):
        def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
            nonlocal most
            most = max(most, sum(ref() is not None for ref in memory))
            values = super().part(name, bounds).numpy().copy()
            assert values.nbytes <= 400
            memory.append(weakref.ref(values))
            return torch.from_numpy(values)

    monkeypatch.setattr(writers, "PART_BYTES", 400)
    wholes = {f"{n}": torch.randn(7, 10, 5) for n in range(3)} | {"one": torch.tensor(2.0)}

    write_distributed_checkpoint(tmp_path / "written", Made(wholes))

    assert len(memory) == 3 * 4 + 1
    assert most <= 1
    states = {name: torch.zeros_like(value) for name, value in wholes.items()}
    assert_equal(loaded(tmp_path / "written", states), wholes)
    assert_equal(IndexedTensors(read_distributed_checkpoint(tmp_path / "written")), wholes)


@pytest.mark.exhaustive
def test_two_processes_load_what_is_written_into_sharded_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "PART_BYTES", 40)
    rows = torch.arange(35.0).reshape(7, 5)
    names = ("model.rows", "model.columns", "model.everywhere")

    write_distributed_checkpoint(tmp_path / "saved", Held(dict.fromkeys(names, rows)))

    subprocess.run([sys.executable, "-c", LOADING, str(tmp_path)], check=True, timeout=200)


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")

    with pytest.raises(ConfigError, match="has files that are not of"):
        write_distributed_checkpoint(tmp_path, Held(x=torch.ones(1)))

    assert (tmp_path / "thesis.tex").exists()
    write_distributed_checkpoint(tmp_path / "new", Held(x=torch.ones(1)))
    write_distributed_checkpoint(tmp_path / "new", Held(y=torch.ones(1)))
    assert set(read_distributed_checkpoint(tmp_path / "new").tensors) == {"y"}


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def in_metadata(folder: Path, planted: Planted) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(planted))


def within_metadata(folder: Path, planted: Planted) -> None:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    found.planner_data["more"] = planted
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def in_old_protocol(folder: Path, planted: Planted) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(planted, protocol=0))


@pytest.mark.parametrize("plant", [in_metadata, within_metadata, in_old_protocol])
def test_a_payload_in_the_metadata_is_named_and_does_not_run(
    plant: Callable[[Path, Planted], None], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "saved", {"x": torch.ones(3)})
    plant(folder, Planted(tmp_path / "ran"))

    with pytest.raises(ConfigError, match=r"asks for posix\.mkdir, which is none of its format"):
        read_distributed_checkpoint(folder)

    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / ".metadata").read_bytes())  # it would have run
    assert (tmp_path / "ran").exists()


def test_a_payload_in_a_tensor_is_named_and_does_not_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", {"x": torch.ones(3)})
    file = folder / "__0_0.distcp"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Planted(tmp_path / "ran"), protocol=2))
        archive.writestr("archive/data/0", bytes(12))
        archive.comment = bytes(3000)
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(found.storage_data.values())).length = file.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(found))

    with pytest.raises(ConfigError, match=r"asks for posix\.mkdir") as caught:
        read_distributed_checkpoint(folder)

    assert "'x'" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_payload_in_a_value_is_named_and_tensors_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", {"x": torch.ones(3), "other": Planted(tmp_path / "ran")})

    found = read_distributed_checkpoint(folder)

    assert found.others["other"].startswith("not read: the pickle asks for posix.mkdir")
    assert torch.equal(IndexedTensors(found)["x"], torch.ones(3))
    assert not (tmp_path / "ran").exists()


def test_more_elements_than_there_are_bytes_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", {"x": torch.ones(4)})
    (file,) = folder.glob("*.distcp")
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    # One number, again and again.
    name = next(name for name in records if name.endswith("data.pkl"))
    assert b"K\x04\x85" in records[name] and b"K\x01\x85" in records[name]
    big = b"\x8a\x06" + (2**40).to_bytes(6, "little") + b"\x85"
    records[name] = records[name].replace(b"K\x04\x85", big).replace(b"K\x01\x85", b"K\x00\x85")
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    place(found, length=file.stat().st_size)
    found.state_dict_metadata["x"].size = torch.Size([2**40])
    one_chunk(found, sizes=torch.Size([2**40]))
    (folder / ".metadata").write_bytes(pickle.dumps(found))

    with pytest.raises(
        ConfigError, match=r"'x' of shape \(1099511627776,\) has the strides \(0,\)"
    ):
        read_distributed_checkpoint(folder)


def of_another_size(folder: Path) -> None:
    """Say in the directory of the archive that its storage is longer."""
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    # The sizes stand 26 and 22 bytes before the name in the last of the two headers of a record.
    name = (
        content.rindex(b"archive/data/0") if b"archive/" in content else content.rindex(b"/data/0")
    )
    begin = content.rindex(b"PK\x01\x02", 0, name)
    content[begin + 20 : begin + 28] = (2**16).to_bytes(4, "little") * 2
    path.write_bytes(content)


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", {"x": torch.ones(2), "y": torch.ones(2)})
    content = (folder / ".metadata").read_bytes()
    assert b"\x8c\x01y" in content  # a text of one byte
    (folder / ".metadata").write_bytes(content.replace(b"\x8c\x01y", b"\x8c\x01x"))

    with pytest.raises(ConfigError, match="the name 'x' is no text, or occurs twice"):
        read_distributed_checkpoint(folder)


def test_a_number_that_no_text_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 64 bits"):
        read_pickle(pickle.dumps(1 << 20_000), known=[])


class _Asking:
    """What a pickle makes by calling `getattr`, as Python 3.11.0 to 3.11.3 writes enums."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return getattr, self.args


def test_a_member_of_an_enum_is_read_as_older_pythons_write_it() -> None:
    member = read_pickle(pickle.dumps(_Asking(date, "today")), known=["datetime.date"])

    assert (str(member.of), member.args) == ("datetime.date", ("today",))


@pytest.mark.parametrize(
    "args", [(os, "sep"), (date, 3), (getattr, "x"), ("x", "upper"), (date, "today", None)]
)
def test_attributes_of_anything_else_are_refused(args: tuple[Any, ...]) -> None:
    class Module:
        def __reduce__(self) -> Any:
            return __import__, ("os",)

    given = tuple(Module() if one is os else one for one in args)

    with pytest.raises(ConfigError, match="none of its format"):
        read_pickle(pickle.dumps(_Asking(*given)), known=["datetime.date"])


def changed(change: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """Return what changes the metadata of a checkpoint."""

    def edit(folder: Path) -> None:
        path = folder / ".metadata"
        metadata: Metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return edit


def place(metadata: Metadata, **fields: Any) -> None:
    """Change the place of a chunk."""
    (info,) = metadata.storage_data.values()
    for name, value in fields.items():
        setattr(info, name, value)


def one_chunk(metadata: Metadata, **fields: Any) -> None:
    """Change the chunk of the tensor."""
    for name, value in fields.items():
        setattr(metadata.state_dict_metadata["x"].chunks[0], name, value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / ".metadata").write_bytes(b""), "cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04K\x01."), "hold metadata"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"x"), "are not in the file of 1"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(bytes(5000)), "not a zip file"),
        (changed(lambda m: place(m, relative_path="../x")), "names no file of this folder"),
        (changed(lambda m: place(m, offset=-1)), "the place of 'x' is invalid"),
        (changed(lambda m: place(m, length=10**9)), "are not in the file"),
        (changed(lambda m: place(m, transform_descriptors=["zstd"])), "'x' was transformed"),
        (changed(lambda m: m.storage_data.clear()), r"the chunk of 'x' at \(0, 0\) is not stored"),
        (changed(lambda m: one_chunk(m, sizes=torch.Size([4, 3]))), r"float32 of shape \(4, 2\)"),
        (
            changed(lambda m: setattr(m.state_dict_metadata["x"].properties, "dtype", torch.int32)),
            "the chunk of 'x' is float32",
        ),
        (of_another_size, "the chunk of 'x' ends after its storage"),
        (changed(lambda m: one_chunk(m, sizes=(4, 2))), "sizes of a chunk of 'x' is no torch.Size"),
        (changed(lambda m: one_chunk(m, sizes=torch.Size([8]))), "does not have the dims"),
        (
            changed(lambda m: setattr(m.state_dict_metadata["x"], "size", torch.Size([5, 2]))),
            r"the pieces of 'x' do not make up its shape \(5, 2\): \[0:4, 0:2\]",
        ),
        (
            changed(lambda m: setattr(m.state_dict_metadata["x"], "size", torch.Size([3, 2]))),
            r"'x' of shape \(3, 2\) has a piece \[0:4, 0:2\]",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "saved", {"x": torch.ones(4, 2)})
    damage(folder)

    with pytest.raises(ConfigError, match=message) as caught:
        read_distributed_checkpoint(folder)

    assert str(folder) in str(caught.value)


def test_whatever_bytes_are_changed_it_is_read_or_refused(tmp_path: Path) -> None:
    states = {"x": torch.ones(4, 2), "y": torch.ones(3).expand(2, 3), "lr": 1.5}
    folder = saved(tmp_path / "saved", states)
    contents = {name: (folder / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    refused = 0

    for seed in range(300):
        draw = random.Random(seed)
        name = draw.choice(list(contents))
        content = bytearray(contents[name])
        for _ in range(draw.randint(1, 4)):
            at, other = draw.randrange(len(content)), draw.randrange(len(content))
            put = bytes([draw.randrange(256)]), b"", content[other : other + 20]
            content[at : at + draw.choice((0, 1, 20))] = draw.choice(put)
        (folder / name).write_bytes(content)
        try:
            found = IndexedTensors(read_distributed_checkpoint(folder))
            for tensor in found:
                found[tensor]
        except ConfigError as error:
            refused += 1
            assert str(folder) in str(error), seed
        (folder / name).write_bytes(contents[name])

    assert refused > 200


@pytest.mark.slow
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.tuples(inner, inner),
    ),
    st.sampled_from([0, 1, 2, 4, 5]),
)
def test_plain_values_are_read_as_they_were_in_every_protocol(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), known=[]) == value
