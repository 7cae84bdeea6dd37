"""A backend of one process a rank, when its program ends without closing it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dict_store import DictControlStore, stores_of

from sbp_core.errors import BoxingError
from sbp_core.processes.connections import Connections
from sbp_core.processes.process_backend import ProcessBackend


class Ends:
    rank = 0


class LonelyConnections(Connections):
    def __init__(self, store: DictControlStore) -> None:
        super().__init__(store)
        self.rendezvous(1.0)

    def _announce(self, text: str) -> None:
        self.control_store.announce_failure(text)

    def _release(self) -> None:
        self.control_store.deregister()


class LonelyBackend(ProcessBackend):
    def __init__(self) -> None:
        super().__init__()
        (self.store,) = stores_of(1)

    def _connect(self, ranks: Sequence[int]) -> tuple[Connections, Any]:
        return LonelyConnections(self.store), Ends()


@pytest.fixture
def backend() -> LonelyBackend:
    backend = LonelyBackend()
    backend.open([0])
    return backend


def test_the_others_hear_that_the_program_ended(backend: LonelyBackend) -> None:
    backend._end_with_program()

    assert "rank 0 reported: its program ended without closing" in (backend.store.failure() or "")


def test_the_others_hear_of_the_exception_that_ended_the_program(
    backend: LonelyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("loss is not a number"), raising=False)

    backend._end_with_program()

    assert backend.store.failure() == "rank 0 reported: ValueError: loss is not a number"


def test_a_forked_process_and_a_closed_backend_say_nothing(
    backend: LonelyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        backend._end_with_program()
    backend.close()
    backend._end_with_program()

    assert backend.store.failure() is None


def test_who_is_left_is_known_when_the_run_has_failed_and_not_before(
    backend: LonelyBackend,
) -> None:
    with pytest.raises(BoxingError, match="asked for when a run has failed"):
        backend.survivors(1.0)

    backend.fail(ValueError("loss is not a number"))

    left = backend.survivors(1.0)
    assert (left.ranks, left.gather("here", 1.0)) == ((0,), ["here"])
    left.leave()
    backend.close()
    with pytest.raises(BoxingError, match="before it closes"):
        backend.survivors(1.0)


PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print("collects", not gc.get_freeze_count(), file=sys.stderr))
from test_processes_backend import LonelyBackend

backend = LonelyBackend()
tell = backend.store.announce_failure
backend.store.announce_failure = lambda text: (tell(text), print(text))
backend.open([0])
if sys.argv[1] == "fail":
    backend.fail(ValueError("loss is not a number"))
if sys.argv[1] in ("close", "fail"):
    backend.close()
if sys.argv[1] == "raise":
    raise ValueError("loss is not a number")
"""


def run_program(how: str) -> subprocess.CompletedProcess[bytes]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env=environment, capture_output=True, timeout=60
    )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("close", ""),
        ("fail", "rank 0 reported: ValueError: loss is not a number"),
        ("raise", "rank 0 reported: ValueError: loss is not a number"),
        ("exit", "rank 0 reported: its program ended without closing the boxing backend"),
    ],
)
def test_a_program_that_ends_tells_by_itself(how: str, told: str) -> None:
    ended = run_program(how)

    assert ended.stdout.decode().strip() == told
    assert ended.returncode == (1 if how == "raise" else 0)


@pytest.mark.parametrize(("how", "collects"), [("close", True), ("raise", False), ("fail", False)])
def test_a_program_that_has_failed_ends_without_looking_at_all_its_objects(
    how: str, collects: bool
) -> None:
    assert f"collects {collects}" in run_program(how).stderr.decode()
