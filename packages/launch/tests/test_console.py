"""Consoles: widths of files and of narrow terminals, and reports on streams that lack something."""

from __future__ import annotations

import errno
import io
import logging

import pytest
import torch
from torch import nn

from sbp_launch import parallelize
from sbp_launch.console import FILE_WIDTH, make_console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Left(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize(("columns", "width"), [("0", 20), ("1", 20), ("20", 20), ("33", 33)])
def test_a_narrow_terminal_is_taken_for_one_of_20_columns(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")

    assert make_console(file=Terminal()).width == width
    assert make_console(file=io.StringIO()).width == FILE_WIDTH
    assert make_console(file=io.StringIO(), file_width=110).width == 110


def test_a_report_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(8, 4)}
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    with (
        caplog.at_level(logging.WARNING),
        parallelize(
            model,
            lambda model, batch: model(batch["x"]).square().mean(),
            batch,
            optimizer,
            mesh=2,
            planner="manual/data_parallel",
        ) as step,
    ):
        step.report(shown)
        for lost in (Full(), Left()):
            step.report(lost)
        loss = float(step(batch))

    shown.flush()
    assert b"parameters" in shown.buffer.getvalue()
    assert caplog.text.count("the plan is not shown") == 2
    assert loss > 0
