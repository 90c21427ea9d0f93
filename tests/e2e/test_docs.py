"""Every Python example of the README and of the guide runs as it stands, without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (
    *(
        "cluster.md",
        "failures.md",
        "fleet.md",
        "gymnasium.md",
        "layout.md",
        "ppo.md",
        "runs.md",
        "testing.md",
    ),
    *("meta-rl.md", "multi-agent.md", "sb3.md", "state-manager.md", "text-environments.md"),
    *("agents.md", "clients.md", "llm-inference.md", "llm-plugins.md", "llm-rollouts.md"),
    *sorted(f"environments/{page.name}" for page in (DOCS / "environments").glob("*.md")),
)


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run_as_pasted(block, folder):
    """Run it as a program, or by pytest if it holds tests; what it printed."""
    script = folder / "example.py"
    script.write_text(block)
    holds_tests = re.search("^(class Test|def test_)", block, re.MULTILINE)
    by_whom = ["-m", "pytest", "-q"] if holds_tests else []
    done = subprocess.run(
        [sys.executable, "-W", "error", *by_whom, script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{page}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks_of(DOCS / page), start=1)
    ],
)
def test_example_runs_as_pasted(block, tmp_path):
    run_as_pasted(block, tmp_path)


def test_the_readme_s_examples_run_and_survive_a_killed_worker(tmp_path):
    ten_lines, survives, *others = blocks_of(ROOT / "README.md")
    assert len(ten_lines.splitlines()) <= 10
    run_as_pasted(ten_lines, tmp_path)
    printed = run_as_pasted(survives, tmp_path)
    assert printed.startswith("32 slots come back truncated: death in slot ")
    for block in others:
        run_as_pasted(block, tmp_path)


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    missing = [page.name for page in DOCS.glob("*.md") if page.name not in index]
    assert missing == ["index.md"] or not missing
