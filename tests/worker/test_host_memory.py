"""What is free on a host: the least of the system's, of every cgroup's above us, and our limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanocore.protocol.errors import ConfigError
from nanocore.worker.memory.host_memory import host_bytes

MB = 2**20
UNLIMITED_V1 = 2**63 - 4096
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /cg\\040v1/memory rw shared:9 - cgroup cgroup rw,memory\n"
CPU_MOUNT = "32 31 0:29 / /cg\\040v1/cpu rw - cgroup cgroup rw,cpu\n"


def make_host(root: Path, cgroup: str, mounts: str, free_mb: int = 1000) -> None:
    folder = root / "proc/self"
    folder.mkdir(parents=True)
    meminfo = f"MemTotal: {2 * free_mb * 1024} kB\nMemAvailable: {free_mb * 1024} kB\n"
    (root / "proc/meminfo").write_text(meminfo)
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mounts)


def make_v2(path: Path, used_mb: int, cached_mb: int = 0, **limits: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.current").write_text(f"{used_mb * MB}\n")
    (path / "memory.stat").write_text(f"anon 7\ninactive_file {cached_mb * MB}\n")
    for name, limit in limits.items():
        (path / f"memory.{name}").write_text(f"{limit}\n")


def make_v1(path: Path, used_mb: int, limit: int, cached_mb: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.usage_in_bytes").write_text(f"{used_mb * MB}\n")
    (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {cached_mb * MB}\n")


def test_without_limits_it_is_what_the_system_has_free(tmp_path: Path) -> None:
    make_host(tmp_path, "0::/\n", V2_MOUNT.format(root="/"))
    assert host_bytes(tmp_path) == 1000 * MB


def test_the_tightest_cgroup_above_us_counts_and_cached_files_count_as_free(
    tmp_path: Path,
) -> None:
    make_host(tmp_path, "0::/a/b/c\n", V2_MOUNT.format(root="/"))
    top = tmp_path / "sys/fs/cgroup/unified"
    make_v2(top / "a/b/c", 50, max="max", high="max")
    make_v2(top / "a/b", 400, cached_mb=100, max=str(500 * MB))
    make_v2(top / "a", 450, max=str(900 * MB), high="max")
    assert host_bytes(tmp_path) == 200 * MB
    make_v2(top / "a", 450, max=str(900 * MB), high=str(500 * MB))
    assert host_bytes(tmp_path) == 50 * MB
    make_v2(top / "a", 600, max=str(500 * MB))
    assert host_bytes(tmp_path) == 0


def test_version_1_is_found_by_its_controller(tmp_path: Path) -> None:
    cgroup = "4:memory:/a/b\n2:cpu,cpuacct:/x\n0::/\n"
    make_host(tmp_path, cgroup, CPU_MOUNT + V1_MOUNT.format(root="/"))
    top = tmp_path / "cg v1/memory"
    make_v1(top, 9, UNLIMITED_V1)
    make_v1(top / "a", 300, 512 * MB, cached_mb=30)
    make_v1(top / "a/b", 300, UNLIMITED_V1)
    assert host_bytes(tmp_path) == (512 - 270) * MB


def test_in_a_container_our_own_cgroup_is_the_mounts_root(tmp_path: Path) -> None:
    # As Docker mounts it: what /proc says is the host's path, what is mounted is its end.
    make_host(tmp_path, "4:memory:/docker/abc\n", V1_MOUNT.format(root="/docker/abc"))
    make_v1(tmp_path / "cg v1/memory", 100, 300 * MB)
    assert host_bytes(tmp_path) == 200 * MB


def test_a_system_that_does_not_say_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="how much memory"):
        host_bytes(tmp_path)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_process_knows_what_its_own_limits_leave(limit: str) -> None:
    program = (
        "import resource, mmap; from nanocore.worker.memory.host_memory import process_bytes\n"
        f"resource.setrlimit(resource.{limit}, (2**30, 2**30))\n"
        "before = process_bytes(); room = mmap.mmap(-1, 2**28, mmap.MAP_PRIVATE)\n"
        "print(before < 2**30, before - process_bytes() >= 2**28)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"True True\n"


def test_this_machine_says_how_much_it_has() -> None:
    assert 0 < host_bytes() < 2**50
