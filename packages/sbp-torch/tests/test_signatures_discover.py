from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sbp_core.errors import (  # noqa: E402 - after the check that torch is there
    SbpLookupError,
    SbpValueError,
    SignatureError,
)
from sbp_core.graph.ir import Ref, TensorType  # noqa: E402
from sbp_core.sbp import B, P, S  # noqa: E402
from sbp_core.signatures import OpCall, derive  # noqa: E402
from sbp_core.user_paths import cache_folder  # noqa: E402
from sbp_torch.signatures.candidates import candidates  # noqa: E402
from sbp_torch.signatures.discovery import discover, discover_call  # noqa: E402
from sbp_torch.signatures.discovery_cache import Discovery  # noqa: E402
from sbp_torch.signatures.verification import call_of  # noqa: E402

LIBRARY = torch.library.Library("sbp_discover_tests", "DEF")
LIBRARY.define("outer(Tensor x, Tensor w) -> Tensor")
LIBRARY.impl("outer", lambda x, w: x[:, None, :] * w[:, :], "CompositeExplicitAutograd")
CALLS: list[int] = []


def _counted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(os.getpid())
    return x + 1


LIBRARY.define("counted(Tensor x) -> Tensor")
LIBRARY.impl("counted", _counted, "CompositeExplicitAutograd")


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def found(op: str, *args: Any, **kwargs: Any) -> set[str]:
    return {str(part) for part in discover(op, *args, cache=False, **kwargs).signatures}


def test_a_matrix_product_has_its_six_signatures() -> None:
    assert found("aten.mm.default", real(4, 6), real(6, 5)) == {
        "S(0), B -> S(0)",
        "B, S(1) -> S(1)",
        "S(1), S(0) -> P",
        "P, B -> P",
        "B, P -> P",
        "B, B -> B",
    }


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        ("relu", (real(4, 5),), ["S(0)", "S(1)", 'P("max")', 'P("min")', "B"]),
        ("cumsum", (real(4, 5), 1), ["S(0)", "P", "B"]),
        ("abs", (real(3, 4).abs(),), ["S(0)", "S(1)", "B"]),
        ("isfinite", (real(4, 5),), ["S(0)", "S(1)", "B"]),
        ("floor", (real(1),), ['P("max")', 'P("min")', "B"]),
    ],
)
def test_an_operator_that_keeps_its_shape(op: str, args: tuple[Any, ...], expected: Any) -> None:
    assert found(f"aten.{op}.default", *args) == {f"{entry} -> {entry}" for entry in expected}


def test_a_sum_is_jointly_linear_and_monotone_in_each_addend() -> None:
    assert found("aten.add.Tensor", real(4, 5), real(4, 5)) == {
        "S(0), S(0) -> S(0)",
        "S(1), S(1) -> S(1)",
        "P, P -> P",
        'P("max"), B -> P("max")',
        'P("min"), B -> P("min")',
        'B, P("max") -> P("max")',
        'B, P("min") -> P("min")',
        "B, B -> B",
    }


@pytest.mark.slow
def test_a_contraction_gives_the_reduction_that_it_is() -> None:
    assert 'S(1) -> P("max")' in found("aten.amax.default", real(4, 5), [1])
    assert 'S(1) -> P("min")' in found("aten.all.dim", real(4, 5) > 0, 1)
    assert "S(0) -> P" in found("aten.sum.default", real(4))


def test_values_that_are_not_read_may_be_partial() -> None:
    assert "P -> B" in found("aten.ones_like.default", real(4))


def test_a_custom_operator_is_discovered() -> None:
    assert found("sbp_discover_tests.outer.default", real(4, 6), real(5, 6)) == {
        "S(0), B -> S(0)",
        "B, S(0) -> S(1)",
        "S(1), S(1) -> S(2)",
        "P, B -> P",
        "B, P -> P",
        "B, B -> B",
    }


@pytest.mark.slow
def test_several_outputs_get_one_entry_each() -> None:
    weight, bias = torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)

    made = found("aten.native_layer_norm.default", real(3, 6, 8), [8], weight, bias, 1e-5)

    assert {
        "S(0), B, B -> S(0), S(0), S(0)",
        "S(1), B, B -> S(1), S(1), S(1)",
        "B, P, P -> P, B, B",
    } <= made
    assert not any(part.startswith("S(2)") for part in made)


def test_random_numbers_allow_no_signature() -> None:
    assert discover("aten.native_dropout.default", real(4, 5), 0.5, True, cache=False) == Discovery(
        signatures=(), tried=0, crashed=0, complete=True
    )


def test_nothing_is_concluded_from_outputs_without_numbers() -> None:
    assert found("aten.relu.default", torch.full((4, 4), float("nan"))) == {"B -> B"}
    assert found("aten.relu.default", torch.empty(0, 4)) == {"B -> B"}


def test_a_signature_says_that_it_needs_even_shards() -> None:
    made = discover("aten.pixel_shuffle.default", real(8, 4, 2, 3), 2, cache=False).signatures
    even = discover("aten._reshape_alias.default", real(4, 6), [24], [1], cache=False)

    batch = next(part for part in made if part.inputs == (S(0),))
    assert batch.requires == ()
    assert {part.origin for part in made} == {"discovered"}
    assert all(part.inputs != (S(0),) for part in even.signatures)


def test_shards_that_have_to_be_even_or_not_empty_are_told() -> None:
    def picky(_op: str, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> torch.Tensor:
        (x,) = args
        if x.shape[0] % 2 or not x.shape[1]:
            raise ValueError("an odd or an empty shard")
        return x.neg()

    made = discover("my.picky.default", real(4, 5), execute=picky, cache=False).signatures

    needs = {part.inputs: part.requires for part in made}
    (even,), (nonempty,) = needs[(S(0),)], needs[(S(1),)]
    assert (even.even, even.extents) == (True, (4,))
    assert (nonempty.even, nonempty.extents) == (False, (5,))
    assert needs[(P,)] == ()


@pytest.mark.slow
def test_a_candidate_that_crashes_is_illegal() -> None:
    def fragile(_op: str, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> torch.Tensor:
        x, w = args
        if x.shape[0] != w.shape[0]:
            os.kill(os.getpid(), signal.SIGFPE)
        return x * w

    made = discover("my.fragile.default", real(4), real(4), execute=fragile, cache=False)

    assert made.crashed == 8
    assert made.complete
    assert {str(part) for part in made.signatures} == {
        "S(0), S(0) -> S(0)",
        "P, B -> P",
        "B, P -> P",
        "B, B -> B",
    }


@pytest.mark.slow
def test_kernels_that_corrupt_memory_do_so_elsewhere() -> None:
    q, k, v = (real(3, 2, 4, 8) for _ in range(3))

    made = discover(
        "aten._scaled_dot_product_flash_attention_for_cpu.default", q, k, v, cache=False, budget=60
    )

    assert not made.complete
    assert "S(0), S(0), S(0) -> S(0), S(0)" in {str(part) for part in made.signatures}
    assert "B, B, P -> P, B" in {str(part) for part in made.signatures}


@pytest.mark.slow
def test_the_search_is_given_up_if_candidates_hang() -> None:
    def slow(_op: str, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> torch.Tensor:
        (x,) = args
        if x.shape != (4, 4, 4, 4):
            time.sleep(30)
        return x.neg()

    made = discover("my.slow.default", real(4, 4, 4, 4), execute=slow, timeout_s=0.3, cache=False)

    assert (made.tried, made.crashed, made.complete) == (3, 3, False)


def test_a_call_that_does_not_run_whole_is_an_error() -> None:
    with pytest.raises(SignatureError, match=r"cannot be run whole: it raised RuntimeError: mat1"):
        discover("aten.mm.default", real(4, 6), real(5, 6), cache=False)


@pytest.mark.parametrize(("key", "value"), [("axis_size", 1), ("budget", -1)])
def test_numbers_out_of_range_are_refused(key: str, value: int) -> None:
    options = {key: value, "cache": False}

    with pytest.raises(SbpValueError, match=key):
        discover("aten.relu.default", real(4), **options)


def test_an_unknown_operator_is_named(tmp_path: Path) -> None:
    with pytest.raises(SbpLookupError, match=r"aten\.nothing\.default"):
        discover("aten.nothing.default", real(4), cache=tmp_path)


@pytest.mark.slow
def test_types_are_enough() -> None:
    call = OpCall(
        op="aten.mul.Tensor",
        args=(Ref("x"), Ref("x")),
        inputs=(TensorType((4, 5), "float32"),) * 2,
        tensor_names=("x", "x"),
        outputs=(TensorType((4, 5), "float32"),),
    )

    made = {str(part) for part in discover_call(call, cache=False).signatures}

    assert {"S(0), S(0) -> S(0)", "P, B -> P", "B, P -> P"} <= made
    assert "P, P -> P" not in made


@pytest.mark.slow
def test_what_is_derived_is_discovered() -> None:
    args = (real(3), real(3, 4), real(4, 3))
    call, _ = call_of("aten.addmm.default", args, {})

    derived = {str(part) for part in derive(call, 2)}

    assert derived <= found("aten.addmm.default", *args)


def test_a_cache_hit_runs_nothing(tmp_path: Path) -> None:
    op, x = "sbp_discover_tests.counted.default", real(4, 5)
    first = discover(op, x, cache=tmp_path)
    (stored,) = tmp_path.iterdir()
    entry = json.loads(stored.read_text())
    entry["found"]["tried"] = 4711
    stored.write_text(json.dumps(entry))

    second = discover(op, real(4, 5) * 2, cache=tmp_path)

    assert second.tried == 4711
    assert second.signatures == first.signatures
    assert CALLS == []  # only workers ran it


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("change", ["shape", "dtype", "axis_size", "literal"])
def test_another_call_is_another_entry(tmp_path: Path, change: str) -> None:
    discover("aten.cumsum.default", real(4, 4), 1, cache=tmp_path, budget=2)

    x = real(4, 5) if change == "shape" else real(4, 4)
    x = x.to(torch.float32) if change == "dtype" else x
    dim, size = (0 if change == "literal" else 1), (3 if change == "axis_size" else 2)
    discover("aten.cumsum.default", x, dim, cache=tmp_path, budget=2, axis_size=size)

    assert len(list(tmp_path.iterdir())) == 2


def test_a_larger_budget_is_not_served_by_a_search_cut_short(tmp_path: Path) -> None:
    short = discover("aten.relu.default", real(4, 5), cache=tmp_path, budget=1)

    long = discover("aten.relu.default", real(4, 5), cache=tmp_path)

    assert (short.tried, short.complete) == (1, False)
    assert (long.tried, long.complete) == (5, True)
    assert "cut short" in str(short)
    assert discover("aten.relu.default", real(4, 5), cache=tmp_path, budget=1) == long


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("damage", ["{", "[]", '{"key": 1}', "\x00"])
def test_a_damaged_entry_is_ignored_and_replaced(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = discover("aten.relu.default", real(4, 5), cache=tmp_path)
    (stored,) = tmp_path.iterdir()
    entry = json.loads(stored.read_text())
    if damage.startswith('{"key"'):
        damage = json.dumps({"key": entry["key"], "found": {"signatures": 3}, "budget": 1})
    stored.write_text(damage)

    with caplog.at_level(logging.WARNING):
        again = discover("aten.relu.default", real(4, 5), cache=tmp_path)

    assert again == first
    assert "ignoring discovered signatures" in caplog.text
    assert json.loads(stored.read_text()) == entry


def test_a_folder_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()

    made = discover("aten.relu.default", real(4), cache=file / "below")

    assert made.complete
    assert "are not kept" in caplog.text


def test_requirements_survive_the_cache(tmp_path: Path) -> None:
    made = discover("aten.reshape.default", real(6, 5), [2, 3, 5], cache=tmp_path).signatures

    assert [
        part.requires
        for part in discover(
            "aten.reshape.default", real(6, 5), [2, 3, 5], cache=tmp_path
        ).signatures
    ] == [part.requires for part in made]


def test_the_cache_is_where_the_user_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    discover("aten.neg.default", real(2))

    assert cache_folder("signatures") == tmp_path / "sbp" / "signatures"
    assert len(list(cache_folder("signatures").iterdir())) == 1


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_the_default_cache_is_below_home(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)

    assert cache_folder("signatures") == Path.home() / ".cache" / "sbp" / "signatures"


def test_candidates_that_agree_come_first() -> None:
    types = [TensorType((4, 6), "float32")] * 12

    first, complete = candidates(types, 2, 200)

    assert not complete
    assert len(set(first)) == 200
    assert {(S(0),) * 12, (S(1),) * 12, (P,) * 12} <= set(first[:8])


def test_all_candidates_are_tried_within_the_budget() -> None:
    types = [TensorType((4, 1), "float32"), TensorType((4,), "bool"), TensorType((3,), "complex64")]

    every, complete = candidates(types, 2, 1000)

    assert complete
    assert len(every) == len(set(every)) == 5 * 4 * 3 - 1
    assert (B, B, B) not in every
