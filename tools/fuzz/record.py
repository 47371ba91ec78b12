"""Runs the fuzzer for a while and records the run in tools/fuzz/results.json.

    nice -n 10 python tools/fuzz/record.py --corpus FOLDER [--seconds 1200]

The corpus folder is kept, so a later run goes on where this one ended. A finding ends the run; its
input is written beside the corpus, and its traceback is in the record.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
MAX_INPUT_BYTES: Final = 8192
_PROGRESS: Final = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/")


def git(*arguments: str) -> str:
    """Output of a git command in this repository."""
    command = ["git", "-C", str(FOLDER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Run, parse what libFuzzer prints, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=FOLDER / "results.json")
    arguments = parser.parse_args()
    flags = [f"-max_total_time={arguments.seconds}", f"-max_len={MAX_INPUT_BYTES}"]
    command = [sys.executable, str(FOLDER / "fuzz_front_desk.py"), str(arguments.corpus), *flags,
               "-print_final_stats=1", f"-artifact_prefix={arguments.corpus}.finding-"]  # fmt: skip
    commit, dirty = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", "nanocore") != ""
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    log = result.stderr
    edges, features, num_inputs = map(int, _PROGRESS.findall(log)[-1])
    done = re.search(r"Done (\d+) runs in (\d+) second", log)
    findings = re.findall(r"=== Uncaught Python exception: ===\n(.*(?:\n.+)*)", log)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "command": f"python tools/fuzz/fuzz_front_desk.py CORPUS {' '.join(flags)}",
        "executions": int(done[1]) if done else None,
        "seconds": int(done[2]) if done else None,
        "coverage_edges": edges,
        "coverage_features": features,
        "corpus_inputs": num_inputs,
        "findings": findings,
        "exit_code": result.returncode,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("atheris", "msgspec", "pyzmq", "numpy")},
        },
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
