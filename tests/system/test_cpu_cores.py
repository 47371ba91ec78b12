"""Which cores kernels get, on machines that are written down as files of /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanocore.system.cpu_cores import FLOATING, read_cores


class Machine:
    """A root folder with the files of some system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cores(self, siblings: list[str], nodes: list[str]) -> None:
        """siblings: of each logical core, all of its physical core. nodes: their logical cores."""
        for core, text in enumerate(siblings):
            self.write(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", text)
        for node, text in enumerate(nodes):
            self.write(f"sys/devices/system/node/node{node}/cpulist", text)

    def quota_v2(self, of_parent: str, of_own: str) -> None:
        self.write("proc/self/cgroup", "0::/pods/one\n")
        mount = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        self.write("proc/self/mountinfo", mount)
        self.write("sys/fs/cgroup/pods/cpu.max", of_parent)
        self.write("sys/fs/cgroup/pods/one/cpu.max", of_own)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


TWO_SOCKETS = ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"] * 2
"""Eight physical cores of two hyperthreads; 0 to 3 and 8 to 11 are the first node."""
NODES = ["0-3,8-11", "4-7,12-15"]


def test_a_rank_has_cores_of_one_node_and_all_hyperthreads_of_a_core(machine: Machine) -> None:
    machine.cores(TWO_SOCKETS, NODES)
    found = read_cores(machine.root, range(16))
    first, second = [0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]
    assert found.nodes == [first, second]
    assert found.of_ranks(1) == [first + second]
    assert found.of_ranks(2) == [first, second]
    assert found.of_ranks(4) == [[0, 8, 1, 9], [2, 10, 3, 11], [4, 12, 5, 13], [6, 14, 7, 15]]
    told = "16 CPU cores: with --tp 2 each rank reads memory of its own NUMA node"
    assert found.describe(1) == told
    assert found.describe(2) == found.describe(4) == ""


def test_nodes_whose_cores_alternate_are_told_apart(machine: Machine) -> None:
    machine.cores([str(core) for core in range(8)], ["0,2,4,6", "1,3,5,7"])
    found = read_cores(machine.root, range(8))
    assert found.of_ranks(2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert found.describe(2) == ""


def test_nodes_of_different_sizes_give_their_ranks_what_they_have(machine: Machine) -> None:
    machine.cores([str(core) for core in range(8)], ["0-3", "4-7"])
    found = read_cores(machine.root, [0, 1, 2, 4])  # by taskset
    assert found.of_ranks(2) == [[0, 1, 2], [4]]
    assert found.of_ranks(3) == [[0], [1], [2]]


def test_nodes_are_in_the_order_of_their_first_cores(machine: Machine) -> None:
    machine.cores([str(core) for core in range(11)], [str(core) for core in range(11)])
    assert read_cores(machine.root, range(11)).nodes == [[core] for core in range(11)]


def test_only_cores_of_the_mask_are_used(machine: Machine) -> None:
    machine.cores(TWO_SOCKETS, NODES)
    assert read_cores(machine.root, [9, 10, 2, 13]).nodes == [[9, 2, 10], [13]]


@pytest.mark.parametrize(
    ("of_parent", "of_own", "num_threads"),
    [
        ("max 100000", "max 100000", 16),
        ("max 100000", "350000 100000", 3),
        ("200000 100000", "350000 100000", 2),
        ("max 100000", "50000 100000", 1),
        ("max 100000", "1600000 100000", 16),
        ("max 100000", "", 16),
    ],
)
def test_a_quota_allows_fewer_threads_which_are_not_pinned(
    machine: Machine, of_parent: str, of_own: str, num_threads: int
) -> None:
    machine.cores(TWO_SOCKETS, NODES)
    machine.quota_v2(of_parent, of_own)
    found = read_cores(machine.root, range(16))
    cores = found.of_ranks(1)[0]
    assert len(cores) == found.num_threads == num_threads
    assert all(core == FLOATING for core in cores) is (num_threads < 16)
    assert ("a CPU quota of" in found.describe(1)) is (num_threads < 16)


def test_a_quota_of_version_1_counts_too(machine: Machine) -> None:
    machine.cores(TWO_SOCKETS, NODES)
    machine.write("proc/self/cgroup", "4:cpu,cpuacct:/box\n")
    mount = "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    machine.write("proc/self/mountinfo", mount)
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    machine.write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "400000")
    for folder in ("", "box/"):
        machine.write(f"sys/fs/cgroup/cpu/{folder}cpu.cfs_period_us", "100000")
    found = read_cores(machine.root, range(16))
    assert found.quota == 4.0
    assert found.of_ranks(2) == [[FLOATING, FLOATING]] * 2


def test_more_ranks_than_threads_share_cores_and_a_line_says_so(machine: Machine) -> None:
    machine.cores(["0", "1"], ["0-1"])
    found = read_cores(machine.root, range(2))
    assert found.of_ranks(3) == [[0], [1], [0]]
    assert found.describe(3) == "2 CPU cores: 3 ranks share them, which is slow: use fewer"


def test_a_system_that_says_nothing_has_plain_cores_of_one_node(machine: Machine) -> None:
    found = read_cores(machine.root, [5, 3])
    assert found.of_ranks(1) == [[3, 5]]
    assert found.describe(1) == ""
