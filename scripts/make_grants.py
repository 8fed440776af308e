"""
Makes docs/grants.md and deploy/nats/authorization.conf from the table of grants.

`--check`: fails when one of them is not up to date.
"""

import sys
from pathlib import Path

from fencepost.contracts import authorization, grants

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "grants.md"
CONFIGURATION = ROOT / "deploy" / "nats" / "authorization.conf"

HEAD = """# Grants

Made by `scripts/make_grants.py` from `libs/contracts/src/fencepost/contracts/grants.py`; change
that, not this. What the users are for, and the worst that each can do, is in
[security.md](security.md);
how a server gets them in [the deployment's notes](../deploy/nats/README.md).

A user has nothing but what stands here. *Where*: the account in which it is carried out; its own
where nothing is said. Everybody hears the answers to what it asks (`_INBOX.>`). Where the shards
are spread over several ledgers, each row of FP_LEDGER stands for FP_LEDGER_0 and every other of
them.
"""


def page() -> str:
    parts = [HEAD]
    for role in grants.ROLES:
        parts.append(
            f"\n## {role}\n\n{grants.ABOUT[role].capitalize()}. "
            f"Account `{grants.account_of(role)}`.\n\n| may | subject | where | for |\n"
            "|---|---|---|---|\n"
        )
        parts.extend(
            f"| {grant.verb} | `{grant.subject}` | {_place(role, grant.account)} | {grant.why} |\n"
            for grant in grants.of(role)
            if grant.subject != grants.INBOXES or grant.verb == "publish"
        )
    return "".join(parts)


def _place(role: grants.Role, account: str) -> str:
    return "" if account in ("", grants.account_of(role)) else f"`{account}`"


def main() -> None:
    made = {PAGE: page(), CONFIGURATION: authorization.render()}
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in made.items() if path.read_text() != text]
        if stale:
            sys.exit(f"not up to date: {', '.join(stale)}; run scripts/make_grants.py")
        return
    for path, text in made.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
