from __future__ import annotations

import json

import pytest

from sbp_core.signatures.__main__ import main


def test_the_command_prints_the_signatures_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["aten.mm.default", "4096x1024", "1024x4096"])

    printed = capsys.readouterr().out
    assert code == 0
    assert "S(1)     S(0)     P" in printed


def test_a_mesh_lists_signatures_of_several_axes(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["aten.view.default", "6", "[2,3]", "--mesh", "2x3"])

    assert code == 0
    assert "(S(0), S(0)) -> (S(0), S(1))" in capsys.readouterr().out.splitlines()


def test_negative_numbers_names_and_dtypes_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["aten.sum.dim_IntList", "4x6:int64", "[-1]", "keepdim=True", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {"inputs": ["S(1)"], "outputs": ["P"]}.items() <= found["legal"][1].items()
    assert main(["aten._softmax.default", "4x6", "-1", "False"]) == 0


def test_lists_of_tensors_and_tensors_without_dims_are_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["aten.cat.default", "[4x6,4x2]", "1"]) == 0
    assert main(["aten.add.Tensor", "4x6", "():float32"]) == 0

    assert "float32[4, 8]" in capsys.readouterr().out


def test_verification_runs_the_signatures(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["aten.mm.default", "5x3", "3x4", "--verify"])

    assert code == 0
    assert "0 wrong" in capsys.readouterr().out


def test_operators_with_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "embedding"]) == 0

    assert "aten.embedding.default" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["aten.mm.defalt", "4x4"], "PyTorch has no operator 'aten.mm.defalt'"),
        (["aten.mm.default", "4x4y", "4x4"], "'4x4y' is no shape"),
        (["aten.mm.default", "4x4:float31", "4x4"], "did you mean 'float32'"),
        (["aten.mm.default", "4x4", "mat3=4x4"], "did you mean 'mat2'"),
        (["aten.mm.default", "4x4", "5x4"], "cannot be called like that"),
        (["aten._softmax.default", "4x4", "one", "False"], "'one' is no value for 'dim'"),
        (["aten.mm.default", "4x4", "4x4", "4x4"], "takes 2 arguments"),
        (["aten.mm.default", "4x4", "4x4", "--axis-size", "0"], "--axis-size 0"),
        (["aten.mm.default", "4x4", "4x4", "--verfy"], "did you mean '--verify'"),
        ([], "no operator is given"),
    ],
)
def test_bad_input_is_answered_with_what_would_be_right(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words)

    assert code == 2
    assert message in capsys.readouterr().err
