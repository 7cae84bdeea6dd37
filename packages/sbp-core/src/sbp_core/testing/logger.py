"""The conformance suite of metric sinks: subclass `MetricSinkConformance` and supply two methods.

    class TestMySink(MetricSinkConformance):
        def make_factory(self):
            return build(MyConfig())
        def read(self, run_folder):
            return [(line.step, line.metrics) for line in parse(run_folder / "my.log")]

A sink that keeps nothing sets `keeps = False`. The tests take pytest's fixture `tmp_path`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from sbp_core.plugins.kinds import MetricSinkFactory

__all__ = ["MetricSinkConformance", "Records"]

#: The metrics of one step, by step.
Records = Sequence[tuple[int, Mapping[str, float]]]


class MetricSinkConformance(ABC):
    """Tests that every metric sink must pass. See the module's docstring for how to use it."""

    #: Whether logged metrics can be read back.
    keeps: bool = True

    #: Metrics of some steps only, numbers without a short decimal form, NaN and infinity.
    records: Records = (
        (1, {"loss": 0.1, "tokens_per_s": 12345.678}),
        (2, {"loss": 1 / 3}),
        (5, {"held_out_loss": 2.5e-300, "loss": float("nan")}),
        (6, {"loss": float("inf")}),
    )

    @abstractmethod
    def make_factory(self) -> MetricSinkFactory:
        """Return the result of `build(config)`."""

    @abstractmethod
    def read(self, run_folder: Path) -> Records | None:
        """Return the metrics that a sink has written: steps in order, each with its metrics.

        None if they cannot be read here, because they are sent to a server: then no test compares.
        """

    def test_what_is_logged_survives_without_close(self, tmp_path: Path) -> None:
        """A run that is killed keeps its logged metrics."""
        sink = self.make_factory()(tmp_path)
        for number, (step, metrics) in enumerate(self.records, start=1):
            sink.log(step, metrics)
            self._check(tmp_path, self.records[:number])
        sink.close()

    def test_closing_loses_nothing(self, tmp_path: Path) -> None:
        """Everything can be read back after closing, exactly."""
        sink = self.make_factory()(tmp_path)
        for step, metrics in self.records:
            sink.log(step, metrics)
        sink.close()
        self._check(tmp_path, self.records)

    def test_a_run_without_metrics_is_fine(self, tmp_path: Path) -> None:
        """Closing immediately leaves no record."""
        self.make_factory()(tmp_path).close()
        self._check(tmp_path, ())

    def test_two_runs_do_not_meet(self, tmp_path: Path) -> None:
        """Each run folder has its own metrics, and nothing is written elsewhere."""
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        sinks = [self.make_factory()(folder) for folder in folders]
        for sink, record in zip(sinks, self.records, strict=False):
            sink.log(*record)
        for sink in sinks:
            sink.close()
        for folder, record in zip(folders, self.records, strict=False):
            self._check(folder, (record,))
        assert sorted(tmp_path.iterdir()) == folders, "files outside the run folder"

    def test_a_resumed_run_goes_on_behind_the_step_that_was_saved(self, tmp_path: Path) -> None:
        """Records of later steps are dropped; a new run starts without records."""
        for stop in (0, 1, 3):
            folder = tmp_path / str(stop)
            folder.mkdir()
            before = self.make_factory()(folder)
            for step, metrics in self.records:
                before.log(step, metrics)
            before.close()
            kept = self.records[:stop]
            resumed = {"resumed_step": kept[-1][0]} if kept else {}
            sink = self.make_factory()(folder, **resumed)
            again = [(step, {"loss": 0.25}) for step, _ in self.records[stop:]]
            for step, metrics in again:
                sink.log(step, metrics)
            sink.close()
            self._check(folder, [*kept, *again])

    def _check(self, folder: Path, wanted: Records) -> None:
        if not self.keeps:
            assert not list(folder.iterdir()), "a sink that keeps nothing wrote files"
            return
        read = self.read(folder)
        if read is None:
            return
        found = [(step, dict(metrics)) for step, metrics in read]
        assert [step for step, _ in found] == [step for step, _ in wanted], f"steps: {found}"
        for (step, metrics), (_, given) in zip(found, wanted, strict=True):
            assert set(metrics) == set(given), f"metrics of step {step}: {metrics}"
            for name, value in given.items():
                same = metrics[name] == value or (math.isnan(metrics[name]) and math.isnan(value))
                assert same, f"{name} of step {step}: {metrics[name]!r}, not {value!r}"
