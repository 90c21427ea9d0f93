"""Limits of control groups, the innermost to the outermost, in both versions of them."""

import pytest

from envfleet.engine import machine


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes what /proc/self/cgroup says, and files below /sys/fs/cgroup."""

    def write(own, files):
        monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(machine, "_CGROUP", tmp_path / "root")
        (tmp_path / "own").write_text("\n".join(own))
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (["0::/"], {"cpu.max": "150000 100000"}, 1.5),
        (["0::/"], {"cpu.max": "max 100000"}, None),
        (["0::/"], {}, None),
        ([], {"cpu.max": "150000 100000"}, None),
        (["0::/a.slice/b"], {"a.slice/b/cpu.max": "300000 100000"}, 3.0),
        (
            ["0::/a.slice/b"],
            {"a.slice/b/cpu.max": "300000 100000", "a.slice/cpu.max": "200000 100000"},
            2.0,
        ),
        (["0::/a.slice/b"], {"a.slice/b/cpu.max": "max 100000", "cpu.max": "50000 100000"}, 0.5),
        (["0::/not/seen/here"], {"cpu.max": "100000 100000"}, 1.0),
        (["0::/../../other"], {"cpu.max": "100000 100000"}, 1.0),
        (
            ["4:memory:/m", "1:cpu,cpuacct:/job/step"],
            {"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        (
            ["1:cpu:/"],
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_the_least_quota_counts(groups, own, files, cores):
    groups(own, files)
    assert machine.cgroup_cores() == cores
    assert machine.usable_cores() >= 1
    if cores is not None:
        assert machine.usable_cores() <= max(1, cores + 0.999)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (["0::/a/b"], {"a/memory.max": "5000", "a/memory.current": "2000"}),
        (["0::/"], {"memory.max": "5000", "memory.current": "2000"}),
        (
            ["3:memory:/a"],
            {
                "memory/a/memory.limit_in_bytes": "5000",
                "memory/a/memory.usage_in_bytes": "2000",
                "memory/memory.limit_in_bytes": "9000",
                "memory/memory.usage_in_bytes": "2000",
            },
        ),
    ],
)
def test_the_least_memory_counts(groups, own, files):
    groups(own, files)
    assert machine.available_memory() == (3000, "memory limit of the cgroup")


def test_more_than_the_limit_is_nothing(groups):
    groups(["0::/"], {"memory.max": "5000", "memory.current": "6000"})
    assert machine.available_memory()[0] == 0


def test_no_limit_is_the_machine(groups):
    groups(["0::/"], {"memory.max": "max", "memory.current": "6000"})
    assert machine.available_memory()[1] == "memory of the machine"
