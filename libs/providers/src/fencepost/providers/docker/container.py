"""
What a sandbox's container is made of, and how its state is read.

The container's own program is a Python that waits; a toolhost is an `exec` beside it. That program
runs once per container: it leaves a mark on the sandbox's volume, and a second start (a restart
policy, `docker start`, an engine that came back) ends at once. Told to end by a signal it stays
while anything else runs in there, which is until the engine kills it: so there is time to save what
is on its disk. So an instance, which is a container
id *and* the time of its start, never has a successor that runs.

Inside, the toolhost is root with the six capabilities that it needs to act for another user, and
tools are that other user without any: they can neither read the state folder nor signal the
toolhost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from fencepost.core.facts import Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers import leftovers
from fencepost.providers.protocol import LABEL_CREATE, LABEL_DEPLOYMENT, Presence

NAME: Final = "docker"
LABEL_PREFIX: Final = "fencepost."
HOME: Final = "/sandbox"
STATE: Final = f"{HOME}/state"
WORKSPACE: Final = f"{HOME}/workspace"
TOOL_UID: Final = 1000
TOO_OLD: Final = 83
STARTED_AGAIN: Final = 84
RESERVED_MB: Final = 128
"""Memory of the container beyond the tools' own: its waiting program and toolhosts."""
RESERVED_PIDS: Final = 16
FILE_MB_MAX: Final = 1024
OPTIONS: Final = frozenset({"python"})

_ALL_LABELS: Final = f"{LABEL_PREFIX}labels"
_NEVER_STARTED: Final = "0001-01-01T00:00:00Z"
_CONTAINER_ID: Final = re.compile(r"[0-9a-f]{64}")
_NATIVE: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_INSTANCE: Final = re.compile(r"i[0-9a-f]{16}-[0-9a-f]{12}")
_CAPABILITIES: Final = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]

# Old Pythons must understand it, to say how old they are.
MAIN: Final = f"""\
import os, signal, sys
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 8):
    sys.stdout.write("too old " + version + "\\n")
    sys.stdout.flush()
    os._exit({TOO_OLD})
try:
    os.close(os.open("{HOME}/.started", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
except FileExistsError:
    os._exit({STARTED_AGAIN})
os.chmod("{HOME}", 0o711)
os.mkdir("{STATE}", 0o700)
os.mkdir("{WORKSPACE}", 0o755)
os.chown("{WORKSPACE}", {TOOL_UID}, {TOOL_UID})
waited = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
sys.stdout.write("ready " + version + "\\n")
sys.stdout.flush()
def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
while signal.sigwait(waited) == signal.SIGCHLD:
    reap()
while sum(name.isdigit() for name in os.listdir("/proc")) > 1:
    signal.sigtimedwait(waited, 0.1)
    reap()
os._exit(0)
"""
# The toolhost's source comes first on its standard input; what follows is the protocol's.
BOOT: Final = """\
import os
left, parts = %d, []
while left:
    part = os.read(0, left)
    if not part:
        os._exit(1)
    left -= len(part)
    parts.append(part)
exec(compile(b"".join(parts), "toolhost.py", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """One container, as an inspection of it says."""

    id: str
    status: str
    running: bool
    started_at: str
    exit_code: int
    image: str
    labels: Mapping[str, str]
    environment: tuple[str, ...]

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> Seen:
        """Raises `ValueError` where an inspection lacks what is needed."""
        try:
            state, config = answer["State"], answer["Config"]
            return cls(
                id=str(answer["Id"]),
                status=str(state["Status"]),
                running=bool(state["Running"]) and not state.get("Restarting", False),
                started_at=str(state["StartedAt"]),
                exit_code=int(state.get("ExitCode", 0)),
                image=str(config.get("Image", "")),
                labels=_labels(config.get("Labels") or {}),
                environment=tuple(str(item) for item in config.get("Env") or ()),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an inspection without {error}") from error

    @property
    def was_started(self) -> bool:
        return self.started_at != _NEVER_STARTED

    @property
    def instance(self) -> str:
        return f"i{digest(self.started_at)[:16]}-{self.id[:12]}"

    @property
    def presence(self) -> Literal["present", "terminating"]:
        """An ended container still has its disk: on its way out, and not gone."""
        ending = self.status in ("removing", "dead", "restarting")
        return "present" if self.running and not ending else "terminating"

    def presence_of(self, ref: Ref) -> Presence:
        return self.presence if self.instance == ref.instance else "terminating"


def _labels(found: Mapping[str, Any]) -> dict[str, str]:
    """
    What the create was given. The single labels are for people's filters: an image may bring such
    ones along, and this one stands over an image's.
    """
    given = json.loads(found.get(_ALL_LABELS, "{}"))
    if not isinstance(given, dict):
        raise TypeError("labels that can be read")
    return {str(key): str(value) for key, value in given.items()}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def name_of(deployment: str, create_id: str) -> str:
    """The name of a create id's container: the engine gives it to one container at a time."""
    readable = re.sub(r"[^A-Za-z0-9_-]", "-", create_id)[:40]
    return f"fencepost-{deployment}-{readable}-{digest(f'{deployment}{chr(10)}{create_id}')[:16]}"


def is_acknowledged(native_id: str) -> bool:
    """Tells whether an engine can have given this id; of another one an absence says nothing."""
    return _CONTAINER_ID.fullmatch(native_id) is not None


def is_well_formed(ref: Ref) -> bool:
    return (
        _NATIVE.fullmatch(ref.native_id) is not None
        and _INSTANCE.fullmatch(ref.instance) is not None
    )


def spec_problem(spec: SandboxSpec, image: str) -> str:
    """What is wrong with a spec, naming the field; "" where nothing is."""
    if not image:
        return "spec.image: expected the name of an image, there is no default"
    if unknown := sorted(set(spec.options) - OPTIONS):
        return f"spec.options.{unknown[0]}: unknown, expected {', '.join(sorted(OPTIONS))}"
    return ""


def python_of(spec: SandboxSpec) -> str:
    return spec.options.get("python", "") or "python3"


def config_of(
    spec: SandboxSpec,
    *,
    image: str,
    network: str,
    deployment: str,
    create_id: str,
    labels: Mapping[str, str],
) -> dict[str, Any]:
    """What the engine is asked to create."""
    told = {**labels, LABEL_DEPLOYMENT: deployment, LABEL_CREATE: create_id}
    shown = {f"{LABEL_PREFIX}{key}": value for key, value in told.items()}
    memory = (spec.memory_mb + RESERVED_MB) << 20
    return {
        "Image": image,
        "Entrypoint": [python_of(spec), "-I", "-S", "-c", MAIN],
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Labels": {**shown, _ALL_LABELS: json.dumps(told)},
        "Volumes": {HOME: {}},
        "Healthcheck": {"Test": ["NONE"]},
        "AttachStdout": True,
        "HostConfig": {
            "NetworkMode": network if spec.network else "none",
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": spec.processes + RESERVED_PIDS,
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": _CAPABILITIES,
            "SecurityOpt": ["no-new-privileges:true"],
            "Tmpfs": {"/tmp": f"rw,nosuid,nodev,mode=1777,size={spec.memory_mb}m"},  # noqa: S108
            "ShmSize": spec.memory_mb << 20,
            "RestartPolicy": {"Name": "no"},
            "AutoRemove": False,
            "Privileged": False,
            "LogConfig": {"Type": "none"},
        },
    }


def toolhost_command(
    seen: Seen, spec: SandboxSpec, *, source_bytes: int, heartbeat_ms: int, channel: str
) -> list[str]:
    """
    The argv of a toolhost in this container, whose source follows on its standard input.

    Its tools carry the channel's name: they are found by it once the toolhost is not there.
    """
    environment = dict(item.split("=", 1) for item in seen.environment if "=" in item)
    environment |= {"HOME": WORKSPACE, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108
    environment[leftovers.CHANNEL] = channel
    limits = {"memory_mb": spec.memory_mb, "file_mb": FILE_MB_MAX}
    command = [python_of(spec), "-I", "-S", "-c", BOOT % source_bytes]
    command += ["--state", STATE, "--workspace", WORKSPACE, "--instance", seen.instance]
    command += ["--env", json.dumps(environment), "--limits", json.dumps(limits)]
    return [*command, "--tool-uid", str(TOOL_UID), "--heartbeat-ms", str(heartbeat_ms)]
