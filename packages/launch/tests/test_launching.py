"""What the command says of ranks that it has started, by how they ended."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from saved_states import STATES, pieces_of, save
from trainable import registry, run_config

from sbp_core.boxing import LaunchSpec
from sbp_core.errors import RunError
from sbp_core.placement import Placement
from sbp_core.processes import ExitReport, LaunchRequest, Line, one_process_per_rank
from sbp_core.sbp import B, NdSbp
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.steps import step_name
from sbp_launch.launching import launching
from sbp_launch.launching.launchers import Spawn
from sbp_launch.run.stopping import SAVING, STARTING
from sbp_launch.settings.config import PluginChoice
from sbp_launch.world import World

#: What one process owns of some states.
OWNED = pieces_of(STATES, Placement.grid((1,), ("a",), "cpu"), NdSbp(B))

#: A rank whose exit code is that of its place in a list.
_RANK = "import os, sys, time; sys.exit(int(sys.argv[1].split(',')[int(os.environ['RANK'])]))"


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, codes: str) -> None:
    """Start two ranks that end with some exit codes."""

    def specs(self: Spawn, request: LaunchRequest) -> tuple[LaunchSpec, ...]:
        command = (sys.executable, "-c", _RANK, codes)
        return one_process_per_rank(2, command, init_method="env://", rank=None, world_size=None)

    monkeypatch.setattr(Spawn, "launch_specs", specs)
    config = replace(run_config(), launcher=PluginChoice(name="spawn"))
    launching.launch(config, registry(), folder, World(), None)


def test_ranks_that_end_well_are_a_run_that_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(tmp_path, monkeypatch, "0,0")
    assert "launcher spawn: 2 processes, one a rank" in capsys.readouterr().out


def test_a_setting_that_rank_0_refuses_is_told_by_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as caught:
        launched(tmp_path, monkeypatch, "2,2")
    assert caught.value.code == 2


@pytest.mark.parametrize("codes", ["0,1", "0,2"])
def test_a_rank_that_fails_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: str
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.txt").write_text("one\nthe last line\n", encoding="utf-8")

    with pytest.raises(RunError, match=f"rank 1 ended with exit code {codes[-1]}") as caught:
        launched(tmp_path, monkeypatch, codes)

    assert "rank_1.txt, which ends with:" in str(caught.value)
    assert "the last line" in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_a_log_that_never_ends_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank_1.txt"
    if kind == "pipe":
        os.mkfifo(log)
    else:
        with log.open("wb") as file:
            file.truncate(2**42)  # of which nothing is on the disk
            file.seek(2**42)
            file.write(b"\nthe last line\n")

    with pytest.raises(RunError, match="rank 1 ended with exit code 1") as caught:
        launched(tmp_path, monkeypatch, "0,1")

    assert ("the last line" in str(caught.value)) == (kind == "huge")


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_run_that_a_signal_stopped_ends_as_if_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: type[BaseException]
) -> None:
    report = ExitReport(exits=(), stopped_by=number)
    monkeypatch.setattr(launching, "supervise", lambda specs, **settings: report)

    with pytest.raises(raised) as caught:
        launched(tmp_path, monkeypatch, "0,0")

    assert getattr(caught.value, "code", 143) == 143


def test_a_run_that_failed_says_from_which_checkpoint_it_goes_on_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        save(LocalStorage(tmp_path / "run" / "checkpoints"), step_name(step), OWNED)

    with pytest.raises(RunError) as caught:
        launched(tmp_path / "run", monkeypatch, "0,1")

    last = str(caught.value).splitlines()[-1]
    assert last == "  to continue from step-00000002: sbp-train resume=run"


def test_ranks_get_time_for_their_step_and_to_save_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = launching._Output()
    first, second = (LaunchSpec(command=("python",), ranks=(rank,)) for rank in (0, 1))
    found = []

    for text in ("planning", f"making the states and {STARTING} ... 0.1 s", SAVING, "saved"):
        output.write(Line(spec=first, text=text))
        output.write(Line(spec=second, text="rank 1 speaks"))
        found.append(output.more_grace_s())

    assert found == [0.0, 30.0, 600.0, 0.0]
    assert "rank 1" not in capsys.readouterr().out
