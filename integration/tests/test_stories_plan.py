"""A plan for more devices than this machine has, as somebody asks for it before renting them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Seconds that planning may take on a slow and busy machine.
_LIMIT_S = 900.0


@pytest.mark.exhaustive
@pytest.mark.timeout(_LIMIT_S)
def test_32_layers_are_planned_for_64_devices(tmp_path: Path) -> None:
    settings = [
        "model.num_layers=32",
        "cluster.mesh=[8,8]",
        "cluster.device=cuda",
        "planner=manual/tensor_parallel",
        "trainer.batch_size=64",
        "out=strategy.yaml",
    ]

    done = subprocess.run(
        [sys.executable, "-m", "sbp_launch.apps.plan", *settings],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "blocks.* x32" in lines
    assert "mlp.up (B, S(0)) (S(0), S(2))" in lines
    assert any("all-reduce of output over tensor: P -> B" in line for line in lines)
    assert "planner manual: 64 ranks, 1 micro-batch" in lines
    assert any(line.startswith("predicted time of a step: ") for line in lines)
    assert any(line.startswith("memory of a rank at its peak: ") for line in lines)
    assert (tmp_path / "strategy.yaml").stat().st_size > 0
