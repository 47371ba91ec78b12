"""The plan's parts without what they measure."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import plan
from benchmarks.gpu.bounded import ENDED
from benchmarks.gpu.reports import read_json, write_json
from benchmarks.gpu.run import report_name

KILLED = "killed at its time limit"
PEERS = ("vllm-site/vllm/__init__.py", "vllm-site/vllm/_C_stable_libtorch.abi3.so", "nano-vllm/x")


def carry_peers(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")
    return folder


def write_kernel(cache: Path, name: str, size: int = 10) -> None:
    (cache / name).mkdir(parents=True)
    for suffix in ("json", "cubin", "ttir"):
        (cache / name / f"kernel.{suffix}").write_bytes(bytes(size))


class FakeParts:
    """In place of subcommands: each takes as long as is said, and writes a report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.now_s, self.begun = 0.0, list[tuple[str, float]]()
        self.takes_s: dict[str, float] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.endings: dict[str, str] = {}
        self.out = tmp_path / "out"
        self.work = tmp_path / "work"
        self.out_is_new = True
        """Each call has an empty folder."""
        self.environment: dict[str, str] = {}
        monkeypatch.setattr(plan, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(plan, "run_subcommand", self._run)

    def call(self, *flags: str, limit_s: float = plan.CALL_LIMIT_S) -> int:
        """A call; returns its exit code."""
        self.begun.clear()
        if self.out_is_new:
            shutil.rmtree(self.out, ignore_errors=True)
            self.out.mkdir()
        flags = ("--out", str(self.out), "--work", str(self.work), *flags)
        return plan.main(["--device", "cpu", *flags, "--limit-s", str(limit_s)])

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.work / "reports" / plan.STATE)["parts"]
        return found

    def problems(self) -> list[str]:
        found: list[str] = read_json(self.work / "reports" / plan.STATE)["problems"]
        return found

    def _run(
        self, subcommand: str, limit_s: float, arguments: Namespace, flags: dict[str, Any],
        changes: dict[str, str], log: Path,
    ) -> str:  # fmt: skip
        of_this = (p for p in plan.PARTS if p.subcommand == subcommand)
        name = next(p.name for p in of_this if ",".join(p.only) == flags["--only"])
        state = self.state()[name]
        assert state["ending"] == "running"
        self.begun.append((name, limit_s))
        self.environment = changes
        log.write_text(f"output of {name}")
        takes_s = self.takes_s.get(name, 5.0)
        self.now_s += min(takes_s, limit_s)
        kind = {"small": arguments.small, "device": {"name": arguments.device}}
        report = {"missing": [], "errors": {}, "skipped": {}} | kind | self.reports.get(name, {})
        if takes_s > limit_s:
            self.takes_s[name] = takes_s - limit_s
            report["missing"] = [
                *(p + "/rest" for p in flags["--only"].split(",")),
            ]
        write_json(report_name(subcommand), report, arguments.out, flags["--keep"])
        return self.endings.get(name, KILLED if takes_s > limit_s else ENDED)
