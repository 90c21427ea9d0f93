"""Options from a YAML file: a flat mapping, with the names of the flags.

Law: everything wrong with a file is one sentence that names the file, the key, and the nearest
right one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envfleet.cli.flags import suggestion
from envfleet.errors import ConfigError, MissingExtra
from envfleet.options import options_of, read
from envfleet.runs.yaml_limit import check_size


def read_config(path: Path, *kinds: type[Any]) -> dict[str, Any]:
    """The options of these classes that a file sets, by name."""
    known = {option.name: option for kind in kinds for option in options_of(kind)}
    found: dict[str, Any] = {}
    for key, value in _pairs(path):
        name = str(key).replace("-", "_")
        if name not in known:
            nearest = suggestion(name, known) or "; `envfleet train --help` lists them all"
            raise ConfigError(f"{path}: there is no option {str(key)!r}{nearest}")
        if name in found:
            raise ConfigError(f"{path} sets {name} twice")
        try:
            found[name] = read(value, known[name].kind)
        except ValueError as exc:
            raise ConfigError(f"{path}: {name} {exc}") from exc
    return found


def _pairs(path: Path) -> list[tuple[Any, Any]]:
    """Every key with its value, also one that comes twice."""
    try:
        import yaml
    except ModuleNotFoundError as exc:
        raise MissingExtra("--config needs PyYAML: pip install 'envfleet[train]'") from exc

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--config {path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"--config {path} cannot be read: it is not text") from exc
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        check_size(node, str(path))
        if node is None or node.tag == "tag:yaml.org,2002:null":  # comments only, say
            return []
        if isinstance(node, yaml.MappingNode):
            return [
                (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True))
                for key, value in node.value
            ]
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: a date that does not exist
        mark = getattr(exc, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        problem = getattr(exc, "problem", None) or exc
        raise ConfigError(f"{path} is not YAML{where}: {' '.join(str(problem).split())}") from exc
    got = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
    raise ConfigError(
        f"{path} must hold options with their values, like `learning_rate: 3e-4`, but holds {got}"
    )
