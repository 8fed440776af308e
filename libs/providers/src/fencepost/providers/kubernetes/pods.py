"""
What a pod of ours looks like, and what one says of itself. Pure: objects in, words out.

Names and labels of Kubernetes are short and of few letters, so they carry digests; what people
wrote (slots, ids) stands in an annotation, whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fencepost.core.steps import SandboxSpec
from fencepost.providers.protocol import LABEL_CREATE, LABEL_DEPLOYMENT, Presence

PREFIX: Final = "fencepost.dev"
CONTAINER: Final = "sandbox"
STATE: Final = "/fencepost/state"
HOME: Final = "/fencepost"
WORKSPACE: Final = "/workspace"
_LABELS: Final = f"{PREFIX}/labels"
_DEPLOYMENT: Final = f"{PREFIX}/deployment"
_MANAGED: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "fencepost"

# Nothing but waiting: the toolhost comes in by exec. A shell that is process 1 reaps its children.
# What is told to end is given its time to be saved in, and killed at the end of it.
_IDLE: Final = ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 3600 & wait $!; done")
_SURE_TO_GO: Final = "DisruptionTarget"


def pod_name(deployment: str, create_id: str) -> str:
    """The one name that a create id can have: the API server refuses a second pod under it."""
    digest = hashlib.sha256(f"{deployment}\n{create_id}".encode()).hexdigest()
    return f"fencepost-{digest[:40]}"


def selector(deployment: str) -> str:
    return f"{_MANAGED}={MANAGER},{_DEPLOYMENT}={label_value(deployment)}"


def label_value(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def manifest(
    create_id: str,
    spec: SandboxSpec,
    labels: Mapping[str, str],
    *,
    deployment: str,
    image: str,
    runtime_class: str,
    grace_s: int,
) -> dict[str, Any]:
    """
    The pod of one create id.

    It is never restarted in place, holds no token of the cluster's, and no right. Workspace and
    state are separate volumes of the pod's own, which end with it. `grace_s` is what others than
    ourselves give it when they end it, unless they say otherwise.
    """
    full = {**labels, LABEL_CREATE: create_id, LABEL_DEPLOYMENT: deployment}
    resources = {"memory": f"{spec.memory_mb}Mi"}
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(deployment, create_id),
            "labels": {
                _MANAGED: MANAGER,
                _DEPLOYMENT: label_value(deployment),
                f"{PREFIX}/network": "open" if spec.network else "closed",
            },
            "annotations": {_LABELS: json.dumps(full, sort_keys=True)},
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": CONTAINER,
                    "image": spec.image or image,
                    "command": list(_IDLE),
                    "workingDir": WORKSPACE,
                    "resources": {"limits": resources, "requests": resources},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [
                        {"name": "state", "mountPath": HOME},
                        {"name": "workspace", "mountPath": WORKSPACE},
                    ],
                }
            ],
            "volumes": [
                {"name": "state", "emptyDir": {}},
                {"name": "workspace", "emptyDir": {}},
            ],
        },
    }
    if runtime_class:
        pod["spec"]["runtimeClassName"] = runtime_class
    return pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """
    One reading of a pod. `ended`: its kubelet said that the container ended, for good.

    `why` is for people: the phase, and what keeps it from running. `notice_ms`: while it runs, how
    long it was given when its end was announced; 0 where that is not said, None where none was.
    """

    name: str
    instance: str
    labels: Mapping[str, str]
    presence: Presence
    is_running: bool
    ended: bool
    uid: str
    why: str
    notice_ms: int | None


def read(pod: Mapping[str, Any]) -> Seen:
    """Reads a pod as the API gives it. Raises `ValueError` where that is no pod of ours."""
    try:
        return _read(pod)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a pod of ours: {type(error).__name__}") from error


def _read(pod: Mapping[str, Any]) -> Seen:
    metadata = pod["metadata"]
    labels = json.loads(metadata["annotations"][_LABELS])
    name, uid = str(metadata["name"]), str(metadata["uid"])
    status = pod.get("status") or {}
    phase = str(status.get("phase", "Unknown"))
    statuses = [
        entry for entry in status.get("containerStatuses") or () if entry.get("name") == CONTAINER
    ]
    container = statuses[0] if statuses else {}
    state = container.get("state") or {}
    restarts = int(container.get("restartCount") or 0)
    # The phase alone may be written for a node that nobody hears; the kubelet's word on the
    # container comes from that node.
    ended = phase in ("Failed", "Succeeded") and "terminated" in state
    leaving = bool(metadata.get("deletionTimestamp")) or ended
    waiting = state.get("waiting") or {}
    reason = status.get("reason") or waiting.get("reason") or ""
    return Seen(
        name=name,
        # A container that was started again has lost its processes, whatever its volumes hold.
        instance=f"{uid}.{restarts}",
        labels={str(key): str(value) for key, value in labels.items()},
        presence="terminating" if leaving else "unknown" if phase == "Unknown" else "present",
        is_running="running" in state and not leaving,
        ended=ended,
        uid=uid,
        why=f"{phase} {reason} {waiting.get('message') or ''}".strip(),
        notice_ms=_notice_ms(metadata, status) if "running" in state else None,
    )


def _notice_ms(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> int | None:
    """A deletion that waits for its grace to pass, or a word that one is to come."""
    if metadata.get("deletionTimestamp"):
        return max(0, int(metadata.get("deletionGracePeriodSeconds") or 0)) * 1000
    for condition in status.get("conditions") or ():
        if condition.get("type") == _SURE_TO_GO and condition.get("status") == "True":
            return 0
    return None
