"""What deploy/ says of the program is so: flags, paths, ports, times, users, codes, files."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from nanocore.cli.engine_choice import LAUNCH_TIMEOUT_S
from nanocore.cli.main import _SUBCOMMANDS
from nanocore.cli.serve.api_keys import API_KEY_VARIABLE
from nanocore.cli.serve.flags import DEFAULT_PORT
from nanocore.cli.serve.flags import build_parser as serve_parser
from nanocore.cli.serve.supervisor import INTERRUPTED
from nanocore.cli.serve.worker_pool import GRACE_S
from nanocore.client.connection.engine_process import STOP_TIMEOUT_S
from nanocore.client.connection.engine_supervisor import _FAILED_STARTS
from nanocore.engine_core.cli import build_parser as engine_parser
from nanocore.http.routes import find_route
from nanocore.http.server.http_server import DISCONNECT_TIMEOUT_S
from nanocore.http.server.service import FLUSH_TIMEOUT_S
from nanocore.protocol.errors import ConfigError, ModelFileError
from nanocore.system.private_directory import make_private
from tests.deploy.dockerfile_in_chroot import ROOT, instructions, is_sent, pairs
from tests.deploy.manifests import (
    ALONE,
    COMPOSE,
    DEPLOY,
    KUBERNETES,
    POD,
    SERVER,
    UNIT,
    Place,
    from_dockerfile,
    places,
    probes,
)
from tests.protocol_files.tables import table_after

WRITTEN_TO = {"/tmp", "/var/cache/nanocore"}
README = (DEPLOY / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("place", places(), ids=str)
def test_every_flag_is_one_of_the_server_or_its_engine(place: Place) -> None:
    command, model, *flags = place.arguments
    assert command in _SUBCOMMANDS
    assert model.startswith("/")
    _, others = serve_parser().parse_known_args(flags)
    engine_parser().parse_args(others)


@pytest.mark.parametrize("place", [p for p in places() if p.grace_s is not None], ids=str)
def test_nobody_is_killed_who_is_still_ending_in_order(place: Place) -> None:
    given, _ = serve_parser().parse_known_args(place.arguments[2:])
    assert any("--shutdown-timeout" in word for word in place.arguments), "the times are together"
    ending_s = max(FLUSH_TIMEOUT_S, GRACE_S) + DISCONNECT_TIMEOUT_S + STOP_TIMEOUT_S
    assert place.grace_s is not None
    assert place.pre_stop_s + given.shutdown_timeout_s + ending_s < place.grace_s


def test_the_pages_table_of_times_is_that_of_the_files() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    heading = "## Shutdown"
    rows = {row[0]: [float(cell) for cell in row[1:4]] for row in table_after(page, heading)}
    said = {}
    for place in places():
        if place.grace_s is not None:
            given, _ = serve_parser().parse_known_args(place.arguments[2:])
            said[place.name] = [place.pre_stop_s, given.shutdown_timeout_s, place.grace_s]
    assert rows == said


def test_what_is_probed_is_served_without_a_key_also_to_who_drains() -> None:
    paths = [probe["httpGet"]["path"] for probe in probes().values()]
    paths += re.findall(r'"(/\w+z)"', (DEPLOY / "healthcheck.py").read_text())
    paths += [POD["metadata"]["annotations"]["prometheus.io/path"], "/metrics"]
    assert len(paths) == 7
    for path in paths:
        route, _ = find_route("GET", path)
        assert route.is_open
        assert not route.is_work


def test_who_is_not_ready_gets_no_requests_and_only_who_is_dead_is_replaced() -> None:
    assert {name: probe["httpGet"]["path"] for name, probe in probes().items()} == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }


def test_a_model_has_the_time_to_load_that_the_program_gives_it() -> None:
    startup = probes()["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > LAUNCH_TIMEOUT_S
    waits_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert KUBERNETES["deployment"]["spec"]["progressDeadlineSeconds"] > waits_s
    assert f"--start-period={LAUNCH_TIMEOUT_S:g}s" in from_dockerfile("HEALTHCHECK")


def test_all_speak_of_the_same_port() -> None:
    (service,) = KUBERNETES["service"]["spec"]["ports"]
    (container,) = SERVER["ports"]
    assert {service["targetPort"], *(p["httpGet"]["port"] for p in probes().values())} == {
        container["name"]
    }
    published = COMPOSE["services"]["server"]["ports"][0].split(":")
    scraped = [
        yaml.safe_load((DEPLOY / "prometheus" / name).read_text())["scrape_configs"][0]
        for name in ("prometheus.yml", "compose.yml")
    ]
    targets = [config["static_configs"][0]["targets"][0] for config in scraped]
    assert targets[1].partition(":")[0] in COMPOSE["services"]
    ports = [from_dockerfile("EXPOSE"), published[1], published[2], service["port"]]
    ports += [container["containerPort"], POD["metadata"]["annotations"]["prometheus.io/port"]]
    ports += [target.partition(":")[2] for target in targets]
    assert {int(port) for port in ports} == {DEFAULT_PORT}


def test_restarts_end_where_they_cannot_help() -> None:
    hopeless = {int(code) for code in UNIT["RestartPreventExitStatus"].split()}
    assert hopeless == {ConfigError.exit_code, ModelFileError.exit_code}
    assert not hopeless & _FAILED_STARTS
    assert int(UNIT["SuccessExitStatus"]) == INTERRUPTED


def test_all_services_come_back_with_dockers_daemon() -> None:
    policies = {name: service["restart"] for name, service in COMPOSE["services"].items()}
    assert policies == dict.fromkeys(COMPOSE["services"], "unless-stopped")


def test_the_pods_that_the_budget_keeps_apart_are_spread_over_nodes() -> None:
    (spread,) = POD["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    selector = KUBERNETES["deployment"]["spec"]["selector"]
    assert (
        spread["labelSelector"] == selector == KUBERNETES["disruption-budget"]["spec"]["selector"]
    )


def test_a_model_is_copied_to_where_the_server_reads_it_by_a_pod_that_is_no_server() -> None:
    pod = KUBERNETES["model-copy"]
    assert POD["spec"]["securityContext"] == pod["spec"]["securityContext"], (
        "its files are readable"
    )
    (volume,) = pod["spec"]["volumes"]
    (served,) = [v for v in POD["spec"]["volumes"] if v["name"] == "model"]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in (volume, served)]
    assert claims == [KUBERNETES["model-claim"]["metadata"]["name"]] * 2
    (container,) = pod["spec"]["containers"]
    assert container["image"] == SERVER["image"]
    assert container["volumeMounts"] == [{"name": "model", "mountPath": SERVER["args"][1]}]
    selector = KUBERNETES["service"]["spec"]["selector"]
    assert not selector.items() <= pod["metadata"]["labels"].items(), "it gets no requests"
    name = pod["metadata"]["name"]
    assert f"kubectl cp path/to/folder/. {name}:{SERVER['args'][1]}\n" in README
    fills = README.index("deploy/kubernetes/model-copy.yaml")
    assert fills < README.index(f"delete pod {name}") < README.index("kubectl apply -k")


def test_the_unit_is_started_after_it_was_told_its_model() -> None:
    lines = (DEPLOY / "systemd" / "environment").read_text().splitlines()
    told = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert told.keys() == {"NANOCORE_MODEL"}, "without one the server needs the demo model"
    assert f"`{told['NANOCORE_MODEL']}`" in README
    compiler, build, edit, start = (
        README.index(text)
        for text in (
            "apt-get install g++",
            "/opt/nanocore/bin/pip install '.",
            "`/etc/nanocore/environment`",
            "systemctl enable --now",
        )
    )
    assert compiler < build < edit < start


def test_docker_is_given_folders_and_no_names_of_volumes() -> None:
    sources = re.findall(r"^docker run .* -v ([^:]+):", README, re.MULTILINE)
    assert sources
    assert {source for source in sources if not source.startswith("/")} == set()


def test_the_user_is_the_same_everywhere() -> None:
    runs = " ".join(value for name, value in instructions() if name == "RUN")
    (made,) = re.findall(r"--uid (\d+)", runs)
    assert from_dockerfile("USER") == f"{made}:{made}"
    context = POD["spec"]["securityContext"]
    assert {context[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {int(made)}


def test_what_is_written_to_can_be_and_nothing_else() -> None:
    mounts = {m["mountPath"] for m in SERVER["volumeMounts"] if not m.get("readOnly")}
    server = COMPOSE["services"]["server"]
    volumes = [v.partition(":")[2] for v in server["volumes"] if isinstance(v, str)]
    assert mounts == {*server["tmpfs"], *volumes} == WRITTEN_TO
    assert SERVER["securityContext"]["readOnlyRootFilesystem"] is server["read_only"] is True
    named = {m["name"] for m in SERVER["volumeMounts"]}
    assert named == {volume["name"] for volume in POD["spec"]["volumes"]}
    environment = pairs(" ".join(value for name, value in instructions() if name == "ENV"))
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert environment[name].startswith("/var/cache/nanocore/")
        assert f"{name}=%C/nanocore/" in (DEPLOY / "systemd" / "nanocore.service").read_text()


def test_keys_come_as_the_program_takes_them() -> None:
    (server,) = [p for p in places() if p.name == "Kubernetes"]
    given, _ = serve_parser().parse_known_args(server.arguments[2:])
    (mount,) = [m for m in SERVER["volumeMounts"] if m["name"] == "api-key"]
    assert Path(given.api_key_file).parent == Path(mount["mountPath"])
    (volume,) = [v for v in POD["spec"]["volumes"] if v["name"] == "api-key"]
    assert volume["secret"]["defaultMode"] == 0o440, "root's, and the group's that runs it"
    assert API_KEY_VARIABLE in COMPOSE["services"]["server"]["environment"]


def test_the_manifests_belong_together() -> None:
    kustomization = KUBERNETES["kustomization"]
    listed = {name.removesuffix(".yaml") for name in kustomization["resources"]}
    assert listed == KUBERNETES.keys() - ALONE
    labels = POD["metadata"]["labels"].items()
    spec = KUBERNETES["disruption-budget"]["spec"]
    for selector in (
        KUBERNETES["service"]["spec"]["selector"],
        KUBERNETES["deployment"]["spec"]["selector"]["matchLabels"],
        spec["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    assert KUBERNETES["deployment"]["spec"]["replicas"] > spec["maxUnavailable"]
    claims = [v["persistentVolumeClaim"] for v in POD["spec"]["volumes"] if len(v) > 1 and
              "persistentVolumeClaim" in v]  # fmt: skip
    assert claims[0]["claimName"] == KUBERNETES["model-claim"]["metadata"]["name"]


def test_the_build_gets_what_it_copies_and_nothing_that_it_does_not_need() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    sent = {name for name in tracked.stdout.decode().splitlines() if is_sent(name)}
    copied = [value.split() for name, value in instructions() if name == "COPY"]
    for *sources, _ in copied:
        for source in sources if not sources[0].startswith("--") else []:
            assert source == "." or source in sent
    for pattern in PROJECT["license-files"] + ["setup.py", PROJECT["readme"]]:
        assert pattern in sent
    package = {name for name in tracked.stdout.decode().splitlines() if name[:9] == "nanocore/"}
    assert package <= sent
    assert {name.partition("/")[0] for name in sent} <= {
        "LICENSE", "MANIFEST.in", "README.md", "constraints-cpu.txt", "demo_model", "deploy",
        "docs", "nanocore", "pyproject.toml", "setup.py",
    }  # fmt: skip
    ours = {name for name in sent if name.startswith("deploy/")}
    assert ours == {"deploy/entrypoint.sh", "deploy/healthcheck.py"}


def test_the_image_has_what_it_starts() -> None:
    tini, _, entrypoint, program = json.loads(from_dockerfile("ENTRYPOINT"))
    runs = [value for name, value in instructions() if name == "RUN"]
    assert any(f" {tini} " in run for run in runs)
    copies = [value.split()[-1] for name, value in instructions() if name == "COPY"]
    assert f"/usr/local/bin/{entrypoint}" in copies
    assert program in PROJECT["scripts"]
    (check,) = json.loads(from_dockerfile("HEALTHCHECK").partition(" CMD ")[2])
    assert f"/usr/local/bin/{check}" in copies
    for name in ("entrypoint.sh", "healthcheck.py"):
        assert (DEPLOY / name).stat().st_mode & 0o111 == 0o111
    args = pairs(" ".join(value for name, value in instructions() if name == "ARG"))
    assert set(args["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert args["EXTRAS"] == "engine,server"


def test_the_engine_finds_a_private_folder_below_one_that_is_open_to_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)  # as a volume of Kubernetes is
    command = ["sh", str(DEPLOY / "entrypoint.sh"), "sh", "-c", 'echo "$TMPDIR"']
    for _ in range(2):  # a container that is started again finds it there
        started = subprocess.run(
            command, capture_output=True, text=True, check=True, env={"TMPDIR": str(tmp_path)}
        )
        folder = Path(started.stdout.strip())
        assert folder.parent == tmp_path
        make_private(folder / "nanocore-launch-1", "a launch's directory")
    with pytest.raises(ConfigError, match="other users can write to"):
        make_private(tmp_path / "nanocore-launch-1", "a launch's directory")


def test_the_commands_of_the_page_name_what_there_is() -> None:
    text = README + (ROOT / "docs" / "deploy.md").read_text()
    arguments = pairs(" ".join(value for name, value in instructions() if name == "ARG")).keys()
    assert set(re.findall(r"--build-arg (\w+)=", text)) <= arguments
    commands = re.findall(r"^(?:docker|kubectl|install|cp) .*", text, re.MULTILINE)
    files = [w for line in commands for w in shlex.split(line) if w.startswith("deploy/")]
    assert files
    assert {file for file in files if not (ROOT / file).exists()} == set()
