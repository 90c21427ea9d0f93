"""The control path: whole messages, in order, of any size, and nobody waits for the other."""

import os
import select
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.engine.backends.process.channel import ParentChannel, WorkerChannel

LARGE = 20 << 20
"""Far more than a socket holds."""


@pytest.fixture
def ends():
    parent, fd = ParentChannel.pair()
    yield parent, WorkerChannel(fd), fd
    parent.close()
    with suppress(OSError):  # some of these tests close it themselves
        os.close(fd)


def pump_until(parent, is_done, timeout_s=20.0):
    """What a fleet does: pump when the socket is readable, or writable if there is a backlog."""
    poll = select.poll()
    mask = select.POLLIN

    def watch(has_backlog):
        nonlocal mask
        mask = select.POLLIN | (select.POLLOUT if has_backlog else 0)
        poll.modify(parent.fd, mask)

    poll.register(parent.fd, mask | (select.POLLOUT if parent._has_backlog else 0))
    parent.on_backlog = watch
    while not is_done():
        assert poll.poll(timeout_s * 1000), "nothing moves any more"
        parent.pump()


def test_messages_arrive_whole_and_in_order(ends):
    parent, worker, _ = ends
    for number in range(50):
        parent.send(bytes([number]) * number)
    assert [worker.recv() for _ in range(50)] == [bytes([n]) * n for n in range(50)]
    for number in range(50):
        worker.send(bytes([number]) * number)
    pump_until(parent, lambda: len(parent.inbox) == 50)
    assert list(parent.inbox) == [bytes([n]) * n for n in range(50)]


@given(st.lists(st.binary(max_size=300_000), max_size=8))
@settings(max_examples=25)
def test_an_echo_is_what_was_sent(messages):
    parent, fd = ParentChannel.pair()
    worker = WorkerChannel(fd)

    def echo():
        for _ in messages:
            worker.send(worker.recv())

    thread = threading.Thread(target=echo)
    thread.start()
    for message in messages:
        parent.send(message)
    pump_until(parent, lambda: len(parent.inbox) == len(messages))
    thread.join()
    assert list(parent.inbox) == messages
    parent.close()
    os.close(fd)


def test_two_sides_with_much_to_say_do_not_wait_for_each_other(ends):
    """The worker talks before it listens; the parent has sent before it looks."""
    parent, worker, _ = ends
    heard: list[int] = []

    def talk_then_listen():
        for _ in range(3):
            worker.send(b"w" * LARGE)
        heard.extend(len(worker.recv()) for _ in range(3))

    thread = threading.Thread(target=talk_then_listen)
    thread.start()
    for _ in range(3):
        parent.send(b"p" * LARGE)
    pump_until(parent, lambda: len(parent.inbox) == 3 and not parent._unsent)
    thread.join(60)
    assert heard == [LARGE] * 3
    assert [len(message) for message in parent.inbox] == [LARGE] * 3


def test_sending_never_blocks(ends):
    """Nobody reads; the parent keeps what does not fit, and says that it has a backlog."""
    parent, worker, _ = ends
    told: list[bool] = []
    parent.on_backlog = told.append
    parent.send(b"x" * LARGE)
    parent.send(b"y")
    assert told == [True]
    reader = threading.Thread(target=lambda: [worker.recv(), worker.recv()])
    reader.start()
    while told[-1:] != [False]:
        parent.pump()
    reader.join(60)
    assert told == [True, False]


def test_messages_sent_before_the_end_still_arrive(ends):
    parent, worker, fd = ends
    worker.send(b"last words")
    worker.send(b"z" * 100_000)
    os.close(fd)
    parent.pump()
    assert [len(message) for message in parent.inbox] == [10, 100_000]
    assert parent.is_broken


def test_sending_to_somebody_who_is_gone_is_no_error(ends):
    parent, _, fd = ends
    os.close(fd)
    parent.send(b"hello")
    parent.send(b"x" * LARGE)
    assert parent.is_broken


def test_half_a_message_is_no_message(ends):
    parent, _, fd = ends
    os.write(fd, (100).to_bytes(8, "little") + b"half")
    parent.pump()
    assert not parent.inbox
    os.close(fd)
    parent.pump()
    assert not parent.inbox
    assert parent.is_broken


def test_a_worker_learns_that_its_parent_is_gone():
    parent, fd = ParentChannel.pair()
    parent.send(b"first")
    parent.close()
    worker = WorkerChannel(fd)
    assert worker.recv() == b"first"
    with pytest.raises(EOFError, match="parent"):
        worker.recv()
    os.close(fd)
