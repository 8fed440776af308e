"""
docker-compose for real: brought up, loaded, scaled, killed, restarted, and brought down.

One stack for the module, of the tree's own compose file in a copy of `deploy/`, on images that were
made here. `make test-compose` runs it alone.
"""

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fencepost.client.processes import free_port

from tests.engine import ROOT, Engine

# It takes half of that, and the other half is for the walks of crashes, which come after it.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(600), pytest.mark.budget(600)]

PROJECT = "fencepost-test"
BUILD_S = 600
ACK_WAIT_S = 30.0
"""JetStream's own wait before it delivers again: what a lost worker costs in a plain work queue."""
SERVICES = ("planner", "sandbox-gateway", "release-tracker", "sweeper")
WORKLOAD = Path(__file__).with_name("compose_workload.py")


def until(what: str | Callable[[], str], holds: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        if found := holds():
            return found
        if time.monotonic() > deadline:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {seconds:.0f} s: {told}")
        time.sleep(0.3)


class Compose:
    """One project, driven by whichever compose command is installed."""

    def __init__(self, engine: Engine, folder: Path, command: list[str]) -> None:
        self.engine = engine
        self.folder = folder
        self._command = command
        self.ports = {"PROMETHEUS_PORT": free_port(), "GRAFANA_PORT": free_port()}
        first = free_port()
        self.environment = {
            **engine.environment,
            **{name: str(port) for name, port in self.ports.items()},
            "FENCEPOST_HTTP_PORTS": f"{first}-{first + 4}",
            "FENCEPOST_IMAGE": "fencepost:test",
            "FENCEPOST_DEPLOYMENT": PROJECT,
            "DOCKER_SOCKET": engine.host.removeprefix("unix://"),
            "COMPOSE_HTTP_TIMEOUT": "180",
            "FENCEPOST_HEALTH_INTERVAL": "2s",
        }

    def run(self, *words: str, seconds: float = 300) -> str:
        return self.shell([*self._command, "-p", PROJECT, *words], seconds=seconds)

    def shell(self, argv: list[str], *, seconds: float = 300) -> str:
        done = subprocess.run(
            argv,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{' '.join(argv)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def ids(self, service: str) -> list[str]:
        labels = (f"project={PROJECT}", f"service={service}")
        words = [word for label in labels for word in ("-f", f"label=com.docker.compose.{label}")]
        return self.engine.docker("ps", "-aq", "--no-trunc", *words).split()

    def health(self, service: str) -> list[str]:
        told = "{{.State.Status}}/{{if .State.Health}}{{.State.Health.Status}}{{end}}"
        ids = self.ids(service)
        return self.engine.docker("inspect", "-f", told, *ids).split() if ids else []

    def until_healthy(self, **wanted: int) -> None:
        for service, count in wanted.items():
            name = service.replace("_", "-")
            until(
                lambda name=name, count=count: f"{count} healthy of {name}: {self.logs(name)}",
                lambda name=name, count=count: self.health(name) == ["running/healthy"] * count,
            )

    def scale(self, service: str, count: int) -> None:
        self.run(
            "up", "-d", "--no-build", "--no-recreate", "--scale", f"{service}={count}", service
        )

    def logs(self, service: str) -> str:
        return "\n".join(
            self.engine.docker("logs", "--tail", "5", id_) for id_ in self.ids(service)
        )

    def prometheus(self, query: str) -> list[dict]:
        url = f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}/api/v1/query?query={query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]["result"]


class Load:
    """A workload in a client's container."""

    def __init__(self, compose: Compose, sandboxes: int) -> None:
        mount = f"{WORKLOAD}:/workload.py:ro"
        command = ("client", "python", "/workload.py", str(sandboxes))
        said = compose.run("run", "-d", "--no-deps", "-T", "-v", mount, *command)
        self._engine = compose.engine
        self.id = said.split()[-1]
        until("the workload's sandboxes", lambda: self._lines("ready"))

    def _lines(self, key: str) -> list[dict]:
        lines = self._engine.docker("logs", self.id).splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        assert "Traceback" not in "".join(lines), "\n".join(lines[-20:])
        return [line for line in found if key in line]

    def steps(self) -> list[dict]:
        return self._lines("step")

    def until_more(self, count: int = 8) -> None:
        """Waits until some steps more have ended: work goes on."""
        before = len(self.steps())
        until(f"{count} steps more", lambda: len(self.steps()) >= before + count)

    def end(self) -> tuple[list[dict], dict[str, list[str]]]:
        """Every step that was told of, and what each disk holds at the end."""
        self._engine.docker("kill", "--signal", "TERM", self.id)
        until("the workload's end", lambda: self._lines("done"), 180)
        logs = {line["box"]: line["log"] for line in self._lines("box")}
        steps = self.steps()
        self._engine.docker("rm", "-fv", self.id)
        return steps, logs


@pytest.fixture(scope="module")
def compose(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    if not engine.is_own:
        pytest.skip("images of this tree are built only on an engine that the tests started")
    command = next(
        (
            list(words)
            for words in (("docker-compose",), ("docker", "compose"))
            if shutil.which(words[0])
            and subprocess.run([*words, "version"], capture_output=True, check=False).returncode
            == 0
        ),
        None,
    )
    if command is None:
        pytest.skip("neither docker-compose nor docker compose is installed")
    folder = tmp_path_factory.mktemp("compose")
    ignored = shutil.ignore_patterns(
        "wheels", ".env", "credentials", "users.conf", "authorization.conf"
    )
    shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=ignored)
    compose = Compose(engine, folder / "deploy" / "compose", command)
    build(compose)
    try:
        compose.shell(["sh", "prepare.sh"])
        compose.run("up", "-d", "--no-build", seconds=BUILD_S)
        yield compose
    finally:
        compose.run("down", "-v", "--remove-orphans", "-t", "20")


def build(compose: Compose) -> None:
    """Builds the one image, from wheels where there is no index that the build could reach."""
    fetched = subprocess.run(
        [sys.executable, ROOT / "deploy" / "docker" / "wheels.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    if fetched.returncode != 0:
        pytest.skip(f"the image's wheels cannot be fetched: {fetched.stderr.strip()[-300:]}")
    compose.environment["DOCKER_BUILDKIT"] = "0"  # a Debian engine has no buildx
    options = "PIP_OPTIONS=--no-index --find-links=/wheels"
    words = ["docker", "build", "-q", "--build-arg", options, "-t", "fencepost:test"]
    compose.shell(
        [*words, "-f", str(ROOT / "deploy/docker/Dockerfile"), str(ROOT)], seconds=BUILD_S
    )


def test_everything_comes_up_and_is_seen(compose: Compose) -> None:
    compose.until_healthy(planner=1, sandbox_gateway=1, release_tracker=1, sweeper=1, postgres=1)
    ready = until(
        "every service scraped and ready",
        lambda: (
            {item["metric"]["service"] for item in compose.prometheus("fencepost_up==1")}
            == set(SERVICES)
        ),
    )
    assert ready
    rules = f"http://127.0.0.1:{compose.ports['PROMETHEUS_PORT']}/api/v1/rules"
    with urllib.request.urlopen(rules, timeout=10) as answer:
        (group,) = json.load(answer)["data"]["groups"]
    assert all(rule["health"] in ("ok", "unknown") for rule in group["rules"])
    health = f"http://127.0.0.1:{compose.ports['GRAFANA_PORT']}/api/health"
    with urllib.request.urlopen(health, timeout=10) as answer:
        assert json.load(answer)["database"] == "ok"


def test_the_containers_have_walls(compose: Compose) -> None:
    for service in SERVICES:
        (container,) = compose.ids(service)
        (found,) = json.loads(compose.engine.docker("inspect", container))
        host = found["HostConfig"]
        assert found["Config"]["User"] == "10001:10001", service
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert "no-new-privileges:true" in host["SecurityOpt"], service
        mounted = {mount["Destination"] for mount in found["Mounts"]}
        secrets = {place for place in mounted if place.startswith("/run/secrets")}
        assert secrets == {"/run/secrets/nats"}, service


def test_a_restart_of_all_planners_under_load_loses_no_step(compose: Compose) -> None:
    compose.scale("planner", 3)
    compose.until_healthy(planner=3)
    load = Load(compose, sandboxes=3)
    load.until_more()
    compose.run("restart", "-t", "20", "planner")
    load.until_more()
    compose.until_healthy(planner=3)
    steps, logs = load.end()
    assert {step["state"] for step in steps} == {"committed"}
    slowest = max(step["waited_s"] for step in steps)
    assert slowest <= ACK_WAIT_S, slowest
    done = [line for log in logs.values() for line in log]
    assert sorted(done) == sorted(step["step"] for step in steps)


def test_killed_planners_and_gateways_lose_no_committed_step(compose: Compose) -> None:
    load = Load(compose, sandboxes=2)
    load.until_more()
    planner, *_ = compose.ids("planner")
    compose.engine.docker("kill", planner)
    load.until_more()
    compose.engine.docker("start", planner)
    (gateway,) = compose.ids("sandbox-gateway")
    compose.engine.docker("kill", gateway)
    compose.engine.docker("start", gateway)
    load.until_more()
    steps, logs = load.end()
    done = [line for log in logs.values() for line in log]
    assert len(done) == len(set(done)), "a step was done twice"
    committed = {step["step"] for step in steps if step["state"] == "committed"}
    assert committed <= set(done)
    # A command that ran when its gateway died may have left no record, and then says so.
    other = [step for step in steps if step["state"] != "committed"]
    assert {step["state"] for step in other} <= {"indeterminate"}, other
    assert len(committed) >= 16
    compose.until_healthy(planner=3, sandbox_gateway=1)


def test_a_sandbox_ended_behind_our_back_is_made_again_and_owes_nothing(compose: Compose) -> None:
    engine = compose.engine
    running = ("ps", "-q", "--filter", f"label=fencepost.deployment={PROJECT}")
    load = Load(compose, sandboxes=1)
    for word in (("kill",), ("restart", "-t", "0")):
        load.until_more()
        (sandbox,) = engine.docker(*running).split()
        engine.docker(*word, sandbox)
        epoch = load.steps()[-1]["epoch"]
        until(f"a generation after {word[0]}", lambda: load.steps()[-1]["epoch"] > epoch)
    load.until_more()
    steps, logs = load.end()
    done = [line for log in logs.values() for line in log]
    assert len(done) == len(set(done)), "a step was done twice on one disk"
    committed = [step["step"] for step in steps if step["state"] == "committed"]
    assert set(committed) <= set(done)
    other = {step["state"] for step in steps if step["state"] != "committed"}
    assert other <= {"indeterminate", "compensated"}, other
    assert len({step["epoch"] for step in steps}) >= 3


def test_the_recorded_ledger_is_clean_and_nothing_is_left(compose: Compose) -> None:
    said = compose.run("run", "--rm", "--no-deps", "-T", "client", "fencepost", "verify")
    assert said.startswith("clean:"), said
    label = f"label=fencepost.deployment={PROJECT}"
    assert compose.engine.docker("ps", "-aq", "--filter", label) == ""
    for service in SERVICES:
        for container in compose.ids(service):
            for line in compose.engine.docker("logs", container).splitlines():
                assert "denied" not in line.lower(), line
