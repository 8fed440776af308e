"""
What a toolhost left that was killed: processes that carry the name of its channel.

A toolhost ends its tools before it ends. One that the kernel takes cannot, and what left its
session would run on until the next toolhost of that disk is marked. So tools carry the random name
of the channel that they were started behind, and who sees it end ends them: no other channel's.
"""

from __future__ import annotations

from typing import Final

from fencepost.providers import processes

CHANNEL: Final = processes.CHANNEL

AFTER: Final = "after"

# Run as a user that may read the environments of those processes. Its arguments: the channel's name
# and, where the toolhost is to end by itself, AFTER: a tool that is killed under a living toolhost
# would be told of as one that ended so.
KILL: Final = f"""\
import os, sys, time
name = sys.argv[1].encode()
def end(file, wanted, is_killed):
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            with open("/proc/" + pid + "/" + file, "rb") as opened:
                if wanted(opened.read()):
                    found += 1
                    if is_killed:
                        os.kill(int(pid), 9)
        except OSError:
            pass
    return found
until = time.monotonic() + 5
while sys.argv[2:] == ["{AFTER}"] and end("cmdline", lambda line: name in line, False):
    if time.monotonic() > until:
        sys.exit("its toolhost lives")
    time.sleep(0.02)
carried = b"{CHANNEL}=" + name
while end("environ", lambda held: carried in held.split(b"\\0"), True):
    if time.monotonic() > until + 5:
        sys.exit("some do not end")
    time.sleep(0.02)
"""
