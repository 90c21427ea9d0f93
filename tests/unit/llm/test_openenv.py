"""OpenEnv's protocol, in both directions: the same episodes as without it."""

import json
import pickle
import threading
import time
import urllib.request

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.sync.server import serve
from websockets.typing import Origin

from envfleet.errors import ConfigError, OpenEnvError
from envfleet.llm import EnvStateManager
from envfleet.llm.environments.frozen_lake import FrozenLakeEnv
from envfleet.llm.openenv import OpenEnvServer, OpenEnvTextEnv
from envfleet.llm.registry import env_type

ACTIONS = ("Right", "Down", "nonsense", "Left", "Down", "Right", "Right", "Down")


@pytest.fixture
def server():
    with OpenEnvServer("frozen_lake", {"size": 4}) as server:
        yield server


@pytest.fixture
def remote(server):
    env = OpenEnvTextEnv({"url": server.url})
    yield env
    env.close()


@pytest.fixture
def socket(server):
    with connect(server.url.replace("http", "ws") + "/ws") as socket:
        yield socket


def told(socket, message):
    socket.send(message if isinstance(message, str) else json.dumps(message))
    return json.loads(socket.recv(timeout=30))


class TestBothWays:
    @pytest.mark.parametrize("seed", [0, 7, 123])
    def test_an_episode_is_the_one_that_the_environment_plays_alone(self, remote, seed):
        alone = FrozenLakeEnv({"size": 4})
        assert remote.reset(seed=seed)[0] == alone.reset(seed=seed)[0]
        for action in ACTIONS:
            _, reward, terminated, truncated, info = alone.step(action)
            _, far_reward, is_done, _, far_info = remote.step(action)
            assert (far_reward, is_done) == (reward, terminated or truncated)
            assert far_info == json.loads(json.dumps(info))
            assert remote.render() == alone.render()
            if is_done:
                break

    def test_two_sessions_do_not_see_each_other(self, server, remote):
        other = OpenEnvTextEnv({"url": server.url})
        first = remote.reset(seed=1)[0]
        other.reset(seed=2)
        other.step("Down")
        other.close()

        assert remote.render() == first
        assert remote.reset(seed=1)[0] == first

    def test_an_episode_that_was_moved_goes_on_where_it_stood(self, remote):
        remote.reset(seed=5)
        remote.step("Right")
        moved = pickle.loads(pickle.dumps(remote))

        assert moved.render() == remote.render()
        assert moved.step("Down")[:2] == remote.step("Down")[:2]
        moved.close()

    def test_a_manager_plays_it_by_its_name(self, server):
        kinds = {"tags": ["Far"], "n_groups": [1]}
        block = {"env_groups": 1, "group_size": 2, "env_configs": kinds}
        far = {"env_type": "openenv", "max_actions_per_traj": 5, "env_config": {"url": server.url}}
        config = {
            "es_manager": {"train": block, "val": block, "use_multiprocessing": False},
            "custom_envs": {"Far": far},
        }
        with EnvStateManager(config) as manager:
            caches = manager.reset(seed=3)
            alone = FrozenLakeEnv({"size": 4}).reset(seed=3)[0]
            assert [one["history"][0]["state"] for one in caches] == [alone, alone]
            turn = {"env_id": 0, "llm_response": "", "llm_raw_response": "", "actions": ["Down"]}
            manager.step([turn])
            assert manager.rollout_cache[0]["history"][0]["actions"] == ["Down"]


class TestServer:
    def test_messages_by_hand(self, socket):
        start = told(socket, {"type": "reset", "data": {"seed": 3, "episode_id": "mine"}})
        assert start["type"] == "observation"
        assert start["data"]["observation"]["text"] == FrozenLakeEnv({"size": 4}).reset(seed=3)[0]
        assert start["data"]["observation"]["actions"] == ["Left", "Down", "Right", "Up"]
        assert (start["data"]["reward"], start["data"]["done"]) == (None, False)

        after = told(socket, {"type": "step", "data": {"message": "Down"}})
        assert isinstance(after["data"]["reward"], float)
        state = told(socket, {"type": "state"})
        assert state == {"type": "state", "data": {"episode_id": "mine", "step_count": 1}}

    @pytest.mark.parametrize(
        ("message", "code"),
        [
            ("{", "INVALID_JSON"),
            ("[1]", "UNKNOWN_TYPE"),
            ({"type": "dance"}, "UNKNOWN_TYPE"),
            ({"type": "step", "data": {}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": 5}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"seed": "x"}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"mode": "x"}}, "EXECUTION_ERROR"),
            ({"type": "step", "data": {"message": "Down"}}, "EXECUTION_ERROR"),
        ],
    )
    def test_a_wrong_message_gets_an_error_and_the_session_goes_on(self, socket, message, code):
        answer = told(socket, message)
        assert (answer["type"], answer["data"]["code"]) == ("error", code)
        assert told(socket, {"type": "reset", "data": {"seed": 1}})["type"] == "observation"

    def test_a_page_in_a_browser_is_refused(self, server):
        address = server.url.replace("http", "ws") + "/ws"
        with (
            pytest.raises(InvalidStatus, match="403"),
            connect(address, origin=Origin("https://evil.example")),
        ):
            pass

    def test_it_says_that_it_is_healthy(self, server):
        with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
            assert json.load(answer) == {"status": "healthy"}

    def test_one_session_too_many_is_told(self):
        with OpenEnvServer("frozen_lake", max_sessions=1) as server:
            first, second = (OpenEnvTextEnv({"url": server.url}) for _ in range(2))
            first.reset(seed=1)
            with pytest.raises(OpenEnvError, match=r"all 1 sessions are taken|did not answer"):
                second.reset(seed=1)
            first.close()
            second.close()

    def test_environments_are_closed_with_their_connection(self):
        closed = threading.Event()

        class Watched(FrozenLakeEnv):
            def close(self):
                closed.set()

        with OpenEnvServer(Watched) as server:
            env = OpenEnvTextEnv({"url": server.url})
            env.reset(seed=1)
            env.close()
            assert closed.wait(30)

    def test_closing_ends_connections_that_are_open(self, server, remote):
        remote.reset(seed=1)
        begun_s = time.monotonic()
        server.close()
        server.close()

        assert time.monotonic() - begun_s < 20
        with pytest.raises(OpenEnvError, match="did not answer step"):
            remote.step("Down")

    def test_wrong_settings_are_refused_at_once(self):
        with pytest.raises(ConfigError, match="size"):
            OpenEnvServer("frozen_lake", {"size": "large"})
        with pytest.raises(ConfigError, match="leave them out"):
            OpenEnvServer(FrozenLakeEnv, {"size": 4})


@pytest.fixture
def odd_server():
    """A server that answers as it is told."""
    answers: list[dict] = []

    def handle(socket):
        for message in socket:
            if answers and json.loads(message)["type"] != "close":
                socket.send(json.dumps(answers.pop(0)))

    server = serve(handle, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", answers
    server.shutdown()
    thread.join()


class TestClient:
    def test_a_server_that_is_not_there_is_one_sentence(self):
        with pytest.raises(OpenEnvError, match=r"ws://127.0.0.1:1/ws cannot be reached"):
            OpenEnvTextEnv({"url": "http://127.0.0.1:1"}).reset(seed=1)

    def test_a_server_that_does_not_answer_is_given_up(self, odd_server):
        env = OpenEnvTextEnv({"url": odd_server[0], "timeout_s": 0.2})
        with pytest.raises(OpenEnvError, match="did not answer reset"):
            env.reset(seed=1)
        env.close()

    def test_another_server_s_fields_can_be_named(self, odd_server):
        url, answers = odd_server
        seen = {"observation": {"echoed": "hello", "n": 1}, "reward": None, "done": False}
        answers += [{"type": "observation", "data": seen}] * 4
        env = OpenEnvTextEnv({"url": url, "text_field": "echoed"})
        assert env.reset(seed=1)[0] == "hello"
        assert env.step("x")[:3] == ("hello", 0.0, False)
        env.close()

        whole = OpenEnvTextEnv({"url": url, "text_field": ""})
        assert json.loads(whole.reset(seed=1)[0]) == {"echoed": "hello", "n": 1}
        whole.close()
        wrong = OpenEnvTextEnv({"url": url})
        with pytest.raises(ConfigError, match=r"set text_field to one of theirs .'echoed', 'n'."):
            wrong.reset(seed=1)
        wrong.close()

    def test_an_episode_that_does_not_come_back_is_an_error(self, odd_server):
        url, answers = odd_server
        for text in ("one", "two"):
            seen = {"observation": {"text": text}, "reward": 0.0, "done": False}
            answers.append({"type": "observation", "data": seen})
        env = OpenEnvTextEnv({"url": url})
        env.reset(seed=1)
        moved = pickle.loads(pickle.dumps(env))
        with pytest.raises(OpenEnvError, match="shows something else"):
            moved.step("x")
        env.close()

    def test_a_wrong_address_is_refused(self):
        with pytest.raises(ConfigError, match="must start with http"):
            OpenEnvTextEnv({"url": "localhost:8000"})

    def test_it_is_an_environment_type(self):
        assert env_type("openenv").env_class is OpenEnvTextEnv
