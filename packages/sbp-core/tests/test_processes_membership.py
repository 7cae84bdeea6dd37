"""Members: which process a rank is, and whether it still runs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dict_store import elsewhere
from sleeping import ME, comes_to, member_of, sleeping

from sbp_core.processes import membership as members
from sbp_core.processes import reaper
from sbp_core.processes.membership import Member, MemberState, state_of


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping() as process:
        yield process


def test_a_process_is_seen_to_run_stop_go_on_and_end(sleeper: subprocess.Popen[bytes]) -> None:
    member = member_of(sleeper)

    assert state_of(member, ME) is MemberState.RUNNING
    sleeper.send_signal(signal.SIGSTOP)
    assert comes_to(member, MemberState.STOPPED)
    sleeper.send_signal(signal.SIGCONT)
    assert comes_to(member, MemberState.RUNNING)
    sleeper.kill()
    # Nobody has waited for it: the kernel still knows it.
    assert comes_to(member, MemberState.ENDED)
    assert sleeper.wait() == -signal.SIGKILL
    assert state_of(member, ME) is MemberState.ENDED


def test_another_process_with_the_same_id_is_not_taken_for_one_that_ended() -> None:
    assert ME.started > 0 and state_of(ME, ME) is MemberState.RUNNING

    assert state_of(replace(ME, started=ME.started - 1), ME) is MemberState.ENDED
    assert state_of(replace(ME, started=0), ME) is MemberState.RUNNING


def test_without_proc_a_signal_finds_out(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (members, reaper):
        monkeypatch.setattr(module, "_PROC", tmp_path)
    member = replace(ME, pid=sleeper.pid)

    assert Member.of_this_process(0).started == 0
    assert state_of(member, ME) is MemberState.RUNNING
    sleeper.kill()
    sleeper.wait()
    assert state_of(member, ME) is MemberState.ENDED


def test_nothing_is_known_of_a_process_on_another_host() -> None:
    assert state_of(elsewhere(1), ME) is MemberState.UNKNOWN
    assert state_of(replace(ME, pid_namespace="a container"), ME) is MemberState.UNKNOWN


def test_a_member_comes_back_from_its_text() -> None:
    assert Member.from_json(ME.to_json()) == ME


def test_messages_name_rank_process_and_host() -> None:
    assert ME.name_for(ME) == f"rank 0 (pid {os.getpid()} on this host)"
    assert elsewhere(3).name_for(ME) == "rank 3 (pid 1 on host far)"
