"""The Kubernetes manifests: fit the published schemas, and hold together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from fencepost.runtime.settings import Settings
from fencepost.sandbox_gateway.app import GatewaySettings
from fencepost.sweeper.app import SweeperSettings

from tests.tidy import tree

ROOT = Path(__file__).resolve().parents[3] / "deploy"
FOLDERS = (ROOT / "kubernetes" / "services", ROOT / "kubernetes" / "sandboxes", ROOT / "nats")
SERVICES = {
    "planner": Settings,
    "sandbox-gateway": GatewaySettings,
    "release-tracker": Settings,
    "sweeper": SweeperSettings,
}


def documents() -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in FOLDERS:
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        for name in listed:
            for document in yaml.safe_load_all((folder / name).read_text()):
                yield folder / name, document


DOCUMENTS = list(documents())


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for _, each in DOCUMENTS if each["kind"] == kind}


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_every_manifest_fits_its_schema(version: str) -> None:
    assert len(DOCUMENTS) > 20
    for _, document in DOCUMENTS:
        kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_manifest_is_seen() -> None:
    wrong = of_kind("Deployment")["planner"]
    wrong = {**wrong, "spec": {**wrong["spec"], "replicas": "three"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_a_kustomization_lists_all_that_lies_there_and_nothing_outside() -> None:
    for folder in FOLDERS:
        read = yaml.safe_load((folder / "kustomization.yaml").read_text())
        lying = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert set(read["resources"]) == lying, folder
        for generator in read.get("configMapGenerator", ()):
            for name in generator["files"]:
                assert (folder / name).is_file()
                assert ".." not in name, "kustomize reads no file outside of its root"
    top = yaml.safe_load((ROOT / "kubernetes" / "kustomization.yaml").read_text())
    for name in top["resources"]:
        assert (ROOT / "kubernetes" / name / "kustomization.yaml").is_file()


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_service_is_told_what_it_knows(service: str) -> None:
    """A misspelt setting would be passed over in silence."""
    known = {f"FENCEPOST_{name.upper()}" for name in SERVICES[service].model_fields}
    everywhere = {
        name
        for each in SERVICES.values()
        for name in (f"FENCEPOST_{field.upper()}" for field in each.model_fields)
    }
    shared = set(of_kind("ConfigMap")["fencepost-settings"]["data"])
    assert shared <= everywhere, shared - everywhere
    container = of_kind("Deployment")[service]["spec"]["template"]["spec"]["containers"][0]
    own = {entry["name"] for entry in container["env"]}
    assert own <= known, own - known
    assert container["args"] == [service]


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_service_is_confined_probed_and_disrupted_gently(service: str) -> None:
    deployment = of_kind("Deployment")[service]
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    drain_s = float(of_kind("ConfigMap")["fencepost-settings"]["data"]["FENCEPOST_DRAIN_S"])
    assert pod["terminationGracePeriodSeconds"] > drain_s
    assert pod["automountServiceAccountToken"] is (service == "sandbox-gateway")
    budget = of_kind("PodDisruptionBudget")[service]
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    mounted = {entry["name"] for entry in container["volumeMounts"]}
    assert mounted == {entry["name"] for entry in pod["volumes"]}


def test_an_autoscaler_names_a_metric_that_its_service_has() -> None:
    metrics = tree.text("libs/runtime/src/fencepost/runtime/metrics.py")
    scalers = of_kind("HorizontalPodAutoscaler")
    assert set(scalers) == set(SERVICES) - {"sweeper"}
    for name, scaler in scalers.items():
        assert scaler["spec"]["scaleTargetRef"]["name"] == name
        for metric in scaler["spec"]["metrics"]:
            short = metric["pods"]["metric"]["name"].removeprefix("fencepost_")
            assert f'"{short}"' in metrics, short


def test_the_gateway_may_do_in_the_cluster_what_its_provider_does_and_no_more() -> None:
    role = of_kind("Role")["sandbox-gateway"]
    granted = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    provider = tree.text("libs/providers/src/fencepost/providers/kubernetes/provider.py")
    used = {
        ("pods", "create"): "create_namespaced_pod(",
        ("pods", "get"): "read_namespaced_pod(",
        ("pods", "list"): "list_namespaced_pod(",
        ("pods", "delete"): "delete_namespaced_pod(",
        ("pods/exec", "get"): "connect_get_namespaced_pod_exec(",
        ("configmaps", "create"): "create_namespaced_config_map(",
        ("configmaps", "get"): "read_namespaced_config_map(",
    }
    assert all(call in provider for call in used.values())
    # Exec by websocket is a GET, which newer API servers ask the right to create for.
    assert granted == {*used, ("pods/exec", "create")}
    assert not of_kind("ClusterRole")
    binding = of_kind("RoleBinding")["sandbox-gateway"]
    assert (
        binding["metadata"]["namespace"] == role["metadata"]["namespace"] == "fencepost-sandboxes"
    )


def test_sandboxes_have_no_network_unless_they_were_made_with_one() -> None:
    closed, open_ = of_kind("NetworkPolicy")["closed"], of_kind("NetworkPolicy")["open"]
    assert closed["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert open_["spec"]["podSelector"]["matchLabels"] == {"fencepost.dev/network": "open"}
    assert "fencepost.dev/network" in tree.text(
        "libs/providers/src/fencepost/providers/kubernetes/pods.py"
    ).replace("{PREFIX}", "fencepost.dev")


def test_nats_syncs_and_keeps_a_majority() -> None:
    nats = of_kind("StatefulSet")["nats"]
    assert nats["spec"]["replicas"] == 3
    assert of_kind("PodDisruptionBudget")["nats"]["spec"]["maxUnavailable"] == 1
    assert "sync_interval: always" in (ROOT / "nats" / "cluster.conf").read_text()
    told = {entry["name"] for entry in nats["spec"]["template"]["spec"]["containers"][0]["env"]}
    wanted = {
        word.strip("$,")
        for word in (ROOT / "nats" / "cluster.conf").read_text().split()
        if word.startswith("$NATS_")
    }
    assert wanted <= told, wanted - told
