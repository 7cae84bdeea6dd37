from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sbp_core.errors import SbpLookupError  # noqa: E402 - after the check that torch is there
from sbp_core.graph.ir import Ref, Symbol, TensorType  # noqa: E402
from sbp_core.signatures import Registry  # noqa: E402
from sbp_core.signatures.verify import call_of, overload, verify  # noqa: E402
from sbp_core.testing.signatures import check_rule, sample  # noqa: E402


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
    rules = Registry({f"aten.{op}.default": notation})

    report = verify(f"aten.{op}.default", real(4, 5), *rest, rules=rules)

    assert not report.ok
    assert any(reason in wrong.reason for wrong in report.wrong)


def test_a_mean_of_uneven_shards_is_refuted() -> None:
    rules = Registry({"aten.mean.default": "a => (); linear 0"})

    report = verify("aten.mean.default", real(5), axis_sizes=(2,), rules=rules)

    assert "(S(0)) -> (P)" in {str(wrong.signature) for wrong in report.wrong}


def test_a_missing_localiser_is_refuted() -> None:
    rules = Registry({"aten.view.default": "a b => (a b)"})

    report = verify("aten.view.default", real(4, 5), [20], rules=rules)

    assert any("fails" in wrong.reason for wrong in report.wrong)


def test_an_output_of_another_shape_is_refuted() -> None:
    rules = Registry({"aten.ones.default": "=> a"})

    report = verify("aten.ones.default", [4], axis_sizes=(2,), rules=rules)

    assert any("rank 0 has float32[4]" in wrong.reason for wrong in report.wrong)


def test_the_conformance_check_prints_what_was_refuted() -> None:
    rules = Registry({"aten.gelu.default": "a => a; linear 0"})

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
