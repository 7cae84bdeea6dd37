"""Runs on processes that stop and go on, as users start them."""

from __future__ import annotations

from pathlib import Path

from checkpoints import saved_states
from small_runs import DATA
from test_launchers import train


def test_processes_go_on_where_they_stopped_bit_for_bit(tmp_path: Path) -> None:
    layout = (*DATA, "boxing=torch", "trainer.compare_steps=0", "trainer.plan_rows=0")
    often = ("trainer.checkpoint.every=2", "trainer.checkpoint.keep=0")
    whole = train(tmp_path, *layout, *often, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    stopped = "trainer.resume=whole/checkpoints/step-00000002"

    rest = train(tmp_path, *layout, stopped, "hydra.run.dir=rest")

    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "going on after step 2, from whole/checkpoints/step-00000002" in rest.stdout
    names = {path.name for path in (tmp_path / "rest/checkpoints/step-00000003").iterdir()}
    assert names == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    states, wanted = saved_states(tmp_path / "rest"), saved_states(tmp_path / "whole")
    assert states.keys() == wanted.keys() and wanted
    assert all(states[name].equal(value) for name, value in wanted.items())
