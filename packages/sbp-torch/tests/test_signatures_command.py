from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sbp_torch.signatures.__main__ import main


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


def test_json_is_one_value_whatever_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["aten.mm.default", "5x3", "3x4", "--verify", "--axis-size", "4", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["axis_size"] == 4
    assert found["verified"]["run"] > 0
    assert found["verified"]["wrong"] == []


def test_the_signatures_of_a_mesh_are_given_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten.mm.default", "4x6", "6x8", "--mesh", "2x2", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert len(found) == 36
    assert {"inputs": ["S(0), B", "B, S(1)"], "outputs": ["S(0), S(1)"]} in found


def test_negative_numbers_keep_their_place_however_they_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # PyTorch takes a size before a number for a shape; the other way round it is refused.
    assert main(["aten.full.default", "-1e-5", "[4,4]"]) == 2
    assert main(["aten.masked_fill.Scalar", "4x6", "4x6:bool", "-inf"]) == 0

    captured = capsys.readouterr()
    assert "cannot be called like that" in captured.err
    assert "float32[4, 6]" in captured.out


def test_options_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--axis-size", "4", "aten.mm.default", "4x6", "--json", "6x8"]) == 0

    assert json.loads(capsys.readouterr().out)["axis_size"] == 4


def test_an_operator_of_ones_own_is_imported_and_found_out_by_execution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mystery_operator.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('command_test::doubled', mutates_args=())\n"
        "def doubled(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x * 2\n"
        "@doubled.register_fake\n"
        "def _(x: torch.Tensor) -> torch.Tensor:\n"
        "    return torch.empty_like(x)\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["command_test.doubled.default", "4x6"]

    before = main(words)
    code = main([*words, "--import", "mystery_operator", "--discover"])

    captured = capsys.readouterr()
    assert (before, code) == (2, 0)
    assert "--import MODULE" in captured.err
    assert "has no rule" in captured.out
    assert "P        P         discovered" in captured.out


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "sbp_torch.signatures", "--list"]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaints = process.stderr.read()

    assert (process.returncode, complaints) == (141, b"")  # as shells say SIGPIPE


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
        (["aten.mm.default", "4x4", "4x4", "--axis-size", "x"], "invalid int value: 'x'"),
        (["aten.mm.default", "4x4", "4x4", "--mesh", "0x2"], "'0x2' is no shape of a mesh"),
        (["aten.mm.default", "4x4", "4x4", "--mesh", "2", "--verify"], "--mesh lists signatures"),
        (["aten.mm.default", "4x4", "4x4", "--axis-size", "1", "--discover"], "on one rank"),
        (["aten.mm.default", "4x-6", "6x8"], "'4x-6' is no shape"),
        (["aten.mm", "4x4"], "did you mean 'aten.mm.default'"),
        (["torch.mm", "4x4"], "did you mean 'aten.mm.default'"),
        (["aten.softmx.int", "4x4"], "did you mean 'aten.softmax.int'"),
        (["aten._to_copy.default", "4x4", "dtype=torch.flot16"], "did you mean 'float16'"),
        (["aten.mm.default", "4x4", "4x4", "--import", "no_such"], "cannot import 'no_such'"),
        (["aten.embedding.default", "1x4", "3:int64", "--verify"], "cannot be run on made-up data"),
        (["--list", "sftmax"], "no operator with a rule has 'sftmax' in its name"),
        ([], "no operator is given"),
    ],
)
def test_bad_input_is_answered_with_what_would_be_right(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(words)

    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("mesh", [(), ("--mesh", "2x2")])
def test_an_operator_without_a_rule_is_answered_with_discover(
    mesh: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["aten.linalg_det.default", "4x4", *mesh])

    assert code == 2
    assert "to fix it: add --discover" in capsys.readouterr().err


def test_an_operator_without_a_rule_is_discovered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aten.linalg_det.default", "4x4", "--discover"]) == 0
    assert "discovered on an axis of size 2" in capsys.readouterr().out
