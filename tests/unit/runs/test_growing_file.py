"""Data that a checkpoint names by its length: nothing marked is lost, nothing later is kept."""

import zlib

import pytest

from envfleet import errors
from envfleet.runs.checkpoint import CheckpointFolder
from envfleet.runs.growing_file import GrowingFile
from tests.unit.observe.small_disk import files_no_larger_than


def resumed(path, mark):
    data = GrowingFile(path)
    data.go_on(mark)
    return data


def test_what_was_appended_after_the_mark_is_dropped(tmp_path):
    data = GrowingFile(tmp_path / "replay.bin")
    data.append(b"one")
    mark = data.mark()
    data.append(b"two")
    assert (data.length, data.read(), data.read(3)) == (6, b"onetwo", b"two")

    again = resumed(tmp_path / "replay.bin", mark)
    assert (again.length, again.read()) == (3, b"one")
    again.append(b"2")
    assert again.mark() == {"name": "replay.bin", "length": 4, "checksum": zlib.crc32(b"one2")}
    assert resumed(tmp_path / "replay.bin", again.mark()).read(1, 3) == b"ne"


def test_a_new_file_replaces_what_was_there_with_its_first_record(tmp_path):
    path = tmp_path / "replay.bin"
    path.write_bytes(b"of an earlier run")
    data = GrowingFile(path)
    mark = data.mark()
    assert path.read_bytes() == b"of an earlier run"
    data.append(b"new")
    assert path.read_bytes() == b"new"
    again = resumed(path, mark)
    again.append(b"other")
    assert path.read_bytes() == b"other"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be used: No such file"),
        (b"0123", "has 4 bytes, the checkpoint needs 8"),
        (b"01234x67", "is damaged"),
    ],
)
def test_a_file_that_lost_some_of_it_is_refused(content, said, tmp_path):
    data = GrowingFile(tmp_path / "replay.bin")
    data.append(b"01234567")
    mark = data.mark()
    (tmp_path / "replay.bin").unlink()
    if content is not None:
        (tmp_path / "replay.bin").write_bytes(content)
    with pytest.raises(errors.CheckpointError, match=said):
        resumed(tmp_path / "replay.bin", mark)
    if content is not None:
        assert (tmp_path / "replay.bin").read_bytes() == content


def test_the_mark_of_another_file_is_refused(tmp_path):
    data = GrowingFile(tmp_path / "a.bin")
    data.append(b"0")
    mark = data.mark()
    with pytest.raises(errors.CheckpointError, match=r"is not the marked file, which is 'a\.bin'"):
        resumed(tmp_path / "b.bin", mark)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    data = GrowingFile(tmp_path / "replay.bin")
    data.append(b"0" * 800)
    with files_no_larger_than(1000), pytest.raises(OSError, match="File too large"):
        data.append(b"1" * 800)
    assert data.read() == b"0" * 800
    assert resumed(tmp_path / "replay.bin", data.mark()).length == 800


def test_a_checkpoint_whose_data_is_damaged_gives_way_to_the_one_before(tmp_path):
    folder, data = CheckpointFolder(tmp_path), GrowingFile(tmp_path / "replay.bin")
    for steps, record in enumerate((b"first", b"second", b"third")):
        data.append(record)
        folder.write(steps, {"steps": steps, "replay": data.mark()})
    damaged = bytearray(data.read())
    damaged[8] ^= 1
    (tmp_path / "replay.bin").write_bytes(damaged)
    taken = []

    def take(state):
        taken.append(resumed(tmp_path / "replay.bin", state["replay"]))

    with pytest.warns(RuntimeWarning, match=r"replay\.bin is damaged.*going on from step_0*\.pt"):
        assert folder.newest(take=take)["steps"] == 0
    assert taken[0].read() == b"first"
