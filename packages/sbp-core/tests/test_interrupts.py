"""What handlers of signals raise waits for the end of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from sbp_core.interrupts import HeldInterrupts


class Alarm(Exception):  # noqa: N818 (as a program calls what its handler raises)
    """What the handler of a test raises."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    def raise_alarm(number: int, frame: FrameType | None) -> None:
        raise Alarm

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGALRM: signal.signal(signal.SIGALRM, raise_alarm),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, Alarm)]
)
def test_what_a_handler_raises_waits_for_the_end_of_the_block(
    number: int, kind: type[BaseException]
) -> None:
    handler, done, heard = signal.getsignal(number), [], []

    with pytest.raises(kind), HeldInterrupts(heard.append) as held:
        signal.raise_signal(number)
        done.append(type(held.error))

    assert done == [kind] == [type(one) for one in heard]
    assert signal.getsignal(number) is handler


def test_what_comes_after_the_most_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), HeldInterrupts(most=1):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Alarm):
            signal.raise_signal(signal.SIGALRM)


def test_an_inner_block_hears_only_what_the_outer_one_no_longer_holds() -> None:
    inner_ones: list[type[BaseException] | None] = []

    with pytest.raises(KeyboardInterrupt), HeldInterrupts(most=1):
        with HeldInterrupts() as inner:
            signal.raise_signal(signal.SIGINT)
            inner_ones.append(inner.error and type(inner.error))
        with pytest.raises(Alarm), HeldInterrupts() as inner:
            signal.raise_signal(signal.SIGALRM)
            inner_ones.append(inner.error and type(inner.error))

    assert inner_ones == [None, Alarm]


def test_an_interrupt_comes_before_the_error_of_the_block_which_is_its_context() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("in the block")

    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_raises_nothing_and_one_of_the_block_stay() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))

    with HeldInterrupts():
        signal.raise_signal(signal.SIGALRM)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    assert heard == [signal.SIGALRM]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_only_the_signals_that_are_named_are_held() -> None:
    with pytest.raises(KeyboardInterrupt), HeldInterrupts(signals=[signal.SIGINT]):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Alarm):
            signal.raise_signal(signal.SIGALRM)


def test_what_is_held_can_be_raised_before_the_end_and_then_is_no_longer_held() -> None:
    with HeldInterrupts(most=1) as held:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                held.raise_held()


def test_other_threads_hold_nothing() -> None:
    handlers = []

    def run() -> None:
        with HeldInterrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert handlers == [signal.default_int_handler]
