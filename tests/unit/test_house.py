"""The structure of the house, held by tests: layers, public names, a free import, one version."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata, resources
from itertools import chain
from pathlib import Path

import pytest

import envfleet

PUBLIC_NAMES = (
    "Batch",
    "FleetVectorEnv",
    "Incident",
    "ParallelEnv",
    "RayOptions",
    "Snapshot",
    "__version__",
    "errors",
    "make_vec",
    "native",
    "register",
)

# Each level may import the levels before it. Rooms on one level never import each other.
LAYERS = (
    ("errors",),
    ("options",),
    ("observe",),
    ("layout",),
    ("engine",),
    ("adapters",),
    ("runs",),
    ("learn", "testing"),
    ("meta", "multiagent", "llm"),
    ("cli", "__main__"),
)
FRONT_DOOR_SHOWS = "adapters"  # the highest room of which the package root shows names

CORE_PACKAGES = frozenset({"numpy", "gymnasium", "cloudpickle", "envfleet"})
NEEDS_ONLY_THE_CORE = (
    "__init__.py",
    "errors.py",
    "options.py",
    "observe/**/*.py",
    "layout/**/*.py",
    "engine/**/*.py",
    "adapters/__init__.py",
    "adapters/gymnasium.py",
    "adapters/opening.py",
    "adapters/sb3_slot.py",
    "runs/**/*.py",
)

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "envfleet"
TEXT = {"", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
FOLDERS = (".ci", "benchmarks", "docs", "examples", "scripts", "src", "tests")


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import in a tree, also in functions and by import_module.

    `from a import b` is given as `a.b`: b may be a module, and if it is not, a is still seen.
    `package` is the dotted package of the file, from which relative imports are resolved.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package.split(".")[: -level + 1 or None] if level else []
                base = ".".join([*parts, *([module] if module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def package_of(path: Path, root: Path) -> str:
    return ".".join((root.name, *path.relative_to(root).parent.parts))


def wrong_imports(root: Path, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    """Every import that points up or sideways, and every room that has no level, one line each."""
    level_of = {room: level for level, rooms in enumerate(layers) for room in rooms}
    top = len(layers) - 1
    wrong = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        room = place.parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        if room not in level_of:
            wrong.append(f"{place}: room {room!r} has no level; give it one in LAYERS")
            continue
        here = level_of[room]
        for line, name in imported_modules(ast.parse(path.read_text()), package_of(path, root)):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package != root.name or target == room or here == top:
                continue
            if target not in level_of:
                if here <= level_of[FRONT_DOOR_SHOWS]:
                    wrong.append(
                        f"{place}:{line}: {room} imports {name} through the front door, which "
                        f"stands above {FRONT_DOOR_SHOWS}; import it from the room that owns it"
                    )
            elif level_of[target] >= here:
                way = "up" if level_of[target] > here else "sideways"
                wrong.append(f"{place}:{line}: {room} imports {way}, {name}")
    return wrong


def what_runs_at_import(tree: ast.Module) -> ast.Module:
    """The tree without what does not run at import: function bodies and `if TYPE_CHECKING`."""

    class OnlyAtImport(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = [ast.Pass()]
            return self.generic_visit(node)

    return OnlyAtImport().visit(tree)


def calls_of_print(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def files_of_the_project() -> Iterator[Path]:
    # what git keeps of a checkout is not the project's; in a worktree it is a file with a path
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.name != ".git")
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


class TestLayers:
    def test_imports_point_one_way(self):
        assert wrong_imports(SRC, LAYERS) == []

    @pytest.mark.parametrize(
        ("place", "code", "fault"),
        [
            ("layout/plan_layout.py", "from envfleet.engine import fleet", "imports up"),
            ("layout/plan_layout.py", "import envfleet.engine.fleet", "imports up"),
            ("layout/plan_layout.py", "from envfleet import engine", "imports up"),
            ("layout/plan_layout.py", "from ..engine import fleet", "imports up"),
            ("layout/plan_layout.py", "from .. import engine", "imports up"),
            ("layout/deep/plan_layout.py", "from ...engine.fleet import Fleet", "imports up"),
            ("layout/__init__.py", "from ..engine import fleet", "imports up"),
            ("layout/plan_layout.py", "def f():\n    import envfleet.cli", "imports up"),
            ("layout/plan_layout.py", "import_module('envfleet.engine')", "imports up"),
            ("layout/plan_layout.py", "importlib.import_module('envfleet.engine')", "imports up"),
            ("meta/task.py", "from envfleet.llm import turn", "imports sideways"),
            ("learn/ppo.py", "from envfleet.testing import faults", "imports sideways"),
            ("errors.py", "from envfleet.observe import events", "imports up"),
            ("engine/fleet.py", "from envfleet import make_vec", "front door"),
            ("engine/fleet.py", "import envfleet", "front door"),
            ("engine/fleet.py", "from .. import make_vec", "front door"),
            ("adapters/sb3.py", "from envfleet import make_vec", "front door"),
            ("attic/old.py", "", "has no level"),
        ],
    )
    def test_a_wrong_import_is_found(self, tmp_path, place, code, fault):
        path = tmp_path / "envfleet" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)

        (found,) = wrong_imports(tmp_path / "envfleet", LAYERS)

        assert fault in found
        assert found.startswith(place)

    @pytest.mark.parametrize(
        ("place", "code"),
        [
            ("__init__.py", "from envfleet.cli import main"),
            ("engine/fleet.py", "from envfleet.layout import plan_layout\nfrom .. import errors"),
            ("engine/fleet.py", "from . import batch\nfrom .batch import Batch"),
            ("engine/backends/serial.py", "from ..batch import Batch\nfrom ...errors import X"),
            ("engine/fleet.py", "import numpy\nfrom os import path"),
            ("testing/kit.py", "from envfleet.adapters import gymnasium"),
            ("testing/kit.py", "from envfleet import make_vec"),
            ("cli/app.py", "from envfleet import __version__\nimport envfleet.testing"),
            ("cli/__init__.py", "from .app import main"),
            ("__main__.py", "from envfleet.cli import main"),
        ],
    )
    def test_a_right_import_passes(self, tmp_path, place, code):
        path = tmp_path / "envfleet" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)

        assert wrong_imports(tmp_path / "envfleet", LAYERS) == []

    def test_the_core_imports_nothing_but_its_dependencies(self):
        allowed = CORE_PACKAGES | sys.stdlib_module_names
        foreign = [
            f"{path.relative_to(SRC)}:{line}: {name}"
            for pattern in NEEDS_ONLY_THE_CORE
            for path in SRC.glob(pattern)
            for line, name in imported_modules(
                what_runs_at_import(ast.parse(path.read_text())), package_of(path, SRC)
            )
            if name.partition(".")[0] not in allowed
        ]

        assert foreign == []

    def test_only_what_runs_at_import_counts_against_the_core(self):
        code = """
import torch
try:
    import rich
except ImportError:
    pass
if TYPE_CHECKING:
    import ray
class A:
    import yaml
    def f(self):
        import joblib
"""
        found = [
            name for _, name in imported_modules(what_runs_at_import(ast.parse(code)), "envfleet")
        ]

        assert sorted(found) == ["rich", "torch", "yaml"]


class TestPublicNames:
    def test_are_these_and_sorted(self):
        assert tuple(envfleet.__all__) == PUBLIC_NAMES == tuple(sorted(PUBLIC_NAMES))

    @pytest.mark.parametrize("name", PUBLIC_NAMES)
    def test_resolve_and_are_listed(self, name):
        assert getattr(envfleet, name) is not None
        assert name in dir(envfleet)

    def test_a_wrong_name_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = envfleet.no_such_name  # type: ignore[attr-defined]

    @pytest.mark.parametrize("room", ["adapters", "engine", "errors", "layout", "observe"])
    def test_rooms_below_the_front_door_need_no_import_of_their_own(self, room):
        done = run_python(f"import envfleet; print(envfleet.{room}.__name__)")

        assert (done.stdout, done.stderr) == (f"envfleet.{room}\n", "")

    def test_types_are_shipped(self):
        assert resources.files("envfleet").joinpath("py.typed").is_file()


class TestImport:
    # gymnasium sets an environment variable when imported, so it is there before the comparison.
    LOOK = """
import json, multiprocessing, os, signal, sys, threading, time, warnings
import gymnasium

def look():
    return {
        "environment": dict(os.environ),
        "threads": threading.active_count(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "signal handlers": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "warning filters": len(warnings.filters),
        "environments": len(gymnasium.registry),
        "streams": [id(sys.stdout), id(sys.stderr), id(sys.excepthook)],
        "children": open(f"/proc/self/task/{os.getpid()}/children").read()
        if os.path.exists(f"/proc/self/task/{os.getpid()}/children")
        else "",
    }

before = look()
from envfleet import *
after = look()
changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
print(json.dumps({"changed": changed, "modules": sorted(sys.modules)}))
"""

    def test_changes_nothing_and_loads_no_extra(self):
        done = run_python(self.LOOK)

        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        seen = json.loads(done.stdout)
        assert seen["changed"] == {}
        extras = {
            "envpool", "imageio_ffmpeg", "joblib", "mujoco", "omegaconf", "pettingzoo", "psutil",
            "pygame", "ray", "rich", "stable_baselines3", "tensorboard", "torch", "wandb",
            "yaml",
        }  # fmt: skip
        assert extras.isdisjoint(name.partition(".")[0] for name in seen["modules"])

    def test_is_quick_and_silent(self):
        code = (
            "import time; start_s = time.process_time(); from envfleet import *; "
            "import sys; sys.exit(time.process_time() - start_s > 1.5)"
        )
        # The first may have to compile the bytecode.
        runs = [run_python(code) for _ in range(3)]

        assert [run.stdout + run.stderr for run in runs] == ["", "", ""]
        assert any(run.returncode == 0 for run in runs), "importing envfleet took over 1.5 s"


class TestVersion:
    def test_is_one_in_package_project_and_changelog(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        head = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
        assert head is not None

        assert (
            envfleet.__version__
            == metadata.version("envfleet")
            == project["version"]
            == head.group(1)
        )

    def test_changelog_sections_are_the_agreed_ones_in_order(self):
        agreed = ["Breaking", "Added", "Changed", "Fixed", "Deprecated", "Removed"]
        _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)

        for release in releases:
            sections = re.findall(r"^### (.+)$", release, re.MULTILINE)
            assert sections == [name for name in agreed if name in sections]


class TestPins:
    @staticmethod
    def pins() -> dict[str, str]:
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    def test_every_direct_dependency_is_pinned(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = chain(project["dependencies"], *project["optional-dependencies"].values())
        names = {re.split(r"[^a-z0-9-]", entry.lower())[0] for entry in wanted} - {"envfleet"}

        assert names - self.pins().keys() == set()

    def test_pins_are_plain_versions(self):
        local = {name: version for name, version in self.pins().items() if "+" in version}

        assert local == {}, "a local version exists on one index only"


class TestManners:
    def test_only_the_command_line_prints(self):
        prints = [
            f"{path.relative_to(SRC)}:{line}"
            for path in sorted(SRC.rglob("*.py"))
            if path.relative_to(SRC).parts[0] != "cli"
            for line in calls_of_print(ast.parse(path.read_text()))
        ]

        assert prints == []

    def test_a_print_is_found(self):
        assert calls_of_print(ast.parse("def f():\n    print('x')\nprinter.print(1)")) == [2]

    def test_no_file_is_named_after_nothing(self):
        vague = {"utils", "util", "helpers", "common", "misc"}

        assert [p for p in SRC.rglob("*") if p.stem in vague] == []

    def test_a_name_stands_for_one_class(self):
        places: dict[str, list[str]] = {}
        for path in sorted(SRC.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(f"{path.relative_to(SRC)}")

        assert {name: where for name, where in places.items() if len(set(where)) > 1} == {}

    def test_no_file_names_a_path_of_one_machine(self):
        path_of_one_machine = re.compile(
            r"(?<![\w.~-])/(?:home/\w+|Users/\w+|root|work|workspace|tmp/\w*jobs[.\w]*)(?![\w-])"
        )
        found = [
            f"{path.relative_to(ROOT)}:{number}: {match.group()}"
            for path in files_of_the_project()
            if path.suffix in TEXT
            for number, line in enumerate(path.read_text().splitlines(), start=1)
            for match in path_of_one_machine.finditer(line)
        ]

        assert found == []


class TestNothingLeftBehind:
    """The fixture that watches every test, watched: each kind of leak must fail its test."""

    LEAKS = """
import mmap, os, subprocess, sys, threading, time
import multiprocessing
import pytest

kept = []
long_s = 60

def rest(seconds):
    time.sleep(seconds)

def test_clean():
    with open(os.devnull), subprocess.Popen([sys.executable, "-c", ""]):
        pass

@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_clean_with(method):
    child = multiprocessing.get_context(method).Process(target=rest, args=(0,))
    child.start()
    child.join()

def test_ends_within_the_grace():
    kept.append(subprocess.Popen(["sleep", "0.2"]))
    threading.Thread(target=lambda: kept[-1].wait()).start()

@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_leaks_child_of(method):
    child = multiprocessing.get_context(method).Process(target=rest, args=(long_s,), daemon=True)
    child.start()
    kept.append(child)

def test_leaks_process():
    kept.append(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({long_s})"]))

def test_leaks_orphan():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    subprocess.run([sys.executable, "-c", code, f"import time; time.sleep({long_s})"])

def test_leaks_descriptor():
    kept.append(os.open(os.devnull, os.O_RDONLY))

def test_leaks_shared_memory():
    # in use here, so that whoever watches other tests meanwhile knows that it is not theirs
    with open(f"/dev/shm/left-behind-{os.getpid()}", "w+") as file:
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))

def test_leaks_thread():
    kept.append(threading.Thread(target=rest, args=(long_s,), daemon=True))
    kept[-1].start()

@pytest.mark.leaves_thread("on purpose")
def test_may_leave_thread():
    threading.Thread(target=rest, args=(long_s,), daemon=True).start()

def teardown_module():
    os.unlink(f"/dev/shm/left-behind-{os.getpid()}")
"""

    def test_each_kind_of_leak_fails_its_test(self, tmp_path):
        conftest = (ROOT / "tests" / "conftest.py").read_text()
        (tmp_path / "conftest.py").write_text(conftest + "\n\nGRACE_S = 0.6\n")
        (tmp_path / "test_leaks.py").write_text(self.LEAKS)

        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v"),
                *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)),
            ],
            capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False,
        )  # fmt: skip

        # Of a test that passes and then fails in its teardown two lines are shown; the last counts.
        verdicts = dict(
            re.findall(r"^\S+::(test_\S+) (PASSED|ERROR|FAILED)", done.stdout, re.MULTILINE)
        )
        assert len(verdicts) == 14, done.stdout + done.stderr
        wrong = {
            name: verdict
            for name, verdict in verdicts.items()
            if verdict != ("ERROR" if name.startswith("test_leaks") else "PASSED")
        }
        assert wrong == {}, done.stdout
        for kind in ("processes", "threads", "file descriptors", "shared memory"):
            assert f"left behind: {kind}" in done.stdout
