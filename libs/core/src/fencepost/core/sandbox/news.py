"""
What those who let go of a sandbox are to hear of it, as a function of what was recorded.

Rule 1: whoever let go hears every change until it is gone, and the last word is that it is.
Rule 2: what was not heard yet is in the state, so that it is told later, and after a takeover.
"""

from __future__ import annotations

from typing import Final

from fencepost.core.sandbox.state import News, Sandbox

_STOP_REASONS: Final = {
    "accepted": "stop_accepted",
    "not_found": "stop_accepted",
    "refused": "stop_refused",
    "refused_other_instance": "stop_refused",
    "timeout": "stop_unreachable",
    "unreachable": "stop_unreachable",
    "unconfigured": "stop_unsupported",
    "unsupported": "stop_unsupported",
}

PENDING: Final = News("releasing", "pending_stop", "")
AMBIGUOUS: Final = News("releasing", "create_ambiguous", "")
_SHARED: Final = News("releasing", "shared", "")
_RETAINED: Final = News("releasing", "retained", "")


def key_of(dag: str, acquisition: str) -> str:
    """A DAG may let go of one sandbox more than once, and two DAGs may use one id."""
    return f"{dag}/{acquisition}"


def heard(phase: str, reason: str, evidence: str) -> str:
    """What is remembered of what was told."""
    return f"{phase}/{reason}/{evidence}"


def answered(answer: str, detail: str) -> News:
    """What a provider's answer to a stop means to those who wait."""
    evidence = f"{answer}: {detail}"[:300] if detail else answer
    return News("releasing", _STOP_REASONS[answer], evidence)


def gone(evidence: str) -> News:
    return News("gone", "", evidence)


def kept(sandbox: Sandbox) -> News | None:
    """Why it is not being released; None where nothing keeps it."""
    if sandbox.holders:
        return _SHARED
    return _RETAINED if sandbox.claims else None


def set_news(sandbox: Sandbox, news: News) -> None:
    sandbox.news = news
    said = heard(news.phase, news.reason, news.evidence)
    sandbox.untold = {key: None for key in sandbox.debtors if sandbox.told.get(key) != said}
