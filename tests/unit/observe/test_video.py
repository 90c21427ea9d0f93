"""Videos, looked at again frame by frame."""

import os
import re
import subprocess

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest

from envfleet import errors
from envfleet.observe import video
from envfleet.observe.video import record


class Painted(gymnasium.Env):
    """Each frame is of one colour, by the step it shows."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=5, size=(64, 96)):
        self.render_mode, self.length, self.size = "rgb_array", length, size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), float(action), self.t == self.length, False, {}

    def render(self):
        return np.full((*self.size, 3), 40 * self.t % 256, np.uint8)


def frames(path):
    """Size, frames per second and codec as ffmpeg tells them, and every frame."""
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(
        [ffmpeg, "-i", str(path), *raw], capture_output=True, timeout=60, check=True
    )
    stream = next(line for line in done.stderr.decode().splitlines() if "Video:" in line)
    about = re.search(r"Video: (\w+).* (\d+)x(\d+).* ([\d.]+) fps", stream)
    assert about, stream
    width, height = int(about.group(2)), int(about.group(3))
    shown = np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)
    return (width, height, float(about.group(4)), about.group(1)), shown


def test_an_episode_is_seen_from_its_reset_to_its_end(tmp_path):
    said = record(lambda obs, info: 1, Painted, tmp_path / "videos" / "a.mp4", seed=0)
    assert (said.frames, said.episode_return, said.is_whole) == (6, 5.0, True)
    about, shown = frames(said.path)
    assert about == (96, 64, 10.0, "h264")
    assert [round(float(one.mean()) / 40) for one in shown] == [0, 1, 2, 3, 4, 5]
    assert os.listdir(said.path.parent) == ["a.mp4"]


def test_odd_sides_are_made_even(tmp_path):
    said = record(lambda obs, info: 0, lambda: Painted(size=(33, 51)), tmp_path / "a.mp4")
    about, shown = frames(said.path)
    assert about[:2] == (52, 34)
    assert len(shown) == 6


def test_an_episode_without_an_end_is_left(tmp_path):
    said = record(lambda obs, info: 0, lambda: Painted(length=-1), tmp_path / "a.mp4", max_frames=8)
    assert (said.frames, said.is_whole) == (8, False)
    assert len(frames(said.path)[1]) == 8


def test_cartpole_is_drawn_without_a_screen(tmp_path, monkeypatch, capfd):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    said = record(
        lambda obs, info: int(obs[2] > 0),
        lambda: gymnasium.make("CartPole-v1", render_mode="rgb_array"),
        tmp_path / "a.mp4",
        seed=0,
    )
    about, shown = frames(said.path)
    assert about[:2] == (600, 400)
    assert len(shown) == said.frames == said.episode_return + 1
    assert shown[0].std() > 5, "there is something to be seen"
    assert "SDL_VIDEODRIVER" not in os.environ
    assert "error" not in capfd.readouterr().err


class Blind(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode


class Unable(Painted):
    def render(self):
        raise RuntimeError("no OpenGL here")


class Wordy(Painted):
    metadata = {"render_modes": ["ansi", "rgb_array"]}  # noqa: RUF012

    def render(self):
        return "a cart and a pole"


@pytest.mark.parametrize(
    ("env_fn", "said"),
    [
        (lambda: Blind("rgb_array"), r"render modes are \[\]"),
        (Unable, "no OpenGL here"),
        (Wordy, "gave str instead of rows of pixels"),
        (lambda: Blind(colour="red"), "unexpected keyword argument"),  # type: ignore[call-arg]
    ],
)
def test_what_cannot_be_drawn_is_said_and_leaves_nothing(env_fn, said, tmp_path):
    with pytest.raises(errors.VideoError, match=said) as caught:
        record(lambda obs, info: 0, env_fn, tmp_path / "a.mp4")
    assert str(tmp_path / "a.mp4") in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_video_that_is_not_whole_is_no_video(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "_written", lambda path: 3)
    with pytest.raises(errors.VideoError, match="is the disk full"):
        record(lambda obs, info: 0, Painted, tmp_path / "a.mp4")
    assert os.listdir(tmp_path) == []


def test_the_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    with pytest.raises(errors.MissingExtra, match=r"pip install 'envfleet\[video\]'"):
        record(lambda obs, info: 0, Painted, tmp_path / "a.mp4")
