"""Weights in formats of other programs: what they wrote is read, and they read what we wrote."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from held import Held, same, values
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from sbp_core.errors import ConfigError
from sbp_launch.checkpoint.formats import indexed
from sbp_launch.checkpoint.formats.index import (
    ITEMSIZE,
    StoredPiece,
    StoredTensor,
    TensorIndex,
    check_tensor,
)
from sbp_launch.checkpoint.formats.indexed import IndexedTensors
from sbp_launch.checkpoint.formats.safetensors_file import (
    CODES,
    read_hugging_face,
    read_safetensors,
)
from sbp_launch.checkpoint.formats.writers import write_safetensors, write_sharded
from sbp_launch.checkpoint.tensors import Chosen

SHAPES = ((), (0, 3), (5,), (4, 3, 2))


def every_dtype() -> dict[str, Tensor]:
    """Return tensors of every dtype that safetensors has, in several shapes."""
    return {
        f"{dtype}.{number}": values(shape, dtype)
        for dtype in CODES
        for number, shape in enumerate(SHAPES)
    }


def test_what_safetensors_writes_is_read_with_every_dtype(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(every_dtype(), path, {"made by": "a test"})

    found = IndexedTensors(read_safetensors(path))

    assert found.keys() == every_dtype().keys()
    assert found.index.notes == {"made by": "a test"}
    for name, value in every_dtype().items():
        assert same(found[name], value)
        like = found.like(name)
        assert (like.shape, like.dtype, like.is_meta) == (value.shape, value.dtype, True)


def test_safetensors_reads_what_is_written_with_every_dtype(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"

    write_safetensors(path, Held(every_dtype()))

    found = load_file(path)
    assert found.keys() == every_dtype().keys()
    assert all(same(found[name], value) for name, value in every_dtype().items())
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("length", range(1, 9))  # so of the header, which is filled up
def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path, length: int) -> None:
    path = tmp_path / "weights.safetensors"
    tensors = {"a": torch.ones(3).bool(), "b": torch.ones(1), "c" * length: torch.ones(5).double()}

    write_safetensors(path, Held(tensors))

    for name, tensor in read_safetensors(path).tensors.items():
        assert tensor.pieces[0].offset % ITEMSIZE[tensor.dtype] == 0, name


def test_a_file_is_durable_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        calls.append(f"sync {re.sub('[.][0-9a-f]{16}[.]', '.RANDOM.', name)}")
        sync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        calls.append(f"replace {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)

    write_safetensors(tmp_path / "x.safetensors", Held(x=torch.ones(3)))

    wanted = ["sync .x.safetensors.RANDOM.part", "replace x.safetensors", f"sync {tmp_path.name}"]
    assert calls == wanted


def test_one_element_is_written_whatever_its_stride_is(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"

    write_safetensors(path, Held({"x": torch.ones(()).expand(1, 1)}))

    assert load_file(path)["x"].tolist() == [[1.0]]


def test_a_dtype_that_safetensors_has_not_is_refused_before_a_byte_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="'w' is complex128, which safetensors does not have"):
        write_safetensors(tmp_path / "w.safetensors", Held(w=torch.zeros(2).to(torch.complex128)))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@given(
    extents=st.lists(st.integers(0, 5), max_size=3),
    block=st.sampled_from([4, 12, 40, 1 << 20]),
    data=st.data(),
)
def test_any_part_is_the_slice_of_the_tensor_whatever_a_block_holds(
    extents: list[int], block: int, data: st.DataObject
) -> None:
    whole = values(tuple(extents), "float32")
    bounds = []
    for extent in extents:
        start = data.draw(st.integers(0, extent))
        bounds.append((start, data.draw(st.integers(start, extent))))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, "x.safetensors")
        save_file({"before": torch.ones(3), "x": whole}, path)
        patch.setattr(indexed, "BLOCK_BYTES", block)

        part = IndexedTensors(read_safetensors(path)).part("x", bounds)

    assert same(part, whole[tuple(slice(*dim) for dim in bounds)].contiguous())


@pytest.mark.slow
@given(data=st.data())
def test_a_tensor_in_pieces_of_several_files_is_read_in_parts(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    whole = values(shape, "int32")
    cuts = [sorted(data.draw(st.sets(st.integers(0, n))) | {0, n}) for n in shape]
    bounds = []
    for extent in shape:
        start = data.draw(st.integers(0, extent))
        bounds.append((start, data.draw(st.integers(start, extent))))
    with tempfile.TemporaryDirectory() as folder:
        pieces = []
        for a, b in zip(cuts[0], cuts[0][1:], strict=False):
            for c, d in zip(cuts[1], cuts[1][1:], strict=False):
                is_turned = data.draw(st.booleans())
                part = whole[a:b, c:d]
                name = f"{a}-{c}"
                flat = part.T if is_turned else part
                Path(folder, name).write_bytes(b"xyzt" + flat.contiguous().numpy().tobytes())
                pieces.append(
                    StoredPiece(
                        file=name,
                        offset=4,
                        bounds=((a, b), (c, d)),
                        strides=(1, b - a) if is_turned else None,
                    )
                )
        stored = StoredTensor(shape=shape, dtype="int32", pieces=tuple(pieces))
        index = TensorIndex(path=Path(folder), folder=Path(folder), tensors={"x": stored})

        part = IndexedTensors(index).part("x", bounds)

    assert same(part, whole[tuple(slice(*dim) for dim in bounds)].contiguous())


@pytest.mark.slow
@given(data=st.data())
def test_pieces_are_accepted_if_they_hold_each_element_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    drawn = st.tuples(
        *(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple) for n in shape)
    )
    bounds = data.draw(st.lists(drawn, max_size=4))
    count = torch.zeros(shape)
    for one in bounds:
        count[tuple(slice(*dim) for dim in one)] += 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "f").write_bytes(bytes(27))
        pieces = tuple(StoredPiece(file="f", offset=0, bounds=one) for one in bounds)
        stored = StoredTensor(shape=shape, dtype="int8", pieces=pieces)

        def make() -> TensorIndex:
            return TensorIndex(
                path=Path(folder), folder=Path(folder), tensors={"x": stored}
            ).validate()

        if bool((count == 1).all()):
            make()
        else:
            with pytest.raises(ConfigError, match="do not make up its shape"):
                make()


def stored(shape: tuple[int, ...] = (2, 3), dtype: str = "int16", **piece: Any) -> StoredTensor:
    """Return a tensor in one piece, behind 4 bytes of a file."""
    bounds = tuple((0, extent) for extent in shape)
    given = {"file": "f", "offset": 4, "bounds": bounds, **piece}
    return StoredTensor(shape=shape, dtype=dtype, pieces=(StoredPiece(**given),))


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (stored(offset=-1), "is at bytes -1 to 11 of f, which has 16"),
        (stored(offset=5), "is at bytes 5 to 17 of f, which has 16"),
        (stored(strides=(1, 1)), "has the strides"),
        (stored(strides=(3, -1)), "has the strides"),
        (stored(strides=(4, 1)), "is at bytes 4 to 18"),
        (stored(bounds=((0, 2), (0, 4))), "has a piece"),
        (stored(bounds=((0, 2), (-1, 3))), "has a piece"),
        (stored(bounds=((0, 2),)), "has a piece"),
        (stored(bounds=((0, 2), (0, 2))), "do not make up its shape"),
        (stored(dtype="int17"), "has the dtype 'int17'"),
        (stored((1,) * 65), "has 65 dims"),
        (stored((2**30, 2**30)), "has 2 dims"),
        (stored((-2, -3)), "has 2 dims"),
    ],
)
def test_a_tensor_that_its_file_cannot_hold_is_refused(tensor: StoredTensor, says: str) -> None:
    for fits in (stored(), stored(strides=(3, 1)), stored((1,) * 64), stored((2**30, 0))):
        check_tensor("x", fits, {"f": 16}, Path("an index"))

    with pytest.raises(ConfigError, match=f"'x' .*{says}") as caught:
        check_tensor("x", tensor, {"f": 16}, Path("an index"))
    assert caught.value.where == ("an index",)


def header(**entries: Any) -> Callable[[Path], None]:
    """Return what writes a file with a header and 8 bytes of data."""

    def write(path: Path) -> None:
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    return write


def entry(dtype: Any = "F32", shape: Any = (2,), data_offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets)}


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "no safetensors file"),
    "short": (lambda path: path.write_bytes(b"abc"), "no safetensors file"),
    "a long header": (lambda path: path.write_bytes(b"\xff" * 16), "its header would have"),
    "no text": (
        lambda path: path.write_bytes(b"\x02" + bytes(7) + b"\xff\xff"),
        "its header is no UTF-8",
    ),
    "no JSON": (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"{,"), "this is no JSON"),
    "a list": (lambda path: path.write_bytes(b"\x02" + bytes(7) + b"[]"), "the header is a list"),
    "twice": (
        lambda path: path.write_bytes(b"\x11" + bytes(7) + b'{"a": {},"a": {}}'),
        "'a' occurs twice",
    ),
    "data left": (header(), "the tensors end at byte 10, and the file has 18"),
    "dtype": (header(x=entry("F31")), "'x' has the dtype 'F31'"),
    "no offsets": (header(x={"dtype": "F32", "shape": [2]}), "x has no 'data_offsets'"),
    "notes": (header(__metadata__={"a": 1}, x=entry()), "__metadata__ is"),
    "negative": (header(x=entry(shape=(-2,), data_offsets=(0, -8))), "'x' has 1 dims"),
    "huge": (header(x=entry(shape=(2**40, 2**40), data_offsets=(0, 8))), "'x' has 2 dims"),
    "many dims": (header(x=entry(shape=[1] * 65)), "'x' has 65 dims"),
    "text for a dim": (header(x=entry(shape=("2",))), r"shape\[0\] is '2'"),
    "beyond": (header(x=entry(shape=(4,), data_offsets=(0, 16))), "the tensors end at byte"),
    "hole": (
        header(x=entry(shape=(1,), data_offsets=(4, 8))),
        "where the tensor before it ends",
    ),
    "overlap": (header(x=entry(), y=entry()), "where the tensor before it ends"),
    "size": (header(x=entry(shape=(3,))), "accepted here: 12 bytes from"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write, message = DAMAGED[case]
    write(path)

    with pytest.raises(ConfigError, match=message) as caught:
        read_safetensors(path)

    assert str(path) in str(caught.value)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"x": torch.arange(100.0)}, path)
    found = IndexedTensors(read_safetensors(path))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)

    with pytest.raises(ConfigError, match="the file ends within 'x'"):
        found["x"]


def test_shards_are_written_as_hugging_face_does_and_read(tmp_path: Path) -> None:
    states = Held({f"layer.{n}": torch.full((10,), float(n)) for n in range(5)})
    (tmp_path / "config.json").write_text("{}")

    files = write_sharded(tmp_path, states, max_shard_bytes=80)

    assert files == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json", *files]
    index = json.loads((tmp_path / files[-1]).read_text())
    assert index["metadata"] == {"total_size": 200}
    assert load_file(tmp_path / files[0]).keys() == {"layer.0", "layer.1"}
    found = IndexedTensors(read_hugging_face(tmp_path))
    assert list(found) == list(states)
    assert all(same(found[name], value) for name, value in states.items())


def test_writing_again_replaces_all_weights_of_a_folder(tmp_path: Path) -> None:
    states = Held({f"layer.{n}": torch.full((10,), float(n)) for n in range(5)})
    write_sharded(tmp_path, states, max_shard_bytes=40)

    assert write_sharded(tmp_path, Held(x=torch.ones(3)), 1 << 30) == ["model.safetensors"]

    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    assert read_hugging_face(tmp_path).tensors.keys() == {"x"}


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    states = Held(a=torch.ones(1), b=torch.ones(100), c=torch.ones(1))

    write_sharded(tmp_path, states, max_shard_bytes=40)

    tensors = read_hugging_face(tmp_path).tensors
    assert len({tensors[name].pieces[0].file for name in "abc"}) == 3


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def mapped(**changes: str | None) -> Callable[[Path], None]:
    """Return what changes the files that an index names."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] |= changes
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
        path.write_text(json.dumps(index))

    return change


def linked(folder: Path) -> None:
    """Move a shard elsewhere, and leave a link."""
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors is miss"),
        (mapped(a="../a.safetensors"), "names no file of this folder"),
        (mapped(a="/etc/passwd"), "names no file of this folder"),
        (mapped(a="model-00001-of-00003.safetensors"), "there is 'model-00001-of-00002.safet"),
        (mapped(b="model-00001-of-00002.safetensors"), "'b' is in model-00002-of-00002"),
        (mapped(c=None), "'c' is in model-00002-of-00002.safetensors, and nowhere"),
        (mapped(aa="model-00001-of-00002.safetensors"), "'aa' is not in model-00001"),
        (linked, "leads out of its folder"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    states = Held(a=torch.ones(10), b=torch.ones(5), c=torch.ones(5))
    write_sharded(folder, states, max_shard_bytes=40)
    damage(folder)

    with pytest.raises(ConfigError, match=message):
        read_hugging_face(folder)


WORDS = (
    b'"', b"{", b"}", b"[", b"-", b"9" * 30, b"1e999", b"NaN", b"null", b'"../x"', b"0.5", b",",
    b"\xff", b'"F64"', b"-1",
)  # fmt: skip


@pytest.mark.slow
def test_whatever_is_changed_in_a_header_or_an_index_it_is_read_or_refused(tmp_path: Path) -> None:
    states = Held(a=torch.ones(4, 2), b=torch.zeros(3, dtype=torch.bfloat16), c=torch.ones(()))
    write_sharded(tmp_path, states, max_shard_bytes=16)
    contents = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    refused = 0

    for seed in range(300):
        draw = random.Random(seed)
        path = draw.choice(list(contents))
        before, content = contents[path], bytearray(contents[path])
        for _ in range(draw.randint(1, 3)):
            at, other = draw.randrange(len(content)), draw.randrange(len(content))
            put = draw.choice((bytes([draw.randrange(256)]), b"", content[other : other + 20]))
            content[at : at + draw.choice((0, 1, 20))] = draw.choice((put, *WORDS))
        if path.suffix == ".safetensors" and draw.random() < 0.7:
            # Let the length of the header fit, so that what is in it is looked at.
            length = int.from_bytes(before[:8], "little") + len(content) - len(before)
            content[:8] = max(0, length).to_bytes(8, "little")
        path.write_bytes(content)
        try:
            found = IndexedTensors(read_hugging_face(tmp_path))
            for tensor in found:
                found[tensor]
        except ConfigError as error:
            refused += 1
            assert str(tmp_path) in str(error), seed
        path.write_bytes(before)

    assert refused > 200


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"x": torch.arange(3.0)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")

    found = IndexedTensors(read_hugging_face(snapshot))

    assert torch.equal(found["x"], torch.arange(3.0))


def test_chosen_tensors_have_other_names() -> None:
    held = Held(a=torch.arange(4.0), b=torch.ones(2))

    chosen = Chosen(held, {"x.a": "a"})

    assert list(chosen) == ["x.a"]
    assert "a" not in chosen
    assert torch.equal(chosen["x.a"], held["a"])
    assert chosen.like("x.a").shape == (4,)
    assert torch.equal(chosen.part("x.a", [(1, 3)]), torch.tensor([1.0, 2.0]))


def test_every_dtype_has_its_size() -> None:
    sizes = {
        dtype: torch.empty(0, dtype=getattr(torch, dtype)).element_size() for dtype in ITEMSIZE
    }

    assert sizes == ITEMSIZE
