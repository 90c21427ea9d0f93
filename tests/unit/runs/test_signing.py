"""The user's key: made once, readable for its user only, and never used where it is not."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from envfleet.runs.signing import NoKey, is_signed, key_path, sign, user_key


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def test_a_key_is_made_once_for_its_user_only(home):
    key = user_key()
    assert (len(key), user_key()) == (32, key)
    path = home / "data" / "envfleet" / "key"
    assert key_path() == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("said", [None, "", "relative/path"])
def test_without_a_directory_of_its_own_it_lies_in_the_home_directory(said, home, monkeypatch):
    monkeypatch.delenv("XDG_DATA_HOME")
    if said is not None:
        monkeypatch.setenv("XDG_DATA_HOME", said)
    monkeypatch.setenv("HOME", str(home))
    assert key_path() == home / ".local" / "share" / "envfleet" / "key"


def test_signatures_are_of_one_key_and_one_content():
    signature = sign(user_key(), b"content")
    assert is_signed(user_key(), b"content", signature)
    assert not is_signed(user_key(), b"Content", signature)
    assert not is_signed(bytes(32), b"content", signature)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_a_key_that_others_can_read_is_not_used(mode):
    user_key()
    key_path().chmod(mode)
    with pytest.raises(NoKey, match="can be read by other users; remove it"):
        user_key()


def test_a_key_that_belongs_to_another_user_is_not_used(monkeypatch):
    user_key()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(NoKey, match="belongs to another user"):
        user_key()


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_key_of_another_length_is_not_used(content):
    user_key()
    key_path().write_bytes(content)
    with pytest.raises(NoKey, match="is damaged; remove it"):
        user_key()


@pytest.mark.parametrize("place", ["/sys/nowhere", "{home}/file"])
def test_a_directory_that_cannot_be_written_is_named(place, home, monkeypatch):
    (home / "file").write_text("")
    where = place.format(home=home)
    monkeypatch.setenv("XDG_DATA_HOME", where)
    with pytest.raises(NoKey, match=where):
        user_key()


def test_processes_that_make_it_at_once_have_one_key():
    code = "from envfleet.runs.signing import user_key; print(user_key().hex())"
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=pipe, text=True) for _ in range(4)
    ]
    keys = {one.communicate(timeout=100)[0] for one in started}
    assert len(keys) == 1
    assert Path(key_path()).read_bytes().hex() == keys.pop().strip()
