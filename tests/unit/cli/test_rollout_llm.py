"""`envfleet rollout` with a model: the folder, the report, going on."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from envfleet.cli import app, rollout_llm
from envfleet.llm.journal import JOURNAL_FILE, read_journal
from envfleet.llm.parallel_rollout import ParallelRolloutManager
from envfleet.llm.rollout_folder import read_run
from envfleet.llm.same_trajectories import trajectory_difference

WORDS = ("rollout", "--config-name", "bandit", "--mode", "val", "--plain")
SCRIPTED = ("es_manager.val.env_groups=2", "es_manager.val.env_configs.n_groups=[2]")
LLM = (*SCRIPTED, "llm.engine=scripted")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    return app.run([*WORDS, *words])


def resume(*words: str) -> int:
    return app.run(["rollout", "--plain", "--resume", *words])


def test_a_rollout_ends_with_metrics_a_report_and_its_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*LLM) == 0
    out = capsys.readouterr().out
    assert "played by scripted" in out
    assert any(verdict in out for verdict in ("-bound: ", "Too short to judge: "))
    folder = Path("runs/bandit-seed123")
    assert f"Report: {folder}/report.html" in out
    assert f"envfleet view {folder}" in out
    page = (folder / "report.html").read_text()
    assert "Conversations" in page
    assert "&lt;think&gt;" in page
    assert "The same rollout again:" in page  # by a script
    for said_of_training in ("environment steps", "steps/s", "No environment raised"):
        assert said_of_training not in page
    about = json.loads((folder / "run.json").read_text())
    assert about["engine"] == "scripted"
    assert about["outcome"]["tags"][0]["num_envs"] == 2
    assert about["command"].endswith("--seed 123 " + shlex.join(LLM))
    run(*LLM)
    assert Path("runs/bandit-seed123-2").is_dir()


def test_a_rollout_goes_on_from_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    run(*LLM, "--out", "one")
    whole = read_journal(Path("one")).trajectories
    path = Path("one", JOURNAL_FILE)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert resume("one") == 0
    assert trajectory_difference(whole, read_journal(Path("one")).trajectories) is None


def test_what_a_damaged_line_cost_is_refused_by_exports_and_played_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(*LLM, "--out", "one")
    whole = read_journal(Path("one")).trajectories
    path = Path("one", JOURNAL_FILE)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"#" + lines[2][1:], *lines[3:]]))
    export = ["export", "one", "--form", "openai", "--out", "chats.jsonl"]
    capsys.readouterr()
    assert app.run(export) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "one/journal.jsonl is damaged in line 3, so that turns are missing" in said
    assert "envfleet rollout --resume one" in said
    assert not Path("chats.jsonl").exists()
    path.write_bytes(b"#" + path.read_bytes()[1:])
    for words in (export, ["rollout", "--resume", "one"]):
        capsys.readouterr()
        assert app.run(words) == 1
        assert "it has no header, which is line 1; restore" in capsys.readouterr().err
    path.write_bytes(b"{" + path.read_bytes()[1:])
    assert resume("one") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Line 3 of one/journal.jsonl was damaged; what was lost was played again." in said
    assert trajectory_difference(whole, read_journal(Path("one")).trajectories) is None
    assert app.run(export) == 0
    path.write_bytes(path.read_bytes()[:-9])  # a torn last line was never finished
    assert app.run(export) == 0
    assert resume("one") == 0
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("journal", [None, b"", b'{"sum":"12'])
def test_a_rollout_that_was_killed_before_its_first_line_begins_again(
    journal: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*LLM, "--out", "one")
    whole = read_journal(Path("one")).trajectories
    begun = json.loads(Path("one/run.json").read_text())
    for go, *words in ((resume, "two"), (run, *LLM, "--out", "two"), (resume, "three")):
        folder = Path(words[-1])
        folder.mkdir(exist_ok=True)
        for left in folder.iterdir():
            left.unlink()
        (folder / ".lock").touch()
        if folder.name == "three":
            assert go(*words) == 2
            assert "begin the rollout by --out three" in capsys.readouterr().err
            continue
        (folder / "run.json").write_text(json.dumps(begun))
        if journal is not None:
            (folder / JOURNAL_FILE).write_bytes(journal)
        assert go(*words) == 0
        assert trajectory_difference(whole, read_journal(folder).trajectories) is None
        about = json.loads((folder / "run.json").read_text())
        assert about["command"].endswith(shlex.join(LLM))
        assert run(*LLM, "--out", folder.name) == 2  # there is something to keep now


def test_after_a_process_that_was_cut_off_environments_play_in_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    under_way: list[bool] = []

    class Here(ParallelRolloutManager):
        def __init__(self, config: Any, llm: Any, **more: Any) -> None:
            asked.append(config["agent_proxy"])
            proxy = config["agent_proxy"] | {"use_parallel_rollout": False}
            super().__init__({**config, "agent_proxy": proxy}, llm, **more)

        def rollout(
            self, *args: Any, folder: Any = None, before_play: Any = None, **more: Any
        ) -> Any:
            before_play()
            under_way.append(read_run(folder)["is_under_way"])
            if len(asked) == 2:
                raise KeyboardInterrupt  # which a process can tell of
            return super().rollout(*args, folder=folder, **more)

    monkeypatch.setattr(rollout_llm, "ParallelRolloutManager", Here)
    assert run(*LLM, "--out", "one") == 0
    path = Path("one/run.json")
    ended = json.loads(path.read_text())
    assert "is_under_way" not in ended
    Path("one", JOURNAL_FILE).write_bytes(
        b"".join(Path("one", JOURNAL_FILE).read_bytes().splitlines(keepends=True)[:3])
    )
    path.write_text(json.dumps(ended | {"is_under_way": True}))
    resume("one")
    assert read_run(Path("one"))["is_under_way"]  # who was cut off once is not trusted sooner
    for words in ((), ("agent_proxy.parallel_backend=sequential",)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"is_under_way": True}))
        assert resume("one", *words) == 0
    assert [one["use_parallel_rollout"] for one in asked] == [False, True, True, False]
    assert [one["parallel_backend"] for one in asked[:3]] == ["auto", "fleet", "fleet"]
    assert all(under_way)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("Environments play in workers now") == 2
    about = json.loads(path.read_text())
    assert "is_under_way" not in about
    assert not about["config"]["agent_proxy"]["use_parallel_rollout"]


def test_results_for_scripts_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*LLM, "--json", "--seed", "5") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["seed"] == 5
    assert document["engine"] == "scripted"
    assert document["folder"] == "runs/bandit-seed5"
    assert document["failures"] == {}
    assert document["verdict"]


def test_a_folder_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert resume("nowhere") != 0
    assert "nowhere/run.json cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ("--resume", "full", "--seed", "1", "--policy", "llm", "--out", "x"),
            "leave out --config-name, --mode, --seed, --policy, --out\n",
        ),
        ((*LLM, "--policy", "random"), "asks no language model; leave out llm.engine=scripted, or"),
        ((*LLM, "--out", "full/file"), "--out full/file is a file, and a rollout with a model"),
        ((*LLM, "--out", "full"), "--out full is not empty"),
        ((*SCRIPTED, "--policy", "llm", "llm.engine=gpt"), "llm.engine must be"),
        ((*LLM, "agent_proxy.on_failure=wait"), "agent_proxy.on_failure must be"),
    ],
)
def test_mistakes_are_one_sentence(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    assert run(*words) in (1, 2)
    assert complaint in capsys.readouterr().err


def test_a_folder_without_a_rollout_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert resume("nowhere") == 1
    assert "nowhere/run.json cannot be read: No such file" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named_with_what_to_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nobody = ("llm.base_url=http://127.0.0.1:9/v1", "llm.model=x", "llm.max_retries=0")
    assert run(*SCRIPTED, *nobody, "--policy", "llm") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "http://127.0.0.1:9/v1 cannot be reached" in out
    assert "Check that the server runs, and llm.base_url" in out
    assert "taken up by: envfleet rollout --resume runs/bandit-seed123" in out
    assert resume("runs/bandit-seed123", "llm.retry_delay_s=0") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Nothing was left to play" not in out
    assert "Failed attempts: engine 2; 2 trajectories masked." in out


def test_a_rollout_that_goes_on_may_get_what_does_not_change_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tight = (*LLM, "llm.token_budget=100", "llm.max_concurrency=1")
    assert run(*tight, "--out", "one") == 1
    assert "The first of reason budget: " in capsys.readouterr().out
    assert ">1 of 2 attempts failed; 1 of 2 trajectories are masked.<" in page_of("one")
    assert resume("one", "agent_proxy.max_turn=2") == 1
    assert "its max_turn is 1 and not 2" in capsys.readouterr().err
    assert resume("one", "llm.token_budget=null") == 0
    assert "; before it was interrupted, 1 turn." in " ".join(capsys.readouterr().out.split())
    assert re.search(r">1</b><small>\d+ tokens; before, 1 turns<", page_of("one"))
    before = page_of("one")
    assert resume("one") == 0
    assert "Nothing was left to play of 2 turns." in capsys.readouterr().out
    assert page_of("one") == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("llm.temperature=1.5", "its llm.temperature is 0.7 and not 1.5"),
        ("llm.max_tokens=9", "its llm.max_tokens is 256 and not 9"),
        ("llm.model=other", "its llm.model is None and not 'other'"),
        ("llm.engine=embedded", "its llm.engine is 'scripted' and not 'embedded'"),
        ("agent_proxy.prompt=json:dumps", "its agent_proxy.prompt is None and not 'json:dumps'"),
        ("agent_proxy.reward_functions=[json:dumps]", "its agent_proxy.reward_functions is []"),
        ("custom_envs.Bandit.env_instruction=Go", "its custom_envs.Bandit.env_instruction is"),
        ("seed.val=5", "its seed.val is 123 and not 5"),
    ],
)
def test_a_rollout_that_goes_on_refuses_what_would_change_it(
    change: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*LLM, "--out", "one")
    record = Path("one/run.json").read_bytes()
    assert resume("one", change) == 1
    assert f"one holds another rollout: {complaint}" in capsys.readouterr().err
    assert Path("one/run.json").read_bytes() == record


def test_the_record_of_a_rollout_changes_only_if_it_is_played_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(*LLM, "--out", "one")
    path, journal = Path("one/run.json"), Path("one", JOURNAL_FILE)
    about = json.loads(path.read_text())
    del about["config"]["llm"]["temperature"], about["config"]["agent_proxy"]["prompt"]
    path.write_text(json.dumps(about))  # as of a version that had no such options
    record = path.read_bytes()
    assert resume("one", "llm.max_retries=9", "+llm.temperature=0.7") == 0
    assert path.read_bytes() == record
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:3]))
    assert resume("one", "llm.max_retries=9", "+llm.temperature=0.9") == 1
    assert path.read_bytes() == record
    assert resume("one", "llm.max_retries=9") == 0
    assert json.loads(path.read_text())["config"]["llm"]["max_retries"] == 9


def page_of(folder: str) -> str:
    return Path(folder, "report.html").read_text()
