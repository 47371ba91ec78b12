"""The Dockerfile's steps without Docker: each stage is a folder, and RUN happens in a chroot of it.

By hand, as root, for it needs debootstrap, the network and gigabytes:

    debootstrap --variant=minbase bookworm /tmp/base
    python -m tests.deploy.dockerfile_in_chroot /tmp/base /tmp/image --arg DEVICE=cpu
    python -m tests.deploy.dockerfile_in_chroot --run /tmp/image -v MODEL:/model -- serve /model

A base of Debian's minbase stands for debian:bookworm-slim, whatever FROM says. `--run` starts the
ENTRYPOINT as the image's USER, in a root that cannot be written to, in which /tmp and the cache are
empty folders, open to all as Kubernetes makes them. It is process 1 of its own; SIGTERM is sent on.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

from dockerfile_parse import DockerfileParser

ROOT: Final = Path(__file__).parents[2]
DOCKERFILE: Final = ROOT / "deploy" / "Dockerfile"
WRITABLE: Final = ("/tmp", "/var/cache/nanocore")
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    """(name, value) of each line of the Dockerfile."""
    with DOCKERFILE.open("rb") as file:
        structure = DockerfileParser(fileobj=file).structure
    return [(i["instruction"], i["value"]) for i in structure if i["instruction"] != "COMMENT"]


def is_sent(path: str) -> bool:
    """Whether Docker gets this file of the repository, by the .dockerignore's order of lines."""
    sent = True
    ends = [path.rsplit("/", i)[0] for i in range(path.count("/") + 1)]
    for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.lstrip("!").removeprefix("**/")
        names = [end.rpartition("/")[2] for end in ends] if "**/" in line else ends
        if line and not line.startswith("#") and any(fnmatch.fnmatch(n, pattern) for n in names):
            sent = line.startswith("!")
    return sent


def pairs(value: str) -> dict[str, str]:
    """Of ARG and ENV."""
    return dict((*word.split("=", 1), "")[:2] for word in shlex.split(value))


def substituted(text: str, values: dict[str, str]) -> str:
    """Docker's ${NAME} and $NAME, of what is known."""
    return re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], name[0]), text)


class Build:
    """Stages below a folder. args: of --build-arg. env, mounts: what RUN needs on this machine."""

    def __init__(
        self, base: Path, out: Path, args: dict[str, str], env: dict[str, str], mounts: list[str]
    ) -> None:
        self._base, self._out, self._args, self._env, self._mounts = base, out, args, env, mounts
        self._stages: dict[str, dict[str, Any]] = {}
        self._global = {}

    def run(self) -> None:
        """Build all stages but those that nothing is made of."""
        blocks: list[list[Instruction]] = [[]]
        for name, value in instructions():
            if name == "FROM":
                blocks.append([])
            blocks[-1].append((name, value))
        self._global = pairs(" ".join(value for _, value in blocks[0])) | self._args
        needed = {self._name(blocks[-1][0])}
        for block in reversed(blocks[1:]):
            if self._name(block[0]) in needed:
                text = " ".join(value for _, value in block)
                needed |= {substituted(block[0][1], self._global).split()[0]}
                needed |= set(re.findall(r"--from=(\S+)", text))
        for block in blocks[1:]:
            if self._name(block[0]) in needed:
                self._stage(block)

    def _name(self, start: Instruction) -> str:
        words = substituted(start[1], self._global).split()
        return words[2] if len(words) > 1 else "final"

    def _stage(self, block: list[Instruction]) -> None:
        name, source = self._name(block[0]), substituted(block[0][1], self._global).split()[0]
        parent = self._stages.get(source)
        root = self._out / name
        subprocess.run(["cp", "-a", parent["root"] if parent else self._base, root], check=True)
        env = dict(parent["env"]) if parent else {"PATH": PATH}
        stage: dict[str, Any] = {"root": str(root), "env": env, "args": {}, "workdir": "/"}
        self._stages[name] = stage
        for kind, value in block[1:]:
            print(f"[{name}] {kind} {value}", flush=True)
            self._step(stage, kind, value)
        (self._out / f"{name}.json").write_text(json.dumps(stage, indent=1))

    def _step(self, stage: dict[str, Any], kind: str, value: str) -> None:
        known = stage["args"] | stage["env"]
        if kind == "ARG":
            for name, default in pairs(value).items():
                stage["args"][name] = self._args.get(name, self._global.get(name, default))
        elif kind == "ENV":
            stage["env"] |= pairs(substituted(value, known))
        elif kind == "WORKDIR":
            stage["workdir"] = value
            (Path(stage["root"]) / value[1:]).mkdir(parents=True, exist_ok=True)
        elif kind == "RUN":
            environment = {"HOME": "/root"} | self._env | known
            command = f"cd {stage['workdir']} && {value}"
            in_chroot(stage["root"], ["/bin/sh", "-c", command], environment, self._mounts)
        elif kind == "COPY":
            self._copy(stage, value.split())
        else:
            assert kind in ("USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"), kind
            stage[kind] = value

    def _copy(self, stage: dict[str, Any], words: list[str]) -> None:
        *sources, target = [word for word in words if not word.startswith("--")]
        origin = next((word[7:] for word in words if word.startswith("--from=")), None)
        place = Path(os.path.normpath(f"{stage['root']}/{Path(stage['workdir']) / target}"))
        for source in sources:
            if origin is not None:
                found = Path(self._stages[origin]["root"]) / source[1:]
                subprocess.run(["cp", "-a", f"{found}/.", place], check=place.mkdir() or True)
                continue
            tracked = subprocess.run(["git", "ls-files", source], cwd=ROOT, capture_output=True)
            names = [name for name in tracked.stdout.decode().splitlines() if is_sent(name)]
            assert names, f"COPY {source}: nothing of that is sent"
            for name in names:
                is_folder = target.endswith("/") or (ROOT / source).is_dir()
                to = place / name if is_folder else place
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, to)


def in_chroot(root: str, command: list[str], env: dict[str, str], mounts: list[str]) -> None:
    """Run it as root, with /proc, /dev and the network of this machine."""
    script = [f"mount --bind {root} {root}", f"cd {root}", "mount -t proc proc proc"]
    script += ["mount --rbind /dev dev", "cp /etc/resolv.conf etc/resolv.conf"]
    for mount in mounts:
        script += read_only(*mount.split(":"))
    script.append(f"exec env -i {shlex.join(f'{k}={v}' for k, v in env.items())} chroot . ")
    text = " && ".join(script) + shlex.join(command)
    subprocess.run(["unshare", "--mount", "--pid", "--fork", "sh", "-ec", text], check=True)


def read_only(source: str, target: str) -> list[str]:
    """Commands that mount a folder of this machine, whatever a step does to it."""
    mount = [f"mkdir -p .{target}", f"mount --bind {os.path.abspath(source)} .{target}"]
    return [*mount, f"mount -o remount,bind,ro .{target}"]


def start(image: Path, arguments: list[str], env: dict[str, str], volumes: list[str]) -> int:
    """Run the ENTRYPOINT until it ends; SIGTERM is sent to it. Its exit code."""
    stage = json.loads((image / "final.json").read_text())
    root, user = stage["root"], stage["USER"]
    script = [f"mount --bind {root} {root}", f"cd {root}", "mount -t proc proc proc"]
    script += ["mount --rbind /dev dev"]
    for volume in volumes:
        script += read_only(*volume.split(":"))
    script += [f"mount -t tmpfs -o mode=0777 tmpfs .{path}" for path in WRITABLE]
    script.append(f"mount -o remount,bind,ro {root}")
    command = json.loads(stage["ENTRYPOINT"]) + (arguments or json.loads(stage["CMD"]))
    given = shlex.join(f"{key}={value}" for key, value in (stage["env"] | env).items())
    script.append(f"exec env -i {given} chroot --userspec={user} . {shlex.join(command)}")
    unshare = ["unshare", "--mount", "--pid", "--fork", "sh", "-ec", " && ".join(script)]
    process = subprocess.Popen(unshare, start_new_session=True)
    (child,) = children(process.pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    return process.wait()


def children(pid: int) -> list[int]:
    """Of unshare: who is process 1 inside, once it is there."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := path.read_text().split()):
        os.sched_yield()
    return [int(one) for one in found]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--arg", action="append", default=[], help="NAME=VALUE")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE, of RUN or --run")
    parser.add_argument("-v", "--volume", action="append", default=[], help="SOURCE:TARGET")
    given, arguments = parser.parse_known_args()
    if given.run:
        arguments = [argument for argument in arguments if argument != "--"]
        return start(given.folders[0], arguments, pairs(shlex.join(given.env)), given.volume)
    base, out = given.folders
    out.mkdir()
    args, env = (pairs(shlex.join(named)) for named in (given.arg, given.env))
    Build(base, out, args, env, given.volume).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
