"""Bells: counters in the kernel, as eventfd and as pipe."""

import os
import select
import threading
import time

import pytest

from envfleet.engine.backends.process import bell as bells
from envfleet.engine.backends.process.bell import Bell


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
