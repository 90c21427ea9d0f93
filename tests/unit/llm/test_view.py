"""The page of a rollout: what it lists, and whom it answers."""

import http.client
import json
from dataclasses import replace

import pytest

from envfleet.errors import ConfigError, JournalError
from envfleet.llm.journal import Journal
from envfleet.llm.trajectories import TrajectoryFailure
from envfleet.llm.view import JournalFeed, Query, ViewServer
from tests.unit.llm.made_trajectories import trajectory, turn


def write(journal, *trajectories):
    for one in trajectories:
        journal.begin(one)
        for each in one.turns:
            journal.turn(one, each)
        if one.is_done:
            journal.end(one)


@pytest.fixture
def folder(tmp_path):
    failure = TrajectoryFailure(reason="engine", error="the engine is gone")
    with Journal(tmp_path, {"seed": 5}) as journal:
        write(
            journal,
            trajectory(0, rewards=(0.0, 1.0), is_success=True),
            trajectory(1, rewards=(0.5,)),
            trajectory(2, rewards=(0.0,), tag="Bandit", failure=failure, is_masked=True),
            trajectory(3, rewards=(0.0, 0.0, 0.0), is_done=False),
        )
    return tmp_path


def ids(feed, **asked):
    return [row["env_id"] for row in feed.page(Query(**asked))["rows"]]


class TestFeed:
    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ({}, [0, 1, 2, 3]),
            ({"tag": "Bandit"}, [2]),
            ({"group_id": 0}, [0, 1]),
            ({"state": "success"}, [0]),
            ({"state": "no success"}, [1]),
            ({"state": "going on"}, [3]),
            ({"state": "failed"}, [2]),
            ({"state": "engine"}, [2]),
            ({"state": "masked"}, [2]),
            ({"least": 0.5}, [0, 1]),
            ({"least": 0.1, "most": 0.9}, [1]),
            ({"order": "-score"}, [0, 1, 2, 3]),
            ({"order": "score"}, [2, 3, 1, 0]),
            ({"order": "-num_turns"}, [3, 0, 1, 2]),
            ({"order": "-changed"}, [3, 2, 1, 0]),
        ],
    )
    def test_a_query_takes_what_it_says(self, folder, asked, expected):
        assert ids(JournalFeed(folder), **asked) == expected

    def test_an_unknown_order_is_refused(self, folder):
        with pytest.raises(ConfigError, match="order must be one of env_id, score"):
            JournalFeed(folder).page(Query(order="__class__"))

    def test_figures_are_of_all(self, folder):
        page = JournalFeed(folder).page(Query(tag="Bandit"))

        assert (page["num_found"], page["num_all"], page["num_ended"]) == (1, 4, 3)
        assert page["states"] == {"success": 1, "no success": 1, "failed": 1, "going on": 1}
        assert page["failures"] == {"engine": 1}
        assert page["mean_score"] == pytest.approx(0.5)
        assert page["num_turns"] == 7
        assert page["tags"] == ["Bandit", "FrozenLake"]

    def test_ten_thousand_are_given_page_by_page(self, tmp_path):
        with Journal(tmp_path, {}) as journal:
            write(journal, *(trajectory(i) for i in range(10_000)))
        feed = JournalFeed(tmp_path)

        page = feed.page(Query(), offset=9_990, limit=50)
        assert (page["num_found"], len(page["rows"])) == (10_000, 10)
        assert page["rows"][0]["env_id"] == 9_990
        assert len(feed.page(Query(), limit=10**9)["rows"]) == 200
        assert feed.trajectory(4_321, 0) == trajectory(4_321)

    def test_what_is_written_later_is_seen_and_a_half_line_only_when_it_is_whole(self, folder):
        feed = JournalFeed(folder)
        before = feed.version
        path = folder / "journal.jsonl"
        whole = path.read_bytes()
        with Journal(folder, {}) as journal:
            journal.turn(trajectory(3), turn(3, reward=0.25))
        line = path.read_bytes()[len(whole) :]
        path.write_bytes(whole + line[:20])

        feed.update()
        assert feed.version == before
        with path.open("ab") as file:
            file.write(line[20:])
        feed.update()
        assert feed.version == before + 1
        assert feed.page(Query(group_id=1))["rows"][1]["num_turns"] == 4
        grown = feed.trajectory(3, 0)
        assert grown is not None
        assert len(grown.turns) == 4

    def test_a_journal_that_took_the_place_of_another_is_read_anew(self, folder):
        feed = JournalFeed(folder)
        (folder / "journal.jsonl").unlink()
        with Journal(folder, {}) as journal:
            write(journal, trajectory(77))

        feed.update()
        assert ids(feed) == [77]

    def test_attempts_are_told_apart(self, tmp_path):
        with Journal(tmp_path, {}) as journal:
            write(journal, trajectory(0), trajectory(0, rewards=(1.0,), attempt=1))
        feed = JournalFeed(tmp_path)

        assert [row["attempt"] for row in feed.page(Query())["rows"]] == [0, 1]
        assert feed.trajectory(0, 1) == trajectory(0, rewards=(1.0,), attempt=1)
        assert feed.trajectory(0, 2) is None

    def test_a_folder_without_a_journal_is_refused(self, tmp_path):
        with pytest.raises(JournalError, match="cannot be read"):
            JournalFeed(tmp_path)


def ask(server, path, *, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        headers = {} if host is None else {"Host": host}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


class TestServer:
    @pytest.fixture
    def server(self, folder):
        with ViewServer(folder) as server:
            yield server

    @pytest.mark.parametrize("path", ["/", "/list", "/wrong/", "/wrong/list", "//list"])
    def test_without_the_token_nothing_is_told(self, server, path):
        status, _, body = ask(server, path)

        assert status == 403
        assert server.token.encode() not in body

    def test_another_host_name_is_refused_even_with_the_token(self, server):
        path = f"/{server.token}/list"

        assert ask(server, path, host=f"evil.example:{server.port}")[0] == 403
        assert ask(server, path, host="127.0.0.1")[0] == 403
        assert ask(server, path, host=f"localhost:{server.port}")[0] == 200

    def test_it_listens_on_the_loopback_interface_only(self, server):
        assert server._server.server_address[0] == "127.0.0.1"

    def test_nothing_can_be_changed(self, server):
        assert ask(server, f"/{server.token}/", method="POST")[0] == 501

    def test_the_page_may_load_nothing_from_elsewhere(self, server):
        status, headers, body = ask(server, f"/{server.token}/")
        policy = headers["Content-Security-Policy"]

        assert status == 200
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert b"{nonce}" not in body
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in body
        assert headers["Referrer-Policy"] == "no-referrer"

    def test_lists_and_conversations_are_json(self, server):
        _, _, body = ask(server, f"/{server.token}/list?state=success")
        page = json.loads(body)
        assert [row["env_id"] for row in page["rows"]] == [0]

        _, _, body = ask(server, f"/{server.token}/list?version={page['version']}")
        assert json.loads(body) == {"version": page["version"], "is_unchanged": True}

        _, _, body = ask(server, f"/{server.token}/conversation?env_id=0&attempt=0&first=1")
        told = json.loads(body)
        assert [one["number"] for one in told["turns"]] == [1]
        assert told["turns"][0]["raw"].startswith("<think>t1")
        assert (told["num_turns"], told["is_success"], told["reward"]) == (2, True, 1.0)

    def test_wrong_questions_get_a_sentence(self, server):
        for rest, status in {
            "conversation?env_id=99": 404,
            "list?group_id=abc": 400,
            "list?order=__dict__": 400,
            "nothing": 404,
        }.items():
            assert ask(server, f"/{server.token}/{rest}")[0] == status

    def test_pictures_come_from_the_run_s_folder_only(self, server, folder, tmp_path_factory):
        (folder / "images").mkdir()
        (folder / "images" / "a.png").write_bytes(b"picture")
        outside = tmp_path_factory.mktemp("outside") / "b.png"
        outside.write_bytes(b"secret")
        (folder / "link.png").symlink_to(outside)

        def picture(name):
            return ask(server, f"/{server.token}/picture?name={name}")

        assert picture("images/a.png")[2] == b"picture"
        assert picture("images/a.png")[1]["Content-Type"] == "image/png"
        for name in (outside, f"../{outside.parent.name}/b.png", "link.png", "journal.jsonl"):
            status, _, body = picture(name)
            assert (status, b"secret" in body) == (404, False)

    def test_the_trace_can_be_downloaded(self, server):
        _, _, body = ask(server, f"/{server.token}/trace.json")

        assert {one["ph"] for one in json.loads(body)["traceEvents"]} >= {"X", "M", "i"}

    def test_a_number_that_json_cannot_hold_does_not_break_the_page(self, tmp_path):
        odd = replace(turn(0), info={"distance": "inf"}, reward=1e308)
        with Journal(tmp_path, {}) as journal:
            write(journal, trajectory(0, turns=[odd, replace(odd, number=1)]))
        with ViewServer(tmp_path) as server:
            assert json.loads(ask(server, f"/{server.token}/list")[2])["rows"][0]["reward"] == "inf"

    def test_a_journal_that_is_gone_is_told(self, server, folder):
        (folder / "journal.jsonl").unlink()

        status, _, body = ask(server, f"/{server.token}/conversation?env_id=0")
        assert status == 400
        assert b"has changed since it was read" in body

    def test_a_taken_port_is_one_sentence(self, server, folder):
        with pytest.raises(ConfigError, match=f"port {server.port} cannot be used"):
            ViewServer(folder, server.port)

    def test_closing_twice_changes_nothing(self, folder):
        server = ViewServer(folder)
        server.close()
        server.close()
