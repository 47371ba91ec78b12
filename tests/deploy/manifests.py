"""What is in deploy/, read: command lines, probes, ports, grace periods, wherever they are said."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.dockerfile_in_chroot import instructions

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
COMPOSE: Final = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: Final = {
    path.stem: yaml.safe_load(path.read_text()) for path in (DEPLOY / "kubernetes").glob("*.yaml")
}
ALONE: Final = {"kustomization", "model-copy"}
"""Of Kubernetes' files: no resource of the kustomization."""
POD: Final = KUBERNETES["deployment"]["spec"]["template"]
SERVER: Final = POD["spec"]["containers"][0]


class _Unit(configparser.RawConfigParser):
    """A unit, whose keys keep their case and may be there more than once."""

    def __init__(self) -> None:
        super().__init__(strict=False, interpolation=None)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read(DEPLOY / "systemd" / "nanocore.service")


UNIT: Final = _Unit()["Service"]


def from_dockerfile(kind: str) -> str:
    """The last of its instructions of a kind."""
    return [value for name, value in instructions() if name == kind][-1]


@dataclass(frozen=True)
class Place:
    """Where a server is told to run. arguments: behind `nanocore`. grace_s: from SIGTERM to
    SIGKILL; pre_stop_s: what of that is over before SIGTERM comes."""

    name: str
    arguments: list[str]
    grace_s: float | None = None
    pre_stop_s: float = 0

    def __str__(self) -> str:
        return self.name


def places() -> list[Place]:
    """All of them."""
    command = shlex.split(UNIT["ExecStart"])
    words = [word for word in command[1:] if not word.startswith("$")]
    server = COMPOSE["services"]["server"]
    (pre_stop,) = SERVER["lifecycle"]["preStop"].values()
    return [
        Place("the image", json.loads(from_dockerfile("CMD"))),
        Place("Compose", server["command"], seconds(server["stop_grace_period"])),
        Place(
            "Kubernetes",
            SERVER["args"],
            POD["spec"]["terminationGracePeriodSeconds"],
            float(pre_stop["command"][-1]),
        ),
        Place("systemd", [words[0], "/a/model", *words[1:]], float(UNIT["TimeoutStopSec"])),
    ]


def seconds(text: str) -> float:
    """Of "45s"."""
    found = re.fullmatch(r"(\d+)s", text)
    assert found is not None, text
    return float(found[1])


def probes() -> dict[str, dict[str, Any]]:
    """Kubernetes', by name."""
    return {name: probe for name, probe in SERVER.items() if name.endswith("Probe")}
