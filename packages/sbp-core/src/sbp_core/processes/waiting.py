"""Waiting with a time limit: polling a condition, and abandoning a call that nothing can interrupt.

Connecting ranks is such a call in every library: gloo, MPI and NCCL wait for the other ranks, even
if those have failed meanwhile. It runs on a thread that may be abandoned inside the library. The
caller waits for the thread, and stops waiting when there is no hope:

    caller   done? no, check; done? no, check: raises           (looks no more)
    thread   inside the library .................. done         `discard(result)`
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from math import inf
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    done: Callable[[], bool], limit_s: float, *, first_pause_s: float, longest_pause_s: float
) -> bool:
    """Poll until `done()` is true or the time is over; return the result.

    Args:
        done: Called at least once; its exceptions are passed on.
        limit_s: Seconds to poll.
        first_pause_s: Seconds between the first two calls; each pause is twice the previous one.
        longest_pause_s: Seconds that no pause exceeds.
    """
    end, pause = time.monotonic() + limit_s, first_pause_s
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest_pause_s)
    return True


def run_abandonable(
    function: Callable[[], T],
    *,
    thread_name: str,
    check: Callable[[], None],
    look_s: float,
    limit_s: float = inf,
    discard: Callable[[T], None] | None = None,
) -> T:
    """Call a function on another thread, and abandon the thread if waiting becomes hopeless.

    Args:
        function: Called once.
        thread_name: The name of the thread.
        check: Called now and then; raises if there is no hope.
        look_s: Seconds between two calls of `check`.
        limit_s: Seconds to wait.
        discard: Called, on a thread of its own, with a result that comes after the caller has left.

    Returns:
        The result of the function.

    Raises:
        TimeoutError: the time was over.
        BaseException: raised by the function or `check`.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(function())
        except BaseException as error:
            made.set_exception(error)

    def discard_late(late: Future[T]) -> None:
        if discard is not None and late.exception() is None:
            # On another thread: this one is the caller's if the result came just now, and ending a
            # connection may wait for other ranks.
            threading.Thread(target=discard, args=(late.result(),), daemon=True).start()

    # A daemon: it may be inside the library when the process ends.
    threading.Thread(target=run, name=thread_name, daemon=True).start()
    end = time.monotonic() + limit_s
    try:
        while not wait([made], min(look_s, max(0.0, end - time.monotonic()))).done:
            check()
            if time.monotonic() >= end:
                raise TimeoutError(f"{thread_name} took longer than {limit_s:.3g} s")
    except BaseException:
        made.add_done_callback(discard_late)
        raise
    return made.result()
