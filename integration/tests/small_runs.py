"""A run of `sbp-train` that takes seconds, for tests that start its ranks as processes."""

from __future__ import annotations

import json
from pathlib import Path

#: Its settings, for two ranks.
SMALL = (
    "model.num_layers=2",
    "model.hidden=16",
    "model.num_heads=2",
    "model.context=16",
    "trainer.steps=3",
    "trainer.batch_size=4",
    "trainer.evaluate.batches=1",
    "trainer.sample_tokens=2",
    "trainer.log_every=1",
    "cluster.mesh=[2]",
)

#: What divides the samples and the parameters among them.
DATA = ("planner=manual/zero", "cluster.axes=[data]")


def losses(run: Path, name: str = "loss") -> list[float]:
    """Return the losses of a run, or another metric, in order, from its folder."""
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)[name] for line in lines]
