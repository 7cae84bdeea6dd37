from __future__ import annotations

import doctest
import multiprocessing
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from sbp_core.compile import CompileOptions, cache, codec, compile_plan, physical
from sbp_core.compile.cache import PlanCache, compile_cached, default_folder, plan_key
from sbp_core.compile.depends import SourceFile
from sbp_core.errors import ConfigError, SbpTypeError
from sbp_core.graph.ir import LogicalGraph
from sbp_aten.passes import prepare_step
from sbp_core.infer import infer_strategy
from sbp_core.placement import Cluster, Device, Link, Placement
from sbp_core.plugins.kinds import PlanRequest
from sbp_core.strategy import Strategy

KEY = "0123456789abcdef"


@pytest.fixture
def plans(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "plans")


@pytest.fixture(scope="module")
def step(gpt_graph: LogicalGraph) -> tuple[LogicalGraph, Strategy]:
    graph = prepare_step(gpt_graph, 2)
    cluster = Cluster(
        name="test",
        num_devices=4,
        devices_per_node=4,
        device=Device(memory_bytes=1 << 30, flop_per_s={"float64": 1e9}, memory_bytes_per_s=1e10),
        intra_node=Link(latency_s=1e-5, bytes_per_s=1e9),
    )
    mesh = Placement.grid((2, 2), ("data", "model"))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster)
    return graph, infer_strategy(request, planner="test", pins={"tokens": "S(0), B"})


def test_a_plan_comes_back_equal_and_with_its_hash(
    plans: PlanCache, step: tuple[LogicalGraph, Strategy]
) -> None:
    made = compile_plan(*step)

    first = compile_cached(plans, *step)
    second = compile_cached(plans, *step)

    assert first == second == made
    assert second.hash == made.hash
    assert physical.to_json(second) == physical.to_json(made)


def test_a_plan_that_is_cached_is_not_compiled(
    plans: PlanCache, step: tuple[LogicalGraph, Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_cached(plans, *step)
    monkeypatch.setattr("sbp_core.compile.compile_plan", None)

    assert compile_cached(plans, *step) == first


def test_a_key_changes_with_everything_that_the_plan_depends_on(
    step: tuple[LogicalGraph, Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, strategy = step
    options = CompileOptions()

    def again() -> str:
        return plan_key(graph, strategy, options)

    before = again()
    keys = [
        before,
        plan_key(graph, strategy, CompileOptions(boxing_thread=True)),
        plan_key(replace(graph, num_micro_batches=3), strategy, options),
        plan_key(graph, Strategy.from_json(strategy.to_json() | {"planner": "b"}), options),
        plan_key(graph, strategy, options, rules="1.0"),
    ]
    monkeypatch.setattr(cache, "compiler_digest", lambda: "of another version")
    keys.append(again())

    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert again() == before


def test_the_report_of_a_strategy_changes_no_key(step: tuple[LogicalGraph, Strategy]) -> None:
    graph, strategy = step
    other = Strategy.from_json(strategy.to_json() | {"report": {"why": "else"}})

    assert plan_key(graph, other, CompileOptions()) == plan_key(graph, strategy, CompileOptions())


@pytest.mark.parametrize("where", [0, 5, 12, 20, -1])
def test_a_damaged_entry_is_reported_and_made_again(plans: PlanCache, where: int) -> None:
    plans.store(KEY, ("old", 1))
    data = bytearray(plans.path(KEY).read_bytes())
    data[where] ^= 1
    plans.path(KEY).write_bytes(bytes(data))

    with pytest.warns(UserWarning, match="is damaged and is made again"):
        made = plans.value(KEY, lambda: ("new", 2))

    assert made == ("new", 2)
    assert plans.load(KEY) == ("new", 2)


@pytest.mark.parametrize("size", [0, 7, 15, 40])
def test_an_entry_that_was_cut_short_is_reported(plans: PlanCache, size: int) -> None:
    plans.store(KEY, "x" * 999)
    plans.path(KEY).write_bytes(plans.path(KEY).read_bytes()[:size])

    with pytest.warns(UserWarning, match="is damaged"):
        assert plans.load(KEY) is None

    assert not plans.path(KEY).exists()


def test_an_entry_lives_as_long_as_its_files_do_not_change(
    plans: PlanCache, tmp_path: Path
) -> None:
    file = tmp_path / "helper.py"
    file.write_text("SCALE = 1\n")
    plans.store(KEY, 1, [SourceFile.read(str(file))])
    first = plans.load(KEY)

    file.write_text("SCALE = 2\n")
    second = plans.load(KEY)
    file.write_text("SCALE = 1\n")
    third = plans.load(KEY)
    file.unlink()

    assert (first, second, third, plans.load(KEY)) == (1, None, 1, None)


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    plans = PlanCache(tmp_path)
    noise = [os.urandom(3000).hex() for _ in range(3)]
    for age, (key, value) in enumerate(zip("ab", noise[:2], strict=True)):
        plans.store(key, value)
        long_ago = time.time() - 100 + age
        os.utime(plans.path(key), (long_ago, long_ago))
    assert plans.load("a") == noise[0]  # used now, so that b is older
    size = plans.path("a").stat().st_size

    PlanCache(tmp_path, limit_bytes=size * 5 // 2).store("c", noise[2])

    assert {path.name for path in tmp_path.iterdir()} == {"a.plan", "c.plan"}


def test_an_entry_above_the_limit_is_kept_until_the_next(tmp_path: Path) -> None:
    plans = PlanCache(tmp_path, limit_bytes=1)

    plans.store("a", "x")
    kept = plans.load("a")
    plans.store("b", "y")

    assert (kept, plans.load("a"), plans.load("b")) == ("x", None, "y")


def test_what_a_writer_left_behind_is_removed_after_an_hour(plans: PlanCache) -> None:
    plans.store("a", 1)
    old, new = plans.folder / "x.plan.1.part", plans.folder / "y.plan.2.part"
    for path in (old, new):
        path.write_bytes(b"half of it")
    os.utime(old, (time.time() - 4000,) * 2)

    plans.store("b", 1)

    assert (old.exists(), new.exists()) == (False, True)


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    plans = PlanCache(blocked / "plans")

    with pytest.warns(UserWarning, match="cannot be cached"):
        made = plans.value(KEY, lambda: 5)

    assert made == 5


def test_what_cannot_be_written_is_refused_and_leaves_nothing(plans: PlanCache) -> None:
    with pytest.raises(SbpTypeError, match="cannot be written"):
        plans.store(KEY, object())

    assert not plans.folder.exists()


def _write_often(folder: Path, value: str) -> None:
    plans = PlanCache(folder)
    for _ in range(40):
        plans.store(KEY, value * 5000)
        assert plans.load(KEY)[:1] in "ab"


def test_processes_that_write_at_once_leave_a_whole_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(tmp_path, value)) for value in "ab"]

    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)

    assert [writer.exitcode for writer in writers] == [0, 0]
    assert PlanCache(tmp_path).load(KEY) in ("a" * 5000, "b" * 5000)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.plan"]


def test_a_limit_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="limit_bytes=0"):
        PlanCache(tmp_path, limit_bytes=0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "/home/me/.cache/sbp/plans"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/sbp/plans"),
        ({"XDG_CACHE_HOME": "/big/cache"}, "/big/cache/sbp/plans"),
        ({"XDG_CACHE_HOME": "here"}, "/home/me/.cache/sbp/plans"),
    ],
)
def test_the_default_folder_follows_the_specification(
    environment: dict[str, str], expected: str
) -> None:
    assert default_folder(environment, Path("/home/me")) == Path(expected)


def test_the_example_in_the_docstring_holds() -> None:
    failed, attempted = doctest.testmod(cache)

    assert (failed, attempted) == (0, 4)


def _entry(packed: bytes) -> bytes:
    return cache.MAGIC + cache._checksum(packed) + packed


@pytest.mark.parametrize(
    "data",
    [
        _entry(b"not compressed"),
        _entry(zlib.compress(codec.encode((1, 2, 3)))),
        _entry(zlib.compress(codec.encode(5))),
        _entry(zlib.compress(codec.encode((1, 2)))),
        _entry(zlib.compress(codec.encode((1, ("file",))))),
        _entry(zlib.compress(b"[" * 100_000)),
    ],
    ids=["no zlib", "three", "a number", "no files", "a name", "deep"],
)
def test_an_entry_with_a_checksum_and_nothing_else_is_made_again(
    plans: PlanCache, data: bytes
) -> None:
    plans.store(KEY, ("made", 1))
    plans.path(KEY).write_bytes(data)

    with pytest.warns(UserWarning, match="is damaged and is made again"):
        assert plans.value(KEY, lambda: ("made", 2)) == ("made", 2)
