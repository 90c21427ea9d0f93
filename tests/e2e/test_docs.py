"""Every Python example of the guide runs as it stands, without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("failures.md", "fleet.md", "gymnasium.md", "layout.md")
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL), start=1
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs_as_pasted(block, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(block)
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    missing = [page.name for page in DOCS.glob("*.md") if page.name not in index]
    assert missing == ["index.md"] or not missing
