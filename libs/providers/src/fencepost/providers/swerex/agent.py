"""
What runs on a SWE-ReX server for us: claims it, starts toolhosts on it, carries their bytes.

Standard library only, Python 3.8 or later: it is written to the server as one file and called by
`execute`, one verb a call, with one JSON object in and one line of JSON out. The server runs one
`execute` at a time, so no verb waits long.

A server holds one sandbox at a time: the folder `claim` below the base, made whole under another
name and put in place by one rename. Its file `claim.json` carries the instance, minted here. Where
another server has taken this one's address there is no such file, and that is all that can be
told of it: SWE-ReX itself answers the same as before.

A toolhost's stream survives lost and repeated calls, because both directions are counted: `pump`
names how many bytes it has sent and had, and gets what follows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

INSTANCE = "FENCEPOST_INSTANCE"
CHANNEL = "FENCEPOST_CHANNEL"
HELD_BYTES = 1 << 22
PUMP_BYTES = 1 << 18
SILENT_S = 60.0
READY_S = 20.0

Answer = Dict[str, Any]


def place(base: str, *names: str) -> str:
    return os.path.join(base, *names)


def read_claim(folder: str) -> Optional[Dict[str, Any]]:
    """The claim in a folder, or None where there is none. Raises where it cannot be read."""
    try:
        with open(place(folder, "claim.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("instance"), str):
        raise ValueError("claim.json is not a claim")
    return found


def current(base: str) -> Optional[Dict[str, Any]]:
    return read_claim(place(base, "claim"))


def settle(base: str, ask: Dict[str, Any]) -> Answer:
    """A claim under this create id that is still on its way makes nothing here any more."""
    os.makedirs(base, mode=0o700, exist_ok=True)
    with open(place(base, "over-" + ask["key"]), "wb") as file:
        os.fsync(file.fileno())
    return {"state": "settled"}


def claim(base: str, ask: Dict[str, Any]) -> Answer:
    """Makes the sandbox of this create id, or finds it again."""
    os.makedirs(base, mode=0o700, exist_ok=True)
    held = current(base)
    if held is None and os.path.exists(place(base, "over-" + ask["key"])):
        return {"state": "settled"}
    if held is None:
        fresh = place(base, "new-" + secrets.token_hex(8))
        os.makedirs(place(fresh, "state"), mode=0o700)
        os.makedirs(place(fresh, "workspace"), mode=0o700)
        made = {
            "create_id": ask["create_id"],
            "labels": ask["labels"],
            "instance": "i" + secrets.token_hex(16),
        }
        with open(place(fresh, "claim.json"), "w", encoding="utf-8") as file:
            json.dump(made, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.rename(fresh, place(base, "claim"))
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
        held = current(base)
    if held is None:
        return {"state": "vanished"}
    if held["create_id"] != ask["create_id"]:
        return {"state": "occupied", "by": held["create_id"]}
    return {"state": "claimed", "claim": held}


def look(base: str, ask: Dict[str, Any]) -> Answer:
    """
    What this server holds now, and what of it is still on its way out.

    `alive`: processes of the instance that was asked about run here, whatever became of its folder.
    """
    leaving = []
    names = os.listdir(base) if os.path.isdir(base) else []
    for name in sorted(names):
        if name.startswith("out-"):
            found = read_claim(place(base, name))
            if found is not None:
                leaving.append(found)
    instance = ask.get("instance", "")
    return {
        "state": "seen",
        "claim": current(base),
        "leaving": leaving,
        "alive": bool(instance) and bool(processes_of(instance)),
    }


def stop(base: str, ask: Dict[str, Any]) -> Answer:
    """
    Ends everything of one instance, its folder included.

    The folder leaves its place first: what is killed must not find it again.
    """
    held = current(base)
    out = place(base, "out-" + ask["instance"])
    if held is not None and held["instance"] == ask["instance"]:
        os.rename(place(base, "claim"), out)
    elif not os.path.isdir(out):
        # Its folder may be gone while it lives: whoever cleans up old files takes one.
        if not end_processes(ask["instance"]):
            return {"state": "leaving"}
        if held is not None:
            return {"state": "other", "instance": held["instance"]}
        return {"state": "absent"}
    if not end_processes(ask["instance"]):
        return {"state": "leaving"}
    shutil.rmtree(out, onerror=make_removable)
    return {"state": "stopped"}


def make_removable(remove: Any, path: str, failure: Any) -> None:
    try:
        os.chmod(os.path.dirname(path), 0o700)
        os.chmod(path, 0o700)
        remove(path)
    except OSError:
        pass  # what is left shows as `leaving`


def processes_of(value: str, variable: str = INSTANCE) -> List[int]:
    wanted = (variable + "=" + value).encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open("/proc/" + name + "/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue
    return found


def end_processes(value: str, variable: str = INSTANCE) -> bool:
    """Kills until a look finds none; a process that forks meanwhile is found by the next look."""
    for _ in range(50):
        left = processes_of(value, variable)
        if not left:
            return True
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.02)
    return False


def start(base: str, ask: Dict[str, Any]) -> Answer:
    """Starts a toolhost of exactly this instance, with a relay that outlives this call."""
    held = current(base)
    if held is None or held["instance"] != ask["instance"]:
        return {"state": "other", "instance": "" if held is None else held["instance"]}
    home = place(base, "claim")
    channel = ask["channel"]
    env = dict(ask["env"])
    env[INSTANCE] = ask["instance"]
    argv = [sys.executable, "-I", os.path.abspath(__file__), base, "relay", channel]
    argv.append(json.dumps({"argv": ask["argv"], "env": env}))
    with open(place(home, "relay.log"), "ab") as log:
        subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            cwd=home,
            start_new_session=True,
        )
    until = time.monotonic() + READY_S
    while not os.path.exists(socket_of(base, channel)):
        if time.monotonic() > until:
            return {"state": "silent"}
        time.sleep(0.01)
    # A stop in between has moved the folder: what was started there is not the sandbox.
    held = current(base)
    if held is None or held["instance"] != ask["instance"]:
        end_processes(ask["instance"])
        return {"state": "other", "instance": "" if held is None else held["instance"]}
    return {"state": "started"}


def socket_of(base: str, channel: str) -> str:
    return place(base, "claim", channel + ".sock")


class Relay:
    """Holds one toolhost's two ends, and answers `pump` until the toolhost ends or nobody asks."""

    def __init__(self, home: str, channel: str, how: Dict[str, Any]) -> None:
        with open(place(home, "toolhost.log"), "ab") as log:
            self.host = subprocess.Popen(
                how["argv"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=how["env"],
                cwd=home,
            )
        self.channel = channel
        assert self.host.stdin is not None and self.host.stdout is not None
        self.to_host, self.from_host = self.host.stdin.fileno(), self.host.stdout.fileno()
        os.set_blocking(self.to_host, False)
        os.set_blocking(self.from_host, False)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(channel + ".new")  # relative: a socket's whole path may be too long
        self.listener.listen(16)
        os.rename(channel + ".new", channel + ".sock")
        self.unsent, self.had = bytearray(), 0  # for the toolhost; bytes taken of the caller
        self.held, self.gone = bytearray(), 0  # of the toolhost; bytes that the caller has
        self.open = True
        self.asked_at = time.monotonic()

    def run(self) -> None:
        over = False
        # Whoever held this stream may be gone: a toolhost without one proves nothing.
        while not over and time.monotonic() - self.asked_at < SILENT_S:
            reading: List[Any] = [self.listener]
            if self.open and len(self.held) < HELD_BYTES:
                reading.append(self.from_host)
            writing = [self.to_host] if self.unsent else []
            ready, writable, _ = select.select(reading, writing, [], 1.0)
            if self.from_host in ready:
                data = os.read(self.from_host, PUMP_BYTES)
                self.held += data
                self.open = bool(data)
                if not data:
                    self.end_left()
            if writable:
                self.feed()
            if self.listener in ready:
                over = self.serve()
        self.host.kill()
        self.end_left()

    def end_left(self) -> None:
        """Ends what a toolhost left that was killed; one that ends by itself leaves nothing."""
        try:
            self.host.wait(2.0)
        except subprocess.TimeoutExpired:
            return
        end_processes(self.channel, CHANNEL)

    def feed(self) -> None:
        try:
            del self.unsent[: os.write(self.to_host, self.unsent)]
        except OSError:
            self.unsent.clear()  # it has ended: what it says, and how, is still to be had

    def serve(self) -> bool:
        """Answers one call; True when the caller has heard that the stream is over."""
        peer, _ = self.listener.accept()
        with peer:
            peer.settimeout(5.0)
            try:
                answer = self.answer(json.loads(receive(peer)))
                peer.sendall(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError, KeyError):
                return False
        return bool(answer.get("ended")) and not self.held

    def answer(self, ask: Dict[str, Any]) -> Answer:
        self.asked_at = time.monotonic()
        skip = self.had - ask["at"]
        if skip < 0 or ask["had"] < self.gone:
            return {"state": "lost"}  # bytes that nobody has any more
        fresh = base64.b64decode(ask["data"])[skip:]
        self.unsent += fresh
        self.had += len(fresh)
        del self.held[: ask["had"] - self.gone]
        self.gone = ask["had"]
        if ask["close"] and not self.unsent and self.host.stdin is not None:
            self.host.stdin.close()
        return {
            "state": "pumped",
            "taken": self.had,
            "from": self.gone,
            "data": base64.b64encode(bytes(self.held[:PUMP_BYTES])).decode(),
            "ended": not self.open and len(self.held) <= PUMP_BYTES,
            "exit": self.host.poll(),
        }


def receive(peer: socket.socket) -> bytes:
    parts = bytearray()
    while not parts.endswith(b"\n"):
        data = peer.recv(PUMP_BYTES)
        if not data:
            raise OSError("closed")
        parts += data
    return bytes(parts)


def pump(base: str, ask: Dict[str, Any]) -> Answer:
    """Carries bytes both ways; waits a moment where the toolhost has nothing to say yet."""
    held = current(base)
    if held is None or held["instance"] != ask["instance"]:
        return {"state": "other", "instance": "" if held is None else held["instance"]}
    os.chdir(place(base, "claim"))
    until = time.monotonic() + ask["wait_ms"] / 1000
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(5.0)
            try:
                peer.connect(ask["channel"] + ".sock")
            except OSError:
                return {"state": "over"}
            peer.sendall(json.dumps(ask).encode() + b"\n")
            answer: Answer = json.loads(receive(peer))
        said = answer.get("data") or answer.get("ended") or answer["state"] != "pumped"
        if said or time.monotonic() >= until:
            return answer
        ask = dict(ask, data="", at=answer["taken"])
        time.sleep(0.005)


def install(base: str, ask: Dict[str, Any]) -> Answer:
    """Puts a file that was written beside its place into it, when it is whole."""
    path = place(base, ask["name"])
    for candidate in (path, path + ".new"):
        try:
            with open(candidate, "rb") as file:
                whole = hashlib.sha256(file.read()).hexdigest() == ask["digest"]
        except FileNotFoundError:
            continue
        if whole:
            if candidate != path:
                os.replace(candidate, path)
            return {"state": "installed"}
    return {"state": "missing"}


VERBS = {
    "install": install,
    "claim": claim,
    "settle": settle,
    "look": look,
    "stop": stop,
    "start": start,
    "pump": pump,
}


def main(argv: List[str]) -> int:
    base, verb = argv[1], argv[2]
    if verb == "relay":
        Relay(place(base, "claim"), argv[3], json.loads(argv[4])).run()
        return 0
    try:
        answer = VERBS[verb](base, json.loads("".join(argv[3:])))
    except (OSError, ValueError, KeyError) as error:
        answer = {"state": "failed", "detail": type(error).__name__ + ": " + str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
