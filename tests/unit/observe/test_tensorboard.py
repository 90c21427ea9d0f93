"""Curves as TensorBoard itself reads them."""

import importlib.util
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envfleet.observe import tensorboard
from envfleet.observe.tensorboard import TensorBoard


def points(folder, curve):
    read = EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, round(event.value, 4)) for event in read.Scalars(curve)]


def test_what_is_noted_is_read_back(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.note(64, {"mean_return": 20.5, "entropy": 0.5, "ended": "no number"})
    sink.note(128, {"mean_return": None, "entropy": 0.25})
    sink.close()
    assert points(tmp_path, "rollout/ep_rew_mean") == [(64, 20.5)]
    assert points(tmp_path, "train/entropy_loss") == [(64, -0.5), (128, -0.25)]


def test_a_note_is_in_the_file_when_it_returns_and_no_thread_is_needed(tmp_path):
    before = threading.active_count()
    TensorBoard(tmp_path).note(64, {"value_loss": 1.0})
    assert points(tmp_path, "train/value_loss") == [(64, 1.0)]
    assert threading.active_count() == before


@pytest.mark.parametrize("kills", [1, 3])
def test_a_run_that_goes_on_has_no_point_twice(kills, tmp_path):
    first = TensorBoard(tmp_path)
    for step in (64, 128, 192):
        first.note(step, {"value_loss": step})
    for attempt in range(kills):
        again = TensorBoard(tmp_path, start_steps=64)
        for step in (128, 192, 256):
            again.note(step, {"value_loss": step + 1000 * (attempt + 1)})
    last = 1000.0 * kills
    expected = [(64, 64.0), (128, 128 + last), (192, 192 + last), (256, 256 + last)]
    assert points(tmp_path, "train/value_loss") == expected


def test_half_a_record_that_a_kill_left_hides_nothing(tmp_path):
    TensorBoard(tmp_path).note(64, {"value_loss": 1.0})
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() + path.read_bytes()[:21])
    TensorBoard(tmp_path, start_steps=64).note(128, {"value_loss": 2.0})
    assert points(tmp_path, "train/value_loss") == [(64, 1.0), (128, 2.0)]


def test_it_is_known_whether_the_package_is_there(monkeypatch):
    assert tensorboard.is_installed()
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    assert not tensorboard.is_installed()
    assert importlib.util.find_spec("tensorboard") is not None
