"""Compiles what is in C; without a compiler envfleet runs the same in Python.

A library lies beside its source, where an editable installation finds it; a wheel takes it along.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = {
    Path("src/envfleet/engine/_rows.c"): "steps",
    Path("src/envfleet/learn/fast/_act.c"): "acting",
}
"""And what is slower without."""


class Compile(BuildHookInterface):  # type: ignore[type-arg]
    """Runs the compiler before a wheel, or an editable one, is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say why not and go on."""
        for source, what in SOURCES.items():
            self._compile(source, what, version, build_data)

    def _compile(self, source: Path, what: str, version: str, build_data: dict[str, Any]) -> None:
        whole = Path(self.root) / source
        library = whole.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
        library.unlink(missing_ok=True)
        try:
            subprocess.run(_command(whole, library), check=True, capture_output=True, text=True)
        except (OSError, ImportError, ValueError, subprocess.CalledProcessError) as exc:
            reason = getattr(exc, "stderr", None) or exc
            self.app.display_warning(f"{source} is not compiled, {what} will be slower: {reason}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            inside = library.relative_to(Path(self.root) / "src").as_posix()
            build_data["force_include"][str(library)] = inside


def _command(source: Path, library: Path) -> list[str]:
    import numpy as np

    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    is_mac = sys.platform == "darwin"
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if is_mac else ["-shared"]
    headers = [f"-I{sysconfig.get_paths()['include']}", f"-I{np.get_include()}"]
    return [
        *compiler,
        "-O3",
        "-DNDEBUG",
        "-fPIC",
        *shared,
        *headers,
        str(source),
        "-o",
        str(library),
    ]
