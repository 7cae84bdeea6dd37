from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sbp_core.errors import (  # noqa: E402 - after the check that torch is there
    SbpLookupError,
    SbpValueError,
)
from sbp_core.graph.ir import Ref, Symbol, TensorType  # noqa: E402
from sbp_core.signatures import RuleRegistry  # noqa: E402
from sbp_torch.signatures.verification import (  # noqa: E402
    call_of,
    overload,
    random_arguments,
    verify,
)
from sbp_torch.testing.signatures import check_rule, sample  # noqa: E402


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_the_report_counts_what_was_run() -> None:
    report = verify("aten.mm.default", real(4, 6), real(6, 5), axis_sizes=(2,))

    assert report.ok
    assert len(report.claimed) == 6 + 12
    assert str(report) == "aten.mm.default: 18 signatures run, 0 wrong"


@pytest.mark.parametrize(
    ("op", "notation", "reason"),
    [
        ("gelu", "a b => a b; linear 0", "differs by up to"),
        ("gelu", "a b => a b; decreasing 0", "differs by up to"),
        ("gelu", "a b => a b; unread 0", "should hold the same value differ"),
        ("logsumexp", "a b => a; reduce b max", "differs by up to"),
        ("cumsum", "a b => a b", "differs by up to"),
        ("flip", "a b => a b", "differs by up to"),
    ],
)
def test_a_wrong_rule_is_refuted(op: str, notation: str, reason: str) -> None:
    rest = {"gelu": (), "logsumexp": ([1],), "cumsum": (1,), "flip": ([1],)}[op]
    rules = RuleRegistry({f"aten.{op}.default": notation})

    report = verify(f"aten.{op}.default", real(4, 5), *rest, rules=rules)

    assert not report.ok
    assert any(reason in wrong.reason for wrong in report.wrong)


def test_a_mean_of_uneven_shards_is_refuted() -> None:
    rules = RuleRegistry({"aten.mean.default": "a => (); linear 0"})

    report = verify("aten.mean.default", real(5), axis_sizes=(2,), rules=rules)

    assert "(S(0)) -> (P)" in {str(wrong.signature) for wrong in report.wrong}


def test_a_missing_localiser_is_refuted() -> None:
    rules = RuleRegistry({"aten.view.default": "a b => (a b)"})

    report = verify("aten.view.default", real(4, 5), [20], rules=rules)

    assert any("fails" in wrong.reason for wrong in report.wrong)


def test_an_output_of_another_shape_is_refuted() -> None:
    rules = RuleRegistry({"aten.ones.default": "=> a"})

    report = verify("aten.ones.default", [4], axis_sizes=(2,), rules=rules)

    assert any("rank 0 has float32[4]" in wrong.reason for wrong in report.wrong)


def test_the_conformance_check_prints_what_was_refuted() -> None:
    rules = RuleRegistry({"aten.gelu.default": "a => a; linear 0"})

    with pytest.raises(AssertionError, match=r"\(P\) -> \(P\) on mesh \(2,\): output 0: differs"):
        check_rule("aten.gelu.default", [sample(real(4))], rules=rules)


def test_the_conformance_check_wants_samples() -> None:
    with pytest.raises(AssertionError, match="no sample"):
        check_rule("aten.gelu.default", [])


def test_a_call_names_its_tensors_and_torch_values() -> None:
    x = real(4, 5)

    call, tensors = call_of(
        "aten._to_copy.default", (x,), {"dtype": torch.float32, "device": torch.device("cpu")}
    )

    assert call.args == (Ref("input0"),)
    assert call.kwargs == {"dtype": Symbol("dtype", "float32"), "device": Symbol("device", "cpu")}
    assert call.inputs == (TensorType((4, 5), "float64"),)
    assert call.outputs == (TensorType((4, 5), "float32"),)
    assert tensors == (x,)


def test_tensor_lists_are_flattened() -> None:
    call, _ = call_of("aten.cat.default", ([real(4), real(2)],), {})

    assert call.args == ((Ref("input0"), Ref("input1")),)
    assert call.tensor_names == ("input0", "input1")


@pytest.mark.parametrize("op", ["aten.nothing.default", "aten.mm", "nowhere.mm.default"])
def test_an_operator_that_pytorch_lacks_is_named(op: str) -> None:
    with pytest.raises(SbpLookupError, match=op):
        overload(op)


LIBRARY = torch.library.Library("sbp_verify_tests", "DEF")
LIBRARY.define("outer(Tensor x, Tensor w) -> Tensor")
LIBRARY.impl("outer", lambda x, w: x[:, None] * w, "CompositeExplicitAutograd")


def whole_only(then: object) -> Any:
    """An operator that runs whole, and does something else on shorter shards."""

    def run(_op: str, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> torch.Tensor:
        (x,) = args
        if x.shape[0] < 4:
            then()
        return x.neg()

    return run


SPLIT = RuleRegistry({"my.op.default": "a => a"})


def test_a_rank_that_dies_is_a_verdict() -> None:
    run = whole_only(lambda: os.kill(os.getpid(), signal.SIGFPE))

    report = verify("my.op.default", real(4), rules=SPLIT, execute=run, axis_sizes=(2,))

    reasons = {str(wrong.signature): wrong.reason for wrong in report.wrong}
    assert reasons["(S(0)) -> (S(0))"] == "a rank run was killed by SIGFPE"
    assert "(B) -> (B)" not in reasons


@pytest.mark.slow
def test_a_rank_that_hangs_is_a_verdict() -> None:
    run = whole_only(lambda: time.sleep(60))

    report = verify(
        "my.op.default", real(4), rules=SPLIT, execute=run, axis_sizes=(2,), timeout_s=0.3
    )

    assert {wrong.reason for wrong in report.wrong} == {"a rank run took longer than 0.3 s"}


def test_a_kernel_that_is_fed_with_shards_that_do_not_fit_is_refuted() -> None:
    x = real(4, 3, 6, 6)
    out, indices = torch.ops.aten.max_pool2d_with_indices.default(x, [2, 2])
    labels = "a! c! i! j!, n d! h! w!, a! c! i! j! => n d! h! w!"
    op = "aten.max_pool2d_with_indices_backward.default"
    order = torch.zeros_like(out), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices

    report = verify(op, *order, rules=RuleRegistry({op: labels}), axis_sizes=(2,))

    assert not report.ok


def test_nothing_has_to_be_forked() -> None:
    pids = set()

    def run(_op: str, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> torch.Tensor:
        pids.add(os.getpid())
        return args[0].neg()

    report = verify("my.op.default", real(4), rules=SPLIT, execute=run, isolated=False)

    assert report.ok
    assert pids == {os.getpid()}


def test_an_accelerator_cannot_be_forked() -> None:
    rules = RuleRegistry({"my.op.default": "a => a"})

    with pytest.raises(SbpValueError, match="isolated=False"):
        verify(
            "my.op.default",
            torch.empty(4, device="meta"),
            rules=rules,
            execute=lambda _op, args, _kwargs: args[0],
        )


def test_a_custom_operator_is_verified() -> None:
    right = RuleRegistry({"sbp_verify_tests.outer.default": "i, j -> i j"})
    wrong = RuleRegistry({"sbp_verify_tests.outer.default": "i, j -> j i"})

    op, square = "sbp_verify_tests.outer.default", (real(4), real(4))

    assert verify(op, *square, rules=right).ok
    assert not verify(op, *square, rules=wrong).ok


def test_a_claim_tells_what_its_shards_are_like() -> None:
    report = verify("aten.neg.default", real(4), axis_sizes=(2, 3, 5))

    splits = {
        claim.mesh_shape: (claim.even, claim.empty)
        for claim in report.claimed
        if str(claim.signature) == "(S(0)) -> (S(0))"
    }
    assert splits == {(2,): (True, False), (3,): (False, False), (5,): (False, True)}
    products = [claim for claim in report.claimed if len(claim.mesh_shape) == 2]
    assert {(claim.even, claim.empty) for claim in products} >= {(True, False), (False, True)}


def test_arguments_are_not_changed() -> None:
    x = real(4)
    before = x.clone()

    report = verify("aten.neg_.default", x, rules=RuleRegistry({"aten.neg_.default": "a => a"}))

    assert report.ok
    assert torch.equal(x, before)


@pytest.mark.parametrize("isolated", [True, False])
def test_random_numbers_are_those_of_the_whole_and_the_callers_stay(isolated: bool) -> None:
    whole = RuleRegistry({"aten.native_dropout.default": "a! => a!, a!"})
    split = RuleRegistry({"aten.native_dropout.default": "a => a, a"})
    torch.manual_seed(7)
    state = torch.get_rng_state()
    call = ("aten.native_dropout.default", real(64), 0.5, True)

    assert verify(*call, rules=whole, isolated=isolated).ok
    assert not verify(*call, rules=split, isolated=isolated).ok
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_that_nobody_wrote_is_not_compared() -> None:
    rules = RuleRegistry({"aten.empty_like.default": "a => a"})
    wrong = RuleRegistry({"aten.empty_like.default": "a! => a"})

    assert verify("aten.empty_like.default", real(4), rules=rules).ok
    report = verify("aten.empty_like.default", real(4), axis_sizes=(2,), rules=wrong)
    assert all("instead of" in entry.reason for entry in report.wrong)


def test_tensors_are_made_up_for_types() -> None:
    args, kwargs = random_arguments(
        [[TensorType((2, 3), "float32")], TensorType((3,), "int64"), 4],
        {"mask": TensorType((), "bool")},
    )

    assert (args[0][0].shape, args[0][0].dtype) == ((2, 3), torch.float32)
    assert set(args[1].tolist()) <= {0, 1}
    assert args[2] == 4
    assert kwargs["mask"].dtype == torch.bool
