"""What the numbers of a machine mean: each judgement at its borders."""

import pytest

from envfleet.cli import doctor_checks as checks
from envfleet.cli.doctor_checks import StartTrial

MEBI, GIBI = 2**20, 2**30


class TestCores:
    def test_a_whole_machine_is_fine(self):
        found = checks.check_cores(8, 8, None, 8)

        assert found.level == "ok"
        assert found.text == "8 usable (8 in the machine, no cgroup quota)"

    def test_affinity_and_quota_are_named(self):
        assert "affinity allows 4" in checks.check_cores(8, 4, None, 4).text
        assert "quota is 2.5" in checks.check_cores(8, 8, 2.5, 3).text

    @pytest.mark.parametrize(
        ("numbers", "remedy"),
        [
            ((8, 8, 0.5, 1), "raise the container's CPU limit"),
            ((8, 1, None, 1), "taskset"),
            ((8, 8, 1.0, 1), "--cpus"),
            ((1, 1, None, 1), "environments that wait"),
        ],
    )
    def test_one_core_is_worth_a_warning(self, numbers, remedy):
        found = checks.check_cores(*numbers)

        assert found.level == "warn"
        assert remedy in (found.remedy or "")

    def test_a_platform_without_affinity(self):
        assert checks.check_cores(8, None, None, 8).level == "ok"


class TestLoad:
    @pytest.mark.parametrize(("average", "level"), [(0.0, "ok"), (2.4, "ok"), (2.6, "warn")])
    def test_is_measured_against_the_cores(self, average, level):
        assert checks.check_load(average, 2).level == level


class TestMemory:
    @pytest.mark.parametrize(
        ("available", "level"),
        [(8 * GIBI, "ok"), (400 * MEBI, "warn"), (100 * MEBI, "bad"), (0, "bad")],
    )
    def test_is_measured_against_the_workers(self, available, level):
        found = checks.check_memory(available, 16 * GIBI, "memory limit of the cgroup", 2)

        assert found.level == level
        assert "memory limit of the cgroup" in found.text
        assert (found.remedy is None) == (level == "ok")

    def test_total_may_be_unknown(self):
        assert checks.check_memory(8 * GIBI, None, "memory of the machine", 2).text.startswith(
            "8.0 GiB fr"
        )


class TestSharedMemory:
    def test_a_small_dev_shm_is_no_problem_with_memfd(self):
        found = checks.check_shared_memory(True, 64 * MEBI, 1 * MEBI, "linux")

        assert found.level == "ok"
        assert "/dev/shm has 1 MiB free of 64 MiB" in found.text

    @pytest.mark.parametrize(
        ("total", "free", "platform", "level"),
        [
            (GIBI, GIBI, "linux", "warn"),
            (64 * MEBI, 60 * MEBI, "linux", "bad"),
            (None, None, "linux", "bad"),
            (None, None, "darwin", "ok"),
        ],
    )
    def test_without_memfd(self, total, free, platform, level):
        found = checks.check_shared_memory(False, total, free, platform)

        assert found.level == level
        assert (found.remedy is None) == (level == "ok")


class TestOpenFiles:
    def test_says_how_many_workers_fit(self):
        found = checks.check_open_files(10, 1024, 1024, 8)

        assert found.level == "ok"
        assert "room for about 332 workers" in found.text

    @pytest.mark.parametrize(
        ("soft", "hard", "level", "remedy"),
        [
            (200, 1 << 20, "warn", "ulimit -n 65536"),
            (200, 4096, "warn", "ulimit -n 4096"),
            (200, 200, "warn", "limits.conf"),
            (48, 4096, "bad", "ulimit -n 4096"),
            (5, 4096, "bad", "ulimit -n 4096"),
        ],
    )
    def test_a_low_limit_names_the_remedy(self, soft, hard, level, remedy):
        found = checks.check_open_files(10, soft, hard, 8)

        assert found.level == level
        assert remedy in (found.remedy or "")


class TestProcesses:
    @pytest.mark.parametrize(
        ("in_use", "allowed", "level"),
        [(10, None, "ok"), (10, 4096, "ok"), (80, 100, "warn"), (95, 100, "bad"), (None, 50, "ok")],
    )
    def test_room_for_workers(self, in_use, allowed, level):
        assert checks.check_processes(in_use, allowed, 4).level == level


class TestStartMethod:
    def test_one_that_works(self):
        found = checks.check_start_method(StartTrial("fork", 0.004), is_default=True)

        assert found.level == "ok"
        assert found.text == "works, the default here; a child answered after 4 ms"

    def test_one_that_is_slow(self):
        assert checks.check_start_method(StartTrial("spawn", 6.0), is_default=False).level == "warn"

    @pytest.mark.parametrize(("is_default", "level"), [(True, "bad"), (False, "warn")])
    @pytest.mark.parametrize(
        ("method", "others"),
        [
            ("fork", "spawn or forkserver"),
            ("spawn", "fork or forkserver"),
            ("forkserver", "fork or spawn"),
        ],
    )
    def test_one_that_fails_names_the_others(self, is_default, level, method, others):
        found = checks.check_start_method(StartTrial(method, None, "no answer in 30 s"), is_default)

        assert found.level == level
        assert "no answer in 30 s" in found.text
        assert (found.remedy or "").endswith(f"with {others}")


class TestKernelCalls:
    def test_all_there(self):
        assert checks.check_kernel_calls(True, True, "linux").level == "ok"

    @pytest.mark.parametrize(("eventfd", "pidfd"), [(True, False), (False, True), (False, False)])
    def test_missing_ones_are_named_and_matter_on_linux_only(self, eventfd, pidfd):
        found = checks.check_kernel_calls(eventfd, pidfd, "linux")

        assert found.level == "warn"
        assert ("eventfd" in found.text.split("missing")[0]) == (not eventfd)
        assert ("pidfd" in found.text.split("missing")[0]) == (not pidfd)
        assert checks.check_kernel_calls(eventfd, pidfd, "darwin").level == "ok"


class TestBlasThreads:
    @pytest.mark.parametrize(
        ("values", "level"),
        [
            ({}, "ok"),
            ({"OMP_NUM_THREADS": "1"}, "ok"),
            ({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, "ok"),
            ({"OMP_NUM_THREADS": "16"}, "warn"),
            ({"OMP_NUM_THREADS": "many"}, "warn"),
        ],
    )
    def test_more_threads_than_cores_is_worth_a_warning(self, values, level):
        assert checks.check_blas_threads(values, 2).level == level


class TestVersions:
    def test_python(self):
        assert checks.check_python_version((3, 11, 0), True, "Linux").level == "ok"
        assert "free-threaded" in checks.check_python_version((3, 14, 0), False, "Linux").text
        assert checks.check_python_version((3, 10, 9), True, "Linux").level == "bad"

    @pytest.mark.parametrize(
        ("version", "level"),
        [("1.2", "ok"), ("1.10.0", "ok"), ("1.2.0rc1", "ok"), ("1.1.9", "bad"), (None, "bad")],
    )
    def test_required(self, version, level):
        found = checks.check_required_packages(
            {"numpy": "2.4", "gymnasium": version}, {"gymnasium": "1.2"}
        )

        assert found.level == level
        assert (found.remedy == "pip install 'gymnasium>=1.2'") == (level == "bad")

    def test_optional_ones_are_only_listed(self):
        found = checks.check_optional_packages({"rich": "15.0", "ray": None})

        assert found.level == "ok"
        assert found.text == "rich 15.0 (not installed: ray)"
        assert checks.check_optional_packages({}).text == "none"

    @pytest.mark.parametrize(
        ("version", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("1.0rc2", (1, 0)), ("dev", ())]
    )
    def test_numbers(self, version, numbers):
        assert checks.version_numbers(version) == numbers


class TestCompiled:
    def test_it_is_there_or_how_to_get_it(self):
        assert checks.check_compiled(True).level == "ok"
        missing = checks.check_compiled(False)
        assert missing.level == "warn"
        assert missing.remedy is not None
        assert "C compiler" in missing.remedy


class TestWakeUp:
    def test_shows_the_middle_and_the_tail(self):
        found = checks.check_wake_up([50.0] * 98 + [2000.0] * 2)

        assert found.level == "ok"
        assert found.text == "50 us there and back (1 in 100 takes 2000 us or more)"

    def test_slow_or_unknown_is_worth_a_warning(self):
        assert checks.check_wake_up([300.0]).level == "warn"
        assert "no fork here" in checks.check_wake_up([], "no fork here").text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(64 * MEBI, "64 MiB"), (1.5 * GIBI, "1.5 GiB"), (24 * GIBI, "24 GiB"), (0, "0 MiB")],
)
def test_size(num_bytes, text):
    assert checks.format_bytes(num_bytes) == text
