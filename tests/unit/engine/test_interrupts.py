"""Handlers of signals wait for what is done as a whole."""

import gc
import os
import random
import signal
import threading
import time

import pytest

from envfleet.engine.interrupts import uninterrupted


class Stop(Exception):
    """What the handler raises."""


@pytest.fixture
def came():
    """Signals whose handler has run; it raises then."""
    numbers = []

    def stop(number, frame):
        numbers.append(number)
        raise Stop

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGUSR1)}
    gc.disable()  # what is raised where it calls others back is dropped
    yield numbers
    gc.enable()
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def as_a_whole(*steps):
    with uninterrupted:
        for step in steps:
            step()


def test_a_handler_waits_for_the_end(came):
    done = []
    with pytest.raises(Stop):
        as_a_whole(interrupt, lambda: done.append("all of it"))
    assert done == ["all of it"]
    assert came == [signal.SIGINT]


def test_it_waits_for_the_outermost_end(came):
    done = []
    with pytest.raises(Stop):
        as_a_whole(lambda: as_a_whole(interrupt), lambda: done.append("all of it"))
    assert done == ["all of it"]


def test_whoever_asks_twice_does_not_wait(came):
    done = []
    with pytest.raises(Stop):
        as_a_whole(interrupt, interrupt, lambda: done.append("too late"))
    assert done == []


def test_every_signal_that_came_is_handled(came):
    with pytest.raises(Stop):
        as_a_whole(interrupt, lambda: interrupt(signal.SIGUSR1))
    assert sorted(came) == [signal.SIGINT, signal.SIGUSR1]


def test_handlers_are_as_they_were_after_an_error(came):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), uninterrupted:
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before
    assert came == []


def until_stopped(after_s):
    """Enter and leave, in the hope that the signal comes in between."""
    signal.setitimer(signal.ITIMER_REAL, after_s)
    limit_s = time.monotonic() + 20
    while time.monotonic() < limit_s:
        as_a_whole(as_a_whole)


def test_a_handler_may_raise_wherever_it_is_held_or_given_back(came):
    """Whenever the signal comes, it is told once, and all is as it was."""
    dice = random.Random(0)
    before = signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGINT))
    numbers = (signal.SIGALRM, signal.SIGINT, signal.SIGUSR1)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        for count in range(1, 500):
            with pytest.raises(Stop):
                until_stopped(after_s=dice.uniform(1e-5, 3e-4))
            assert [signal.getsignal(number) for number in numbers] == handlers
            assert came == [signal.SIGALRM] * count
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(handler, came):
    signal.signal(signal.SIGUSR1, handler)
    with uninterrupted:
        assert signal.getsignal(signal.SIGUSR1) is handler


def test_other_threads_hold_nothing_back(came):
    found = []

    def look():
        before = signal.getsignal(signal.SIGINT)
        with uninterrupted:
            found.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert found == [True]


def test_another_thread_does_not_end_what_is_whole_here(came):
    done = []

    def elsewhere():
        thread = threading.Thread(target=as_a_whole)
        thread.start()
        thread.join(60)

    with pytest.raises(Stop):
        as_a_whole(elsewhere, interrupt, lambda: done.append("all of it"))
    assert done == ["all of it"]


def test_a_copy_of_the_process_has_its_handlers_at_once(came):
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted:
        pid = os.fork()
        if not pid:
            os._exit(0 if signal.getsignal(signal.SIGINT) is before else 1)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
