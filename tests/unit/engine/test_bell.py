"""Bells: counters in the kernel, as eventfd and as pipe, and words in shared memory."""

import mmap
import os
import select
import signal
import threading
import time

import numpy as np
import pytest

from envfleet.engine import rows, rows_python
from envfleet.engine.backends.process import bell as bells
from envfleet.engine.backends.process.bell import Bell, WordBell
from tests.gates import PATIENCE_S


@pytest.fixture(params=["eventfd", "pipe"] if bells.HAS_EVENTFD else ["pipe"])
def create(request, monkeypatch):
    """Makes bells of one kind, and closes them."""
    if request.param == "pipe":
        monkeypatch.setattr(bells, "HAS_EVENTFD", False)
    made = []

    def create(**how):
        made.append(Bell.create(**how))
        assert (made[-1].fd == made[-1].write_fd) == (request.param == "eventfd")
        return made[-1]

    yield create
    for bell in made:
        bell.close()


def is_readable(bell):
    poll = select.poll()
    poll.register(bell.fd, select.POLLIN)
    return bool(poll.poll(0))


def test_a_bell_counts_its_rings(create):
    bell = create(take_waits=False)
    for count in (1, 2, 7, 1000):
        for _ in range(count):
            bell.ring()
        assert is_readable(bell)
        assert bell.take() == count
        assert not is_readable(bell)


def test_taking_from_a_silent_bell_gives_nothing(create):
    bell = create(take_waits=False)
    assert bell.take() == 0
    bell.ring()
    assert (bell.take(), bell.take()) == (1, 0)


def test_taking_waits_where_it_was_asked_to(create):
    bell = create(take_waits=True)
    threading.Timer(0.1, bell.ring).start()
    started_s = time.monotonic()
    assert bell.take() == 1
    assert time.monotonic() - started_s > 0.05


def test_no_ring_is_lost_between_threads(create):
    bell, rings = create(take_waits=True), 20_000
    thread = threading.Thread(target=lambda: [bell.ring() for _ in range(rings)])
    thread.start()
    heard = 0
    while heard < rings:
        heard += bell.take()
    thread.join()
    assert heard == rings


def test_a_bell_rings_in_another_process(create):
    """By its descriptors, which is how a worker gets it."""
    bell = create(take_waits=False)
    pid = os.fork()
    if pid == 0:
        mine = Bell(bell.fd, bell.write_fd)
        for _ in range(3):
            mine.ring()
        os._exit(0)
    os.waitpid(pid, 0)
    assert bell.take() == 3


def test_closing_twice_closes_nobody_else_s_descriptor(create):
    bell = create(take_waits=False)
    bell.close()
    read_fd, write_fd = os.pipe()
    bell.close()
    os.write(write_fd, b"x")
    assert os.read(read_fd, 1) == b"x"
    os.close(read_fd)
    os.close(write_fd)


def test_ringing_a_closed_bell_is_an_error_and_is_heard_by_nobody(create):
    bell = create(take_waits=False)
    fds = {bell.fd, bell.write_fd}
    bell.close()
    others = [create(take_waits=False) for _ in fds]
    assert fds <= {fd for other in others for fd in (other.fd, other.write_fd)}
    for _ in range(2):
        with pytest.raises(OSError, match="closed"):
            bell.ring()
    assert [other.take() for other in others] == [0] * len(others)


@pytest.mark.skipif(not rows_python.HAS_FUTEX, reason="needs futexes")
@pytest.mark.parametrize("form", [rows, rows_python])
class TestWordBell:
    """A bell without a descriptor, on a word that two processes share."""

    @pytest.fixture
    def words(self, form, monkeypatch):
        monkeypatch.setattr(bells, "wait_for_count", form.wait_for_count)
        return np.frombuffer(mmap.mmap(-1, 4096), np.uint64).data

    def test_it_counts_from_zero_whatever_rang_before_it_was_made(self, words):
        words[0] = 3
        bell = WordBell(words)
        assert bell.take() == 3
        words[0] = 2**32 + 5  # the kernel compares half of it
        assert bell.take() == 2**32 + 2

    def test_taking_waits_for_a_ring(self, words):
        bell = WordBell(words)
        waited, is_done = [], threading.Event()

        def wait():
            waited.append(bell.take())
            is_done.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not is_done.wait(0.1)
        bell.ring()  # nothing was counted
        assert not is_done.wait(0.1)
        words[0] = 1
        bell.ring()
        assert is_done.wait(PATIENCE_S)
        thread.join()
        assert waited == [1]

    def test_a_signal_does_not_end_the_wait(self, words):
        bell = WordBell(words)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            words[1] = 1
            os._exit(bell.take())
        while not words[1]:
            time.sleep(0.001)
        for _ in range(5):
            time.sleep(0.01)
            os.kill(pid, signal.SIGUSR1)
        words[0] = 7
        bell.ring()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    def test_no_ring_is_lost_between_processes(self, words):
        bell, rings = WordBell(words), 5000
        pid = os.fork()
        if pid == 0:
            heard = 0
            while heard < rings:
                heard += bell.take()
                words[1] = heard
            os._exit(0)
        for count in range(1, rings + 1):
            words[0] = count
            bell.ring()
            if count % 7 == 0:
                os.sched_yield()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert words[1] == rings
