"""The run: judge every recorded call in worker processes, with the cached results of earlier runs.

A worker takes the calls of one operator. A crash or hang of a worker is a verdict on its current
call; another worker continues with the remaining calls.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from signatures.cache import Cache, found_from_json, found_to_json
from signatures.calls import RecordedCall
from signatures.judge import (
    Verdict,
    discovered,
    judge,
    refusal,
    rule_hash,
    search_hash,
    searchable,
)
from signatures.store import Calls

#: Seconds that one call may take.
_CALL_LIMIT_S = 300.0

#: The greatest number of calls of one worker.
_MOST_CALLS = 40


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run.

    Args:
        jobs: Number of worker processes.
        search: Whether to discover signatures.
    """

    jobs: int
    search: bool


@dataclass(slots=True)
class _Task:
    """The calls of one operator for a worker, and whether each claim runs in its own process."""

    op: str
    calls: deque[tuple[RecordedCall, bool]]
    process: Any = None
    heard: float = 0.0


@dataclass(slots=True)
class Progress:
    """The progress of a run; `tell` is called after each verdict."""

    tell: Callable[[Progress], None]
    calls: int = 0
    all_calls: int = 0
    op: str = ""
    wrong: int = 0
    missed: int = 0
    cached: int = 0
    verdicts: list[Verdict] = field(default_factory=list)


def run(
    calls: Calls,
    ops: Sequence[str],
    cache: Cache,
    options: Options,
    tell: Callable[[Progress], None],
) -> list[Verdict]:
    """Return the verdict on every recorded call of the operators.

    Args:
        calls: The recorded calls.
        ops: The operators.
        cache: The results of earlier runs, to which new ones are added.
        options: The options.
        tell: Called with the progress.
    """
    tasks = []
    for op in ops:
        # Calls that share a discovery are neighbours, so that one worker gets both.
        recorded = sorted((call for call, _ in calls.of(op)), key=search_hash)
        for start in range(0, len(recorded), _MOST_CALLS):
            part = recorded[start : start + _MOST_CALLS]
            tasks.append(_Task(op, deque((call, False) for call in part)))
    # Long tasks first, so that none remains alone at the end.
    waiting = deque(sorted(tasks, key=lambda task: -len(task.calls)))
    progress = Progress(tell, all_calls=sum(len(task.calls) for task in tasks))
    running: dict[Connection, _Task] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            _start(waiting.popleft(), running, cache, options)
        for connection in wait(list(running), timeout=1.0):
            assert isinstance(connection, Connection)
            _receive(connection, running, waiting, cache, progress)
        for connection, task in list(running.items()):
            if time.monotonic() - task.heard > _CALL_LIMIT_S:
                task.process.kill()
                _bury(connection, running, waiting, progress, f"no answer in {_CALL_LIMIT_S:g} s")
    return progress.verdicts


def _start(task: _Task, running: dict[Connection, _Task], cache: Cache, options: Options) -> None:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    task.process = context.Process(
        target=_work, args=(list(task.calls), cache, options, sending), daemon=False
    )
    task.heard = time.monotonic()
    task.process.start()
    sending.close()
    running[receiving] = task


def _work(
    calls: Iterable[tuple[RecordedCall, bool]], cache: Cache, options: Options, sending: Connection
) -> None:
    """Judge calls in a worker; sends (verdict, its hash, discovery, its hash, cached) for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for recorded, isolated in calls:
        hashed = rule_hash(recorded) + ("/searched" if options.search else "")
        verdict = cache.verdicts.get(hashed)
        if verdict is not None:
            sending.send((verdict.to_json(), hashed, None, "", True))
            continue
        fresh, search_key = None, search_hash(recorded)
        started = time.perf_counter()
        try:
            found = None
            if options.search and searchable(recorded):
                found = cache.found.get(search_key)
                if found is None:
                    fresh = found = cache.found[search_key] = discovered(recorded)
            discover_s = time.perf_counter() - started
            verdict = judge(recorded, found, isolated=isolated)
            verdict.discover_s = discover_s
        except Exception as error:  # an error of the rule, the engine or an operator is a verdict
            verdict = refusal(recorded, f"{type(error).__name__}: {error}".splitlines()[0][:300])
        packed = None if fresh is None else found_to_json(fresh)
        sending.send((verdict.to_json(), hashed, packed, search_key, False))
    sending.close()
    os._exit(0)  # without the exit handlers of the parent


def _receive(
    connection: Connection,
    running: dict[Connection, _Task],
    waiting: deque[_Task],
    cache: Cache,
    progress: Progress,
) -> None:
    task = running[connection]
    try:
        value, hashed, packed, search_key, cached = connection.recv()
    except EOFError:
        _bury(connection, running, waiting, progress, "execution crashes")
        return
    task.heard = time.monotonic()
    task.calls.popleft()
    verdict = Verdict.from_json(value)
    if not cached:
        cache.keep_verdict(hashed, verdict)
    if packed is not None:
        cache.keep_found(search_key, found_from_json(packed))
    _count(progress, verdict, cached=cached)


def _bury(
    connection: Connection,
    running: dict[Connection, _Task],
    waiting: deque[_Task],
    progress: Progress,
    reason: str,
) -> None:
    """End a worker; requeue its remaining calls, except the current one."""
    task = running.pop(connection)
    connection.close()
    task.process.join()
    if not task.calls:
        return
    recorded, isolated = task.calls.popleft()
    if isolated:
        _count(progress, refusal(recorded, reason), cached=False)
    else:
        # Try again with each claim in its own process, to find the one that crashes.
        task.calls.appendleft((recorded, True))
    if task.calls:
        waiting.appendleft(_Task(task.op, task.calls))


def _count(progress: Progress, verdict: Verdict, *, cached: bool) -> None:
    progress.verdicts.append(verdict)
    progress.calls += 1
    progress.op = verdict.op
    progress.wrong += len(verdict.wrong)
    progress.missed += sum(not entry.reason for entry in verdict.missed)
    progress.cached += cached
    progress.tell(progress)
