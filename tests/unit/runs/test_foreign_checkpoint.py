"""A run that somebody else made: its pickles are opened on request only, and by eval never.

Every malicious pickle here tries to create a file. It is planted in each part of a checkpoint, in
the formats that earlier versions read, and with a forged signature.
"""

import hashlib
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from envfleet import errors
from envfleet.cli import main
from envfleet.learn.load import load_agent, resumed_options
from envfleet.learn.train import train
from envfleet.runs import checkpoint
from envfleet.runs.checkpoint import FORMAT, NOT_OPENED, load, save
from envfleet.runs.plain_data import encode
from tests.unit.learn.test_train import PPO, RUN, StopAt, metrics, weights

SMALL = replace(RUN, num_episodes=4, save_every=64, eval_episodes=1, tensorboard=False)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A run that was made with another user's key."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "their home"))
    train(SMALL, PPO, tmp_path / "run", StopAt(2))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "my home"))
    return tmp_path / "run"


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "was run"


def put(folder, content):
    """Give every checkpoint of a run this content."""
    for path in folder.glob("*.pt"):
        path.unlink()
        path.write_bytes(content)


def assembled(header, pickles, arrays, signature=bytes(32)):
    """The bytes of a checkpoint, by a forger who knows the format."""
    lengths = [len(part).to_bytes(8, "little") for part in (header, pickles)]
    body = b"".join((FORMAT, *lengths, header, pickles, *arrays, signature))
    return body + hashlib.sha256(body).digest()


def forged(folder, mark, where):
    """A checkpoint of this run with something malicious in one of its parts."""
    state = load(folder / "latest.pt", trust="none")
    evil = pickle.dumps([Malicious(mark)] * 4)
    header, arrays, objects = encode(state)
    assert objects == [NOT_OPENED] * 4
    match where:
        case "pickles":
            return assembled(header, evil, arrays)
        case "header":
            return assembled(evil, evil, arrays)
        case "arrays":
            return assembled(header, b"", [evil, *arrays])
        case "signature":
            return assembled(header, evil, arrays, hashlib.sha256(evil).digest())
        case "another place":
            at = header.replace(b'"iteration": 2', b'"iteration": {"!": "object", "at": 0}')
            assert at != header
            return assembled(at, evil, arrays)
        case "an object array":
            at = header.replace(b'["tensor", "float32"', b'["array", "|O"', 1)
            assert at != header
            return assembled(at, evil, [evil, *arrays])
        case "torch":
            torch.save(
                {"format": "envfleet checkpoint 2", "trainer": Malicious(mark)}, folder / "x"
            )
            return (folder / "x").read_bytes()
        case "a plain pickle":
            return pickle.dumps(Malicious(mark))
    raise AssertionError(where)


PLACES = [
    *("pickles", "header", "arrays", "signature", "another place", "an object array"),
    *("torch", "a plain pickle"),
]


def test_the_pickle_would_run(mark):
    pickle.loads(pickle.dumps(Malicious(mark)))
    assert mark.exists()


@pytest.mark.parametrize("where", PLACES)
def test_resuming_runs_nothing_of_it(where, theirs, mark):
    put(theirs, forged(theirs, mark, where))
    with pytest.raises(errors.CheckpointError):
        train(*resumed_options(theirs), theirs, is_resumed=True)
    assert not mark.exists()


@pytest.mark.parametrize("where", PLACES)
def test_the_command_line_says_one_sentence(where, theirs, mark, capsys):
    put(theirs, forged(theirs, mark, where))
    assert main(["train", "--resume", str(theirs), "--plain"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in said
    if where in ("pickles", "signature"):
        assert "not written by this user on this machine" in said
        assert "--trust" in said
    assert not mark.exists()


@pytest.mark.parametrize("where", PLACES)
def test_eval_never_opens_it(where, theirs, mark, capsys):
    put(theirs, forged(theirs, mark, where))
    for path in (theirs, theirs / "latest.pt"):
        code = main(["eval", str(path), "--episodes", "1"])
        # where an agent is not concerned it is as good as any
        assert code == (0 if where in ("pickles", "signature", "another place") else 1)
        assert "Traceback" not in capsys.readouterr().err
    assert not mark.exists()


def test_eval_opens_no_pickle_of_this_user_either(tmp_path, mark):
    train(SMALL, PPO, tmp_path / "run", StopAt(2))
    state = load(tmp_path / "run" / "latest.pt")
    state["job"]["slots"] = Malicious(mark)
    save(tmp_path / "run" / "latest.pt", state)
    load_agent(tmp_path / "run")
    assert not mark.exists()


def test_with_trust_it_runs(theirs, mark):
    put(theirs, forged(theirs, mark, "pickles"))
    main(["train", "--resume", str(theirs), "--plain", "--trust"])
    assert mark.exists()


def test_another_user_s_run_is_evaluated_and_with_trust_resumed(theirs, tmp_path, capsys):
    train(SMALL, PPO, tmp_path / "whole")
    assert main(["eval", str(theirs), "--episodes", "1"]) == 0
    assert main(["train", "--resume", str(theirs), "--plain"]) == 1
    assert "--trust" in capsys.readouterr().err
    assert main(["train", "--resume", str(theirs), "--plain", "--trust"]) == 0
    assert weights(theirs) == weights(tmp_path / "whole")
    # what was written since is this user's
    assert main(["train", "--resume", str(theirs), "--plain", "--num-episodes", "5"]) == 0


def test_trust_without_a_run_to_go_on_with_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--env", "CartPole-v1", "--trust"]) == 2
    assert "--trust goes with --resume" in capsys.readouterr().err


def test_a_foreign_newest_checkpoint_gives_way_to_one_of_this_user(tmp_path, mark):
    train(SMALL, PPO, tmp_path / "whole")
    mine = tmp_path / "run"
    train(SMALL, PPO, mine, StopAt(3))
    foreign = forged(mine, mark, "pickles")
    for name in ("latest.pt", "step_000000000192.pt"):
        (mine / name).unlink()
        (mine / name).write_bytes(foreign)
    with pytest.warns(RuntimeWarning, match=r"not written by this user.*going on from step_0*128"):
        train(*resumed_options(mine), mine, is_resumed=True)
    assert weights(mine) == weights(tmp_path / "whole")
    assert not mark.exists()


@pytest.mark.parametrize("part", ["header", "arrays", "pickles"])
def test_a_signature_is_of_the_whole_checkpoint(part, tmp_path):
    path = tmp_path / "a.pt"
    save(path, {"number": 1, "weights": torch.zeros(3), "object": Malicious(tmp_path / "x")})
    content = bytearray(path.read_bytes()[:-32])
    header = int.from_bytes(content[22:30], "little")
    pickles = int.from_bytes(content[30:38], "little")
    begin = {"header": 38, "pickles": 38 + header, "arrays": 38 + header + pickles}[part]
    content[begin + 10] ^= 1
    path.write_bytes(bytes(content) + hashlib.sha256(content).digest())
    with pytest.raises(errors.CheckpointError):
        load(path)
    assert not (tmp_path / "x").exists()


class TestWithoutAKey:
    """The user's directory cannot be written: that is said, and --trust is needed."""

    @pytest.fixture(autouse=True)
    def _no_key(self, monkeypatch):
        monkeypatch.setenv("XDG_DATA_HOME", "/sys/nowhere")

    def test_a_run_says_so_once_and_resuming_needs_trust(self, tmp_path):
        train_of = (SMALL, PPO, tmp_path / "run")
        with pytest.warns(RuntimeWarning) as said:
            train(*train_of, StopAt(2))
        texts = [str(one.message) for one in said if "signed" in str(one.message)]
        assert len(texts) == 1
        assert "/sys/nowhere" in texts[0]
        assert texts[0].endswith("resuming this run will need --trust")
        with pytest.raises(errors.CheckpointError, match=r"key is missing.*resume with --trust"):
            train(*train_of, is_resumed=True)
        with pytest.warns(RuntimeWarning, match="cannot be signed"):
            train(*train_of, is_resumed=True, is_trusted=True)
        assert metrics(tmp_path / "run")[-1]["ended"] == "finished"

    def test_eval_needs_no_key(self, tmp_path):
        with pytest.warns(RuntimeWarning, match="cannot be signed"):
            train(SMALL, PPO, tmp_path / "run", StopAt(2))
        assert main(["eval", str(tmp_path / "run"), "--episodes", "1"]) == 0

    def test_a_checkpoint_without_pickles_needs_no_key(self, tmp_path):
        assert checkpoint.save(tmp_path / "a.pt", {"weights": torch.zeros(3)})
        assert load(tmp_path / "a.pt")["weights"].tolist() == [0, 0, 0]


def test_a_copied_run_is_still_this_user_s(tmp_path):
    train(SMALL, PPO, tmp_path / "run", StopAt(2))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert train(*resumed_options(tmp_path / "copy"), tmp_path / "copy", is_resumed=True).new_steps


def test_a_signature_of_zeros_is_none_even_for_the_key_of_zeros(tmp_path, monkeypatch, mark):
    home = tmp_path / "home" / "envfleet"
    home.mkdir(parents=True)
    (home / "key").write_bytes(bytes(32))
    os.chmod(home / "key", 0o600)
    monkeypatch.setenv("XDG_DATA_HOME", str(home.parent))
    header, arrays, _ = encode({"a": Malicious(mark)})
    (tmp_path / "a.pt").write_bytes(assembled(header, pickle.dumps([Malicious(mark)]), arrays))
    with pytest.raises(errors.CheckpointError, match="not written by this user"):
        load(tmp_path / "a.pt")
    assert not mark.exists()
