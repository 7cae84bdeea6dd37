"""`sbp-watch RUN` asks the processes of a run by their sockets, and shows what they say."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sbp_core.errors import SbpError
from sbp_core.testing.signals import hears_signals
from sbp_launch.apps.watch import main, picture
from sbp_launch.exit_codes import BAD_CONFIG
from sbp_launch.run.status import StatusSignal, answer, ask, listen
from sbp_launch.world import World

SAID = [
    "2026-11-24 07:48:27+00:00 process 0 of 2: host node1, pid 301",
    "20 steps are done",
    "rank 0, thread compute: at receive x@0, micro-batch 3; 28 of 46 firings of the step are done",
    "  waits for: data in register x#0 from rank 1",
    "  last boxing:",
    "    commit (all-reduce), step 20: ended 12 ms ago, took 636 µs",
    "  registers: 2 of 14 are full; alive of quota, and who reads last:",
    "    forward.0.0#0: 4 of 4, for backward.0.6",
    "    host>vote to commit: 1 of 1, for vote to commit",
    "    forward.0.1#0: 1 of 4, for backward.0.5",
    "rank 0, thread boxing: between steps",
    "  registers: 0 of 3 are full",
]


@contextmanager
def answering(path: Path, lines: Sequence[str]) -> Iterator[None]:
    """Tell the first one who asks at a socket some lines."""
    listener = listen(path)
    assert listener is not None
    thread = threading.Thread(target=answer, args=(listener, list(lines)))
    thread.start()
    yield
    thread.join()
    listener.close()


def shown(*paths: Path) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(picture(paths))
    return console.export_text()


def test_a_process_is_asked_by_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "status_0.sock"

    with answering(path, SAID):
        found = ask(path)

    assert found == SAID
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_may_have_a_longer_name_than_an_address_of_a_socket(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40) / "status_0.sock"

    with answering(path, ["here"]):
        assert ask(path) == ["here"]


def test_the_socket_of_an_ended_process_is_said_to_give_no_answer_and_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "status_3.sock"
    listen(path).close()  # type: ignore[union-attr] # there are sockets in tests

    with pytest.raises(SbpError, match="no answer: Connection refused"):
        ask(path)
    assert "process 3: no answer: Connection refused" in shown(path)
    with answering(path, ["again"]):
        assert ask(path) == ["again"]


def test_a_place_that_takes_no_socket_is_gone_without(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")

    assert listen(tmp_path / "logs" / "status_0.sock") is None


def test_what_ranks_are_at_and_full_registers_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "status_0.sock"

    with answering(path, SAID):
        told = shown(path)

    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert f"{SAID[0]} · 20 steps are done" in lines
    at = lines.index("rank at of the step does registers")
    assert lines[at + 1] == (
        "0 receive x@0, micro-batch 3 28 of 46 waits for: data in register x#0 from rank 1 "
        "2 of 14 full"
    )
    assert lines[at + 2] == "0, boxing between steps 0 of 3 full"
    # A register of one place is full whenever it is used, and one that is not full holds nobody up.
    assert lines[at + 4] == "rank 0: forward.0.0#0 4/4 > backward.0.6"
    assert "commit" not in told and "forward.0.1" not in told


@hears_signals()
def test_a_run_answers_while_its_main_thread_is_busy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    session: Any = SimpleNamespace(status=lambda: ["7 steps are done", *SAID[2:]])
    with StatusSignal(tmp_path / "logs", World(rank=1, size=2, local_rank=1, local_size=2)) as one:
        one.session = session
        main([str(tmp_path), "--once"])
        told = capsys.readouterr().out
        one.session = None
        main([str(tmp_path), "--once"])
        before = capsys.readouterr().out

    assert "process 1 of 2: host " in told and "7 steps are done" in told
    assert "28 of 46" in told
    assert "no session is open now" in " ".join(before.split())
    assert not list((tmp_path / "logs").glob("*.sock"))


@hears_signals()
def test_a_run_that_has_not_begun_leaves_its_folder_alone(tmp_path: Path) -> None:
    with StatusSignal(tmp_path / "logs", World()):
        pass

    assert not list(tmp_path.iterdir())


@hears_signals()
def test_a_status_that_fails_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    def fails() -> list[str]:
        raise RuntimeError("no such register")

    with StatusSignal(tmp_path, World(rank=0, size=1, local_rank=0, local_size=1)) as one:
        one.session = SimpleNamespace(status=fails)  # type: ignore[assignment] # only asked
        first, second = ask(one.live_path), ask(one.live_path)

    assert first[1] == second[1] == "the state of its ranks cannot be read: no such register"


@pytest.mark.parametrize("folder", ["", "logs"])
def test_a_run_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    (tmp_path / "run" / folder).mkdir(parents=True)

    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "run")])

    assert ended.value.code == BAD_CONFIG
    told = capsys.readouterr().err
    assert ("is not running" if folder else "is not the folder of a run") in told
    assert "'run folder:'" in told


def test_too_quick_looks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--every", "0"])

    assert ended.value.code == BAD_CONFIG
    assert "0.05 to 3600 seconds" in capsys.readouterr().err


def test_nobody_who_does_not_listen_holds_a_run_up(tmp_path: Path) -> None:
    path = tmp_path / "status_0.sock"
    listener = listen(path)
    assert listener is not None
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))

    answer(listener, ["nobody reads this"])

    listener.close()
