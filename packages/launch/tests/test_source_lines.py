from __future__ import annotations

import pytest
from trainable import planned, registry, run_config

from sbp_core.errors import RunError
from sbp_launch.planning.source_lines import with_source_line
from sbp_launch.trainer import trainer
from sbp_torch.runtime.reference import ReferenceSession


def test_a_failed_node_is_told_with_its_line_of_the_model() -> None:
    cause = ValueError("no")
    error = RunError(
        "rank 1 failed", where=("op 'head.addmm': v3 = addmm(v1, v2)",), todo="mend it"
    )
    error.__cause__ = cause
    error.add_note("the states were not saved: no space is left")

    made = with_source_line(error, planned().graph)

    assert "trainable.py:" in made.where[0]
    assert "module 'head' (head.addmm)" in made.where[0]
    assert (made.what, made.where[1:], made.todo) == (error.what, error.where, error.todo)
    assert made.__cause__ is cause
    assert made.__notes__ == ["the states were not saved: no space is left"]


@pytest.mark.parametrize("where", ["", "op 'nowhere': f()", "thread 'compute', step 2"])
def test_an_error_that_names_no_node_stays_as_it_is(where: str) -> None:
    error = RunError("rank 1 failed", where=where)

    assert with_source_line(error, planned().graph) is error


def test_a_run_that_fails_in_an_operator_names_the_line(tmp_path, monkeypatch) -> None:
    def fail(*given: object, **named: object) -> None:
        raise RunError("rank 0 failed", where="op 'head.addmm': addmm()") from ValueError("no")

    monkeypatch.setattr(ReferenceSession, "step", fail)

    with pytest.raises(RunError) as caught:
        trainer.train(run_config(), registry(), tmp_path)

    assert "trainable.py:" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
