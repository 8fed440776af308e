"""
The toolhost: runs inside a sandbox, checks every fence against the disk's own generation marker,
applies a tool at most once per fence, and says what it did in receipts.

The contract is `docs/toolhost-protocol.md`. Rules that this file keeps:

1. Nothing is touched before the marker on the disk was read, under the lock, and equals the fence.
2. `begun` and the pre-images are in the journal before the first effect, `done` after the last one.
3. Whoever holds the lock is the only one who writes; what it finds begun and not done is broken.
   The exceptions are single appended records (`ended`, `revoked`) that need no lock.
4. No path is resolved by the kernel in one go: every component is opened by itself, below the
   workspace, without following symbolic links.
5. One thread. Commands and long reads are child processes, watched by one poll loop, so that a
   revocation, a lost grant or a heartbeat never waits for a tool.

Standard library only, Python 3.8 or later, started as `python3 -I -S toolhost.py ...`. Imports that
only some tools need are delayed: start-up and the small write are the hot path.
"""

import binascii
import errno
import fcntl
import gc
import hashlib
import json
import os
import re
import select
import signal
import stat
import sys
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself would cost a tenth of the start-up
    from typing import Any

PROTOCOL = 1
WINDOW = 4096  # records that are remembered
HEAD_MAX = 64 * 1024
BODY_MAX = 80 * 1024 * 1024
CONTENT_MAX = 64 * 1024 * 1024
BLOBS_MAX = 32  # whole blobs that wait for their use
QUEUE_MAX = 4096  # mutating frames that wait behind a command
BACKLOG_MAX = 8 * 1024 * 1024  # unread answers; above this no more frames are read
READS_MAX = 16  # read tools that run as child processes at once
READ_BYTES_MAX = 1024 * 1024
ANSWER_BYTES = 768 * 1024  # of listings and matches
OUTPUT_BYTES = 16 * 1024
OUTPUT_BYTES_MAX = 1024 * 1024
PRE_INLINE_BYTES = 2048  # pre-images up to here stand in the journal itself
PRE_COPY_BYTES = 64 * 1024  # larger ones are linked when no other name leads to them
COMPACT_BYTES = 64 * 1024 * 1024
COMMAND_MS = 600_000
READ_MS = 30_000
MARK_MS = 5_000
GONE_S = 5.0  # how long killed processes may take to vanish
HUNG_S = 1.0  # how long a lock holder may keep a `mark` waiting once its tools are gone

TEMP_PREFIX = b".fencepost-"
TEMP_SUFFIX = b".tmp"
TRASH = b".fencepost-trash"
DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
TEMP_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

FILE_TOOLS = ("write_file", "apply_patch", "delete_path")
COMMAND_TOOLS = ("run_command", "run_migration")
READ_TOOLS = ("read_file", "list_dir", "search", "stat")

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}").fullmatch
_loads = json.JSONDecoder().decode
_monotonic = time.monotonic


def _make_dumps():
    """A compact JSON writer. `JSONEncoder.encode` builds the C encoder anew on every call."""
    made = json.JSONEncoder(separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return made.encode
    escape = json.encoder.encode_basestring_ascii
    encode = make(None, made.default, escape, None, ":", ",", False, False, False)
    join = "".join
    return lambda value: join(encode(value, 0))


_dumps = _make_dumps()

CRASH_AT, _, _crash_count = os.environ.get("FENCEPOST_TOOLHOST_CRASH", "").partition("#")
CRASH_ONCE = os.environ.get("FENCEPOST_TOOLHOST_CRASH_ONCE", "")
_crash_hits = [int(_crash_count or "1")]


def crash(point):
    """
    A numbered point between two effects: tests let the process die here, as by `kill -9`.

    `@<file>` names the point in a file's first line, read anew each time; who dies takes it out.
    """
    if CRASH_AT.startswith("@"):
        crash_by_script(CRASH_AT[1:], point)
    if point != CRASH_AT or (CRASH_ONCE and os.path.exists(CRASH_ONCE)):
        return
    _crash_hits[0] -= 1
    if _crash_hits[0] <= 0:
        if CRASH_ONCE:
            os.close(os.open(CRASH_ONCE, os.O_WRONLY | os.O_CREAT, 0o600))
        os._exit(137)


def crash_by_script(path, point):
    try:
        with open(path) as script:
            armed, _, rest = script.read().partition("\n")
    except OSError:
        return
    if armed == point:
        with open(path + ".new", "w") as script:
            script.write(rest)
        os.rename(path + ".new", path)
        os._exit(137)


class Refusal(Exception):
    """Nothing was touched, and this is why."""

    def __init__(self, reason, detail=""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class ToolFailure(Exception):
    """The tool ran and failed: a result that the caller must hear, not a fault of ours."""

    def __init__(self, result):
        super().__init__(result.get("error"))
        self.result = result


class Fault(Exception):
    """The machinery failed; the disk is as it was."""

    def __init__(self, reason, detail=""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Indeterminate(Exception):
    """Something began and what it did cannot be known."""

    def __init__(self, reason, detail=""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Malformed(Exception):
    """A frame without a readable head: no answer can be addressed."""


class WentBack(Exception):
    """The journal holds less than was read from it before: this is an older disk."""


def bad(field, text):
    return Refusal("invalid_arguments", "%s: %s" % (field, text))


def text(raw):
    """Bytes as text that any JSON reader takes; what is not UTF-8 is replaced."""
    return raw.decode("utf-8", "replace")


def clean(value):
    """A string without lone surrogates."""
    return (
        value
        if value.isascii()
        else value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    )


def shown(value):
    if isinstance(value, bytes):
        value = text(value)
    found = repr(value)
    return found if len(found) <= 80 else found[:77] + "..."


def sha256(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_fd(fd):
    """Makes a file's content survive a power loss; macOS's `fsync` alone stops at the drive."""
    if FULL_SYNC is not None:
        try:
            fcntl.fcntl(fd, FULL_SYNC)
            return
        except OSError:
            pass  # not every file system can
    os.fsync(fd)


FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
sync_data = getattr(os, "fdatasync", sync_fd)


def is_no_space(error):
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


# The tool's own failures: the tree is not as the call expects. Everything else is a fault.
_TREE_ERRORS = frozenset(
    (
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR,
        errno.EISDIR, errno.ENOTEMPTY, errno.EBUSY, errno.EXDEV, errno.ELOOP, errno.ENAMETOOLONG,
        errno.ETXTBSY, errno.EMLINK, errno.EILSEQ,
    )
)  # fmt: skip


def from_os_error(error):
    """Tells a failure of the tool from a fault of the machinery."""
    if is_no_space(error):
        return Fault("no_space", str(error))
    if error.errno in _TREE_ERRORS:
        return ToolFailure({"error": clean(error.strerror or str(error))})
    return Fault("io_error", str(error))


# ---------------------------------------------------------------- arguments


def parse_arguments(body):
    try:
        args = _loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise bad("arguments", "not UTF-8") from None
    except (ValueError, RecursionError):
        raise bad("arguments", "not JSON") from None
    if type(args) is not dict:
        raise bad("arguments", "must be an object")
    return args


def check_fields(args, allowed):
    for name in args:
        if name not in allowed:
            raise bad(clean(name), "unknown field, known are " + ", ".join(allowed))


def get_str(args, name, default=None, required=False):
    value = args.get(name, default)
    if value is None and not (required or name in args):
        return None
    if type(value) is not str:
        raise bad(name, "missing" if name not in args else "must be a string, got " + shown(value))
    return value


def get_int(args, name, default, low, high):
    value = args.get(name, default)
    if name in args and (type(value) is not int or not low <= value <= high):
        raise bad(name, "must be an integer from %d to %d, got %s" % (low, high, shown(value)))
    return value


def get_bool(args, name, default):
    value = args.get(name, default)
    if type(value) is not bool:
        raise bad(name, "must be true or false, got " + shown(value))
    return value


def to_bytes(value, field):
    """A JSON string as bytes; lone surrogates U+DC80 to U+DCFF stand for single raw bytes."""
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise bad(field, "holds a lone surrogate") from None


def split_path(value, field, root_ok=False):
    """A path argument as a tuple of component names; the tree is checked when it is walked."""
    if type(value) is not str:
        raise bad(field, "must be a string, got " + shown(value))
    raw = to_bytes(value, field)
    if not raw:
        raise bad(field, "is empty")
    if b"\0" in raw:
        raise bad(field, "contains a NUL")
    if len(raw) > 4096:
        raise bad(field, "is longer than 4096 bytes")
    if raw[:1] == b"/":
        raise bad(field, "is absolute, must be relative to the workspace")
    parts = tuple(raw.split(b"/"))
    if b"" in parts or b"." in parts:
        if not root_ok and parts[-1] in (b"", b"."):
            raise bad(field, "must end in a name")
        parts = tuple(part for part in parts if part not in (b"", b"."))
    for part in parts:
        if part == b"..":
            raise bad(field, "leaves the workspace by '..'")
        if len(part) > 255:
            raise bad(field, "has a name of more than 255 bytes")
    if not parts and not root_ok:
        raise bad(field, "must name something below the workspace")
    return parts


def joined(parts):
    return b"/".join(parts).decode("utf-8", "surrogateescape")


def split_joined(path):
    return tuple(path.encode("utf-8", "surrogateescape").split(b"/"))


# ---------------------------------------------------------------- processes
#
# Two ways to look at processes: Linux's /proc, and `ps` where there is none (macOS, the BSDs).
# Both answer `look` and `processes`; everything else is the same code.

# FENCEPOST_PORTABLE is for tests: it lets Linux do without what only Linux has.
IS_LINUX = os.path.exists("/proc/self/stat") and not os.environ.get("FENCEPOST_PORTABLE")
DEAD = (b"Z", b"X")


def start_time(pid):
    """
    When a process started, as a number that grows; with its id it names one process for ever.

    0 when there is no such process, or it is dead and only waits to be reaped.
    """
    found = look(pid)
    return found[1] if found and found[0] not in DEAD else 0


def look_in_proc(pid):
    """(state, start time in kernel ticks) of one process, or None."""
    fields = proc_stat(pid)
    return (fields[0], int(fields[19])) if fields else None


def proc_stat(pid):
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None


def processes_in_proc(group, cookie, started):
    """
    The living processes of one tool: those of its group or session, and those that carry its
    cookie in their environment (a child may leave its session, it hardly drops the variable).

    Without the cookie a process only counts while the group's leader is the recorded one or is
    gone, so that a reused process id never leads to somebody else's process.
    """
    found = []
    leader = start_time(group) if group else 0
    ours = bool(group) and leader in (0, started)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        fields = proc_stat(pid)
        if fields is None or fields[0] in DEAD or pid == os.getpid():
            continue
        member = ours and group in (int(fields[2]), int(fields[3])) and int(fields[19]) >= started
        if member or (cookie and carries(pid, cookie)):
            found.append(pid)
    return found


def carries(pid, cookie):
    if TOOL_UID[0]:
        # Another user's environment cannot be read; one user runs no other things than tools.
        return uid_of(pid) == TOOL_UID[0]
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return cookie in file.read()
    except OSError:
        return False


TOOL_UID = [0]  # the user that tools run as, where it is another one than the toolhost's


def uid_of(pid):
    try:
        with open("/proc/%d/status" % pid, "rb") as file:
            return int(file.read().partition(b"\nUid:")[2].split(None, 1)[0])
    except (OSError, ValueError, IndexError):
        return -1


def give_to_tools(name, parent):
    """What a file tool makes belongs to the tools' user, as what a command makes does."""
    if TOOL_UID[0]:
        os.chown(name, TOOL_UID[0], TOOL_UID[0], dir_fd=parent, follow_symlinks=False)


def become_tool_user(parent):
    """Leaves root behind for good; the parent's death signal does not outlive the change."""
    if TOOL_UID[0]:
        os.setgroups([])
        os.setresgid(TOOL_UID[0], TOOL_UID[0], TOOL_UID[0])
        os.setresuid(TOOL_UID[0], TOOL_UID[0], TOOL_UID[0])
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
            os._exit(127)


def look_by_ps(pid):
    """As `look_in_proc`; the start time is in seconds."""
    for row in ps("-p", "%d" % pid):
        return row[3], row[4]
    return None


def processes_by_ps(group, cookie, started):
    """
    As `processes_in_proc`, and what descends from those: macOS does not show the environment of
    its own programs, so that a cookie may be there and not be seen.
    """
    rows = {row[0]: row for row in ps("-axww" if ON_DARWIN else "axww", environment=True)}
    if os.getpid() not in rows:
        raise OSError(errno.EIO, "ps lists no processes")
    leader = rows.get(group)
    ours = bool(group) and (
        leader is None or leader[3] in DEAD or abs(leader[4] - started) <= PS_START_SLACK_S
    )
    shown_cookie = b" " + cookie.replace(b"\0", b" ") if cookie else b""
    found = set()
    for pid, _, in_group, state, began, words in rows.values():
        if state in DEAD or pid == os.getpid():
            continue
        began_after = began >= started - PS_START_SLACK_S
        member = ours and began_after and (group == in_group or group == session_of(pid))
        if member or (shown_cookie and shown_cookie in words):
            found.add(pid)
    below = found
    while below:
        below = {row[0] for row in rows.values() if row[1] in found and row[3] not in DEAD} - found
        found |= below
    return sorted(found)


def session_of(pid):
    try:
        return os.getsid(pid)
    except OSError:
        return 0


ON_DARWIN = sys.platform == "darwin"
MONTHS = b"JanFebMarAprMayJunJulAugSepOctNovDec"
# procps works a start time out from the boot time anew at each call: it may be told a second apart.
PS_START_SLACK_S = 1
PS_COLUMNS = ("pid", "ppid", "pgid", "stat", "lstart", "command")


def ps(*which, environment=False):
    """Rows of (pid, parent, group, state, start time, words and environment), as `ps` tells."""
    import subprocess

    flags = list(which)
    if environment:
        flags[0] += "E" if ON_DARWIN else "e"
    argv = ["ps", *flags]
    for name in PS_COLUMNS:  # one option each: in BSD's ps what follows "=" is a heading
        argv += ["-o", name + "="]
    env = {"PATH": "/bin:/usr/bin", "LC_ALL": "C", "TZ": "UTC"}
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=env, timeout=GONE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise OSError(errno.ETIMEDOUT, "ps does not answer") from error
    rows = []
    for line in done.stdout.splitlines():
        words = line.split(None, 9)
        if len(words) >= 9 and words[0].isdigit():
            told = b" %b " % words[9] if len(words) == 10 else b""
            pid, parent, group = int(words[0]), int(words[1]), int(words[2])
            rows.append((pid, parent, group, words[3][:1], seconds_of(words[4:9]), told))
    return rows


def seconds_of(words):
    """`Mon Nov 30 09:42:24 2026` as a number that grows with time; months have 31 days."""
    _, month, day, clock, year = words
    hours, minutes, seconds = clock.split(b":")
    days = (int(year) * 12 + MONTHS.index(month) // 3) * 31 + int(day)
    return ((days * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)


look = look_in_proc if IS_LINUX else look_by_ps
processes = processes_in_proc if IS_LINUX else processes_by_ps


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def end_processes(group, cookie, started, deadline):
    """Kills a tool's processes and waits until the last one is gone; tells whether it is."""
    while True:
        found = processes(group, cookie, started)
        for pid in found:
            kill(pid)
        if not found:
            return True
        if _monotonic() > deadline:
            return False
        time.sleep(0.003)


# ---------------------------------------------------------------- the journal


class Entry:
    """What the journal knows of one fence. Receipts stay on the disk, this holds where."""

    __slots__ = (
        "at",
        "attempt",
        "begun",
        "digest",
        "direction",
        "ended",
        "good",
        "group",
        "key",
        "no",
        "of",
        "pre",
        "receipt",
        "revoked",
        "started",
        "state",
        "step",
        "tool",
        "undone",
        "verdict",
    )  # fmt: skip

    def __init__(self, key, attempt, direction, step, no, at):
        self.key = key
        self.at = at  # its place among all records that were read
        self.attempt = attempt
        self.direction = direction
        self.step = step
        self.no = no
        self.tool = ""
        self.digest = ""
        self.of = ""
        self.state = ""  # "", open, done, broken, rolled
        self.verdict = ""
        self.good = False  # the outcome was ok
        self.begun = None  # (offset, length) of the begun record
        self.receipt = None
        self.group = 0
        self.started = 0
        self.revoked = False
        self.ended = False
        self.undone = False
        self.pre = False


def key_of(attempt, direction):
    return "undo:" + attempt if direction == "undo" else attempt


class Journal:
    """
    The append-only record of what began and what is done.

    One record a line: the CRC-32 of the JSON in hex, a space, the JSON. A torn last line is closed
    with a newline by the next append and fails its CRC from then on: cutting it could cut a record
    that another toolhost appends without the lock at the same instant.
    """

    def __init__(self, state_dir, sync):
        self.path = os.path.join(state_dir, "journal.jsonl")
        self.dir = state_dir
        self.sync = sync
        self.fd = -1
        self.reset()

    def reset(self):
        self.size = 0
        self.ino = 0
        self.seq = 0
        self.forgotten_no = 0
        self.forgotten_since = 0
        self.corrupt = 0
        self.torn = False
        self.entries = {}
        self.steps = {}
        self.order: deque[Any] = deque()
        self.open = set()
        self.dropped = []
        self.owed = []
        self.count = 0  # of records
        self.opened = None  # (count, record) of the first marker of the latest epoch
        self.restored = None  # (count, record) of the latest restore, finished or not
        self.forgotten_at = 0  # the latest of the forgotten

    def refresh(self):
        """Takes in what other processes appended, or replaced by a compaction."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            found = None
        if found is None or found.st_ino != self.ino or found.st_size < self.size:
            self.reopen()
        elif found.st_size != self.size:
            self.load_tail()

    def reopen(self):
        owed, seq = self.owed, self.seq
        if self.fd >= 0:
            os.close(self.fd)
        self.reset()
        self.owed = owed
        self.fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.ino = os.fstat(self.fd).st_ino
        self.load_tail()
        if self.seq < seq:
            # An older copy was put in its place. Going on, the count would reach what it was, and
            # nobody could tell the two disks apart any more.
            raise WentBack("%d records are done where %d were" % (self.seq, seq))

    def load_tail(self):
        """Reads complete lines from where the last reading ended."""
        rest = b""
        base = self.size
        while True:
            chunk = os.pread(self.fd, 1 << 20, base + len(rest))
            if not chunk:
                break
            data = rest + chunk
            end = data.rfind(b"\n") + 1
            position = 0
            while position < end:
                stop = data.index(b"\n", position)
                self.take(data[position:stop], base + position)
                position = stop + 1
            base += end
            rest = data[end:]
        self.size = base
        self.torn = bool(rest)

    def take(self, line, offset):
        body = line[9:]
        try:
            intact = len(line) > 10 and int(line[:8], 16) == binascii.crc32(body)
        except ValueError:
            intact = False
        if not intact:
            self.corrupt += 1
            return
        # The long parts stand last and are not parsed; a quote inside a string is escaped, so the
        # first occurrence of these bytes is the key.
        long = LONG_PART.get(body[6 : body.find(b'"', 6)].decode())
        cut = body.find(b"," + long) if long else -1
        if cut >= 0:
            record = json.loads(body[:cut] + b"}")
            self.apply(record, (offset + 9, len(body)), (offset + 9 + cut + 5, len(body) - cut - 6))
        else:
            self.apply(json.loads(body), (offset + 9, len(body)), None)

    def entry(self, record):
        key = key_of(record["a"], record["d"])
        entry = self.entries.get(key)
        if entry is None:
            entry = Entry(key, record["a"], record["d"], record["s"], record["no"], self.count)
            self.entries[key] = entry
            self.order.append(key)
            if len(self.entries) > WINDOW:
                self.forget()
        return entry

    def forget(self):
        """Drops the oldest settled record; one that is still open moves to the end instead."""
        for _ in range(len(self.order)):
            key = self.order.popleft()
            if key in self.open:
                self.order.append(key)
                continue
            entry = self.entries.pop(key)
            if self.steps.get(entry.step) == key:
                del self.steps[entry.step]
            self.forgotten_no = max(self.forgotten_no, entry.no)
            self.forgotten_at = max(self.forgotten_at, entry.at)
            self.forgotten_since += 1
            if entry.pre:
                self.dropped.append(key)
            return

    def apply(self, record, where, part):
        kind = record["k"]
        self.count += 1
        if kind == "base":
            self.seq = record["seq"]
            self.forgotten_no = record["no"]
            return
        if kind in RESTORES:
            self.restored = (self.count, record)
            # A fence from before is never taken for one that this tree has not seen.
            highest = max((entry.no for entry in self.entries.values()), default=0)
            self.forgotten_no = max(self.forgotten_no, highest)
            return
        if kind == "opened":
            if self.opened is None or self.opened[1]["epoch"] != record["epoch"]:
                self.opened = (self.count, record)
            return
        entry = self.entry(record)
        if kind == "begun":
            entry.state = "open"
            entry.tool = record["t"]
            entry.digest = record["g"]
            entry.of = record["of"]
            entry.group = record["pg"]
            entry.started = record["st"]
            entry.pre = record["pre"]
            entry.begun = where
            self.open.add(entry.key)
            self.steps[entry.step] = entry.key
        elif kind == "done":
            entry.state = "done"
            entry.tool = record["t"]
            entry.digest = record["g"]
            entry.of = record["of"]
            entry.verdict = record["v"]
            entry.good = record["ok"]
            if entry.receipt is None:
                self.seq += 1
            entry.receipt = part
            self.open.discard(entry.key)
            self.steps[entry.step] = entry.key
            if entry.direction == "undo" and entry.good and entry.of in self.entries:
                self.entries[entry.of].undone = True
        elif kind == "ended":
            entry.ended = True
        elif kind == "revoked":
            entry.revoked = True
        elif kind in ("broken", "rolled"):
            entry.state = kind
            self.open.discard(entry.key)
            if kind == "broken":
                self.steps[entry.step] = entry.key
            elif self.steps.get(entry.step) == entry.key:
                if entry.direction == "undo" and entry.of in self.entries:
                    self.steps[entry.step] = entry.of  # what was to be undone stands again
                else:
                    del self.steps[entry.step]

    def append(self, record, long=b"", owe=False):
        """
        Appends one record with one write. `long` is its last part, which is not parsed again.

        `owe`: when the disk is full, the record is kept and goes in front of the next one, so
        that a rolled back attempt is never rolled back again over a later step's work.
        """
        body = _dumps(record).encode()
        short = len(body)
        if long:
            body = b"%b,%b%b}" % (body[:-1], LONG_PART[record["k"]], long)
        line = b"%08x %b\n" % (binascii.crc32(body), body)
        data = line
        if self.owed or self.torn:
            data = (b"\n" if self.torn else b"") + b"".join(self.owed) + line
        try:
            self.write(data)
        except OSError:
            if owe:
                self.owed.append(line)
                self.take(line[:-1], -1)
            raise
        size = self.size
        if data is not line or os.lseek(self.fd, 0, os.SEEK_CUR) != size + len(data):
            self.owed.clear()
            self.load_tail()
            return
        self.size = size + len(data)
        part = (size + 9 + short + 4, len(long)) if long else None
        self.apply(record, (size + 9, len(body)), part)

    def write(self, data):
        written = os.write(self.fd, data)
        if written != len(data):
            self.torn = True
            raise OSError(errno.ENOSPC, "the journal took %d of %d bytes" % (written, len(data)))
        if self.sync:
            sync_data(self.fd)

    def append_unlocked(self, record):
        """
        Appends a record while another process may hold the lock, or be compacting.

        A compaction replaces the file: look whether ours still is the journal, else write again.
        Reading a record twice changes nothing.
        """
        for _ in range(10):
            self.append(record)
            try:
                if os.stat(self.path).st_ino == self.ino:
                    return
            except FileNotFoundError:
                pass
            self.reopen()

    def read(self, where):
        return os.pread(self.fd, where[1], where[0])

    def plan_of(self, entry):
        """The `x` part of a begun record: operations and, for migrations, the way down."""
        return json.loads(self.read(entry.begun))["x"]

    def compact(self):
        """Rewrites the journal with what is remembered. The lock is held."""
        temp = self.path + ".new"
        old = self.fd
        base = b'{"k":"base","seq":%d,"no":%d}' % (self.seq - self.done_count(), self.forgotten_no)
        placed = [(entry.at, self.lines_of(entry)) for entry in self.entries.values()]
        for one in (self.opened, self.restored):
            if one is not None:
                placed.append((one[0], [_dumps(one[1]).encode()]))
        placed.sort(key=lambda item: item[0])
        lines = [base]
        for _, some in placed:
            lines.extend(some)
        data = b"".join(b"%08x %b\n" % (binascii.crc32(line), line) for line in lines)
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, data)
            if self.sync:
                sync_fd(fd)
        finally:
            os.close(fd)
        crash("compact_written")
        os.rename(temp, self.path)
        crash("compact_renamed")
        # Another toolhost may have appended to the old file until this instant: carry it over.
        late = os.pread(old, 1 << 20, self.size)
        self.reopen()
        if late:
            self.write(late)
            self.load_tail()
        if self.sync:
            sync_dir(self.dir)

    def is_restoring(self):
        """Whether a restore began here and is not finished."""
        return self.restored is not None and self.restored[1]["k"] == "restoring"

    def is_here(self, entry):
        """Whether what an attempt did was done to this tree, not to one before a restore."""
        return self.restored is None or entry.at > self.restored[0]

    def last_of(self, step):
        """The latest record of a step, as far as it is about this tree."""
        entry = self.entries.get(self.steps.get(step, ""))
        return entry if entry is not None and self.is_here(entry) else None

    def has_begun_since(self, count, directions):
        """Whether a step was begun after so many records, and may have had an effect."""
        return self.forgotten_at > count or any(
            entry.at > count and entry.state in ("open", "done", "broken")
            for entry in self.entries.values()
            if entry.direction in directions
        )

    def done_count(self):
        return sum(1 for entry in self.entries.values() if entry.receipt is not None)

    def lines_of(self, entry):
        lines = []
        if entry.begun is not None:
            lines.append(self.read(entry.begun))
        if entry.revoked:
            lines.append(_dumps(record_of("revoked", entry)).encode())
        if entry.ended:
            lines.append(_dumps(record_of("ended", entry)).encode())
        if entry.receipt is not None:
            record = done_record(entry, entry.digest, entry.of, entry.verdict, entry.good)
            body = _dumps(record).encode()[:-1]
            lines.append(b'%b,"r":%b}' % (body, self.read(entry.receipt)))
        elif entry.state in ("broken", "rolled"):
            lines.append(_dumps(record_of(entry.state, entry)).encode())
        return lines


RESTORES = ("restoring", "restored", "unrestored")
LONG_PART = {"begun": b'"x":', "done": b'"r":'}


def record_of(kind, one):
    """A record about a fence: `one` is a `Call` or an `Entry`."""
    return {"k": kind, "a": one.attempt, "d": one.direction, "no": one.no, "s": one.step}


def done_record(one, digest, of, verdict, good):
    return {
        "k": "done", "a": one.attempt, "d": one.direction, "no": one.no, "s": one.step,
        "t": one.tool, "g": digest, "of": of, "v": verdict, "ok": good,
    }  # fmt: skip


def sync_dir(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_fd(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- the workspace


class Node:
    """What stands at a path: its digest as receipts tell it, and what a pre-image needs."""

    __slots__ = ("data", "digest", "kind", "links", "mode", "size")

    def __init__(self, kind, digest=None, mode=0, data=None, size=0, links=1):
        self.kind = kind  # none, file, link, dir, other
        self.digest = digest
        self.mode = mode
        self.data = data
        self.size = size
        self.links = links


ABSENT = Node("none")


class Source:
    """Content to be written: bytes, a file to copy, or a link's target."""

    __slots__ = ("data", "digest", "file", "mode", "target")

    def __init__(self, data=None, file=None, digest=None, mode=None, target=None):
        self.data = data
        self.file = file
        self.target = target
        self.mode = mode  # None: as before, or 0644
        if digest is None:
            digest = link_digest(target) if target is not None else sha256(data)
        self.digest = digest


def link_digest(target):
    return "link:" + target.decode("utf-8", "surrogateescape")


def link_target(digest):
    return digest[5:].encode("utf-8", "surrogateescape")


class Workspace:
    """
    The only tree that file tools read and write.

    Directories are opened component by component and kept for the duration of one frame
    (`release`), so that what was checked is what is used.
    """

    def __init__(self, root, hidden):
        self.root = os.fsencode(os.path.realpath(root))
        self.root_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.dirs = {}
        found = os.stat(hidden)
        state = os.fsencode(os.path.realpath(hidden))
        inside = state == self.root or state.startswith(self.root + b"/")
        # The state folder inside the workspace is the provider's choice; no path leads to it.
        self.hidden = (found.st_dev, found.st_ino) if inside else None
        self.hidden_parts = tuple(state[len(self.root) + 1 :].split(b"/")) if inside else None

    def release(self):
        if self.dirs:
            for fd in self.dirs.values():
                os.close(fd)
            self.dirs.clear()

    def check_writable(self, parts, field):
        if parts[0] == TRASH or (
            parts[-1].startswith(TEMP_PREFIX) and parts[-1].endswith(TEMP_SUFFIX)
        ):
            raise bad(field, "names beginning with %s are the toolhost's" % text(TEMP_PREFIX))
        hidden = self.hidden_parts
        if hidden is not None and parts[: len(hidden)] == hidden[: len(parts)]:
            raise bad(field, "leads to the toolhost's own state")

    def is_own(self, parts):
        """Whether a path is the toolhost's: its state, its trash, or a temporary file."""
        if parts[0] == TRASH or (
            parts[-1].startswith(TEMP_PREFIX) and parts[-1].endswith(TEMP_SUFFIX)
        ):
            return True
        return self.is_state(parts)

    def is_state(self, parts):
        hidden = self.hidden_parts
        return hidden is not None and parts[: len(hidden)] == hidden

    def leads_to_own(self, parts):
        hidden = self.hidden_parts
        return hidden is not None and parts != hidden and parts == hidden[: len(parts)]

    def above_own(self):
        """The directories that cannot be removed: the workspace, and those above the state."""
        count = 1 if self.hidden_parts is None else len(self.hidden_parts)
        return [(self.hidden_parts or ())[:number] for number in range(count)]

    def dir_fd(self, parts, field="path"):
        """The open directory, or None where nothing is; symbolic links are never traversed."""
        if not parts:
            return self.root_fd
        fd = self.dirs.get(parts)
        if fd is not None:
            return fd
        parent = self.dir_fd(parts[:-1], field)
        if parent is None:
            return None
        try:
            fd = os.open(parts[-1], DIR_FLAGS, dir_fd=parent)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            found = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                raise bad(
                    field, "passes through the symbolic link %s" % shown(joined(parts))
                ) from None
            raise ToolFailure({"error": "not a directory: " + clean(joined(parts))}) from None
        self.dirs[parts] = fd
        return fd

    def look(self, parts, field="path", load=0):
        """Reads what stands at a path; the content too when it has at most `load` bytes."""
        parent = self.dir_fd(parts[:-1], field)
        if parent is None:
            return ABSENT
        return look_at(parent, parts[-1], load)


def look_at(parent, name, load=0):
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return ABSENT
    mode = found.st_mode
    if stat.S_ISREG(mode):
        return look_file(parent, name, load)
    if stat.S_ISLNK(mode):
        return Node("link", link_digest(os.readlink(name, dir_fd=parent)))
    if stat.S_ISDIR(mode):
        return Node("dir", "dir", stat.S_IMODE(mode))
    return Node("other", "other")


def look_file(parent, name, load):
    fd = os.open(name, READ_FLAGS, dir_fd=parent)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Node("other", "other")
        mode = stat.S_IMODE(found.st_mode)
        if found.st_size <= load:
            data = read_fully(fd, found.st_size)
            return Node("file", sha256(data), mode, data, len(data), found.st_nlink)
        digest, size = digest_fd(fd)
        return Node("file", digest, mode, None, size, found.st_nlink)
    finally:
        os.close(fd)


def read_fully(fd, size):
    data = os.read(fd, size + 1)
    if len(data) == size:
        return data
    pieces = [data]
    while pieces[-1]:
        pieces.append(os.read(fd, 1 << 20))
    return b"".join(pieces)


def digest_fd(fd):
    digest = hashlib.sha256()
    size = 0
    while True:
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return "sha256:" + digest.hexdigest(), size
        digest.update(chunk)
        size += len(chunk)


def copy_fd(source, target):
    """Copies the rest of a file; returns the digest of what was copied."""
    digest = hashlib.sha256()
    while True:
        chunk = os.read(source, 1 << 20)
        if not chunk:
            return "sha256:" + digest.hexdigest()
        digest.update(chunk)
        write_all(target, chunk)


_libc = []  # type: list[Any]


def libc(name):
    """A function of Linux's C library, or None; `ctypes` is loaded when it is first needed."""
    if not IS_LINUX:
        return None
    if not _libc:
        try:
            import ctypes

            _libc.append(ctypes.CDLL(None))
        except (ImportError, OSError):
            _libc.append(None)
    return getattr(_libc[0], name, None)


RENAME_EXCHANGE = 2


def exchange(fd, name, other_fd, other):
    """Lets two names change places; False where the system cannot."""
    call = libc("renameat2")
    return call is not None and call(fd, name, other_fd, other, RENAME_EXCHANGE) == 0


def prctl(option, value):
    """Linux's prctl, where the interpreter has ctypes; elsewhere process groups must do."""
    call = libc("prctl")
    return call is not None and call(option, value, 0, 0, 0) == 0


# ---------------------------------------------------------------- operations on files
#
# A file tool is compiled to a list of operations, plain JSON that stands in its begun record:
#   p path, b digest before, a digest after, bm/am modes, and for what is replaced or removed
#   d (content, base64) or f (file in the pre-image folder). t is the kind:
#   rm      a file or a link goes            put     a file or a link comes, by temp and rename
#   mkdir   a directory comes                rmdir   an empty directory goes (kept if not empty)
#   tree    a directory is moved to trash    untree  it is moved back
# Their order: temps are written first, then rm, tree, rmdir, mkdir, put, untree.


class Plan:
    def __init__(self, workspace, field="path"):
        self.workspace = workspace
        self.field = field
        self.gone = set()
        self.made = set()
        self.rm = []
        self.rmdir = []
        self.mkdir = []
        self.puts = []
        self.trees = []
        self.sources = {}
        self.loaded = {}

    def ops(self):
        return self.rm + self.rmdir + self.mkdir + self.puts + self.trees

    def before(self, parts, node, kind, after):
        op = {"t": kind, "p": joined(parts), "b": node.digest, "a": after}
        if node.kind == "file":
            op["bm"] = node.mode
            if node.data is not None:
                op["d"] = binascii.b2a_base64(node.data, newline=False).decode()
            else:
                op["f"] = ""  # named when the pre-image is saved
                op["l"] = node.links == 1 and node.size > PRE_COPY_BYTES
        return op

    def put(self, parts, source, create_dirs=True):
        node = ABSENT if parts in self.gone_dirs() else self.look(parts)
        if node.kind == "dir":
            raise ToolFailure({"error": "is a directory: " + clean(joined(parts))})
        if node.kind == "other":
            raise ToolFailure({"error": "not a regular file: " + clean(joined(parts))})
        home = self.make_dirs(parts[:-1], create_dirs)
        op = self.before(parts, node, "put", source.digest)
        if source.target is None:
            kept = node.mode if node.kind == "file" else 0o644
            op["am"] = kept if source.mode is None else source.mode
        op["h"] = joined(home)
        self.sources[len(self.puts)] = source
        self.puts.append(op)

    def look(self, parts):
        for depth in range(1, len(parts)):
            if parts[:depth] in self.gone:
                return ABSENT
        return self.workspace.look(parts, self.field, PRE_INLINE_BYTES)

    def gone_dirs(self):
        return {split_joined(op["p"]) for op in self.rmdir} if self.rmdir else ()

    def make_dirs(self, parts, create):
        """Plans the missing directories; returns the deepest one that exists, home of the temp."""
        for depth in range(len(parts), -1, -1):
            here = parts[:depth]
            if any(here[:n] in self.gone for n in range(1, depth + 1)):
                continue
            if self.workspace.dir_fd(here, self.field) is not None:
                break
        if depth < len(parts) and not create:
            raise ToolFailure({"error": "no such directory: " + clean(joined(parts))})
        for longer in range(depth + 1, len(parts) + 1):
            if parts[:longer] not in self.made:
                self.made.add(parts[:longer])
                self.mkdir.append(
                    {"t": "mkdir", "p": joined(parts[:longer]), "b": None, "a": "dir"}
                )
        return parts[:depth]

    def remove(self, parts, node):
        """Plans to take a file or a link away."""
        self.rm.append(self.before(parts, node, "rm", None))
        self.gone.add(parts)

    def remove_empty_parents(self, parts, arriving):
        """Plans, as git does, to remove directories that this plan empties."""
        while len(parts) > 1:
            parts = parts[:-1]
            if any(path[: len(parts)] == parts for path in arriving if len(path) > len(parts)):
                return
            fd = self.workspace.dir_fd(parts, self.field)
            if fd is None or any(
                parts + (os.fsencode(n),) not in self.gone for n in os.listdir(fd)
            ):
                return
            if parts not in self.gone:
                self.gone.add(parts)
                self.rmdir.append({"t": "rmdir", "p": joined(parts), "b": "dir", "a": None})


class Files:
    """Carries operations out, saves their pre-images first, and takes them back."""

    def __init__(self, workspace, state_dir, sync):
        self.workspace = workspace
        self.sync = sync
        self.pre_root = os.path.join(state_dir, "pre")
        os.makedirs(self.pre_root, mode=0o700, exist_ok=True)
        self.trash_is_state = None

    # -- pre-images

    def save(self, key, ops):
        """Saves what the operations will replace; True when a pre-image folder was made."""
        folder = None
        for number, op in enumerate(ops):
            if op["t"] == "tree":
                op["f"] = self.trash_name(key, number)
                continue
            if "l" not in op:
                continue
            if folder is None:
                folder = os.path.join(self.pre_root, key)
                os.makedirs(folder, mode=0o700, exist_ok=True)
            op["f"] = str(number)
            self.save_file(op, os.path.join(folder, op["f"]))
        if folder is not None and self.sync:
            sync_dir(folder)
            sync_dir(self.pre_root)
        return folder is not None or any(op["t"] == "tree" for op in ops)

    def save_file(self, op, path):
        """
        A large file with one name is linked: it is replaced by rename, so the link keeps the old
        inode. Who still has it open could write to it, so its digest is looked at before use.
        Small files, and those that another name leads to, are copied.
        """
        parts = split_joined(op["p"])
        parent = self.workspace.dir_fd(parts[:-1])
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        if op["l"]:
            try:
                os.link(parts[-1], path, src_dir_fd=parent, follow_symlinks=False)
                return
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                    raise
        source = os.open(parts[-1], READ_FLAGS, dir_fd=parent)
        try:
            target = os.open(path, TEMP_FLAGS, 0o600)
            try:
                digest = copy_fd(source, target)
                if self.sync:
                    sync_fd(target)
            finally:
                os.close(target)
        finally:
            os.close(source)
        if digest != op["b"]:
            raise Fault("io_error", "%s changed while its pre-image was saved" % clean(op["p"]))

    def trash_name(self, key, number):
        """Where a deleted tree goes: beside the pre-images, or inside the workspace's own disk."""
        if self.trash_is_state is None:
            self.trash_is_state = self.can_rename()
        name = "%s~%d" % (key, number)
        if self.trash_is_state:
            return os.path.join(self.pre_root, name)
        try:
            os.mkdir(TRASH, 0o700, dir_fd=self.workspace.root_fd)
        except FileExistsError:
            pass
        return "~" + name

    def can_rename(self):
        probe = os.path.join(self.pre_root, ".probe")
        try:
            os.mkdir(probe)
        except FileExistsError:
            pass
        name = TEMP_PREFIX + b"probe" + TEMP_SUFFIX
        try:
            os.rename(probe, name, dst_dir_fd=self.workspace.root_fd)
            os.rmdir(name, dir_fd=self.workspace.root_fd)
        except OSError:
            os.rmdir(probe)
            return False
        return True

    def trash_place(self, op):
        """The trash as (path, directory fd)."""
        if not op["f"].startswith("~"):
            return op["f"], None
        root = self.workspace.root_fd
        return TRASH + b"/" + op["f"][1:].encode(), root

    def drop(self, key):
        """Forgets an attempt's pre-images: a flat folder of files, or else a tree in the trash."""
        folder = os.path.join(self.pre_root, key)
        try:
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
        except FileNotFoundError:
            self.drop_trees(key.encode() + b"~")

    def drop_trees(self, prefix):
        import shutil

        for root in self.kept_in():
            for name in os.listdir(root):
                if name.startswith(prefix):
                    shutil.rmtree(os.path.join(root, name), ignore_errors=True)

    def kept_in(self):
        roots = (os.fsencode(self.pre_root), os.path.join(self.workspace.root, TRASH))
        return [root for root in roots if os.path.isdir(root)]

    def drop_unknown(self, known):
        """Drops pre-images that no record names: a crash between saving them and `begun`."""
        for root in self.kept_in():
            for name in os.listdir(root):
                key = name.partition(b"~")[0].decode("utf-8", "replace")
                if key not in known:
                    self.drop(key)

    # -- doing

    def temp_name(self, number, index):
        return b"%b%d-%d%b" % (TEMP_PREFIX, number, index, TEMP_SUFFIX)

    def stage(self, plan, number):
        """Writes every new content beside its place; no path has changed when this fails."""
        for index, op in enumerate(plan.puts):
            home = self.workspace.dir_fd(split_joined(op["h"]) if op["h"] else ())
            name, source = self.temp_name(number, index), plan.sources[index]
            self.write_temp(home, name, source, op.get("am"))
            if CRASH_AT:
                crash("temp_written")

    def write_temp(self, parent, name, source, mode):
        if source.target is not None:
            try:
                os.symlink(source.target, name, dir_fd=parent)
            except FileExistsError:
                os.unlink(name, dir_fd=parent)
                os.symlink(source.target, name, dir_fd=parent)
            give_to_tools(name, parent)
            return
        try:
            fd = os.open(name, TEMP_FLAGS, 0o644, dir_fd=parent)
        except FileExistsError:
            os.unlink(name, dir_fd=parent)
            fd = os.open(name, TEMP_FLAGS, 0o644, dir_fd=parent)
        try:
            if source.data is not None:
                data = source.data
                if os.write(fd, data) != len(data):
                    os.lseek(fd, 0, os.SEEK_SET)
                    write_all(fd, data)
            else:
                self.copy_in(source, fd)
            if TOOL_UID[0]:
                os.fchown(fd, TOOL_UID[0], TOOL_UID[0])
            if mode != 0o644:
                os.fchmod(fd, mode)
            if self.sync:
                sync_fd(fd)
        finally:
            os.close(fd)

    def copy_in(self, source, target):
        fd = os.open(source.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if copy_fd(fd, target) != source.digest:
                raise Refusal("blob_missing", "its bytes do not have the digest " + source.digest)
        finally:
            os.close(fd)

    def carry_out(self, ops, number):
        index = 0
        for op in ops:
            parts = split_joined(op["p"])
            parent = self.workspace.dir_fd(parts[:-1])
            kind = op["t"]
            if kind == "put":
                home = self.workspace.dir_fd(split_joined(op["h"]) if op["h"] else ())
                self.put_in_place(home, self.temp_name(number, index), parent, parts[-1], op)
                index += 1
            elif kind == "rm":
                os.unlink(parts[-1], dir_fd=parent)
            elif kind == "mkdir":
                os.mkdir(parts[-1], 0o755, dir_fd=parent)
                give_to_tools(parts[-1], parent)
            elif kind == "rmdir":
                op["kept"] = not self.rmdir(parent, parts)
            else:
                self.move_tree(op, parts, parent, back=kind == "untree")
            if self.sync and parent is not None:
                sync_fd(parent)
            if CRASH_AT:
                crash("effect")

    def put_in_place(self, home, temp, parent, name, op):
        """
        Moves a temp to its place in one step. Where something is replaced the two exchange names,
        and the old one is unlinked: ext4 begins to write a file out when it is renamed over
        another, which costs more than all else together.
        """
        if op["b"] is None or not exchange(home, temp, parent, name):
            os.rename(temp, name, src_dir_fd=home, dst_dir_fd=parent)
            return
        if CRASH_AT:
            crash("exchanged")
        os.unlink(temp, dir_fd=home)

    def rmdir(self, parent, parts):
        fd = self.workspace.dirs.pop(parts, None)
        if fd is not None:
            os.close(fd)
        try:
            os.rmdir(parts[-1], dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def move_tree(self, op, parts, parent, back):
        place, place_fd = self.trash_place(op)
        if back:
            os.rename(place, parts[-1], src_dir_fd=place_fd, dst_dir_fd=parent)
        else:
            os.rename(parts[-1], place, src_dir_fd=parent, dst_dir_fd=place_fd)

    # -- taking back

    def roll_back(self, key, ops, number):
        """
        Puts every path back as it was before the operations began, however far they came.

        Idempotent. Only called under the lock and before any later step, so whatever stands there
        is these operations' work.
        """
        self.workspace.release()
        puts = [op for op in ops if op["t"] == "put"]
        for index, op in enumerate(puts):
            home = self.dir_or_none(split_joined(op["h"]) if op["h"] else ())
            if home is not None:
                try:
                    os.unlink(self.temp_name(number, index), dir_fd=home)
                except FileNotFoundError:
                    pass
        for op in reversed(ops):
            self.roll_back_one(key, op, number)
            if CRASH_AT:
                crash("rolled_one")

    def dir_or_none(self, parts):
        """The directory; None too where a file or link stands that operations would replace."""
        try:
            return self.workspace.dir_fd(parts)
        except (ToolFailure, Refusal):
            return None

    def roll_back_one(self, key, op, number):
        parts = split_joined(op["p"])
        kind = op["t"]
        parent = self.dir_or_none(parts[:-1])
        if parent is None:
            return
        if kind == "mkdir":
            self.rmdir(parent, parts)
        elif kind == "rmdir":
            try:
                os.mkdir(parts[-1], 0o755, dir_fd=parent)
                give_to_tools(parts[-1], parent)
            except FileExistsError:
                pass
        elif kind in ("tree", "untree"):
            try:
                self.move_tree(op, parts, parent, back=kind == "tree")
            except FileNotFoundError:
                pass
        else:
            now = look_at(parent, parts[-1])
            if now.digest != op["b"] or (now.kind == "file" and now.mode != op["bm"]):
                self.put_back(key, op, parent, parts[-1], number)

    def put_back(self, key, op, parent, name, number):
        if op["b"] is None:
            os.unlink(name, dir_fd=parent)
            return
        temp = self.temp_name(number, 0)
        if op.get("f") and op["l"]:
            # The linked old inode itself: needs no space on a full disk.
            os.rename(os.path.join(self.pre_root, key, op["f"]), name, dst_dir_fd=parent)
            return
        source = self.source_before(key, op)
        try:
            self.write_temp(parent, temp, source, op.get("bm"))
        except OSError as error:
            if not is_no_space(error):
                raise
            try:
                os.unlink(name, dir_fd=parent)  # what we wrote makes the room
            except FileNotFoundError:
                pass
            self.write_temp(parent, temp, source, op.get("bm"))
        os.rename(temp, name, src_dir_fd=parent, dst_dir_fd=parent)

    def source_before(self, key, op):
        """What stood there before an operation, as content to be written again."""
        if op["b"].startswith("link:"):
            return Source(target=link_target(op["b"]))
        if "d" in op:
            return Source(data=binascii.a2b_base64(op["d"]), digest=op["b"], mode=op["bm"])
        path = os.path.join(self.pre_root, key, op["f"])
        return Source(file=path, digest=op["b"], mode=op["bm"])

    def plan_undo(self, key, ops):
        """The operations that take a done attempt back, while every path is as it left it."""
        plan = Plan(self.workspace)
        for op in reversed(ops):
            parts = split_joined(op["p"])
            # What a later operation of the same attempt put here is planned to go already.
            now = ABSENT if parts in plan.gone else plan.look(parts)
            kind = op["t"]
            if kind in ("mkdir", "rmdir"):
                self.plan_undo_dir(plan, op, parts, now)
                continue
            if now.digest != op["a"] or (now.kind == "file" and now.mode != op["am"]):
                raise Refusal(
                    "overwritten", "%s is no longer as this attempt left it" % clean(op["p"])
                )
            if kind == "tree":
                self.plan_untree(plan, op, parts)
            elif op["b"] is None:
                plan.remove(parts, now)
            else:
                source = self.source_before(key, op)
                if source.file is not None and not has_digest(source.file, source.digest):
                    raise Refusal("overwritten", "the pre-image of %s was altered" % clean(op["p"]))
                plan.put(parts, source)
        return plan

    def plan_undo_dir(self, plan, op, parts, now):
        if op["t"] == "rmdir":
            if now.kind == "none":
                plan.make_dirs(parts, create=True)
        elif now.kind == "dir":
            plan.gone.add(parts)
            plan.rmdir.append({"t": "rmdir", "p": op["p"], "b": "dir", "a": None})

    def plan_untree(self, plan, op, parts):
        place, place_fd = self.trash_place(op)
        try:
            os.stat(place, dir_fd=place_fd, follow_symlinks=False)
        except FileNotFoundError:
            raise Refusal("overwritten", "the kept tree of %s is gone" % clean(op["p"])) from None
        plan.make_dirs(parts[:-1], create=True)
        plan.trees.append({"t": "untree", "p": op["p"], "b": None, "a": "dir", "f": op["f"]})


def has_digest(path, digest):
    try:
        fd = os.open(path, READ_FLAGS)
    except FileNotFoundError:
        return False
    try:
        return digest_fd(fd)[0] == digest
    finally:
        os.close(fd)


def changes_of(ops):
    """The operations as a receipt tells them; directories that were kept are left out."""
    changes = []
    for op in ops:
        if op.get("kept"):
            continue
        change = {"path": clean(op["p"]), "before": op["b"], "after": op["a"]}
        for side in ("before", "after"):
            if change[side] is not None:
                change[side] = clean(change[side])
        mode = op.get("am")
        if mode is not None and mode != op.get("bm", 0o644):
            change["mode"] = "%04o" % mode
        changes.append(change)
    return changes


# ---------------------------------------------------------------- patches


class FilePatch:
    """One file of a unified diff. Paths are component tuples, None where there is no file."""

    __slots__ = ("change", "hunks", "line", "new", "new_mode", "old", "old_mode")

    def __init__(self, line):
        self.line = line
        self.old = None
        self.new = None
        self.old_mode = None
        self.new_mode = None
        self.change = "modified"
        self.hunks = []


class PatchReader:
    """
    Reads git's extended unified diff and the plain one, as bytes.

    Text around the files (a mail's head, a signature) is skipped, but a hunk that is shorter or
    longer than its header says is refused: nothing is guessed.
    """

    HUNK = rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@"
    ESCAPES = {ord(k): v for k, v in zip('abtnvfr"\\', b'\a\b\t\n\v\f\r"\\')}
    MODES = {b"100644": 0o100644, b"100755": 0o100755, b"120000": 0o120000}

    def __init__(self, raw):
        pieces = raw.split(b"\n")
        last = pieces.pop()
        self.lines = [piece + b"\n" for piece in pieces]
        if last:
            self.lines.append(last)
        self.at = 0
        self.hunk_header = re.compile(self.HUNK).match

    def error(self, problem, line=None):
        return bad("patch", "line %d: %s" % ((self.at if line is None else line) + 1, problem))

    def head(self, offset=0):
        at = self.at + offset
        return self.lines[at].rstrip(b"\r\n") if at < len(self.lines) else b""

    def read(self):
        found = []
        while self.at < len(self.lines):
            line = self.head()
            if line.startswith(b"diff --git "):
                found.append(self.read_git())
            elif line.startswith(b"--- ") and self.head(1).startswith(b"+++ "):
                found.append(self.read_plain())
            elif self.hunk_header(line):
                raise self.error("a hunk without a file header")
            elif line.startswith((b"GIT binary patch", b"Binary files ")):
                raise self.error("binary patches are not supported")
            else:
                self.at += 1
        if not found:
            raise bad("patch", "names no file")
        return found

    def read_git(self):
        patch = FilePatch(self.at)
        left, right = self.names_of_header(self.head()[11:])
        self.at += 1
        while self.at < len(self.lines) and self.extended(patch, self.head()):
            self.at += 1
        line = self.head()
        if line.startswith((b"GIT binary patch", b"Binary files ")):
            raise self.error("binary patches are not supported (%s)" % shown(right or left or b"?"))
        if patch.old is None and patch.new is None:
            if left is None:
                raise self.error("cannot tell the file's name", patch.line)
            patch.old = patch.new = left
        if line.startswith(b"--- ") and self.head(1).startswith(b"+++ "):
            self.check_names(patch, line[4:], self.head(1)[4:])
            self.at += 2
            self.read_hunks(patch)
        elif self.hunk_header(line):
            raise self.error("a hunk without --- and +++ lines")
        return self.finish(patch)

    def extended(self, patch, line):
        """Takes one extended header line; False when it is none."""
        for prefix, field in ((b"old mode ", "old_mode"), (b"new mode ", "new_mode")):
            if line.startswith(prefix):
                setattr(patch, field, self.mode(line[len(prefix) :]))
                return True
        for prefix, field, change in (
            (b"new file mode ", "new_mode", "created"),
            (b"deleted file mode ", "old_mode", "deleted"),
        ):
            if line.startswith(prefix):
                setattr(patch, field, self.mode(line[len(prefix) :]))
                patch.change = change
                return True
        for prefix, field, change in (
            (b"rename from ", "old", "renamed"), (b"rename to ", "new", "renamed"),
            (b"rename old ", "old", "renamed"), (b"rename new ", "new", "renamed"),
            (b"copy from ", "old", "copied"), (b"copy to ", "new", "copied"),
        ):  # fmt: skip
            if line.startswith(prefix):
                setattr(patch, field, self.unquoted(line[len(prefix) :]))
                patch.change = change
                return True
        if line.startswith(b"index "):
            mode = line.rpartition(b" ")[2]
            if mode in self.MODES and patch.old_mode is None:
                patch.old_mode = self.MODES[mode]
            return True
        return line.startswith((b"similarity index ", b"dissimilarity index "))

    def mode(self, raw):
        mode = self.MODES.get(raw.strip())
        if mode is None:
            raise self.error("mode %s is not supported" % shown(raw.strip()))
        return mode

    def names_of_header(self, rest):
        """The two names of a `diff --git` line without their prefixes; None when not to be told."""
        if rest.startswith(b'"'):
            left, used = self.unquote(rest)
            right = self.unquoted(rest[used + 1 :])
            return self.stripped(left, right)
        if rest.endswith(b'"') and b' "' in rest:
            cut = rest.index(b' "')
            return self.stripped(rest[:cut], self.unquoted(rest[cut + 1 :]))
        at = rest.find(b" ")
        while at >= 0:
            left, right = self.stripped(rest[:at], rest[at + 1 :])
            if left == right:
                return left, right
            at = rest.find(b" ", at + 1)
        return None, None

    def stripped(self, left, right):
        """Without `a/` and `b/` (or git's mnemonic letters), when they have them."""
        pair = (left[:2], right[:2])
        if pair[0] != pair[1] and all(
            len(p) == 2 and p[1:] == b"/" and p[:1] in b"abciow12" for p in pair
        ):
            return left[2:], right[2:]
        return left, right

    def file_name(self, raw):
        if raw.startswith(b'"'):
            return self.unquote(raw)[0]
        return raw.partition(b"\t")[0]

    def check_names(self, patch, old, new):
        old, new = self.file_name(old), self.file_name(new)
        if old == b"/dev/null" and patch.change == "modified":
            patch.change = "created"
        if new == b"/dev/null" and patch.change == "modified":
            patch.change = "deleted"
        for found, known, other in ((old, patch.old, new), (new, patch.new, old)):
            if found != b"/dev/null" and known not in (found, self.without_prefix(found, other)):
                raise self.error(
                    "the file names disagree: %s, %s" % (shown(known or b""), shown(found))
                )

    def without_prefix(self, name, other):
        if name[1:2] == b"/" and (other == b"/dev/null" or other[:2] != name[:2]):
            return name[2:]
        return name

    def read_plain(self):
        patch = FilePatch(self.at)
        old, new = self.file_name(self.head()[4:]), self.file_name(self.head(1)[4:])
        if old == b"/dev/null":
            patch.change = "created"
            patch.old = patch.new = new[2:] if new[:2] in (b"b/", b"a/") else new
        elif new == b"/dev/null":
            patch.change = "deleted"
            patch.old = patch.new = old[2:] if old[:2] in (b"a/", b"b/") else old
        else:
            patch.old, patch.new = self.stripped(old, new)
            if patch.old != patch.new:
                raise self.error("the file names disagree: %s, %s" % (shown(old), shown(new)))
        self.at += 2
        self.read_hunks(patch)
        if not patch.hunks:
            raise self.error("a file without hunks", patch.line)
        return self.finish(patch)

    def finish(self, patch):
        if patch.change in ("renamed", "copied") and (patch.old is None or patch.new is None):
            raise self.error("%s without both names" % patch.change, patch.line)
        old = patch.old.decode("utf-8", "surrogateescape")
        new = patch.new.decode("utf-8", "surrogateescape")
        patch.old = None if patch.change == "created" else self.checked(old, patch)
        patch.new = None if patch.change == "deleted" else self.checked(new, patch)
        return patch

    def checked(self, path, patch):
        try:
            return split_path(path, "path")
        except Refusal as refusal:
            raise self.error(refusal.detail, patch.line) from None

    def read_hunks(self, patch):
        while self.at < len(self.lines):
            found = self.hunk_header(self.lines[self.at])
            if not found:
                break
            old_at, old_count, _, new_count = (
                int(g) if g is not None else 1 for g in found.groups()
            )
            self.at += 1
            patch.hunks.append((old_at, old_count, self.read_hunk(old_count, new_count)))
        line = self.lines[self.at] if self.at < len(self.lines) else b""
        sign = line.rstrip(b"\r\n") == b"-- " or line.startswith((b"--- ", b"-- \n"))
        if patch.hunks and line[:1] in (b" ", b"+", b"-", b"\\") and not sign:
            raise self.error("the hunk is longer than its header says")

    def read_hunk(self, old_left, new_left):
        """The lines of a hunk as (sign, bytes with their line end)."""
        lines: list[Any] = []
        while old_left or new_left or self.head().startswith(b"\\"):
            if self.at >= len(self.lines):
                raise self.error("the hunk is shorter than its header says")
            raw = self.lines[self.at]
            sign, rest = raw[:1], raw[1:]
            if raw in (b"\n", b"\r\n"):  # an empty context line whose blank was cut off
                sign, rest = b" ", raw
            if sign == b"\\":
                if not lines:
                    raise self.error("nothing before the no-newline mark")
                lines[-1] = (lines[-1][0], lines[-1][1].rstrip(b"\n"))
            elif sign in (b" ", b"-", b"+"):
                old_left -= sign != b"+"
                new_left -= sign != b"-"
                if old_left < 0 or new_left < 0:
                    raise self.error("the hunk's counts do not fit its lines")
                lines.append((sign, rest))
            else:
                raise self.error("the hunk is shorter than its header says")
            self.at += 1
        return lines

    def unquoted(self, raw):
        return self.unquote(raw)[0] if raw.startswith(b'"') else raw

    def unquote(self, raw):
        """A C-quoted name and how many bytes it took."""
        out = bytearray()
        at = 1
        while at < len(raw):
            byte = raw[at]
            if byte == 0x22:
                return bytes(out), at + 1
            if byte != 0x5C:
                out.append(byte)
                at += 1
                continue
            octal = raw[at + 1 : at + 4]
            if len(octal) == 3 and all(0x30 <= d <= 0x37 for d in octal):
                out.append(int(octal, 8) & 0xFF)
                at += 4
            elif at + 1 < len(raw) and raw[at + 1] in self.ESCAPES:
                out.append(self.ESCAPES[raw[at + 1]])
                at += 2
            else:
                break
        raise self.error("a badly quoted file name")


def apply_hunks(patch, data):
    """The new content; every context and removed line must stand exactly at its stated line."""
    pieces = data.split(b"\n")
    last = pieces.pop()
    lines = [piece + b"\n" for piece in pieces]
    if last:
        lines.append(last)
    out = []
    done = 0
    for number, (old_at, old_count, hunk) in enumerate(patch.hunks, 1):
        start = old_at - 1 if old_count else old_at
        if start < done:
            raise hunk_failure(
                patch, number, old_at, "a later line", "a hunk that overlaps the one before"
            )
        if start > len(lines):
            raise hunk_failure(patch, number, old_at, "line %d" % old_at, None)
        out.extend(lines[done:start])
        done = start
        for sign, line in hunk:
            if sign == b"+":
                out.append(line)
                continue
            found = lines[done] if done < len(lines) else None
            if found != line:
                raise hunk_failure(patch, number, done + 1, line, found)
            done += 1
            if sign == b" ":
                out.append(line)
    out.extend(lines[done:])
    for line in out[:-1]:
        if not line.endswith(b"\n"):
            raise hunk_failure(
                patch,
                len(patch.hunks),
                len(out),
                "a line end",
                "a line without one inside the file",
            )
    return b"".join(out)


def hunk_failure(patch, number, line, expected, found):
    def told(value):
        if value is None:
            return "the end of the file"
        return value if isinstance(value, str) else text(value[:500])

    return ToolFailure(
        {
            "error": "the patch does not apply", "file": clean(joined(patch.new or patch.old)),
            "hunk": number, "line": line, "expected": told(expected), "found": told(found),
        }
    )  # fmt: skip


def patch_failure(parts, expected, found):
    return ToolFailure(
        {
            "error": "the patch does not apply", "file": clean(joined(parts)), "hunk": 0,
            "expected": expected, "found": found,
        }
    )  # fmt: skip


class PatchPlanner:
    """
    Applies all files of a patch in memory, then plans what differs from the disk.

    A rename's or copy's source is read as it was before the whole patch (so two files can change
    names); a file named twice is patched on top of the first result.
    """

    def __init__(self, workspace, patches):
        self.workspace = workspace
        self.original = {}
        self.result = {}
        self.taken = set()
        self.leaving = {p.old for p in patches if p.change in ("deleted", "renamed")}

    def on_disk(self, parts):
        node = self.original.get(parts)
        if node is None:
            node = self.original[parts] = self.workspace.look(parts, "patch", CONTENT_MAX)
        return node

    def current(self, parts):
        if parts in self.result:
            source = self.result[parts]
            if source is None:
                return ABSENT
            if source.target is not None:
                return Node("link", source.digest)
            return Node("file", source.digest, source.mode, source.data, len(source.data))
        for depth in range(1, len(parts)):
            if parts[:depth] in self.leaving:
                return ABSENT  # a file that this patch removes: the path below it is free
        return self.on_disk(parts)

    def add(self, patch):
        if patch.change in ("renamed", "copied"):
            before = self.on_disk(patch.old)
        elif patch.old is not None:
            before = self.current(patch.old)
        else:
            before = ABSENT
        if patch.old is not None:
            self.check_before(patch, before)
        if patch.new is None:
            self.add_deletion(patch, before)
            return
        if patch.change == "renamed":
            if patch.old not in self.taken:
                self.result[patch.old] = None
        if patch.change in ("created", "renamed", "copied"):
            there = self.current(patch.new)
            # A directory in the way may be emptied by this patch: the plan decides.
            if there.kind not in ("none", "dir") and patch.old != patch.new:
                raise patch_failure(patch.new, "nothing", there.kind)
            self.taken.add(patch.new)
        self.result[patch.new] = self.content_after(patch, before)

    def check_before(self, patch, before):
        wanted = "link" if patch.old_mode == 0o120000 else "file"
        if (
            patch.old_mode is None
            and patch.change in ("renamed", "copied")
            and before.kind == "link"
        ):
            return  # a pure rename does not tell the mode
        if before.kind != wanted:
            raise patch_failure(
                patch.old, wanted, "nothing" if before.kind == "none" else before.kind
            )

    def content_after(self, patch, before):
        data = apply_hunks(patch, self.data_of(before)) if patch.hunks else self.data_of(before)
        mode = patch.new_mode
        if mode == 0o120000 or (mode is None and before.kind == "link"):
            if not data or b"\0" in data:
                raise bad("patch", "a symbolic link to nothing: " + clean(joined(patch.new)))
            return Source(target=data)
        if before.kind == "link":
            raise bad(
                "patch", "a link's mode changes without deleting it: " + clean(joined(patch.new))
            )
        if mode is None:
            return Source(data=data, mode=before.mode if before.kind == "file" else 0o644)
        if before.kind == "file" and (mode & 0o111 != 0) == (before.mode & 0o111 != 0):
            return Source(data=data, mode=before.mode)
        return Source(data=data, mode=mode & 0o777)

    def data_of(self, node):
        if node.kind == "link":
            return link_target(node.digest)
        if node.kind == "file" and node.data is None:
            raise ToolFailure({"error": "the file is larger than %d bytes" % CONTENT_MAX})
        return node.data or b""

    def add_deletion(self, patch, before):
        rest = apply_hunks(patch, self.data_of(before)) if patch.hunks else self.data_of(before)
        if rest:
            raise patch_failure(
                patch.old, "nothing after the deletion", "%d bytes left" % len(rest)
            )
        self.result[patch.old] = None

    def plan(self):
        plan = Plan(self.workspace, "patch")
        arriving = [parts for parts, source in self.result.items() if source is not None]
        for parts, source in self.result.items():
            if source is None:
                node = self.workspace.look(parts, "patch", PRE_INLINE_BYTES)
                if node.kind in ("file", "link"):
                    plan.remove(parts, node)
        for op in list(plan.rm):
            plan.remove_empty_parents(split_joined(op["p"]), arriving)
        for parts in arriving:
            source = self.result[parts]
            there = self.original.get(parts, ABSENT)
            if there.digest == source.digest and (
                source.target is not None or there.mode == source.mode
            ):
                continue
            plan.put(parts, source)
        return plan


# ---------------------------------------------------------------- contents by reference


class Blobs:
    """Contents that travelled ahead of the frame that names them."""

    def __init__(self, state_dir):
        self.root = os.path.join(state_dir, "blobs")
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        self.failed = {}
        for name in os.listdir(self.root):
            pid = name.partition(".")[2]
            if pid and (not pid.isdigit() or start_time(int(pid)) == 0):
                os.unlink(os.path.join(self.root, name))

    def path(self, digest):
        return os.path.join(self.root, digest[7:])

    def take(self, digest, size, last, body):
        """Takes one part. A content that does not add up is dropped: its user finds it missing."""
        if not is_digest(digest):
            return
        part = "%s.%d" % (self.path(digest), os.getpid())
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, body)
                length = os.fstat(fd).st_size
                if length > min(size, CONTENT_MAX):
                    os.unlink(part)
                elif last:
                    os.lseek(fd, 0, os.SEEK_SET)
                    if length == size and digest_fd(fd)[0] == digest:
                        os.rename(part, self.path(digest))
                        self.failed.pop(digest, None)
                        self.keep_few()
                    else:
                        os.unlink(part)
            finally:
                os.close(fd)
        except OSError as error:
            try:
                os.unlink(part)
            except FileNotFoundError:
                pass
            if len(self.failed) < BLOBS_MAX:
                self.failed[digest] = error

    def keep_few(self):
        whole = [name for name in os.listdir(self.root) if "." not in name]
        if len(whole) > BLOBS_MAX:
            paths = [os.path.join(self.root, name) for name in whole]
            paths.sort(key=lambda path: os.stat(path).st_mtime)
            for path in paths[: len(whole) - BLOBS_MAX]:
                os.unlink(path)

    def find(self, value, field):
        """The path of a whole content that an argument names."""
        if (
            type(value) is not dict
            or set(value) != {"$blob", "size"}
            or not is_digest(value["$blob"])
        ):
            raise bad(field, 'must be {"$blob": "sha256:<hex>", "size": <bytes>}')
        if type(value["size"]) is not int or not 0 <= value["size"] <= CONTENT_MAX:
            raise bad(field, "size must be an integer up to %d" % CONTENT_MAX)
        digest = value["$blob"]
        path = self.path(digest)
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            error = self.failed.pop(digest, None)
            if error is not None:
                raise from_os_error(error) from None
            raise Refusal("blob_missing", digest) from None
        if size != value["size"]:
            raise bad(field, "size is %d, the content has %d bytes" % (value["size"], size))
        return path

    def drop(self, path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


def is_digest(value):
    return type(value) is str and re.fullmatch(r"sha256:[0-9a-f]{64}", value) is not None


def content_of(args, name, blobs):
    """The content argument of a tool in one of its three forms: a `Source` and the blob it uses."""
    forms = [form for form in (name, name + "_b64", name + "_ref") if form in args]
    if len(forms) != 1:
        raise bad(name, "give exactly one of %s, %s_b64, %s_ref" % (name, name, name))
    if forms[0] == name:
        return Source(data=to_bytes(get_str(args, name), name)), None
    if forms[0] == name + "_ref":
        path = blobs.find(args[forms[0]], forms[0])
        return Source(file=path, digest=args[forms[0]]["$blob"]), path
    try:
        data = get_str(args, forms[0]).encode("ascii")
        if len(data) % 4:
            raise ValueError
        decoded = binascii.a2b_base64(data)
        if binascii.b2a_base64(decoded, newline=False) != data:
            raise ValueError
    except ValueError:
        raise bad(forms[0], "is not base64") from None
    return Source(data=decoded), None


# ---------------------------------------------------------------- the file tools


def plan_write_file(workspace, blobs, args):
    """Returns plan, result and the blob that is used up."""
    check_fields(
        args,
        ("path", "content", "content_b64", "content_ref", "mode", "symlink_to", "create_dirs"),
    )
    parts = split_path(args.get("path"), "path") if "path" in args else None
    if parts is None:
        raise bad("path", "missing")
    workspace.check_writable(parts, "path")
    mode = get_int(args, "mode", None, 0, 0o777)
    create = get_bool(args, "create_dirs", True)
    blob = None
    if "symlink_to" in args:
        for other in ("content", "content_b64", "content_ref", "mode"):
            if other in args:
                raise bad(other, "cannot be given with symlink_to")
        target = to_bytes(get_str(args, "symlink_to"), "symlink_to")
        if not target or b"\0" in target or len(target) > 4095:
            raise bad("symlink_to", "must have 1 to 4095 bytes and no NUL")
        source = Source(target=target)
    else:
        source, blob = content_of(args, "content", blobs)
        source.mode = mode
    plan = Plan(workspace)
    plan.put(parts, source, create)
    return plan, None, blob


def plan_apply_patch(workspace, blobs, args):
    check_fields(args, ("patch", "patch_b64", "patch_ref"))
    source, blob = content_of(args, "patch", blobs)
    raw = source.data
    if raw is None:
        with open(source.file, "rb") as file:
            raw = file.read()
        if sha256(raw) != source.digest:
            raise Refusal("blob_missing", "its bytes do not have the digest " + source.digest)
    patches = PatchReader(raw).read()
    planner = PatchPlanner(workspace, patches)
    files = []
    for patch in patches:
        for parts in (patch.old, patch.new):
            if parts is not None:
                workspace.check_writable(parts, "patch")
        planner.add(patch)
        told = {
            "path": clean(joined(patch.new or patch.old)),
            "change": patch.change,
            "hunks": len(patch.hunks),
        }
        if patch.change in ("renamed", "copied"):
            told["from"] = clean(joined(patch.old))
        files.append(told)
    return planner.plan(), {"files": files}, blob


def plan_delete_path(workspace, _blobs, args):
    check_fields(args, ("path", "recursive", "missing_ok"))
    if "path" not in args:
        raise bad("path", "missing")
    parts = split_path(args["path"], "path")
    workspace.check_writable(parts, "path")
    recursive = get_bool(args, "recursive", False)
    missing_ok = get_bool(args, "missing_ok", False)
    plan = Plan(workspace)
    node = plan.look(parts)
    if node.kind == "none":
        if not missing_ok:
            raise ToolFailure({"error": "no such path: " + clean(joined(parts))})
    elif node.kind == "dir":
        if os.listdir(workspace.dir_fd(parts)) and not recursive:
            raise ToolFailure({"error": "the directory is not empty: " + clean(joined(parts))})
        plan.trees.append({"t": "tree", "p": joined(parts), "b": "dir", "a": None})
    elif node.kind == "other":
        raise ToolFailure({"error": "not a regular file: " + clean(joined(parts))})
    else:
        plan.remove(parts, node)
    return plan, None, None


PLANS = {
    "write_file": plan_write_file,
    "apply_patch": plan_apply_patch,
    "delete_path": plan_delete_path,
}


# ---------------------------------------------------------------- checkpoints
#
# A snapshot of the workspace is a Merkle tree of chunks named by their sha256:
#   pack    the contents of neighbouring small files, one after the other
#   block   a part of a large file, or (`list`) the digests of such parts
#   page    entries of neighbouring paths, with the packs that hold their contents
#   index   pages, by their digests; the root, an index with totals, is the manifest
# A path in a page has one character a byte, so that any name can stand in JSON. Paths stand in
# the order of a walk, directories before what is in them. Where a pack, a page or
# an index ends depends on the paths and sizes alone, so a change moves its neighbourhood only.
#
# The cache tells which contents were read under which stats. Git's rule holds: what changed so
# shortly before the walk that a later change could look the same is read again the next time.

SNAPSHOT = 1  # of the form of pages
SMALL_BYTES = 128 * 1024  # larger files are cut in blocks
PACK_BYTES = 128 * 1024  # a pack's usual size
CHUNK_BYTES = 512 * 1024  # no chunk is larger
PAGE_ENTRIES, PAGE_ENTRIES_MAX = 256, 1024
PAGE_BYTES = 200 * 1024  # of entries, before a page is closed
INDEX_CHILDREN, INDEX_CHILDREN_MAX = 64, 256
INLINE_BLOCKS = 64  # of one file; more stand in lists
LIST_BLOCKS = 8192
LEVELS_MAX = 8
ENTRIES_MAX = 2_000_000
CHUNKS_MAX = 262_144
OFFER = 16  # chunks that are offered, or asked for, at once
NEEDS = 4 * OFFER  # chunks that may be on their way during a restore
JOB_SILENT_S = 60.0  # how long the gateway may say nothing to a checkpoint or restore
JOB_SLICE_S = 0.02
TICK_NS = 50_000_000  # within this a file may change without another time
COARSE_TICK_NS = 2_100_000_000  # the same where times are whole seconds
PATH_BYTES = 4096


class Broken(Exception):
    """A checkpoint or a restore cannot be finished; the reason is a word of the protocol."""

    def __init__(self, reason, detail=""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def broken_by(error):
    if is_no_space(error):
        return Broken("no_space", str(error))
    return Broken("io_error", str(error))


def mixed(path, salt):
    """32 bits that depend on a path alone, as evenly spread for similar paths as for others."""
    return (binascii.crc32(path, salt) * 0x9E3779B1 >> 3) & 0xFFFFFFFF


def by_digest(data):
    return hashlib.sha256(data).digest()


class Dirs:
    """
    Directories below the workspace, opened component by component, the latest ones kept open.

    Symbolic links are never followed: an `OSError` (ELOOP, ENOTDIR) where one stands.
    """

    KEPT = 100

    def __init__(self, root_fd):
        self.root_fd = root_fd
        self.fds: dict[Any, int] = {}

    def open(self, parts):
        fd = self.root_fd if not parts else self.fds.get(parts)
        if fd is not None:
            return fd
        known = len(parts) - 1
        while known and parts[:known] not in self.fds:
            known -= 1
        fd = self.fds[parts[:known]] if known else self.root_fd
        while known < len(parts):
            known += 1
            fd = os.open(parts[known - 1], DIR_FLAGS, dir_fd=fd)
            self.fds[parts[:known]] = fd
            if len(self.fds) > self.KEPT:
                oldest = next(iter(self.fds))
                os.close(self.fds.pop(oldest))
        return fd

    def forget(self, parts):
        fd = self.fds.pop(parts, None)
        if fd is not None:
            os.close(fd)

    def close(self):
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()

    def wipe(self, workspace):
        """Removes everything but the toolhost's own; yields between directories."""
        for root in workspace.above_own():
            stack = [root]
            while stack:
                here = stack[-1]
                below = self.wipe_one(here, workspace)
                yield AGAIN
                if below:
                    stack.extend(below)
                    continue
                stack.pop()
                self.forget(here)
                if here != root:
                    os.rmdir(here[-1], dir_fd=self.open(here[:-1]))

    def wipe_one(self, here, workspace):
        """Removes a directory's files; returns its directories that are still to be emptied."""
        try:
            fd = self.open(here)
        except FileNotFoundError:
            return []
        except PermissionError:
            os.chmod(here[-1], 0o700, dir_fd=self.open(here[:-1]))
            fd = self.open(here)
        found = scan(fd)
        if found and os.fstat(fd).st_mode & 0o300 != 0o300:
            os.fchmod(fd, 0o700)
        below = []
        for entry in found:
            name = os.fsencode(entry.name)
            parts = (*here, name)
            if workspace.is_state(parts) or workspace.leads_to_own(parts):
                continue
            if entry.is_dir(follow_symlinks=False):
                try:
                    os.rmdir(name, dir_fd=fd)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    below.append(parts)
            else:
                os.unlink(name, dir_fd=fd)
        return below


def scan(fd):
    """The entries of an open directory, which must stay open while they are looked at."""
    with os.scandir(fd) as found:
        return list(found)


AGAIN, WAIT = "again", "wait"  # what a job's generator yields: go on, or wait for a frame


def widen_pipes():
    """Lets more of a chunk be under way at once; a stream that is no pipe stays as it is."""
    if IS_LINUX:
        for fd in (0, 1):
            try:
                fcntl.fcntl(fd, F_SETPIPE_SZ, PIPE_BYTES)
            except OSError:
                pass  # no pipe, or its user has enough of them


F_SETPIPE_SZ = 1031
PIPE_BYTES = 1 << 20


class Job:
    """
    A checkpoint or a restore under way: a generator that the loop moves on in slices, so that
    heartbeats, reads and revocations go on. The lock is held for as long as it lives.
    """

    def __init__(self, kind, head):
        self.kind = kind
        self.id = head.get("id")
        self.key = ""
        self.checkpoint = word("checkpoint", head.get("checkpoint"))
        self.session = string("session", head.get("session"))
        self.epoch = whole("epoch", head.get("epoch"), 1)
        if kind == "restore":
            self.manifest = head.get("manifest")
            if not is_digest(self.manifest):
                raise Malformed("manifest")
        else:
            self.base = string("base", head.get("base", ""))
        self.steps = None
        self.inbox: deque[Any] = deque()
        self.waits = False
        self.heard = _monotonic()

    def is_ready(self):
        return not self.waits or bool(self.inbox)

    def next_frame(self):
        """The next frame for this job: `frame = yield from job.next_frame()`."""
        while not self.inbox:
            yield WAIT
        return self.inbox.popleft()


class Cache:
    """
    `snapshot.json` in the state folder: what the last stored snapshot read, and under which stats.

    A hint: what is missing or unreadable is read from the disk again.
    """

    def __init__(self, state_dir):
        self.path = os.path.join(state_dir, "snapshot.json")

    def load(self):
        """(manifest, {key of stats: digests of contents}, other digests of that snapshot)."""
        try:
            with open(self.path, "rb") as file:
                found = json.loads(file.read())
            if found["v"] != SNAPSHOT:
                raise ValueError
            read = {
                key: [binascii.unhexlify(one) for one in digests]
                for key, digests in found["read"].items()
            }
            return found["manifest"], read, {binascii.unhexlify(one) for one in found["more"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "", {}, set()

    def store(self, manifest, read, more):
        """Replaces it; a failure costs the next snapshot its speed alone."""
        temp = "%s.%d" % (self.path, os.getpid())
        told = {
            "v": SNAPSHOT, "manifest": manifest, "more": [one.hex() for one in more],
            "read": {key: [one.hex() for one in digests] for key, digests in read.items()},
        }  # fmt: skip
        try:
            with open(temp, "w") as file:
                file.write(_dumps(told))
            crash("cache_written")
            os.rename(temp, self.path)
        except OSError:
            try:
                os.unlink(temp)
            except OSError:
                return


class Found:
    """One file of the walk."""

    __slots__ = ("ctime", "dev", "ino", "mode", "mtime", "parts", "path", "size")

    def __init__(self, parts, path, found):
        self.parts = parts
        self.path = path
        self.mode = found.st_mode & 0o777
        self.size = found.st_size
        self.mtime = found.st_mtime_ns
        self.ctime = found.st_ctime_ns
        self.ino = found.st_ino
        self.dev = found.st_dev

    def told(self):
        return b"%b\0%d %d %d %d %d\n" % (
            self.path, self.size, self.mtime, self.ctime, self.ino, self.dev,
        )  # fmt: skip

    def is_racy(self, now_ns):
        """Whether it could be changed after this walk and show the same times."""
        coarse = self.ctime % 1_000_000_000 == 0 and self.mtime % 1_000_000_000 == 0
        return self.ctime >= now_ns - (COARSE_TICK_NS if coarse else TICK_NS)


class Page:
    """Entries of neighbouring paths, and the pack that is being filled."""

    def __init__(self):
        self.entries = []  # type: list[Any]
        self.packs = []  # type: list[Any]
        self.bytes = 0  # of the entries, about
        self.files = 0
        self.size = 0  # of the files
        self.group = []  # type: list[Found]
        self.group_size = 0


class Snapshot:
    """
    Walks the workspace and offers every chunk that the base does not hold.

    `run` is the job's generator; `send` takes frames. Nothing on the disk changes but the cache,
    which is written when the gateway says that all of it is kept.
    """

    def __init__(self, job, workspace, cache, is_alone, send):
        self.job = job
        self.workspace = workspace
        self.send = send
        self.cache = cache
        self.dirs = Dirs(workspace.root_fd)
        self.is_alone = is_alone  # no process that could write meanwhile
        self.now_ns = self.time_of_disk() if is_alone else 0
        manifest, self.was_read, more = cache.load()
        # What the base holds is kept already, and is not offered again.
        self.held = set()  # type: set[bytes]
        if job.base and manifest == job.base:
            self.held = more.union(*self.was_read.values())
        self.read = {}  # type: dict[str, list[bytes]]
        self.more = set()  # type: set[bytes]
        self.all = set()  # type: set[bytes]
        self.seen = set()  # type: set[bytes]
        self.waiting = []  # type: list[tuple[bytes, str, bytes]]
        self.files = self.entries = self.size = self.sent = self.skipped = 0
        self.contents = 0  # that a restore asks for, equal ones each time
        self.children = []  # type: list[Any]

    def time_of_disk(self):
        """What the workspace's file system takes for now; 0 where that cannot be asked."""
        name = TEMP_PREFIX + b"probe" + TEMP_SUFFIX
        root = self.workspace.root_fd
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=root))
            found = os.stat(name, dir_fd=root, follow_symlinks=False)
            os.unlink(name, dir_fd=root)
        except OSError:
            return 0
        return found.st_ctime_ns

    # -- the walk

    def run(self):
        """Yields as a job does; returns the manifest."""
        try:
            page = Page()
            for item in self.walk():
                if item is None:
                    yield AGAIN
                    continue
                yield from self.add(page, *item)
                if self.is_full(page, item[1]):
                    yield from self.close_page(page)
                    page = Page()
            if page.entries:
                yield from self.close_page(page)
            manifest = yield from self.close_tree()
            yield from self.offer()
            return "sha256:" + manifest.hex()
        finally:
            self.dirs.close()

    def walk(self):
        """
        Every entry as (parts, path, stat, link target), directories before what is in them; None
        where the loop may do something else.
        """
        stack = [iter(self.level(()))]
        while stack:
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
                continue
            yield item
            if stat.S_ISDIR(item[2].st_mode):
                stack.append(iter(self.level(item[0])))
                yield None

    def level(self, here):
        """What is in one directory, by name."""
        fd = self.dirs.open(here)
        prefix = b"/".join((*here, b""))
        level = []
        for entry in scan(fd):
            name = os.fsencode(entry.name)
            parts = (*here, name)
            if self.workspace.is_own(parts):
                continue
            found = entry.stat(follow_symlinks=False)
            kind = stat.S_IFMT(found.st_mode)
            target = b""
            if kind == stat.S_IFLNK:
                target = os.readlink(name, dir_fd=fd)
            elif kind not in (stat.S_IFREG, stat.S_IFDIR):
                self.skipped += 1  # a socket, a pipe or a device is nothing that could be kept
                continue
            path = prefix + name
            if len(path) > PATH_BYTES:
                raise Broken("too_large", "a path of more than %d bytes" % PATH_BYTES)
            level.append((parts, path, found, target))
        level.sort(key=lambda item: item[0][-1])
        self.entries += len(level)
        if self.entries > ENTRIES_MAX:
            raise Broken("too_large", "more than %d paths" % ENTRIES_MAX)
        return level

    def add(self, page, parts, path, found, target):
        told = path.decode("latin-1")
        page.bytes += len(told) + 60
        if stat.S_ISDIR(found.st_mode):
            page.entries.append([told, "d", found.st_mode & 0o777])
            return
        if stat.S_ISLNK(found.st_mode):
            page.entries.append([told, "l", target.decode("latin-1")])
            page.bytes += len(target)
            return
        file = Found(parts, path, found)
        page.files += 1
        page.size += file.size
        if file.size > SMALL_BYTES:
            yield from self.close_pack(page)
            digests = yield from self.cut(file)
            kind = "f"
            if len(digests) > INLINE_BLOCKS:
                kind = "F"
                digests = yield from self.listed(digests)
            page.entries.append(
                [told, kind, file.mode, file.mtime, file.size, [one.hex() for one in digests]]
            )
            page.bytes += 67 * len(digests)
            return
        if page.group_size + file.size > CHUNK_BYTES:
            yield from self.close_pack(page)
        page.entries.append([told, "s", file.mode, file.mtime, file.size])
        if file.size:
            page.group.append(file)
            page.group_size += file.size
            # Chances by size: packs of many tiny files and of few larger ones end up alike.
            if mixed(path, 1) * PACK_BYTES < file.size + 64 << 32:
                yield from self.close_pack(page)

    def is_full(self, page, path):
        count = len(page.entries)
        if count >= PAGE_ENTRIES_MAX or page.bytes >= PAGE_BYTES:
            return True
        return mixed(path, 2) * PAGE_ENTRIES < 1 << 32

    # -- contents

    def cached(self, key):
        """The digests of contents that need not be read: they are known, and the base has them."""
        digests = self.was_read.get(key) if self.now_ns else None
        if digests is None or not all(one in self.held or one in self.seen for one in digests):
            return None
        return digests

    def note(self, key, digests, files):
        self.all.update(digests)
        self.contents += len(digests)
        self.check_room(0)
        if self.now_ns and not any(file.is_racy(self.now_ns) for file in files):
            self.read[key] = digests

    def check_room(self, more):
        if max(len(self.all), self.contents + more) > CHUNKS_MAX:
            raise Broken("too_large", "more than %d chunks" % CHUNKS_MAX)

    def close_pack(self, page):
        group = page.group
        if not group:
            return
        key = hashlib.sha256(b"pack" + b"".join(file.told() for file in group)).hexdigest()
        digests = self.cached(key)
        if digests is None:
            data = b"".join([self.content(file) for file in group])
            digests = [(yield from self.emit("content", data))]
        self.note(key, digests, group)
        page.packs.append([digests[0].hex(), page.group_size])
        page.group = []
        page.group_size = 0

    def content(self, file):
        fd = self.open(file)
        try:
            data = read_fully(fd, file.size)
            self.check_same(file, os.fstat(fd), len(data))
            return data
        finally:
            os.close(fd)

    def cut(self, file):
        """The digests of a large file's blocks."""
        self.check_room(file.size // CHUNK_BYTES)  # before it is read: it may be one long hole
        key = hashlib.sha256(b"file" + file.told()).hexdigest()
        digests = self.cached(key)
        if digests is None:
            digests = []
            fd = self.open(file)
            try:
                left = file.size
                while left:
                    data = read_up_to(fd, min(left, CHUNK_BYTES))
                    if not data:
                        break
                    left -= len(data)
                    digests.append((yield from self.emit("content", data)))
                    yield AGAIN
                self.check_same(file, os.fstat(fd), file.size - left)
            finally:
                os.close(fd)
        self.note(key, digests, [file])
        return digests

    def listed(self, digests):
        lists = []
        for at in range(0, len(digests), LIST_BLOCKS):
            data = b"".join(digests[at : at + LIST_BLOCKS])
            lists.append((yield from self.emit("list", data)))
        self.all.update(lists)
        return lists

    def open(self, file):
        try:
            return os.open(file.parts[-1], READ_FLAGS, dir_fd=self.dirs.open(file.parts[:-1]))
        except FileNotFoundError:
            raise self.changed(file) from None

    def check_same(self, file, now, length):
        told = Found(file.parts, file.path, now).told()
        if not stat.S_ISREG(now.st_mode) or told != file.told() or length != file.size:
            raise self.changed(file)

    def changed(self, file):
        return Broken("busy", "%s changed while it was read" % text(file.path))

    # -- the tree of pages

    def close_page(self, page):
        yield from self.close_pack(page)
        told = {"v": SNAPSHOT, "k": "page", "packs": page.packs, "e": page.entries}
        digest = yield from self.emit("page", _dumps(told).encode())
        self.all.add(digest)
        self.children.append([digest.hex(), page.files, page.size])
        self.files += page.files
        self.size += page.size

    def close_tree(self):
        level = self.children
        while len(level) > INDEX_CHILDREN_MAX:
            level = yield from self.index(level)
        root = {
            "v": SNAPSHOT, "k": "root", "entries": self.entries, "files": self.files,
            "size": self.size, "c": level,
        }  # fmt: skip
        digest = yield from self.emit("page", _dumps(root).encode())
        self.all.add(digest)
        return digest

    def index(self, level):
        above = []
        children = []  # type: list[Any]
        for number, child in enumerate(level, 1):
            children.append(child)
            count = len(children)
            cut = count >= 8 and int(child[0][:8], 16) % INDEX_CHILDREN == 0
            if cut or count >= INDEX_CHILDREN_MAX or number == len(level):
                told = {"v": SNAPSHOT, "k": "index", "c": children}
                digest = yield from self.emit("page", _dumps(told).encode())
                self.all.add(digest)
                above.append(
                    [digest.hex(), sum(one[1] for one in children), sum(one[2] for one in children)]
                )
                children = []
        return above

    # -- sending

    def emit(self, kind, data):
        """Has a chunk offered, unless it is known to be kept; returns its digest."""
        digest = by_digest(data)
        if digest not in self.held and digest not in self.seen:
            self.seen.add(digest)
            self.waiting.append((digest, kind, data))
            if len(self.waiting) >= OFFER:
                yield from self.offer()
        return digest

    def offer(self):
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        if CRASH_AT:
            crash("checkpoint_offer")
        self.send({"k": "offer", "id": self.job.id}, b"".join(one[0] for one in waiting))
        head, body = yield from self.job.next_frame()
        if head["k"] != "want" or len(body) % 32:
            raise Broken("io_error", "no answer to an offer: %s" % shown(head["k"]))
        wanted = {body[at : at + 32] for at in range(0, len(body), 32)}
        for digest, kind, data in waiting:
            if digest in wanted:
                self.sent += len(data)
                self.send(
                    {"k": "chunk", "id": self.job.id, "digest": digest.hex(), "kind": kind}, data
                )
        if CRASH_AT:
            crash("checkpoint_sent")

    def to_cache(self):
        """What the cache is to hold of this snapshot once all of it is kept."""
        return self.read, self.all.difference(*self.read.values())


def read_up_to(fd, size):
    """As many bytes as are there, up to `size`."""
    data = os.read(fd, size)
    while 0 < len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            break
        data += more
    return data


# ---------------------------------------------------------------- restoring


def corrupt(problem):
    return Broken("corrupt", problem)


class Restore:
    """
    Makes a checkpoint's tree in an empty workspace, chunk by chunk, as they come.

    Every chunk is asked for by its digest and has it, or nothing of it is used. Chunks come in
    the order in which they were asked for, which is the order of the paths where that is known.
    No path is believed: each goes by the rules of tools, and none is written twice.
    """

    def __init__(self, job, workspace, sync, send):
        self.job = job
        self.workspace = workspace
        self.sync = sync
        self.send = send
        self.dirs = Dirs(workspace.root_fd)
        self.pending = []  # type: list[Any]
        self.awaited: deque[Any] = deque()
        self.count = 0
        self.last = ()  # type: tuple[bytes, ...]
        self.modes = []  # type: list[Any]
        self.made_in = set()  # type: set[tuple[bytes, ...]]
        self.totals = (0, 0, 0)
        self.entries = self.files = self.size = 0

    def run(self):
        """Yields as a job does, until the tree is whole."""
        import heapq

        self.push, self.pop = heapq.heappush, heapq.heappop
        try:
            self.need((), unhexed(self.job.manifest[7:]), self.take_root)
            while self.pending or self.awaited:
                self.ask()
                head, body = yield from self.job.next_frame()
                self.take(head, body)
                yield AGAIN
            if (self.entries, self.files, self.size) != self.totals:
                raise corrupt("the totals of the manifest are wrong")
            yield from self.finish()
        finally:
            self.dirs.close()
            for _, _, taker in [*self.awaited, *(item[2:] for item in self.pending)]:
                close = getattr(taker, "close", None)
                if close is not None:
                    close()

    def need(self, where, digest, taker):
        """Has a chunk asked for; `where` is its place in the order of the tree."""
        self.count += 1
        if self.count > 2 * CHUNKS_MAX:
            raise corrupt("more than %d chunks" % CHUNKS_MAX)
        self.push(self.pending, (where, self.count, where, digest, taker))

    def ask(self):
        if not self.pending or len(self.awaited) > NEEDS - OFFER:
            return
        asked = []
        while self.pending and len(self.awaited) < NEEDS:
            item = self.pop(self.pending)[2:]
            self.awaited.append(item)
            asked.append(item[1])
        self.send({"k": "need", "id": self.job.id}, b"".join(asked))

    def take(self, head, body):
        if not self.awaited:
            raise Broken("io_error", "a frame that was not asked for")
        where, digest, taker = self.awaited.popleft()
        if head["k"] == "chunk_failed":
            reason = head.get("reason")
            known = reason in ("missing", "corrupt", "unreachable")
            raise Broken(reason if known else "io_error", "chunk %s" % digest.hex())
        if head["k"] != "chunk":
            raise Broken("io_error", "no answer to a need: %s" % shown(head["k"]))
        if by_digest(body) != digest:
            raise corrupt("chunk %s has other bytes" % digest.hex())
        taker(where, body)

    # -- pages

    def parsed(self, body, kinds):
        try:
            page = _loads(body.decode("utf-8"))
        except (ValueError, RecursionError):
            raise corrupt("a page that is not JSON") from None
        if type(page) is not dict or page.get("v") != SNAPSHOT or page.get("k") not in kinds:
            raise corrupt("a page of another form")
        return page

    def take_root(self, where, body):
        root = self.parsed(body, ("root",))
        self.totals = tuple(natural(root.get(name)) for name in ("entries", "files", "size"))
        if self.totals[0] > ENTRIES_MAX:
            raise corrupt("more than %d paths" % ENTRIES_MAX)
        self.take_children(where, root)

    def take_page(self, where, body):
        page = self.parsed(body, ("page", "index"))
        if page["k"] == "page":
            self.take_entries(where, page)
        elif len(where) >= LEVELS_MAX:
            raise corrupt("more than %d levels" % LEVELS_MAX)
        else:
            self.take_children(where, page)

    def take_children(self, where, page):
        for number, child in enumerate(listed_in(page, "c", INDEX_CHILDREN_MAX)):
            if type(child) is not list or not child:
                raise corrupt("a child of another form")
            self.need((*where, number), unhexed(child[0]), self.take_page)

    def take_entries(self, where, page):
        """Makes a page's directories, links and empty files; asks for the other contents."""
        packs = iter(listed_in(page, "packs", PAGE_ENTRIES_MAX))
        files = []  # type: list[Any]
        left = number = 0
        for entry in listed_in(page, "e", PAGE_ENTRIES_MAX):
            if type(entry) is not list or len(entry) not in (3, 5, 6) or type(entry[1]) is not str:
                raise corrupt("an entry of another form")
            parts = self.path_of(entry[0])
            kind = entry[1] if len(entry) == KINDS.get(entry[1]) else ""
            self.entries += 1
            number += 1
            if kind == "d":
                self.make_dir(parts, mode_of(entry[2]))
            elif kind == "l":
                self.make_link(parts, entry[2])
            elif kind:
                file = Target(parts, entry)
                self.files += 1
                self.size += file.size
                if kind != "s":
                    self.need_blocks((*where, number), file, entry[5], kind)
                elif not file.size:
                    self.write(file, b"")
                else:
                    if not left:
                        files = []
                        left = self.need_pack((*where, number), next(packs, None), files)
                    files.append(file)
                    left -= file.size
                    if left < 0:
                        raise corrupt("a pack that ends inside a file")
            else:
                raise corrupt("an entry of an unknown kind")
        if left or next(packs, None) is not None:
            raise corrupt("a pack with more bytes than its files")

    def path_of(self, told):
        """A page's path as components, by the rules of tools and in the order of a walk."""
        try:
            raw = told.encode("latin-1")
        except (AttributeError, UnicodeEncodeError):
            raise corrupt("a path that is none") from None
        parts = tuple(raw.split(b"/"))
        if len(raw) > PATH_BYTES or b"\0" in raw:
            raise corrupt("the path %s" % shown(raw))
        for part in parts:
            if part in (b"", b".", b"..") or len(part) > 255:
                raise corrupt("the path %s" % shown(raw))
        if self.workspace.is_own(parts):
            raise corrupt("%s is the toolhost's own" % shown(raw))
        if parts <= self.last:
            raise corrupt("%s is out of order" % shown(raw))
        self.last = parts
        return parts

    # -- making

    def make_dir(self, parts, mode):
        try:
            parent = self.dirs.open(parts[:-1])
            os.mkdir(parts[-1], 0o755, dir_fd=parent)
        except FileExistsError:
            if not self.workspace.leads_to_own(parts):
                raise corrupt("%s is there already" % shown(joined(parts))) from None
        except OSError as error:
            raise self.failed(parts, error) from error
        else:
            give_to_tools(parts[-1], parent)
        self.made_in.add(parts[:-1])
        if mode != 0o755:
            self.modes.append((parts, mode))

    def make_link(self, parts, told):
        try:
            target = told.encode("latin-1")
        except (AttributeError, UnicodeEncodeError):
            raise corrupt("a link without a target") from None
        if not target or b"\0" in target or len(target) > 4095:
            raise corrupt("the target of the link %s" % shown(joined(parts)))
        try:
            parent = self.dirs.open(parts[:-1])
            os.symlink(target, parts[-1], dir_fd=parent)
            give_to_tools(parts[-1], parent)
        except OSError as error:
            raise self.failed(parts, error) from error
        self.made_in.add(parts[:-1])

    def create(self, file):
        parent = file.parts[:-1]
        try:
            fd = os.open(file.parts[-1], TEMP_FLAGS, file.mode, dir_fd=self.dirs.open(parent))
        except OSError as error:
            raise self.failed(file.parts, error) from error
        self.made_in.add(parent)
        return fd

    def failed(self, parts, error):
        if error.errno in (errno.EEXIST, errno.ELOOP, errno.ENOTDIR, errno.ENOENT):
            return corrupt("%s cannot be made: %s" % (shown(joined(parts)), error.strerror))
        return broken_by(error)

    def seal(self, fd, file):
        if TOOL_UID[0]:
            os.fchown(fd, TOOL_UID[0], TOOL_UID[0])
        if file.mode & 0o022:
            os.fchmod(fd, file.mode)  # what the mask took away
        os.utime(fd, ns=(file.mtime, file.mtime))
        if self.sync:
            sync_fd(fd)

    def write(self, file, data):
        fd = self.create(file)
        try:
            if data:
                write_all(fd, data)
            self.seal(fd, file)
        finally:
            os.close(fd)
        if CRASH_AT:
            crash("restore_file")

    def need_pack(self, where, pack, files):
        if type(pack) is not list or len(pack) != 2:
            raise corrupt("a pack is missing")
        size = natural(pack[1])
        if not 0 < size <= CHUNK_BYTES:
            raise corrupt("a pack of %d bytes" % size)

        def take(_where, body):
            if len(body) != size:
                raise corrupt("a pack of another size")
            at = 0
            for file in files:
                self.write(file, body[at : at + file.size])
                at += file.size

        self.need(where, unhexed(pack[0]), take)
        return size

    def need_blocks(self, where, file, digests, kind):
        if type(digests) is not list or len(digests) > INLINE_BLOCKS or not file.size:
            raise corrupt("the blocks of %s" % shown(joined(file.parts)))
        blocks = Blocks(self, file)
        digests = [unhexed(one) for one in digests]
        if kind == "f":
            blocks.expect(where, digests)
            blocks.check_count()
            return
        blocks.lists = len(digests)
        for number, digest in enumerate(digests):
            self.need((*where, number), digest, blocks.take_list)

    # -- the end

    def finish(self):
        """What can only be done when nothing is made below any more: the modes of directories."""
        if self.sync:
            for parts in sorted(self.made_in):
                sync_fd(self.dirs.open(parts))
                yield AGAIN
        for number, (parts, mode) in enumerate(reversed(self.modes)):
            try:
                fd = self.dirs.open(parts)
                os.fchmod(fd, mode)
                if self.sync:
                    sync_fd(fd)
            except OSError as error:
                raise self.failed(parts, error) from error
            if CRASH_AT:
                crash("restore_mode")
            if number % 256 == 255:
                yield AGAIN


KINDS = {"d": 3, "l": 3, "s": 5, "f": 6, "F": 6}  # fields of an entry


class Target:
    """A file that is to be made."""

    __slots__ = ("mode", "mtime", "parts", "size")

    def __init__(self, parts, entry):
        self.parts = parts
        self.mode = mode_of(entry[2])
        self.mtime = entry[3]
        if type(self.mtime) is not int or abs(self.mtime) >= 1 << 62:
            raise corrupt("the time of %s" % shown(joined(parts)))
        self.size = natural(entry[4])


class Blocks:
    """A large file that is being made from its blocks, one after the other."""

    def __init__(self, restore, file):
        self.restore = restore
        self.file = file
        self.left = self.to_come = file.size
        self.lists = 0
        self.fd = -1

    def expect(self, where, digests):
        for number, digest in enumerate(digests):
            if self.to_come <= 0:
                raise corrupt("%s has too many blocks" % shown(joined(self.file.parts)))
            self.to_come -= CHUNK_BYTES
            self.restore.need((*where, number), digest, self)

    def check_count(self):
        if self.to_come > 0:
            raise corrupt("%s has too few blocks" % shown(joined(self.file.parts)))

    def take_list(self, where, body):
        if len(body) % 32 or len(body) > 32 * LIST_BLOCKS:
            raise corrupt("a list of blocks of another form")
        self.expect(where, [body[at : at + 32] for at in range(0, len(body), 32)])
        self.lists -= 1
        if not self.lists:
            self.check_count()

    def __call__(self, _where, body):
        if len(body) != min(self.left, CHUNK_BYTES):
            raise corrupt("a block of another size")
        if self.fd < 0:
            self.fd = self.restore.create(self.file)
        if body.count(0) == len(body):
            os.lseek(self.fd, len(body), os.SEEK_CUR)  # a hole, as it may have been
        else:
            write_all(self.fd, body)
        if CRASH_AT:
            crash("restore_block")
        self.left -= len(body)
        if not self.left:
            os.ftruncate(self.fd, self.file.size)
            self.restore.seal(self.fd, self.file)
            self.close()

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def natural(value):
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise corrupt("a number that is none: %s" % shown(value))
    return value


def mode_of(value):
    if type(value) is not int or not 0 <= value <= 0o777:
        raise corrupt("a mode that is none: %s" % shown(value))
    return value


def unhexed(value):
    if type(value) is not str or len(value) != 64:
        raise corrupt("a digest that is none")
    try:
        return binascii.unhexlify(value)
    except ValueError:
        raise corrupt("a digest that is none") from None


def listed_in(page, name, most):
    found = page.get(name)
    if type(found) is not list or len(found) > most:
        raise corrupt("a page without its %s" % name)
    return found


# ---------------------------------------------------------------- the read tools


class Reader:
    """
    Read tools: no lock, no journal. Symbolic links are followed by hand, as long as they stay
    below the workspace; a link to an absolute path counts as inside when it names the workspace.
    """

    LINKS_MAX = 40

    def __init__(self, workspace):
        self.workspace = workspace

    def open_parent(self, parts, follow=True):
        """The directory and name that a path comes to; the caller closes the directory."""
        rest = list(parts)
        stack = [os.dup(self.workspace.root_fd)]
        links = 0
        try:
            while rest:
                name = rest.pop(0)
                if name in (b"", b"."):
                    continue
                if name == b"..":
                    if len(stack) == 1:
                        raise bad("path", "leaves the workspace through a symbolic link")
                    os.close(stack.pop())
                    continue
                if not rest and not follow:
                    return stack.pop(), name
                target = self.link_at(stack[-1], name)
                if target is not None:
                    links += 1
                    if links > self.LINKS_MAX:
                        raise bad("path", "passes through too many symbolic links")
                    rest[:0] = self.target_parts(target, stack)
                    continue
                if not rest:
                    return stack.pop(), name
                stack.append(self.open_dir(stack[-1], name))
            return stack.pop(), b"."
        finally:
            for fd in stack:
                os.close(fd)

    def link_at(self, parent, name):
        try:
            return os.readlink(name, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
                return None
            raise

    def target_parts(self, target, stack):
        root = self.workspace.root
        if target.startswith(b"/"):
            if target != root and not target.startswith(root + b"/"):
                raise bad("path", "leaves the workspace through a symbolic link")
            while len(stack) > 1:
                os.close(stack.pop())
            target = target[len(root) :]
        return target.split(b"/")

    def open_dir(self, parent, name):
        fd = os.open(name, DIR_FLAGS, dir_fd=parent)
        hidden = self.workspace.hidden
        if hidden is not None:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) == hidden:
                os.close(fd)
                raise bad("path", "leads to the toolhost's own state")
        return fd

    def open_path(self, parts):
        """The opened file or directory and its `fstat`; never a device, a pipe or a socket."""
        parent, name = self.open_parent(parts)
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                return self.open_dir(parent, name), found
            if not stat.S_ISREG(found.st_mode):
                raise ToolFailure({"error": "not a regular file or directory", "reason": "failed"})
            fd = os.open(name, READ_FLAGS, dir_fd=parent)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                os.close(fd)
                raise ToolFailure({"error": "not a regular file", "reason": "failed"})
            return fd, found
        finally:
            os.close(parent)

    # -- tools

    def read_file(self, args):
        check_fields(args, ("path", "offset", "limit", "encoding"))
        parts = split_path(self.needed(args, "path"), "path")
        offset = get_int(args, "offset", 0, 0, 2**53)
        limit = get_int(args, "limit", READ_BYTES_MAX, 0, READ_BYTES_MAX)
        encoding = get_str(args, "encoding", "utf8")
        if encoding not in ("utf8", "base64"):
            raise bad("encoding", "must be utf8 or base64, got " + shown(encoding))
        fd, found = self.open_path(parts)
        try:
            if stat.S_ISDIR(found.st_mode):
                raise ToolFailure({"error": "is a directory", "reason": "failed"})
            data = os.pread(fd, limit, offset)
        finally:
            os.close(fd)
        result = {
            "size": found.st_size,
            "offset": offset,
            "mode": "%04o" % stat.S_IMODE(found.st_mode),
        }
        if encoding == "base64":
            result["content_b64"] = binascii.b2a_base64(data, newline=False).decode()
        else:
            if offset + len(data) < found.st_size:
                data = whole_letters(data)
            content = data.decode("utf-8", "replace")
            result["content"] = content
            if "\ufffd" in content:
                result["lossy"] = content.encode() != data
        result["length"] = len(data)
        result["cut"] = max(0, found.st_size - offset - len(data))
        return result

    def needed(self, args, name):
        if name not in args:
            raise bad(name, "missing")
        return args[name]

    def stat(self, args):
        check_fields(args, ("path",))
        parts = split_path(self.needed(args, "path"), "path", root_ok=True)
        try:
            parent, name = self.open_parent(parts, follow=False)
        except FileNotFoundError:
            return {"exists": False}
        try:
            try:
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                return {"exists": False}
            result = self.told(parent, name, found)
            result["exists"] = True
            result["mtime_ms"] = found.st_mtime_ns // 1_000_000
            if result["type"] == "file" and found.st_size <= CONTENT_MAX:
                result["digest"] = look_at(parent, name).digest
            return result
        finally:
            os.close(parent)

    def told(self, parent, name, found):
        mode = found.st_mode
        result = {"type": "other", "mode": "%04o" % stat.S_IMODE(mode)}
        if stat.S_ISREG(mode):
            result["type"] = "file"
            result["size"] = found.st_size
        elif stat.S_ISDIR(mode):
            result["type"] = "dir"
        elif stat.S_ISLNK(mode):
            result["type"] = "link"
            result["target"] = text(os.readlink(name, dir_fd=parent))
        return result

    def list_dir(self, args):
        check_fields(args, ("path", "recursive", "limit"))
        parts = split_path(args.get("path", "."), "path", root_ok=True)
        recursive = get_bool(args, "recursive", False)
        limit = get_int(args, "limit", 1000, 1, 100_000)
        entries: list[Any] = []
        cut = False
        room = ANSWER_BYTES
        for path, parent, name in self.walk(parts, recursive):
            if len(entries) == limit or room < 0:
                cut = True
                break
            try:
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
                told = self.told(parent, name, found)
            except FileNotFoundError:
                continue
            told["path"] = text(path)
            room -= len(path) + len(told.get("target", "")) + 80
            entries.append(told)
        return {"entries": entries, "cut": cut}

    def walk(self, parts, recursive):
        """Yields (path below the start, open directory, name), sorted; links are not followed."""
        fd, found = self.open_path(parts)
        if not stat.S_ISDIR(found.st_mode):
            os.close(fd)
            raise ToolFailure({"error": "not a directory", "reason": "failed"})
        stack = [(b"", fd, iter(self.names(fd)))]
        try:
            while stack:
                prefix, fd, names = stack[-1]
                name = next(names, None)
                if name is None:
                    os.close(fd)
                    stack.pop()
                    continue
                path = prefix + name
                yield path, fd, name
                if not recursive:
                    continue
                try:
                    below = self.open_dir(fd, name)
                except (OSError, Refusal):
                    continue
                stack.append((path + b"/", below, iter(self.names(below))))
        finally:
            for _, fd, _ in stack:
                os.close(fd)

    def names(self, fd):
        found = (os.fsencode(name) for name in os.listdir(fd))
        return sorted(
            name
            for name in found
            if name != TRASH and not (name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX))
        )

    def search(self, args):
        check_fields(args, ("pattern", "path", "glob", "limit"))
        pattern = get_str(args, "pattern", required=True)
        glob = get_str(args, "glob")
        limit = get_int(args, "limit", 200, 1, 100_000)
        parts = split_path(args.get("path", "."), "path", root_ok=True)
        try:
            matches = re.compile(to_bytes(pattern, "pattern")).search
        except (re.error, OverflowError, RecursionError) as error:
            raise bad("pattern", "is not a regular expression: %s" % error) from None
        found: list[Any] = []
        counts = {"files": 0, "skipped": 0, "room": ANSWER_BYTES}
        cut = False
        for path, parent, name in self.candidates(parts):
            if glob is not None and not self.globbed(path, name, glob):
                continue
            cut = self.search_file(matches, path, parent, name, limit, found, counts)
            if cut:
                break
        return {
            "matches": found,
            "cut": cut,
            "files": counts["files"],
            "skipped": counts["skipped"],
        }

    def globbed(self, path, name, glob):
        import fnmatch

        tried = path if "/" in glob else name
        return fnmatch.fnmatchcase(text(tried), glob)

    def candidates(self, parts):
        fd, found = self.open_path(parts)
        os.close(fd)
        if stat.S_ISDIR(found.st_mode):
            for path, parent, name in self.walk(parts, recursive=True):
                yield (b"/".join(parts + (path,))), parent, name
            return
        parent, name = self.open_parent(parts)
        try:
            yield b"/".join(parts), parent, name
        finally:
            os.close(parent)

    def search_file(self, matches, path, parent, name, limit, found, counts):
        """Searches one file; True when there is more than the limit. Binary files are skipped."""
        try:
            fd = os.open(name, READ_FLAGS, dir_fd=parent)
        except OSError:
            return False
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            return False
        with os.fdopen(fd, "rb") as file:
            if status.st_size > CONTENT_MAX or b"\0" in file.read(8192):
                counts["skipped"] += 1
                return False
            counts["files"] += 1
            file.seek(0)
            for number, line in enumerate(file, 1):
                if matches(line.rstrip(b"\r\n")):
                    if len(found) == limit or counts["room"] < 0:
                        return True
                    line = line.rstrip(b"\r\n")
                    match = {
                        "path": text(path),
                        "line": number,
                        "text": text(whole_letters(line[:500])),
                    }
                    if len(line) > 500:
                        match["cut"] = len(line) - 500
                    counts["room"] -= len(path) + len(match["text"]) + 60
                    found.append(match)
        return False


def whole_letters(data):
    """Without the last bytes, when they are the beginning of a UTF-8 letter that was cut."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = (
            2
            if byte & 0xE0 == 0xC0
            else 3
            if byte & 0xF0 == 0xE0
            else 4
            if byte & 0xF8 == 0xF0
            else 1
        )
        return data[:-back] if length > back else data
    return data


# ---------------------------------------------------------------- child processes


class Capture:
    """One output stream: the first and the last part of it, and how much was cut between them."""

    def __init__(self, limit):
        self.limit = limit
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def feed(self, chunk):
        self.total += len(chunk)
        room = (self.limit + 1) // 2 - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            chunk = chunk[room:]
        self.tail += chunk
        keep = self.limit // 2
        if len(self.tail) > keep + 65536:
            del self.tail[: len(self.tail) - keep]

    def told(self):
        """The text and the number of bytes that were cut out of its middle."""
        keep = self.limit // 2
        tail = bytes(self.tail[max(0, len(self.tail) - keep) :])
        cut = self.total - len(self.head) - len(tail)
        if not cut:
            return text(bytes(self.head) + tail), 0
        head = whole_letters(bytes(self.head))
        while tail and tail[0] & 0xC0 == 0x80:
            tail = tail[1:]
        cut = self.total - len(head) - len(tail)
        return "%s\n[%d bytes cut]\n%s" % (text(head), cut, text(tail)), cut


class Child:
    """A process group that runs for one frame, watched by the poll loop."""

    def __init__(self, pid, outputs, finished):
        self.pid = pid
        self.started = start_time(pid)
        self.outputs = outputs  # fd -> Capture
        self.captures = list(outputs.values())
        self.finished = finished
        self.stdin_fd = -1
        self.stdin = memoryview(b"")
        self.cookie = b""
        self.began = _monotonic()
        self.deadline = None
        self.status = None
        self.timed_out = False
        self.killed = ""  # why we ended it
        self.sweep_until = None
        self.background = 0
        self.alive_after = False


class Limits:
    """Limits of tool processes, as `--limits` gives them."""

    def __init__(self, given):
        self.pairs = []
        if given:
            import resource

            for name, kind, factor in (
                ("memory_mb", resource.RLIMIT_AS, 1 << 20),
                ("processes", resource.RLIMIT_NPROC, 1),
                ("file_mb", resource.RLIMIT_FSIZE, 1 << 20),
            ):
                if name in given:
                    most = resource.getrlimit(kind)[1]
                    value = given[name] * factor
                    if most != resource.RLIM_INFINITY:
                        value = min(value, most)  # only root may raise it
                    self.pairs.append((kind, value))
            self.set = resource.setrlimit

    def apply(self):
        for kind, value in self.pairs:
            try:
                self.set(kind, (value, value))
            except (OSError, ValueError) as error:
                # Elsewhere some cannot be set, as the memory's on macOS: a limit less.
                if sys.platform == "linux":
                    raise OSError(errno.EINVAL, "limit %d: %s" % (kind, error)) from error


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def spawn(argv, cwd_fd, env, stdin, output_max, limits, finished):
    """
    Starts a child that waits for `release` before it becomes the command: its process group can
    stand in the journal before it does anything.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a command leaves behind becomes our child
    pipes = [os.pipe() for _ in range(5)]
    (go_r, go_w), (fail_r, fail_w), (out_r, out_w), (err_r, err_w), (in_r, in_w) = pipes
    parent = os.getpid()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError:
        for pair in pipes:
            os.close(pair[0])
            os.close(pair[1])
        raise
    if pid == 0:
        try:
            for fd in (go_w, fail_r, out_r, err_r, in_w):
                os.close(fd)
            become(argv, cwd_fd, env, limits, parent, go_r, (in_r, out_w, err_w))
        except OSError as error:
            os.write(fail_w, b"%d" % (error.errno or errno.EIO))
        finally:
            os._exit(127)
    for fd in (go_r, fail_w, out_w, err_w, in_r):
        os.close(fd)
    os.set_blocking(in_w, False)
    for fd in (out_r, err_r):
        os.set_blocking(fd, False)
    child = Child(pid, {out_r: Capture(output_max), err_r: Capture(output_max)}, finished)
    child.stdin_fd = in_w
    child.stdin = memoryview(stdin)
    return child, go_w, fail_r


def become(argv, cwd_fd, env, limits, parent, go_r, streams):
    """Runs in the forked child: from here to the command itself."""
    os.setsid()
    if prctl(PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(127)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for target, source in enumerate(streams):
        os.dup2(source, target)
    if os.read(go_r, 1) != b"1":
        os._exit(127)
    os.fchdir(cwd_fd)
    limits.apply()
    become_tool_user(parent)
    os.execvpe(argv[0], argv, env)


def release(go_w, fail_r):
    """Lets the child become its command; returns the errno when it could not."""
    try:
        os.write(go_w, b"1")
        os.close(go_w)
        said = os.read(fail_r, 16)
    finally:
        os.close(fail_r)
    return int(said) if said else 0


def command_of(args, field):
    """The argv of an `{argv | shell}` object."""
    if type(args) is not dict:
        raise bad(field, "must be an object with argv or shell")
    prefix = field + "." if field else ""
    forms = [form for form in ("argv", "shell") if form in args]
    if len(forms) != 1:
        raise bad(prefix + "argv", "give exactly one of argv, shell")
    if forms[0] == "shell":
        line = get_str(args, "shell")
        if not line or "\0" in line:
            raise bad(prefix + "shell", "must not be empty or contain a NUL")
        return [b"/bin/sh", b"-c", to_bytes(line, prefix + "shell")]
    argv = args["argv"]
    if type(argv) is not list or not argv or not all(type(item) is str for item in argv):
        raise bad(prefix + "argv", "must be a list of strings, not empty")
    if not argv[0] or any("\0" in item for item in argv):
        raise bad(prefix + "argv", "must name a program and contain no NUL")
    return [to_bytes(item, prefix + "argv") for item in argv]


class Command:
    """The checked arguments of one run."""

    FIELDS = ("argv", "shell", "cwd", "env", "stdin", "timeout_ms", "output_max_bytes")

    def __init__(self, args):
        check_fields(args, self.FIELDS)
        self.argv = command_of(args, "")
        self.cwd = split_path(args.get("cwd", "."), "cwd", root_ok=True)
        self.env = {}
        env = args.get("env", {})
        if type(env) is not dict or not all(type(value) is str for value in env.values()):
            raise bad("env", "must be an object of strings")
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise bad("env", "has a name or value that no environment can hold: " + shown(name))
            self.env[to_bytes(name, "env")] = to_bytes(value, "env")
        self.stdin = to_bytes(get_str(args, "stdin", ""), "stdin")
        self.timeout_ms = get_int(args, "timeout_ms", COMMAND_MS, 1, 86_400_000)
        self.output_max = get_int(args, "output_max_bytes", OUTPUT_BYTES, 0, OUTPUT_BYTES_MAX)

    @classmethod
    def of_migration(cls, args):
        """The way up, and the way down to be kept for the undo."""
        check_fields(args, ("name", "up", "down", "timeout_ms"))
        name = get_str(args, "name", required=True)
        if not name:
            raise bad("name", "is empty")
        for side in ("up", "down"):
            if side not in args:
                raise bad(side, "missing")
            command_of(args[side], side)
            check_fields(
                {"%s.%s" % (side, k): 0 for k in args[side]}, (side + ".argv", side + ".shell")
            )
        given = dict(args["up"])
        if "timeout_ms" in args:
            given["timeout_ms"] = args["timeout_ms"]
        return cls(given)


def result_of(child):
    """What a command did, as its receipt tells it."""
    result = {}
    if child.status is not None and os.WIFSIGNALED(child.status):
        result["signal"] = os.WTERMSIG(child.status)
    elif child.status is not None:
        result["exit_code"] = os.WEXITSTATUS(child.status)
    for name, capture in zip(("stdout", "stderr"), child.captures):
        result[name], result[name + "_cut"] = capture.told()
    result["duration_ms"] = int((_monotonic() - child.began) * 1000)
    result["timed_out"] = child.timed_out
    if child.background:
        result["background_killed"] = child.background
    return result


# ---------------------------------------------------------------- the toolhost


class Call:
    """One fenced frame, read strictly: True is not 1, and 7.0 is not 7."""

    __slots__ = (
        "attempt",
        "body",
        "digest",
        "direction",
        "epoch",
        "key",
        "kind",
        "no",
        "of",
        "root",
        "sandbox",
        "session",
        "step",
        "timeout_ms",
        "tool",
    )  # fmt: skip

    def __init__(self, kind, head, body):
        fence = head.get("fence")
        if type(fence) is not dict:
            raise Malformed("fence")
        get = fence.get
        self.kind = kind
        self.body = body
        self.sandbox = word("sandbox", get("sandbox"))
        self.attempt = attempt = word("attempt", get("attempt"))
        self.step = word("step", head.get("step"))
        self.session = string("session", get("session"))
        self.tool = string("tool", head.get("tool", ""))
        self.digest = string("digest", head.get("digest", ""))
        self.of = string("of", head.get("of", ""))
        self.epoch = whole("epoch", get("epoch"), 1)
        self.no = whole("no", get("no"), 0)
        self.direction = direction = get("direction")
        if direction not in DIRECTIONS[kind]:
            raise Malformed("direction")
        self.timeout_ms = head.get("timeout_ms")
        if self.timeout_ms is not None:
            whole("timeout_ms", self.timeout_ms, 1)
        self.key = "undo:" + attempt if direction == "undo" else attempt
        self.root = ""  # undo: the attempt that wrote, where `of` only attested it


def word(name, value):
    if type(value) is not str or not _ID(value):
        raise Malformed(name)
    return value


def string(name, value):
    if type(value) is not str:
        raise Malformed(name)
    return value


def whole(name, value, least):
    if type(value) is not int or value < least:
        raise Malformed(name)
    return value


JOBS = ("checkpoint", "restore")
DIRECTIONS = {"apply": ("apply", "replay"), "undo": ("undo",), "revoke": ("revoke",)}


class Marker:
    """One reading of the disk's generation marker."""

    __slots__ = ("epoch", "nonce", "raw", "session")

    def __init__(self, epoch, session, nonce, raw):
        self.epoch = epoch
        self.session = session
        self.nonce = nonce
        self.raw = raw

    def told(self, instance):
        return {
            "epoch": self.epoch,
            "session": self.session,
            "nonce": self.nonce,
            "instance": instance,
        }


NO_MARKER = Marker(0, "", "", b"")


class Run:
    """The one mutating command that runs, with what its receipt needs. The lock is held."""

    def __init__(self, call, marker, child):
        self.call = call
        self.marker = marker
        self.child = child


class Toolhost:
    def __init__(self, options):
        self.instance = options["instance"]
        self.sync = options["sync"]
        self.heartbeat_s = options["heartbeat_ms"] / 1000.0
        self.prefix = options["exec_prefix"]
        self.prefix_ro = options["exec_prefix_ro"]
        self.limits = Limits(options["limits"])
        TOOL_UID[0] = options["tool_uid"]
        self.state_dir = os.path.realpath(options["state"])
        try:
            # Not what is above it: a sandbox that was removed meanwhile must stay so.
            os.mkdir(self.state_dir, 0o700)
        except FileExistsError:
            pass
        self.marker_path = os.path.join(self.state_dir, "marker.json")
        self.workspace = Workspace(options["workspace"], self.state_dir)
        self.env = base_environment(options["env"], self.workspace.root)
        self.files = Files(self.workspace, self.state_dir, self.sync)
        self.blobs = Blobs(self.state_dir)
        self.journal = Journal(self.state_dir, self.sync)
        self.lock_fd = os.open(
            os.path.join(self.state_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        self.holder = b"%d %d\n" % (os.getpid(), start_time(os.getpid()))
        found = os.stat(self.state_dir)
        disk = hashlib.sha256(b"%d:%d" % (found.st_dev, found.st_ino)).hexdigest()[:16]
        self.cookie = b"FENCEPOST_FENCE=" + disk.encode() + b":"
        self.locked = False
        self.tidied = False
        self.last_marker = NO_MARKER
        self.run = None
        self.job = None  # the checkpoint or restore under way
        self.cache = Cache(self.state_dir)
        self.unkept = None  # what the cache is to hold once the gateway has kept all of it
        self.children = {}  # process id -> Child
        self.queue: deque[Any] = deque()  # Calls that wait for the lock or behind a command
        self.revokes: deque[Any] = deque()
        self.grant_until = None
        self.outgoing = []
        self.backlog = bytearray()
        self.backlog_full = False
        self.counters = {"frames": 0, "applied": 0, "attested": 0, "refused": 0, "fault": 0,
                         "indeterminate": 0, "repeated": 0, "heartbeats": 0}  # fmt: skip
        self.next_heartbeat = _monotonic() + self.heartbeat_s
        self.stopping = 0
        self.journal.refresh()

    # -- the marker and the lock

    def read_marker(self):
        """The marker as it is on the disk now, or None; what cannot be understood is none."""
        try:
            fd = os.open(self.marker_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            raw = os.read(fd, 4096)
        finally:
            os.close(fd)
        if raw and raw == self.last_marker.raw:
            return self.last_marker
        try:
            found = json.loads(raw)
            epoch, session, nonce = found["epoch"], found["session"], found["nonce"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if (
            type(epoch) is not int
            or not 1 <= epoch < 1 << 53
            or type(session) is not str
            or type(nonce) is not str
        ):
            return None
        self.last_marker = Marker(epoch, session, nonce, raw)
        return self.last_marker

    def write_marker(self, epoch, session, nonce):
        temp = self.marker_path + ".new"
        raw = _dumps({"epoch": epoch, "session": session, "nonce": nonce}).encode()
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, raw)
            if self.sync:
                sync_fd(fd)
        finally:
            os.close(fd)
        crash("marker_written")
        os.rename(temp, self.marker_path)
        if self.sync:
            sync_dir(self.state_dir)
        crash("marker_renamed")

    def try_lock(self):
        """Takes the lock if it is free, and makes the disk and our picture of it whole."""
        if self.locked:
            return True
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.locked = True
        try:
            if os.pread(self.lock_fd, 64, 0) != self.holder:
                os.ftruncate(self.lock_fd, 0)
                os.pwrite(self.lock_fd, self.holder, 0)
            if CRASH_AT:
                crash("locked")
            self.journal.refresh()
            if self.journal.open:
                self.recover()
            self.tidy()
        except BaseException:
            self.unlock()
            raise
        return True

    def unlock(self):
        if self.locked and self.run is None and self.job is None:
            self.locked = False
            fcntl.flock(self.lock_fd, fcntl.LOCK_UN)

    def recover(self):
        """
        Settles what began and is not done. We hold the lock, so whoever began it is gone: file
        operations are taken back, a command is broken.
        """
        for key in sorted(self.journal.open):
            if self.run is None or self.run.call.key != key:
                self.settle(self.journal.entries[key])

    def settle(self, entry):
        if entry.group:
            cookie = self.cookie + entry.key.encode() + b"\0"
            if not end_processes(entry.group, cookie, entry.started, _monotonic() + GONE_S):
                raise Fault("io_error", "processes of %s cannot be ended" % entry.key)
            self.journal.append(record_of("broken", entry))
            return
        plan = self.journal.plan_of(entry)
        try:
            self.files.roll_back(entry.key, plan["ops"], entry.no)
        finally:
            self.workspace.release()
        if CRASH_AT:
            crash("rolled_back")
        self.journal.append(record_of("rolled", entry), owe=True)

    def tidy(self):
        """Drops pre-images of forgotten records; compacts a journal that has grown too long."""
        journal = self.journal
        if not self.tidied:
            self.tidied = True
            self.files.drop_unknown(journal.entries)
        while journal.dropped:
            self.files.drop(journal.dropped.pop())
        if journal.forgotten_since >= WINDOW or (
            journal.size > COMPACT_BYTES and journal.forgotten_since >= 256
        ):
            try:
                journal.compact()
            except OSError as error:
                if not is_no_space(error):
                    raise
                journal.forgotten_since = 0  # tried again after as many records

    # -- answers

    def send(self, head, body=b""):
        if body:
            head["n"] = len(body)
        self.outgoing.append(_dumps(head).encode() + b"\n" + body)

    def send_receipt(self, call, verdict, epoch, body):
        self.outgoing.append(
            b'{"k":"receipt","sandbox":"%b","step":"%b","attempt":"%b","direction":"%b",'
            b'"verdict":"%b","epoch":%d,"n":%d}\n%b'
            % (
                call.sandbox.encode(), call.step.encode(), call.attempt.encode(),
                call.direction.encode(), verdict.encode(), epoch, len(body), body,
            )
        )  # fmt: skip

    def receipt(self, call, verdict, marker, after=None, **more):
        """The receipt's bytes. `marker` was read before the effect, `after` after it."""
        seq = more.pop("seq", None)
        instance = self.instance
        receipt = {
            "sandbox": call.sandbox, "step": call.step, "attempt": call.attempt,
            "direction": call.direction, "no": call.no, "verdict": verdict,
            "epoch": marker.epoch, "session": marker.session, "nonce": marker.nonce,
            "instance": instance, "after": (after or marker).told(instance),
            "tool": clean(call.tool), "digest": clean(call.digest), "outcome": "", "changes": [],
            "result": None, "journal_seq": self.journal.seq if seq is None else seq,
            "of": clean(call.of), "reason": "", "detail": "",
        }  # fmt: skip
        receipt.update(more)
        if receipt["detail"]:
            receipt["detail"] = clean(receipt["detail"])[:2000]
        return _dumps(receipt).encode()

    def answer(self, call, verdict, marker=None, **more):
        """Sends a receipt that is not journaled: it speaks of no effect."""
        if verdict in self.counters:
            self.counters[verdict] += 1
        if marker is None:
            marker = self.last_marker
        self.send_receipt(call, verdict, marker.epoch, self.receipt(call, verdict, marker, **more))

    def record(self, call, verdict, marker, after, **more):
        """Journals a receipt that speaks of an effect, then sends it."""
        of = more.get("of") or call.root or call.of
        body = self.receipt(call, verdict, marker, after, seq=self.journal.seq + 1, **more)
        if CRASH_AT:
            crash("before_done")
        good = more["outcome"] == "ok"
        self.journal.append(done_record(call, call.digest, of, verdict, good), body)
        if CRASH_AT:
            crash("after_done")
        self.counters[verdict] += 1
        self.send_receipt(call, verdict, marker.epoch, body)

    def resend(self, call, entry):
        """The first receipt, byte for byte."""
        body = self.journal.read(entry.receipt)
        self.counters["repeated"] += 1
        self.send_receipt(call, entry.verdict, json.loads(body)["epoch"], body)

    def apart(self, call, work):
        """Does one call's work and turns every failure into its answer."""
        try:
            work(call)
        except Refusal as refusal:
            self.answer(call, "refused", reason=refusal.reason, detail=refusal.detail)
        except Fault as fault:
            self.answer(call, "fault", reason=fault.reason, detail=fault.detail)
        except Indeterminate as error:
            self.answer(call, "indeterminate", reason=error.reason, detail=error.detail)
        except OSError as error:
            reason = "no_space" if is_no_space(error) else "io_error"
            self.answer(call, "fault", reason=reason, detail=str(error))
        finally:
            self.workspace.release()

    # -- fenced calls

    def pump(self):
        """Works off the waiting calls, in order, as far as the lock can be had."""
        while self.revokes:
            call = self.revokes[0]
            if not self.reach(call, self.revoke_unlocked):
                break
            self.revokes.popleft()
            self.apart(call, self.revoke)
        while self.queue and self.run is None and self.job is None:
            call = self.queue[0]
            if not self.reach(call, self.answer_running):
                break
            self.queue.popleft()
            if call.kind in JOBS:
                self.begin_job(call)
                continue
            self.apart(call, self.undo if call.kind == "undo" else self.apply)
        self.unlock()

    def reach(self, call, meanwhile):
        """Tries the lock for a call; while another toolhost has it, does what needs no lock."""
        try:
            if self.try_lock():
                return True
            self.journal.refresh()
        except (Fault, OSError) as error:
            # The disk cannot be made whole: nothing may be done on it. Each is told so.
            queue = self.revokes if call.kind == "revoke" else self.queue
            queue.popleft()
            detail = getattr(error, "detail", "") or str(error)
            reason = "no_space" if isinstance(error, OSError) and is_no_space(error) else "io_error"
            if call.kind in JOBS:
                self.job_failed(call, reason, detail)
            else:
                self.answer(call, "fault", reason=reason, detail=detail)
            return False
        meanwhile(call)
        return False

    def answer_running(self, call):
        """A duplicate of what another toolhost runs is answered at once."""
        if call.key in self.journal.open:
            self.queue.popleft()
            self.answer(call, "running", self.read_marker() or NO_MARKER)

    def check_fence(self, call):
        marker = self.read_marker()
        if marker is None:
            self.last_marker = NO_MARKER
            raise Refusal("no_generation", "no marker on this disk")
        if marker.epoch != call.epoch:
            raise Refusal("stale_epoch", "the disk is at epoch %d" % marker.epoch)
        if marker.session != call.session:
            raise Refusal("stale_session", "the disk is at another session")
        if call.kind != "restore" and self.journal.is_restoring():
            raise Fault("restoring", "a restore of this disk is not finished")
        return marker

    def look_up(self, call):
        """Answers from the journal what it already decides; True when it did."""
        entry = self.journal.entries.get(call.key)
        if entry is not None:
            if entry.state == "done":
                self.resend(call, entry)
                return True
            if entry.state == "broken":
                raise Indeterminate("broken", "it began and left no record")
            if entry.state == "open":
                self.answer(call, "running")
                return True
        if self.is_revoked(call.attempt):
            raise Refusal("revoked", "this fence was revoked")
        if entry is None and call.no <= self.journal.forgotten_no:
            raise Refusal("too_old", "fences up to %d are forgotten" % self.journal.forgotten_no)
        if self.grant_until is not None and _monotonic() > self.grant_until:
            raise Refusal("grant_expired", "the gateway's grant was not renewed")
        return False

    def is_revoked(self, attempt):
        for direction in ("apply", "undo"):
            entry = self.journal.entries.get(key_of(attempt, direction))
            if entry is not None and entry.revoked:
                return True
        return False

    def check_digest(self, call):
        found = sha256(call.body)
        if call.digest and call.digest != found:
            raise Refusal("digest_mismatch", "the arguments have the digest " + found)
        call.digest = found

    def apply(self, call):
        marker = self.check_fence(call)
        if self.look_up(call):
            return
        self.check_digest(call)
        last = self.journal.last_of(call.step)
        if last is not None:
            if last.state == "broken":
                raise Indeterminate(
                    "broken", "attempt %s of this step left no record" % last.attempt
                )
            if last.state == "done" and last.direction != "undo" and last.digest == call.digest:
                self.attest(call, marker, last)
                return
            if last.no > call.no:
                raise Refusal("revoked", "attempt %s of this step is newer" % last.attempt)
        self.perform(call, marker)

    def attest(self, call, marker, last):
        """The step is on this disk already: says so under the new fence."""
        first = json.loads(self.journal.read(last.receipt))
        of = last.of if last.verdict == "attested" else last.attempt
        kept = {name: first[name] for name in ("outcome", "changes", "result")}
        kept["of_seq"] = first.get("of_seq") or first["journal_seq"]
        self.record(call, "attested", marker, self.second_reading(marker), of=of, **kept)

    def second_reading(self, marker):
        after = self.read_marker()
        if after is None or after.raw != marker.raw:
            raise Fault("marker_moved", "the marker changed under the tool")
        return after

    def perform(self, call, marker):
        """Runs a call's tool for the first time under its fence."""
        args = parse_arguments(call.body)
        if call.tool in COMMAND_TOOLS:
            if call.tool == "run_migration":
                command = Command.of_migration(args)
                self.start(call, marker, command, {"down": args["down"]})
            else:
                self.start(call, marker, Command(args), {})
            return
        make_plan = PLANS.get(call.tool)
        if make_plan is None:
            raise bad("tool", "%s is not a mutating tool" % shown(call.tool))
        try:
            plan, result, blob = make_plan(self.workspace, self.blobs, args)
        except ToolFailure as failure:
            self.record_failure(call, marker, failure)
            return
        except OSError as error:
            self.fail_or_fault(call, marker, error)
            return
        self.carry_out(call, marker, plan, result)
        if blob is not None:
            self.blobs.drop(blob)

    def record_failure(self, call, marker, failure):
        after = self.second_reading(marker)
        self.record(call, "applied", marker, after, outcome="failed", result=failure.result)

    def fail_or_fault(self, call, marker, error):
        turned = from_os_error(error)
        if isinstance(turned, Fault):
            raise turned from error
        self.record_failure(call, marker, turned)

    def begin(self, call, ops, kept, group=0, started=0, pre=False):
        record = {
            "k": "begun", "a": call.attempt, "d": call.direction, "no": call.no, "s": call.step,
            "t": call.tool, "g": call.digest, "of": call.root or call.of,
            "pg": group, "st": started, "pre": pre,
        }  # fmt: skip
        self.journal.append(record, _dumps({"ops": ops, **kept}).encode())

    def carry_out(self, call, marker, plan, result):
        """Pre-images, begun, effects, second reading, done: or all of it taken back."""
        ops = plan.ops()
        try:
            pre = self.files.save(call.key, ops)
            if CRASH_AT:
                crash("pre_saved")
            self.begin(call, ops, {}, pre=pre)
        except OSError as error:
            self.files.drop(call.key)
            self.fail_or_fault(call, marker, error)
            return
        try:
            if CRASH_AT:
                crash("begun")
            self.files.stage(plan, call.no)
            self.files.carry_out(ops, call.no)
            after = self.second_reading(marker)
            changes = changes_of(ops)
            self.record(
                call, "applied", marker, after, outcome="ok", changes=changes, result=result
            )
        except (OSError, Fault, Refusal) as error:
            self.take_back(call, ops)
            if isinstance(error, OSError):
                self.fail_or_fault(call, marker, error)
                return
            raise

    def take_back(self, call, ops):
        try:
            self.files.roll_back(call.key, ops, call.no)
        except OSError as error:
            # The record stays open: it is settled before anything else is done on this disk, so
            # asking again tells; and where the disk is being taken away, nobody will ask.
            raise Fault("io_error", "cannot be rolled back yet: %s" % error) from error
        try:
            self.journal.append(record_of("rolled", call), owe=True)
        except OSError:
            return  # owed: it goes in front of the next record

    def undo(self, call):
        marker = self.check_fence(call)
        if self.look_up(call):
            return
        target = self.target_of(call)
        if call.tool:
            self.check_digest(call)
            self.perform(call, marker)
            return
        if target.state == "broken":
            raise Indeterminate("broken", "what %s did is not known" % call.of)
        if target.undone:
            after = self.second_reading(marker)
            self.record(
                call, "applied", marker, after, outcome="ok", result={"already_undone": True}
            )
            return
        first = json.loads(self.journal.read(target.receipt))
        if target.tool in COMMAND_TOOLS:
            self.undo_command(call, marker, target)
            return
        if first["outcome"] != "ok" or target.begun is None:
            raise Refusal("nothing_to_undo", "%s changed nothing" % call.of)
        self.check_untouched(target)
        try:
            plan = self.files.plan_undo(target.key, self.journal.plan_of(target)["ops"])
        except ToolFailure as failure:
            raise Refusal("overwritten", failure.result["error"]) from failure
        self.carry_out(call, marker, plan, None)

    def target_of(self, call):
        """The record that an undo names, through attestations to the one that has the pre-image."""
        entries = self.journal.entries
        target = entries.get(call.of)
        if target is not None and target.verdict == "attested":
            target = entries.get(target.of)
            if target is None:
                raise Refusal("too_old", "the first apply is forgotten")
            call.root = target.attempt
        if target is not None and not self.journal.is_here(target):
            raise Refusal("nothing_to_undo", "%s was before a restore" % clean(call.of))
        if target is None:
            if self.journal.forgotten_no:
                raise Refusal("too_old", "%s is not among the remembered records" % clean(call.of))
            raise Refusal("nothing_to_undo", "%s never began" % clean(call.of))
        if target.state not in ("done", "broken"):
            raise Refusal("nothing_to_undo", "%s never began, or was rolled back" % clean(call.of))
        return target

    def undo_command(self, call, marker, target):
        if target.tool != "run_migration":
            raise bad("tool", "%s keeps no pre-image, an undo command is needed" % target.tool)
        down = self.journal.plan_of(target)["down"]
        self.start(call, marker, Command(dict(down)), {})

    def check_untouched(self, target):
        """Refuses when a later step wrote one of the paths, even with the same bytes."""
        paths = {op["p"] for op in self.journal.plan_of(target)["ops"] if op["t"] != "mkdir"}
        later = False
        for key in self.journal.order:
            entry = self.journal.entries[key]
            if key == target.key:
                later = True
            elif later and entry.state == "done" and entry.begun and not entry.undone:
                if entry.direction == "undo" or entry.tool in COMMAND_TOOLS:
                    continue
                for op in self.journal.plan_of(entry)["ops"]:
                    if op["p"] in paths and op["t"] != "mkdir":
                        text_of = "%s was written by the later step %s" % (
                            clean(op["p"]),
                            entry.step,
                        )
                        raise Refusal("overwritten", text_of)

    # -- commands

    def start(self, call, marker, command, kept):
        """Starts a mutating command; `finish_run` ends what begins here."""
        if call.timeout_ms is not None:
            command.timeout_ms = min(command.timeout_ms, call.timeout_ms)
        cookie = self.cookie + call.key.encode()
        child, go_w, fail_r = self.spawn(command, self.prefix, cookie, self.finish_run)
        try:
            if CRASH_AT:
                crash("spawned")
            self.begin(call, [], kept, child.pid, child.started)
            if CRASH_AT:
                crash("begun")
        except OSError:
            os.close(go_w)  # the child sees the end of the pipe and goes away
            os.close(fail_r)
            child.finished = None
            raise
        self.run = Run(call, marker, child)
        self.let_go(child, go_w, fail_r, command)

    def let_go(self, child, go_w, fail_r, command):
        error = release(go_w, fail_r)
        if error:
            child.captures[1].feed(b"cannot start: " + os.strerror(error).encode())
        child.began = _monotonic()
        child.deadline = child.began + command.timeout_ms / 1000.0
        if CRASH_AT:
            crash("started")

    def spawn(self, command, prefix, cookie, finished):
        reader = Reader(self.workspace)
        try:
            cwd_fd, found = reader.open_path(command.cwd)
        except (FileNotFoundError, NotADirectoryError, ToolFailure):
            raise bad("cwd", "is not a directory") from None
        try:
            if not stat.S_ISDIR(found.st_mode):
                raise bad("cwd", "is not a directory")
            cwd = self.path_of(cwd_fd, found, command.cwd) if prefix else ""
            root = os.fsdecode(self.workspace.root)
            filled = [p.replace("{workspace}", root).replace("{cwd}", cwd) for p in prefix]
            argv = [os.fsencode(part) for part in filled] + command.argv
            env = dict(self.env)
            env.update(command.env)
            name, _, value = cookie.partition(b"=")
            env[name] = value
            child, go_w, fail_r = spawn(
                argv, cwd_fd, env, command.stdin, command.output_max, self.limits, finished
            )
        finally:
            os.close(cwd_fd)
        child.cookie = cookie + b"\0"
        self.children[child.pid] = child
        return child, go_w, fail_r

    def path_of(self, fd, found, parts):
        """The name of an open directory below the workspace, without symbolic links."""
        if IS_LINUX:
            return os.readlink("/proc/self/fd/%d" % fd)
        path = os.path.realpath(os.path.join(os.fsdecode(self.workspace.root), joined(parts)))
        if not os.path.samestat(os.stat(path), found):
            raise bad("cwd", "moved while it was opened")
        return path

    def end_child(self, child, why):
        """Kills a child's whole group; the poll loop sees it go."""
        if not child.killed:
            child.killed = why
        if child.status is None:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                kill(child.pid)

    def reap(self):
        """Notes which children ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.get(pid)
            if child is not None:
                child.status = status

    def step_child(self, child):
        """Moves an ended child on: kill what it left, read what it said, finish."""
        now = _monotonic()
        if child.status is None:
            return
        if child.sweep_until is None:
            child.sweep_until = now + GONE_S
        left = processes(child.pid, child.cookie, child.started) if child.cookie else []
        for pid in left:
            kill(pid)
        child.background = max(child.background, len(left))
        if left and now < child.sweep_until:
            return
        child.alive_after = bool(left)
        for fd in list(child.outputs):
            self.drain(child, fd)
        if child.outputs and now < child.sweep_until and not child.alive_after:
            return
        for fd in list(child.outputs):
            os.close(fd)
        child.outputs.clear()
        self.close_stdin(child)
        del self.children[child.pid]
        if child.finished is not None:
            child.finished(child)

    def drain(self, child, fd):
        for _ in range(64):
            try:
                chunk = os.read(fd, 65536)
            except BlockingIOError:
                return
            if not chunk:
                os.close(fd)
                del child.outputs[fd]
                return
            child.outputs[fd].feed(chunk)

    def feed_stdin(self, child):
        try:
            child.stdin = child.stdin[os.write(child.stdin_fd, child.stdin[:65536]) :]
        except BlockingIOError:
            return
        except OSError:
            child.stdin = memoryview(b"")
        if not child.stdin:
            self.close_stdin(child)

    def close_stdin(self, child):
        if child.stdin_fd >= 0:
            os.close(child.stdin_fd)
            child.stdin_fd = -1

    def finish_run(self, child):
        """The command is over: journals and answers what it did, unless it was ended."""
        run, self.run = self.run, None
        assert run is not None
        try:
            self.apart(run.call, lambda call: self.settle_run(call, run, child))
        finally:
            self.unlock()

    def settle_run(self, call, run, child):
        if CRASH_AT:
            crash("command_over")
        try:
            self.journal.refresh()
            after = self.read_marker()
            why = self.why_broken(call, run, child, after)
            if not why:
                result = result_of(child)
                good = result.get("exit_code") == 0 and not child.timed_out
                outcome = "ok" if good else "failed"
                self.record(call, "applied", run.marker, after, outcome=outcome, result=result)
                return
            self.journal.append(record_of("broken", call))
        except OSError as error:
            # The open record is settled as broken before anything else is done on this disk.
            raise Indeterminate("no_record", "it ran and its record failed: %s" % error) from error
        raise Indeterminate(why, "the command was ended before it was done")

    def why_broken(self, call, run, child, after):
        """Why a command that is over cannot be vouched for; empty when it can."""
        entry = self.journal.entries.get(call.key)
        if child.killed:
            return child.killed
        if entry is None or entry.state != "open":
            return "no_record"
        if entry.ended:
            return "ended"
        if self.is_revoked(call.attempt):
            return "revoked"
        if child.alive_after:
            return "processes_left"
        if after is None or after.raw != run.marker.raw:
            return "marker_moved"
        return ""

    # -- revocation

    def revoke_unlocked(self, call):
        """Another toolhost has the lock: ends the attempt it runs, so that the lock comes free."""
        entry = self.entry_of_attempt(call.attempt)
        if entry is not None and entry.state == "open" and entry.group and not entry.revoked:
            self.journal.append_unlocked(record_of("revoked", entry))
            self.journal.refresh()
            cookie = self.cookie + entry.key.encode() + b"\0"
            end_processes(entry.group, cookie, entry.started, _monotonic() + 0.2)

    def entry_of_attempt(self, attempt):
        return self.journal.entries.get(attempt) or self.journal.entries.get("undo:" + attempt)

    def revoke(self, call):
        """Under the lock (ours, even while our command runs)."""
        marker = self.read_marker()
        if marker is None:
            raise Refusal("no_generation", "no marker on this disk")
        if marker.epoch != call.epoch:
            raise Refusal("stale_epoch", "the disk is at epoch %d" % marker.epoch)
        entry = self.entry_of_attempt(call.attempt)
        if entry is not None and entry.state == "open":
            self.revoke_running(entry)
            entry = self.entry_of_attempt(call.attempt)
        if entry is None:
            if call.no <= self.journal.forgotten_no:
                raise Refusal(
                    "too_old", "fences up to %d are forgotten" % self.journal.forgotten_no
                )
        elif entry.state == "done":
            first = json.loads(self.journal.read(entry.receipt))
            self.answer(call, "already_done", marker, result=first, of=call.attempt)
            return
        elif entry.state == "broken":
            raise Indeterminate("broken", "it began and left no record")
        older, undone = self.carried_into(call, entry)
        if entry is None or not entry.revoked:
            record = record_of("revoked", call if entry is None else entry)
            if entry is None:
                record["d"] = "apply"
            if CRASH_AT:
                crash("before_revoked")
            self.journal.append(record)
            if CRASH_AT:
                crash("after_revoked")
        if older is not None and older.state == "broken":
            raise Indeterminate("broken", "attempt %s of this step left no record" % older.attempt)
        if older is not None:
            first = json.loads(self.journal.read(older.receipt))
            self.answer(call, "already_done", marker, result=first, of=older.attempt)
            return
        rolled = entry is not None and entry.state == "rolled"
        reason = "undone" if undone else "rolled_back" if rolled else "never_began"
        self.answer(call, "revoked", marker, reason=reason)

    def carried_into(self, call, entry):
        """
        The older attempt of this step that is on this disk, and whether one was and is undone.

        The ledger carried it into this attempt, so "never began" would deny its effect.
        """
        if entry is not None and entry.state in ("done", "broken", "rolled"):
            return None, False
        last = self.journal.last_of(call.step)
        if last is not None and last.state == "open":
            self.revoke_running(last)
            last = self.journal.last_of(call.step)
        if last is None or last.state not in ("done", "broken"):
            return None, False
        if last.direction != "undo":
            return last, False
        if last.state == "done" and last.good:
            return None, True
        # The undo failed, or left no record: what it was to take back may stand.
        older = self.journal.entries.get(last.of)
        if older is None:
            raise Refusal("too_old", "%s is not among the remembered records" % clean(last.of))
        return older, False

    def revoke_running(self, entry):
        """Only our own command can be open while we hold the lock: ends it and waits."""
        self.journal.append(record_of("revoked", entry))
        self.end_run("revoked", _monotonic() + GONE_S)

    def end_run(self, why, deadline):
        """Ends our own command now; its receipt is sent from here. Tells whether it is gone."""
        run = self.run
        if run is None:
            return True
        child = run.child
        self.end_child(child, why)
        while self.run is run and _monotonic() < deadline:
            self.reap()
            self.step_child(child)
            if self.run is run:
                time.sleep(0.002)
        return self.run is not run

    # -- checkpoints and restores

    def begin_job(self, job):
        """Starts a job, under the lock and between two steps; it holds the lock until it ends."""
        try:
            marker = self.check_fence(job)
            if job.kind == "checkpoint":
                alone = not processes(0, self.cookie, 0)
                snapshot = Snapshot(job, self.workspace, self.cache, alone, self.send)
                job.steps = self.checkpoint(job, marker, snapshot)
            elif self.is_restored(job, marker):
                self.say_restored(job)
                return
            else:
                self.check_not_begun(marker)
                restore = Restore(job, self.workspace, self.sync, self.send)
                job.steps = self.restore(job, marker, restore)
        except (Refusal, Fault, Broken) as error:
            self.job_failed(job, error.reason, error.detail)
        except OSError as error:
            broken = broken_by(error)
            self.job_failed(job, broken.reason, broken.detail)
        else:
            widen_pipes()
            job.heard = _monotonic()
            self.job = job

    def step_job(self):
        """Moves the job on for a moment, or ends it."""
        job = self.job
        assert job is not None
        now = _monotonic()
        if self.grant_until is not None and now > self.grant_until:
            self.end_job("unreachable", "the gateway's grant was not renewed")
            return
        if not job.is_ready():
            if now - job.heard > JOB_SILENT_S:
                self.end_job("unreachable", "the gateway does not answer")
            return
        try:
            job.waits = False
            while _monotonic() < now + JOB_SLICE_S:
                if next(job.steps) is WAIT:
                    job.waits = True
                    return
        except StopIteration:
            self.job = None
        except (Refusal, Fault, Broken) as error:
            self.job = None
            self.job_failed(job, error.reason, error.detail)
        except OSError as error:
            self.job = None
            broken = broken_by(error)
            self.job_failed(job, broken.reason, broken.detail)
        finally:
            self.unlock()

    def end_job(self, reason, detail):
        """
        Leaves a job where it is. What a restore has made stays, unusable, until a restore is asked
        for again: the journal says that it is not whole.
        """
        job, self.job = self.job, None
        if job is not None:
            job.steps.close()
            self.job_failed(job, reason, detail)
            self.unlock()

    def job_failed(self, job, reason, detail):
        self.send(
            {
                "k": job.kind + "_failed", "id": job.id, "checkpoint": job.checkpoint,
                "reason": reason, "detail": clean(detail)[:1000],
            }
        )  # fmt: skip

    def checkpoint(self, job, marker, snapshot):
        if CRASH_AT:
            crash("checkpoint_begun")
        manifest = yield from snapshot.run()
        self.second_reading(marker)
        self.unkept = (manifest, *snapshot.to_cache())
        if CRASH_AT:
            crash("checkpoint_read")
        self.send(
            {
                "k": "checkpointed", "id": job.id, "checkpoint": job.checkpoint,
                "manifest": manifest, "journal_seq": self.journal.seq, "epoch": marker.epoch,
                "session": marker.session, "nonce": marker.nonce, "files": snapshot.files,
                "size": snapshot.size, "sent": snapshot.sent, "skipped": snapshot.skipped,
            }
        )  # fmt: skip

    def take_kept(self, head):
        """The gateway has all of a snapshot: what it read need not be read again."""
        unkept, self.unkept = self.unkept, None
        if unkept is not None and head.get("manifest") == unkept[0]:
            self.cache.store(*unkept)

    def is_restored(self, job, marker):
        """
        Whether this restore was done here already, and what followed came after it.

        In its own epoch it never is done again: a request that is late would undo the steps
        since. In a later one it is, unless only replays followed.
        """
        if self.journal.restored is None:
            return False
        at, found = self.journal.restored
        if (found["k"], found["c"], found["m"]) != ("restored", job.checkpoint, job.manifest):
            return False
        return found["e"] == marker.epoch or not self.journal.has_begun_since(at, ("apply",))

    def check_not_begun(self, marker):
        """
        What the disk holds from before this generation is replaced; what this one did never is.
        """
        opened, restored = self.journal.opened, self.journal.restored
        since = 0 if opened is None else opened[0]
        if self.journal.has_begun_since(since, ("apply", "replay", "undo")):
            raise Broken("not_empty", "steps of this generation were applied here")
        if restored is not None and (restored[1]["k"], restored[1]["e"]) == (
            "restored",
            marker.epoch,
        ):
            raise Broken("not_empty", "this generation began with %s" % restored[1]["c"])

    def restore(self, job, marker, restore):
        """
        Makes the tree between two records: `restoring` before the first effect, `restored` after
        the last. Where it fails the workspace is emptied again, as it was.
        """
        about = {"c": job.checkpoint, "m": job.manifest, "e": marker.epoch}
        self.journal.append({"k": "restoring", **about})
        if CRASH_AT:
            crash("restoring")
        try:
            yield from restore.dirs.wipe(self.workspace)
            if CRASH_AT:
                crash("restore_wiped")
            yield from restore.run()
            self.second_reading(marker)
            if CRASH_AT:
                crash("before_restored")
            self.journal.append(
                {"k": "restored", **about, "files": restore.files, "size": restore.size}
            )
        except (Broken, OSError):
            yield from restore.dirs.wipe(self.workspace)
            if CRASH_AT:
                crash("restore_undone")
            self.journal.append({"k": "unrestored", **about})
            raise
        finally:
            restore.dirs.close()
        if CRASH_AT:
            crash("after_restored")
        self.say_restored(job)

    def say_restored(self, job):
        assert self.journal.restored is not None
        found = self.journal.restored[1]
        self.send(
            {
                "k": "restored", "id": job.id, "checkpoint": found["c"], "manifest": found["m"],
                "files": found["files"], "size": found["size"], "journal_seq": self.journal.seq,
            }
        )  # fmt: skip

    # -- opening a generation or a session

    def mark(self, head):
        epoch, session, nonce = head.get("epoch"), head.get("session"), head.get("nonce")
        ms = head.get("timeout_ms", MARK_MS)
        if type(epoch) is not int or epoch < 1:
            raise bad("epoch", "must be an integer from 1")
        if type(session) is not str or not session or type(nonce) is not str or not nonce:
            raise bad(
                "session" if type(session) is not str or not session else "nonce",
                "must be a string",
            )
        if type(ms) is not int or not 0 < ms <= 600_000:
            raise bad("timeout_ms", "must be an integer up to 600000")
        deadline = _monotonic() + ms / 1000.0
        # A paused gateway's late `mark` must not end the tools of a newer one: look first.
        marker = self.check_upwards(epoch, nonce)
        same = marker is not None and (marker.epoch, marker.session, marker.nonce) == (
            epoch,
            session,
            nonce,
        )
        ended = []
        if not same:
            self.end_job("unreachable", "another session was marked")
        if self.run is not None and not same:
            ended.append(self.run.child.pid)
            if not self.end_run("ended", deadline):
                raise Refusal("tools_alive", "process group %d does not end" % ended[0])
        if self.run is None:
            self.lock_for_mark(deadline, ended)
        try:
            marker = self.check_upwards(epoch, nonce)
            if not same:
                if CRASH_AT:
                    crash("before_marker")
                self.write_marker(epoch, session, nonce)
                opened = {"k": "opened", "epoch": epoch, "session": session, "nonce": nonce}
                self.journal.append(opened)
                if CRASH_AT:
                    crash("opened")
        finally:
            self.unlock()
        return {
            "k": "marked", "epoch": epoch, "session": session, "nonce": nonce,
            "journal_seq": self.journal.seq, "ended": ended,
        }  # fmt: skip

    def check_upwards(self, epoch, nonce):
        marker = self.read_marker()
        if marker is not None:
            if epoch < marker.epoch:
                raise Refusal("stale_epoch", "the disk is at epoch %d" % marker.epoch)
            if epoch == marker.epoch and nonce != marker.nonce:
                raise Refusal("other_nonce", "epoch %d has another nonce" % epoch)
        return marker

    def lock_for_mark(self, deadline, ended):
        """
        Takes the lock from whoever has it: ends the tools of other toolhosts, then, if the holder
        is stopped or still does not let go, the holder itself.
        """
        patience = _monotonic() + HUNG_S
        while True:
            self.journal.refresh()
            self.end_others(deadline, ended)
            if self.try_lock():
                # What carries this disk's cookie now was left by a session that is over.
                for pid in processes(0, self.cookie, 0):
                    kill(pid)
                if not end_processes(0, self.cookie, 0, deadline):
                    self.unlock()
                    raise Refusal("tools_alive", "processes of a former session do not end")
                return
            self.end_stuck_holder(_monotonic() > patience)
            if _monotonic() > deadline:
                raise Refusal("tools_alive", "the lock is not let go")
            time.sleep(0.005)

    def end_others(self, deadline, ended):
        for key in sorted(self.journal.open):
            entry = self.journal.entries[key]
            if not entry.group:
                continue
            if not entry.ended:
                self.journal.append_unlocked(record_of("ended", entry))
                if CRASH_AT:
                    crash("ended")
            if entry.group not in ended:
                ended.append(entry.group)
            cookie = self.cookie + key.encode() + b"\0"
            if not end_processes(entry.group, cookie, entry.started, deadline):
                raise Refusal("tools_alive", "process group %d does not end" % entry.group)

    def end_stuck_holder(self, is_late):
        try:
            pid, started = (int(part) for part in os.pread(self.lock_fd, 64, 0).split())
        except ValueError:
            return
        if pid == os.getpid():
            return
        found = look(pid)
        if found and found[1] == started and (is_late or found[0] in (b"T", b"t")):
            kill(pid)

    # -- read tools

    def read(self, head, body):
        request, tool = head.get("id"), head.get("tool")
        if self.journal.is_restoring():
            # What is not there yet must not be taken for absent.
            told = {"reason": "overloaded", "error": "the workspace is being restored"}
            self.answer_read(request, False, told)
            return
        try:
            args = parse_arguments(body)
            ms = head.get("timeout_ms", READ_MS)
            if type(ms) is not int or not 0 < ms <= 86_400_000:
                raise bad("timeout_ms", "must be an integer from 1")
            reader = Reader(self.workspace)
            if tool == "run_command":
                self.read_command(request, args, ms)
            elif tool == "search" or (tool == "list_dir" and args.get("recursive") is True):
                self.read_apart(request, getattr(reader, tool), args, ms)
            elif tool in READ_TOOLS:
                self.answer_read(request, True, read_result(getattr(reader, tool), args))
            else:
                raise bad("tool", "%s is not a read-only tool" % shown(tool))
        except Refusal as refusal:
            self.answer_read(
                request, False, {"reason": refusal.reason, "error": clean(refusal.detail)}
            )
        except ToolFailure as failure:
            self.answer_read(request, False, failure.result)

    def answer_read(self, request, good, result):
        body = result if isinstance(result, bytes) else _dumps(result).encode()
        marker = self.marker_or_none() or NO_MARKER
        self.send(
            {
                "k": "read", "id": request, "epoch": marker.epoch, "session": marker.session,
                "nonce": marker.nonce, "ok": good,
            },
            body,
        )  # fmt: skip

    def marker_or_none(self):
        try:
            return self.read_marker()
        except OSError:
            return None

    def check_reads(self):
        if len(self.children) > READS_MAX:
            raise Refusal("overloaded", "too many reads at once")

    def read_command(self, request, args, ms):
        if not self.prefix_ro:
            raise Refusal("unsupported", "no read-only view of the workspace here")
        self.check_reads()
        command = Command(args)
        command.timeout_ms = min(command.timeout_ms, ms)

        def finished(child):
            result = result_of(child)
            if child.killed:
                self.answer_read(
                    request, False, {"reason": child.killed, "error": "the command was ended"}
                )
            else:
                self.answer_read(request, True, result)

        cookie = b"FENCEPOST_READ=%b%d-%d" % (
            self.cookie[16:], os.getpid(), self.counters["frames"],
        )  # fmt: skip
        child, go_w, fail_r = self.spawn(command, self.prefix_ro, cookie, finished)
        self.let_go(child, go_w, fail_r, command)

    def read_apart(self, request, tool, args, ms):
        """A read that may take long goes to a forked copy of this process, under a time limit."""
        self.check_reads()
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # loads what the copy needs, once
        out_r, out_w = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                os.close(self.lock_fd)
                if prctl(PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
                    os._exit(1)
                for fd in range(3, out_w):
                    if fd != self.workspace.root_fd:
                        try:
                            os.close(fd)
                        except OSError:
                            pass
                write_all(out_w, forked_result(tool, args))
                status = 0
            finally:
                os._exit(status)
        os.close(out_w)
        os.set_blocking(out_r, False)

        def finished(child):
            said = bytes(child.captures[0].head)
            if child.status == 0 and said[:1] in (b"+", b"-"):
                self.answer_read(request, said[:1] == b"+", said[1:])
            else:
                reason = "timeout" if child.timed_out else child.killed or "failed"
                self.answer_read(request, False, {"reason": reason, "error": "the read was ended"})

        child = Child(pid, {out_r: Capture(2 * BODY_MAX)}, finished)
        child.deadline = child.began + ms / 1000.0
        self.children[pid] = child

    # -- frames

    def handle(self, head, body):
        kind = head.get("k")
        self.counters["frames"] += 1
        if kind in DIRECTIONS:
            self.take_call(kind, head, body)
        elif kind == "read":
            self.read(head, body)
        elif kind == "grant":
            self.take_grant(head)
        elif kind == "blob":
            if type(head.get("size")) is int:
                self.blobs.take(head.get("digest"), head["size"], head.get("last") is True, body)
        elif kind == "mark":
            self.take_mark(head)
        elif kind in ("want", "chunk", "chunk_failed"):
            if self.job is not None and self.job.id == head.get("id"):
                self.job.inbox.append((head, body))
                self.job.heard = _monotonic()
        elif kind in JOBS:
            self.take_job(kind, head)
        elif kind == "abort":
            self.abort(head.get("id"))
        elif kind == "kept":
            self.take_kept(head)
        elif kind == "hello":
            self.send(self.hello(head))
        elif kind == "stat":
            self.send(self.stat(head))
        else:
            self.send_refused(head, "unknown_kind", shown(kind))

    def send_refused(self, head, reason, detail):
        self.send({"k": "refused", "id": head.get("id"), "reason": reason, "detail": clean(detail)})

    def take_call(self, kind, head, body):
        try:
            call = Call(kind, head, body)
        except Malformed as error:
            self.send_refused(head, "invalid_arguments", "%s: malformed or missing" % error)
            return
        if kind == "revoke":
            self.revokes.append(call)
        elif self.run is not None and self.run.call.key == call.key:
            self.answer(call, "running", self.marker_or_none() or NO_MARKER)
        elif len(self.queue) >= QUEUE_MAX:
            self.answer(call, "fault", reason="overloaded", detail="too many calls wait")
        else:
            self.queue.append(call)

    def abort(self, request):
        if self.job is not None and self.job.id == request:
            self.end_job("unreachable", "the gateway gave it up")
            return
        for job in self.queue:
            if job.kind in JOBS and job.id == request:
                self.queue.remove(job)
                self.job_failed(job, "unreachable", "the gateway gave it up")
                return

    def take_job(self, kind, head):
        try:
            job = Job(kind, head)
            if len(self.queue) >= QUEUE_MAX:
                self.job_failed(job, "busy", "too many calls wait")
            else:
                self.queue.append(job)
        except Malformed as error:
            self.send_refused(head, "invalid_arguments", "%s: malformed or missing" % error)

    def take_mark(self, head):
        self.pump()  # calls that came before it are decided before it
        try:
            answer = self.mark(head)
            answer["id"] = head.get("id")
            self.send(answer)
        except Refusal as refusal:
            self.send_refused(head, refusal.reason, refusal.detail)
        except Fault as fault:
            self.send_refused(head, fault.reason, fault.detail)
        except OSError as error:
            self.send_refused(head, "no_space" if is_no_space(error) else "io_error", str(error))

    def take_grant(self, head):
        ms = head.get("ms")
        if type(ms) is int and ms > 0:
            self.grant_until = _monotonic() + ms / 1000.0

    def hello(self, head):
        marker = self.marker_or_none()
        told = None
        if marker is not None:
            told = {"epoch": marker.epoch, "session": marker.session, "nonce": marker.nonce}
        self.journal.refresh()
        return {
            "k": "hello", "id": head.get("id"), "marker": told, "journal_seq": self.journal.seq,
            "instance": self.instance, "python": sys.version.split()[0], "protocol": PROTOCOL,
            "readonly_commands": bool(self.prefix_ro),
        }  # fmt: skip

    def stat(self, head):
        rss = resident_bytes()
        return {
            "k": "stat", "id": head.get("id"), "counters": self.counters, "rss_bytes": rss,
            "records": len(self.journal.entries), "journal_bytes": self.journal.size,
            "journal_seq": self.journal.seq, "corrupt_records": self.journal.corrupt,
            "queued": len(self.queue) + len(self.revokes), "children": len(self.children),
            "cpu_ms": int(time.process_time() * 1000), "pid": os.getpid(),
        }  # fmt: skip

    def heartbeat(self, now):
        self.next_heartbeat = now + self.heartbeat_s
        try:
            marker = self.read_marker() or NO_MARKER
            if self.run is None:
                self.journal.refresh()
        except OSError:
            return  # no heartbeat is the truth about a disk that cannot be read
        self.counters["heartbeats"] += 1
        running = [self.run.call.attempt] if self.run is not None else []
        self.send(
            {
                "k": "heartbeat", "epoch": marker.epoch, "session": marker.session,
                "nonce": marker.nonce, "journal_seq": self.journal.seq, "running": running,
            }
        )  # fmt: skip

    # -- the loop

    def serve(self):
        wake_r, wake_w = os.pipe()
        for fd in (wake_r, wake_w):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        os.set_blocking(1, False)
        buffer = bytearray()
        poller = select.poll()
        poller.register(wake_r, select.POLLIN)
        poller.register(0, select.POLLIN)
        while not self.stopping:
            ready = self.wait(poller)
            for fd, _ in ready:
                if fd == 0:
                    if not self.take_input(buffer):
                        return self.close(0)
                elif fd == wake_r:
                    os.read(wake_r, 4096)
                    self.reap()
            if self.children:
                self.watch_children()
            if self.queue or self.revokes:
                self.pump()
            if self.job is not None and len(self.backlog) < BACKLOG_MAX:
                self.step_job()
            now = _monotonic()
            if now >= self.next_heartbeat:
                self.heartbeat(now)
            if self.outgoing or self.backlog:
                self.flush(poller)
        return self.close(self.stopping)

    def on_terminate(self, *_):
        self.stopping = 143

    def wait(self, poller):
        """Waits for input, output room, a child or the next timer."""
        now = _monotonic()
        until = self.next_heartbeat
        if self.queue or self.revokes:
            if (self.run is None and self.job is None) or self.revokes:
                until = min(until, now + 0.005)
        if self.job is not None and self.job.is_ready() and len(self.backlog) < BACKLOG_MAX:
            until = now
        extra: list[Any] = []
        for child in self.children.values():
            until = min(until, now + 0.003 if child.status is not None else child.deadline or until)
            extra.extend((fd, select.POLLIN) for fd in child.outputs)
            if child.stdin_fd >= 0:
                extra.append((child.stdin_fd, select.POLLOUT))
        if self.run is not None and self.grant_until is not None:
            until = min(until, self.grant_until)
        if extra:
            for fd, events in extra:
                poller.register(fd, events)
        try:
            return poller.poll(max(0.0, (until - now) * 1000.0) + 0.5 if until > now else 0)
        finally:
            for fd, _ in extra:
                poller.unregister(fd)

    def watch_children(self):
        now = _monotonic()
        lost = self.grant_until is not None and now > self.grant_until
        self.reap()
        for child in list(self.children.values()):
            for fd in list(child.outputs):
                self.drain(child, fd)
            if child.stdin_fd >= 0:
                self.feed_stdin(child)
            if child.status is None:
                if lost and child.cookie:
                    self.end_child(child, "grant_expired")
                elif child.deadline is not None and now > child.deadline:
                    child.timed_out = True
                    self.end_child_in_time(child)
            self.step_child(child)

    def end_child_in_time(self, child):
        """A tool's own time limit: it ran and failed, which is a result."""
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            kill(child.pid)

    def take_input(self, buffer):
        """Reads what is there and handles every complete frame; False at the end of the stream."""
        try:
            chunk = os.read(0, 1 << 18 if self.job is None else PIPE_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if not chunk:
            if buffer:
                raise Malformed("the stream ended inside a frame")
            return False
        buffer += chunk
        position = 0
        while True:
            end = buffer.find(b"\n", position, position + HEAD_MAX + 1)
            if end < 0:
                if len(buffer) - position > HEAD_MAX:
                    raise Malformed("a head of more than %d bytes" % HEAD_MAX)
                break
            head = parse_head(buffer[position:end])
            size = head.get("n", 0)
            if len(buffer) - end - 1 < size:
                break
            body = bytes(buffer[end + 1 : end + 1 + size])
            position = end + 1 + size
            self.handle(head, body)
            if self.children and self.revokes:
                self.pump()
        if position:
            del buffer[:position]
        return True

    def flush(self, poller):
        """Sends what waits, as far as the gateway reads; stops reading when it does not."""
        if self.outgoing:
            self.backlog += b"".join(self.outgoing)
            self.outgoing.clear()
        try:
            sent = os.write(1, self.backlog)
            del self.backlog[:sent]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionError):
            self.stopping = self.stopping or 3
            return
        if self.backlog:
            poller.register(1, select.POLLOUT)
        else:
            try:
                poller.unregister(1)
            except KeyError:
                pass
        if (len(self.backlog) > BACKLOG_MAX) != self.backlog_full:
            self.backlog_full = not self.backlog_full
            poller.modify(0, 0 if self.backlog_full else select.POLLIN)

    def close(self, code):
        """Ends every tool. What ran is broken: nobody is left who could vouch for it."""
        self.end_job("unreachable", "the stream ended")
        self.end_run("closed", _monotonic() + GONE_S)
        for child in list(self.children.values()):
            self.end_child(child, "closed")
            end_processes(child.pid, child.cookie, child.started, _monotonic() + 1.0)
        return code


def read_result(tool, args):
    try:
        return tool(args)
    except FileNotFoundError:
        raise ToolFailure({"reason": "not_found", "error": "no such path"}) from None
    except OSError as error:
        raise ToolFailure(
            {"reason": "failed", "error": clean(error.strerror or str(error))}
        ) from None


def forked_result(tool, args):
    try:
        return b"+" + _dumps(read_result(tool, args)).encode()
    except Refusal as refusal:
        return b"-" + _dumps({"reason": refusal.reason, "error": clean(refusal.detail)}).encode()
    except ToolFailure as failure:
        return b"-" + _dumps(failure.result).encode()


def parse_head(raw):
    try:
        head = _loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise Malformed("a head that is not JSON") from None
    if type(head) is not dict:
        raise Malformed("a head that is not an object")
    size = head.get("n", 0)
    if type(size) is not int or not 0 <= size <= BODY_MAX:
        raise Malformed("a body of %s bytes" % shown(size))
    return head


def resident_bytes():
    """Our memory now; where that cannot be asked, the most that it ever was."""
    if IS_LINUX:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if ON_DARWIN else 1024)


def base_environment(given, root):
    env = {
        b"PATH": os.environb.get(
            b"PATH", b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        ),
        b"HOME": root,
        b"LANG": b"C.UTF-8",
    }
    for name, value in given.items():
        env[os.fsencode(name)] = os.fsencode(value)
    return env


def parse_options(argv):
    """Reads the command line. `argparse` would cost a third of the start-up."""
    options: dict[str, Any] = {
        "state": None, "workspace": None, "instance": "", "sync": False, "heartbeat_ms": 1000,
        "exec_prefix": [], "exec_prefix_ro": [], "env": {}, "limits": {}, "tool_uid": 0,
    }  # fmt: skip
    at = 0
    while at < len(argv):
        flag = argv[at]
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or name not in options:
            raise SystemExit("toolhost: unknown option %s" % flag)
        if name == "sync":
            options[name] = True
            at += 1
            continue
        if at + 1 == len(argv):
            raise SystemExit("toolhost: %s needs a value" % flag)
        options[name] = option_value(flag, options[name], argv[at + 1])
        at += 2
    for name in ("state", "workspace"):
        if not options[name]:
            raise SystemExit("toolhost: --%s is missing" % name)
    return options


def option_value(flag, default, given):
    if default is None or type(default) is str:
        return given
    try:
        value = json.loads(given)
    except ValueError:
        value = None
    good = type(value) is type(default)
    if good and type(value) is list:
        good = all(type(item) is str for item in value)
    if good and flag == "--env":
        good = all(type(item) is str for item in value.values())
    if good and flag == "--limits":
        good = all(type(item) is int and item > 0 for item in value.values())
    if not good or (flag in ("--heartbeat-ms", "--tool-uid") and value < 1):
        raise SystemExit("toolhost: %s has a wrong value: %s" % (flag, given))
    return value


def main(argv):
    if not __debug__:
        raise SystemExit("toolhost: refuses to run with -O")
    os.umask(0o022)
    try:
        toolhost = Toolhost(parse_options(argv))
        # A step leaves no cycles behind: what stands now is never looked at again.
        gc.freeze()
        gc.set_threshold(5_000, 20, 20)
        return toolhost.serve()
    except OSError as error:
        sys.stderr.write("toolhost: %s\n" % error)
        return 4


def run(argv):
    """Serves until the stream ends; a stream that lost its framing ends it with status 2."""
    try:
        return main(argv)
    except Malformed as error:
        sys.stderr.write("toolhost: the stream cannot be trusted: %s\n" % error)
        return 2
    except WentBack as error:
        sys.stderr.write("toolhost: the disk went back: %s\n" % error)
        return 4


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
