"""Some random programs are those of one device; `python -m random_programs` runs very many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from random_programs import blocks, losses, shrink, trial
from random_programs.__main__ import main
from random_programs.oracle import follows, judged
from random_programs.program import Program, Term, draw
from random_programs.shrink import shrunk
from random_programs.trial import Outcome, attempt, compare, executed, plain_steps, quiet

PLAIN = shrink._SIMPLEST
QUICK = ("mesh=1, planner='manual/data_parallel'", "mesh=2, planner='manual/zero'")


@pytest.mark.parametrize("seed", range(3))
def test_a_program_of_one_micro_batch_is_that_of_one_device(seed: int) -> None:
    outcome = attempt(draw(seed, [1], QUICK))

    assert not outcome.failed, outcome.message


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("seed", range(8))
def test_a_program_of_several_micro_batches_is_that_of_one_device_or_refused(seed: int) -> None:
    outcome = attempt(draw(seed, [2, 4, 0], QUICK))

    assert not outcome.failed, outcome.message


def test_gradients_of_programs_without_flags_follow_from_those_of_parts() -> None:
    programs = [draw(seed, [2, 4, 0]) for seed in range(60)]

    found = {p.seed: follows(p) for p in programs if not p.meanings}

    assert [seed for seed, verdict in found.items() if verdict is False] == []
    assert list(found.values()).count(True) > 15


@pytest.mark.parametrize(
    ("value", "expected"),
    [("e.mean()", True), ("e.mean().square()", True), ("e.std()", False), ("e[1:].mean()", False)],
)
def test_execution_tells_whether_gradients_follow(value: str, expected: bool) -> None:
    program = replace(PLAIN, terms=(Term(value=value, error="(z - t).abs().sum(-1)"),))

    assert follows(replace(program, micro_batches=2)) is expected


def test_a_program_is_found_again_by_its_seed_and_prints_itself() -> None:
    program = draw(5, [1], QUICK)

    assert draw(5, [1], QUICK) == program
    assert eval(repr(program), {"Program": Program, "Term": Term}) == program
    with quiet():
        assert compare(executed(program.source)).kind == "equal"


def test_every_block_is_drawn() -> None:
    tables = {
        "stem": blocks.STEMS, "inputs": blocks.INPUTS, "form": blocks.FORMS,
        "layers": blocks.LAYERS, "head": blocks.HEADS, "outputs": losses.OUTPUTS,
        "error": losses.ERRORS, "weight": losses.WEIGHTS, "scale": losses.SCALES,
        "metrics": losses.METRICS, "value": {**losses.REDUCTIONS, **losses.WHOLE},
        "optimizer": blocks.OPTIMIZERS, "groups": blocks.GROUPS, "layout": blocks.LAYOUTS,
    }  # fmt: skip
    missing = {f"{part} {name}" for part, table in tables.items() for name in table}

    for seed in range(10_000):
        missing -= draw(seed).choices
        if not missing:
            break

    assert missing == set()


def test_a_deviation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_parallel_steps", lambda names: plain_steps(names, moved_by=1e-7))

    outcome = attempt(PLAIN)

    assert outcome.kind == "WRONG"
    assert "loss of step 0 is off by" in outcome.message


def test_a_program_shrinks_to_the_blocks_that_are_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong_if_halved(program: Program) -> Outcome:
        return Outcome(kind="WRONG" if "=> h / 2" in program.layers else "equal")

    monkeypatch.setattr(shrink, "attempt", wrong_if_halved)
    program = replace(draw(7), layers=("nn.Tanh()", "=> h / 2", "nn.ReLU()"))

    minimal, outcome = shrunk(program, Outcome(kind="WRONG"))

    assert outcome.kind == "WRONG"
    assert minimal.choices - PLAIN.choices == {"layers => h / 2"}
    assert shrink.explains(minimal, program)


def test_a_refusal_is_wrong_where_nothing_speaks_against_the_program() -> None:
    refused = Outcome(kind="refused", message="no")
    parts = replace(PLAIN, micro_batches=2)
    contrast = Term(value="supervised_contrast(z, y)")

    assert judged(PLAIN, refused).kind == "wrong refusal"
    assert judged(parts, refused).kind == "wrong refusal"
    assert judged(replace(parts, terms=(contrast,)), refused).kind == "refused"
    assert judged(replace(PLAIN, layout="mesh=2"), refused).kind == "refused here"


@pytest.mark.slow
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--count", "2", "--micro-batches", "1", "--jobs", "1", f"--layout={QUICK[0]}"])

    assert code == 0
    assert "2 programs in" in capsys.readouterr().out
