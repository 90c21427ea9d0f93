"""The README's second example: the same lines, surviving a kill -9."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_a_killed_worker_is_survived_as_pasted(tmp_path):
    _, survives = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "survives.py"
    script.write_text(survives)
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("32 slots come back truncated: death in slot ")
