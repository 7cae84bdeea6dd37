"""A checkpoint holds what was saved, from any mesh to any part, and nothing that was changed."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from saved_states import STATES, pieces_of, save, save_whole
from torch import Tensor

from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.placement import Placement
from sbp_core.runtime import StatePiece
from sbp_core.sbp import B, NdSbp, S, Sbp
from sbp_launch.checkpoint import manifest, reading, writing
from sbp_launch.checkpoint.cover import covers, split_into_blocks
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.manifest import (
    CheckpointManifest,
    DamagedError,
    Metadata,
    manifest_bytes,
    parse_manifest,
)
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.writing import commit, write_part


def verify(root: Path) -> None:
    with Checkpoint(LocalStorage(root), "step-1") as found:
        found.verify()


LAYOUTS = st.sampled_from([B, S(0), S(1)])
MESHES = st.sampled_from([(1, 1), (1, 2), (2, 2), (4, 1), (3, 2)])


def equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    sizes=MESHES,
    outer=LAYOUTS,
    inner=LAYOUTS,
    block_bytes=st.sampled_from([16, 24, 64, 2**20]),
    data=st.data(),
)
def test_any_part_can_be_read_from_what_any_mesh_has_saved(
    sizes: tuple[int, int], outer: Sbp, inner: Sbp, block_bytes: int, data: st.DataObject
) -> None:
    mesh = Placement.grid(sizes, ("a", "b"), "cpu")
    pieces = pieces_of(STATES, mesh, NdSbp(outer, inner))

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "BLOCK_BYTES", block_bytes)
        storage = LocalStorage(Path(folder))
        save(storage, "step-1", pieces)
        with Checkpoint(storage, "step-1") as found:
            assert found.keys() == STATES.keys()
            found.verify()
            for name, value in STATES.items():
                assert equal(found[name], value)
                like = found.like(name)
                assert (like.shape, like.dtype) == (value.shape, value.dtype)
                bounds = []
                for extent in value.shape:
                    start = data.draw(st.integers(0, extent))
                    bounds.append((start, data.draw(st.integers(start, extent))))
                part = value[tuple(slice(*dim) for dim in bounds)]
                assert equal(found.part(name, bounds), part)


@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([1, 2, 8]),
    st.integers(8, 100),
)
def test_blocks_are_runs_of_bytes_that_make_up_the_tensor(
    shape: list[int], item_bytes: int, block_bytes: int
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)

    blocks = list(split_into_blocks(shape, item_bytes, block_bytes))

    parts = [whole[tuple(slice(*dim) for dim in block)] for block in blocks]
    assert torch.equal(torch.cat([part.flatten() for part in parts]), whole.flatten())
    assert all(part.numel() * item_bytes <= block_bytes for part in parts)
    assert covers(blocks, shape)


@given(MESHES, LAYOUTS, LAYOUTS, st.data())
def test_what_makes_up_a_tensor_does_not_without_a_slice_or_with_one_twice(
    sizes: tuple[int, int], outer: Sbp, inner: Sbp, data: st.DataObject
) -> None:
    mesh = Placement.grid(sizes, ("a", "b"), "cpu")
    pieces = pieces_of({"weight": STATES["weight"]}, mesh, NdSbp(outer, inner))
    slices = [piece.bounds for owned in pieces.values() for piece in owned]
    one = data.draw(st.integers(0, len(slices) - 1))

    assert covers(data.draw(st.permutations(slices)), (6, 10))
    assert not covers(slices[:one] + slices[one + 1 :], (6, 10))
    assert not covers([*slices, slices[one]], (6, 10))


def test_each_file_is_one_of_safetensors(tmp_path: Path) -> None:
    mesh = Placement([0, 1], ("rank",))
    save(LocalStorage(tmp_path), "step-1", pieces_of(STATES, mesh, NdSbp(S(0))))

    first, second = (
        load_file(tmp_path / "step-1" / f"rank-{rank:05d}.safetensors") for rank in (0, 1)
    )

    assert torch.equal(first["weight[0:3, 0:10]"], STATES["weight"][:3])
    assert torch.equal(second["weight[3:6, 0:10]"], STATES["weight"][3:])
    assert torch.equal(first["step"], STATES["step"])
    phase = torch.view_as_complex(first["phase[0:3]"])
    assert torch.equal(phase, STATES["phase"][:3])


def test_the_folder_has_the_manifest_and_a_file_for_each_rank_that_owns_something(
    tmp_path: Path,
) -> None:
    mesh = Placement([0, 1], ("rank",))
    save(LocalStorage(tmp_path), "step-1", pieces_of(STATES, mesh, NdSbp(B)))

    names = sorted(path.name for path in (tmp_path / "step-1").iterdir())
    assert names == ["manifest.json", "rank-00000.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_what_lies_anyhow_in_memory_is_saved_too(tmp_path: Path) -> None:
    states = {
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "every_other": torch.arange(8)[::2],
        "expanded": torch.ones(1).expand(5),
        "one_expanded": torch.ones((), dtype=torch.float64).expand(1, 1),
    }

    with save_whole(tmp_path, "step-1", states) as found:
        assert all(equal(found[name], value) for name, value in states.items())


def test_a_manifest_says_where_the_run_was(tmp_path: Path) -> None:
    metadata = Metadata(
        step=12,
        seed=3,
        cursor={"sample": 480},
        trainer={"best": [1.5, 10]},
        settings={"trainer.schedule": {"decay": "cosine"}},
        graph_hash="g",
        config_hash="c",
        versions={"torch": "2.13.0"},
    )
    pieces = pieces_of(STATES, Placement([0], ("rank",)), NdSbp(B))

    saved = save(LocalStorage(tmp_path), "step-12", pieces, metadata)

    found = Checkpoint(LocalStorage(tmp_path), "step-12").manifest
    assert found == saved
    assert found.metadata == metadata
    text = (tmp_path / "step-12" / "manifest.json").read_text()
    assert json.loads(text)["format"] == "sbp-checkpoint"


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors"])
def test_a_flipped_byte_anywhere_names_the_file_and_the_tensor(tmp_path: Path, file: str) -> None:
    save_whole(tmp_path, "step-1")
    path = tmp_path / "step-1" / file
    whole = path.read_bytes()

    for index in range(0, len(whole), 1 + len(whole) // 250):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        with pytest.raises(DamagedError) as caught:
            verify(tmp_path)
        assert caught.value.where[0].endswith(file), index
        if file != "manifest.json":
            assert re.search(r"tensor '\w+' \(bytes|its header", caught.value.what), index
    path.write_bytes(whole)
    verify(tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_shares_of_a_checkpoint_that_are_verified_are_all_of_it(tmp_path: Path, count: int) -> None:
    found = save_whole(tmp_path, "step-1")
    sizes = [
        tensor.piece_bytes(piece)
        for tensor in found.manifest.tensors.values()
        for piece in tensor.pieces
    ]
    read: list[list[int]] = []

    with found:
        for index in range(count):
            read.append([])
            found.verify(read[-1].append, share=(index, count))

    assert [size for share in read for size in share] == sizes
    assert max(map(sum, read)) <= sum(sizes) / count + max(sizes)


def test_a_damaged_tensor_is_refused_when_a_part_of_it_is_read(tmp_path: Path) -> None:
    found = save_whole(tmp_path, "step-1")
    piece = found.manifest.tensors["weight"].pieces[0]
    path = tmp_path / "step-1" / piece.file
    data = bytearray(path.read_bytes())
    data[piece.offset + 3] ^= 1
    path.write_bytes(data)

    with (
        found,
        pytest.raises(DamagedError, match=r"the xxh3_128 of tensor 'weight' \(bytes "),
    ):
        assert equal(found["half"], STATES["half"])
        found.part("weight", [(5, 6), (9, 10)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.unlink(), "the file is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), r"the file has 1,\d+ bytes, not"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"the file has 1,\d+ bytes, not"),
    ],
)
def test_a_missing_or_cut_file_is_named(tmp_path: Path, change: object, says: str) -> None:
    save_whole(tmp_path, "step-1")
    change(tmp_path / "step-1" / "rank-00000.safetensors")

    with pytest.raises(DamagedError, match=says) as caught:
        Checkpoint(LocalStorage(tmp_path), "step-1")
    assert caught.value.where[0].endswith("rank-00000.safetensors")


def edited(tmp_path: Path, edit: object) -> bytes:
    """Return a manifest that was changed, with the right checksum."""
    save_whole(tmp_path, "step-1")
    value = json.loads((tmp_path / "step-1" / "manifest.json").read_text())
    del value["xxh3_128"]
    edit(value)
    body = json.dumps(value)[:-1].encode()
    checksum = writing.xxh3_128_hexdigest(body)
    return body + f',\n"xxh3_128": "{checksum}"}}\n'.encode()


def weight(value: dict) -> dict:
    return value["tensors"]["weight"]


def a_file(value: dict) -> dict:
    return dict(value["files"]["rank-00000.safetensors"])


def one_piece_of(size_bytes: int) -> object:
    """Return what makes a tensor of bytes, in one piece."""
    count = size_bytes // 4

    def edit(value: dict) -> None:
        weight(value).update(shape=[count], dtype="float32")
        weight(value)["pieces"][0].update(bounds=[[0, count]])

    return edit


def one_header_of(size_bytes: int) -> object:
    def edit(value: dict) -> None:
        file = value["files"]["rank-00000.safetensors"]
        file.update(header_bytes=size_bytes, size_bytes=2 * size_bytes)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda v: v.update(version=2), "its version is 2"),
        (lambda v: v.update(more=1), "has no place for 'more'"),
        (lambda v: v.pop("files"), "has no 'files'"),
        (lambda v: v["metadata"].update(step=-1), "step=-1 is negative"),
        (lambda v: v["metadata"].update(seed="x"), "metadata.seed is 'x'"),
        (lambda v: weight(v).update(dtype="float31"), "no dtype is called 'float31'"),
        (lambda v: weight(v).update(shape=[6, 11]), "do not make up the tensor"),
        (lambda v: weight(v).update(shape=[2**40, 10]), "do not make up the tensor"),
        (lambda v: weight(v).update(shape=[6, -10]), "shape="),
        (lambda v: weight(v)["pieces"].clear(), "do not make up the tensor"),
        (lambda v: weight(v)["pieces"][0].update(bounds=[[-1, 6], [0, 10]]), "is no slice"),
        (lambda v: weight(v)["pieces"][0].update(bounds=[[0, 6], [0, 11]]), "reach beyond"),
        (lambda v: weight(v)["pieces"][0].update(bounds=[[0, 6]]), "reach beyond"),
        (lambda v: weight(v).update(dtype="int16"), "do not make up its bytes"),
        (one_piece_of(64 * 2**20 + 4), "pieces are too large: [0:16777217]"),
        (one_header_of(64 * 2**20 + 1), "is too much"),
        (lambda v: v["files"].update({"rank-00001.safetensors2": a_file(v)}), "files has 'rank-"),
        (lambda v: v["files"].update({"rank-00001.safetensors": a_file(v)}), "do not make up its"),
        (lambda v: weight(v)["pieces"].append(weight(v)["pieces"][0]), "do not make up"),
        (lambda v: weight(v)["pieces"][0].update(bounds=[[0, 6], [0, 2**50]]), "reach beyond"),
        (lambda v: weight(v)["pieces"][0].update(bounds=[[3, 0], [0, 10]]), "is no slice"),
        (lambda v: weight(v)["pieces"][0].update(offset=-1), "offset=-1 is negative"),
        (lambda v: weight(v)["pieces"][0].update(offset=9), "do not make up its bytes"),
        (lambda v: weight(v)["pieces"][0].update(file="../../etc/passwd"), "no file of a checkp"),
        (lambda v: weight(v)["pieces"][0].update(file="rank-00009.safetensors"), "files: rank-0"),
        (lambda v: weight(v)["pieces"][0].update(xxh3_128="0"), "is no checksum"),
        (lambda v: v["files"]["rank-00000.safetensors"].update(size_bytes=5), "header_bytes="),
        (lambda v: v["files"]["rank-00000.safetensors"].update(size_bytes=2**60), "do not make up"),
        (lambda v: v["files"].update({"../x": v["files"].popitem()[1]}), "files"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused(
    tmp_path: Path, edit: object, says: str
) -> None:
    data = edited(tmp_path, edit)

    with pytest.raises(DamagedError, match=re.escape(says)) as caught:
        parse_manifest(data, "manifest.json")
    assert caught.value.where[0].startswith("manifest.json")


def test_a_manifest_ends_in_its_checksum(tmp_path: Path) -> None:
    data = edited(tmp_path, lambda value: None)
    parse_manifest(data, "manifest.json")

    for other in (data + b"\n", data[:-1], data + b" ", data + data):
        with pytest.raises(DamagedError):
            parse_manifest(other, "manifest.json")


def test_a_manifest_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_whole(tmp_path, "step-1")
    size = (tmp_path / "step-1" / "manifest.json").stat().st_size

    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", size)
    manifest.read_manifest(LocalStorage(tmp_path), "step-1")
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(DamagedError, match="the manifest is too large"):
        manifest.read_manifest(LocalStorage(tmp_path), "step-1")


def test_every_piece_begins_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    states = {**STATES, "a": torch.tensor([True]), "b": torch.ones(3, dtype=torch.float64)}
    saved = save_whole(tmp_path, "step-1", states).manifest

    for name, tensor in saved.tensors.items():
        size = states[name].element_size()
        assert all(piece.offset % min(size, 8) == 0 for piece in tensor.pieces), name
    assert list(saved.tensors) == sorted(states)


@given(st.binary(max_size=200))
def test_no_bytes_are_a_manifest_by_chance(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_manifest(data, "manifest.json")


def test_a_piece_that_is_not_what_its_bounds_say_is_refused(tmp_path: Path) -> None:
    piece = StatePiece(
        name="w", shape=(4,), dtype="float32", bounds=((0, 2),), value=torch.zeros(3)
    )

    with pytest.raises(SbpValueError, match=r"'w' has shape \(3,\) and dtype float32"):
        write_part(LocalStorage(tmp_path).stage("step-1"), 0, Metadata(step=1, seed=0), [piece])


def test_states_that_no_process_has_saved_whole_are_not_committed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    pieces = pieces_of(STATES, Placement([0, 1], ("rank",)), NdSbp(S(0)))
    staged = storage.stage("step-1")
    write_part(staged, 0, Metadata(step=1, seed=0), pieces[0])

    with pytest.raises(DamagedError, match="do not make up the tensor"):
        commit(staged, [0])
    assert list(storage.names()) == []


def test_files_are_opened_as_they_are_needed_and_never_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_FILES", 2)
    mesh = Placement(list(range(5)), ("rank",))
    save(LocalStorage(tmp_path), "step-1", pieces_of(STATES, mesh, NdSbp(S(0))))

    found = Checkpoint(LocalStorage(tmp_path), "step-1")

    with found:
        assert equal(found["weight"], STATES["weight"])
        assert len(found._open) <= 2
        found.close()
        assert equal(found["weight"], STATES["weight"])


def test_a_manifest_is_written_as_it_is_read(tmp_path: Path) -> None:
    manifest: CheckpointManifest = save_whole(tmp_path, "step-1").manifest

    assert parse_manifest(manifest_bytes(manifest), "m") == manifest


@pytest.mark.slow
def test_saving_and_loading_take_little_memory_beside_the_states(tmp_path: Path) -> None:
    states = {f"w{index}": torch.ones(1024, 8192) for index in range(4)}
    states["turned"] = torch.ones(8192, 1024).T  # no block of memory
    pieces = pieces_of(states, Placement([0], ("rank",)), NdSbp(B))
    storage = LocalStorage(tmp_path)

    with peak() as of_save:
        save(storage, "step-1", pieces)
    del states, pieces
    with peak() as of_load, Checkpoint(storage, "step-1") as found:
        # Of rows, blocks go to their places; of columns, each block is held first.
        rows = [found.part(f"w{index}", [(0, 512), (0, 8192)]) for index in range(2)]
        columns = [found.part(f"w{index}", [(0, 1024), (0, 4096)]) for index in range(2, 4)]

    held = sum(part.nbytes for part in (*rows, *columns))
    assert held == 2**26
    assert of_save.bytes < 2**26
    assert of_load.bytes - held < 2**26


@dataclass
class Peak:
    """What a block of code took of memory beyond what there was, at its peak."""

    bytes: int = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the `with` block, by what Linux says of this process."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, found = memory_bytes("VmRSS"), Peak()
    yield found
    found.bytes = memory_bytes("VmHWM") - before


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save_whole(tmp_path, "step-1")  # a name that says no step
    staged = storage.stage("step-00000012")
    write_part(staged, 0, Metadata(step=9, seed=0), [])
    commit(staged, [0])

    with pytest.raises(DamagedError, match="step-00000012 is of step 9") as refused:
        manifest.read_manifest(storage, "step-00000012")
    assert "step-00000009" in str(refused.value)


@pytest.mark.parametrize("shape", [(0, 2**62, 2**62), (0,) * 65, (-1,)])
def test_a_shape_that_no_tensor_has_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"shape=.* is none"):
        manifest.SavedTensor(shape=shape, dtype="float32", pieces=())
