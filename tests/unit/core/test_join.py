"""Every receipt of the wrong shape is refused with its reason, and the right one then commits."""

from typing import Any

import msgspec
import pytest
from fencepost.core import limits
from fencepost.core.receipts import Change, Marker, Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import join

from tests.factories import Bench, kinds, last_refusal, only


@pytest.fixture
def bench() -> Bench:
    bench = Bench().live()
    bench.step("other")
    bench.answer("other")
    bench.step("s1")
    return bench


# One field of the right receipt is changed: (field, value, reason).
WRONG: list[tuple[str, Any, str]] = [
    ("attempt", "s1.0", "late_attempt"),
    ("attempt", "s1.2", "wrong_attempt"),
    ("attempt", "s1." + "9" * 5000, "late_attempt"),
    ("attempt", "s1.\u0661", "wrong_attempt"),
    ("direction", "undo", "wrong_direction"),
    ("direction", "revoke", "wrong_direction"),
    ("direction", "replay", "wrong_direction"),
    ("no", 1, "stale_fence"),
    ("no", 3, "stale_fence"),
    ("tool", "delete_path", "wrong_tool"),
    ("tool", "", "wrong_tool"),
    ("digest", "sha256:" + "0" * 64, "wrong_digest"),
    ("digest", "", "wrong_digest"),
    ("epoch", 0, "stale_epoch"),
    ("epoch", -1, "stale_epoch"),
    ("epoch", 2, "future_epoch"),
    ("epoch", 1 << 70, "future_epoch"),
    ("epoch", True, "malformed"),
    ("epoch", 1.0, "malformed"),
    ("epoch", "1", "malformed"),
    ("epoch", None, "malformed"),
    ("session", "S0", "stale_session"),
    ("session", "", "stale_session"),
    ("nonce", "N0", "wrong_nonce"),
    ("nonce", "", "wrong_nonce"),
    ("instance", "i2", "wrong_instance"),
    ("instance", "", "wrong_instance"),
    ("outcome", "", "not_whole"),
    ("journal_seq", -1, "malformed"),
    ("journal_seq", 1 << 60, "malformed"),
    ("journal_seq", True, "malformed"),
    ("sandbox", "sbx2", "wrong_sandbox"),
    ("result", msgspec.Raw(b"[" * 65 + b"]" * 65), "malformed"),
    ("result", msgspec.Raw(b'"' + b"x" * limits.RECEIPT_BYTES_MAX + b'"'), "too_large"),
    ("detail", "x" * limits.RECEIPT_BYTES_MAX, "too_large"),
    ("of", "x" * limits.RECEIPT_BYTES_MAX, "too_large"),
    ("changes", [Change(f"f{n}", None, "sha256:0") for n in range(2_000)], "too_large"),
]


@pytest.mark.parametrize(("field", "value", "reason"), WRONG)
def test_s008_s149_a_receipt_of_wrong_shape_is_refused(
    bench: Bench, field: str, value: Any, reason: str
) -> None:
    right = bench.receipt("s1")
    changes: dict[str, Any] = {field: value}
    if field in ("epoch", "session", "nonce", "instance"):
        # Both readings of the marker, so that nothing but the value itself is wrong.
        changes["after"] = msgspec.structs.replace(right.after, **{field: value})
    wrong = msgspec.structs.replace(right, **changes)
    refused = only(bench.receive(wrong))
    assert (type(refused), refused.reason) == (e.ReceiptRefused, reason)
    assert refused.step == "s1"
    assert bench.open("s1").phase == "apply"
    assert kinds(bench.receive(right)) == ["committed"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("epoch", 2), ("epoch", True), ("session", "S9"), ("nonce", "N9"), ("instance", "i9")],
)
def test_s008_a_marker_that_moved_under_the_write_is_refused(
    bench: Bench, field: str, value: Any
) -> None:
    right = bench.receipt("s1")
    after = msgspec.structs.replace(right.after, **{field: value})
    refused = only(bench.receive(msgspec.structs.replace(right, after=after)))
    assert refused.reason == ("malformed" if value is True else "marker_moved")
    assert kinds(bench.receive(right)) == ["committed"]


@pytest.mark.parametrize("value", [True, 1.0])
def test_s008_what_only_equals_the_epoch_is_no_epoch(bench: Bench, value: Any) -> None:
    right = bench.receipt("s1")
    assert only(bench.receive(msgspec.structs.replace(right, epoch=value))).reason == "malformed"
    assert kinds(bench.receive(right)) == ["committed"]


def test_s008_s149_a_receipt_of_a_step_that_nobody_minted_moves_nothing(bench: Bench) -> None:
    right = bench.receipt("s1")
    assert bench.receive(msgspec.structs.replace(right, step="s9")) == []
    assert bench.receive(msgspec.structs.replace(right, step="s9", sandbox="sbx2")) == []
    assert kinds(bench.receive(right)) == ["committed"]


def test_s215_another_gateways_receipt_is_refused(bench: Bench) -> None:
    right = bench.receipt("s1")
    assert only(bench.receive(right, gateway="gw2")).reason == "wrong_gateway"
    assert kinds(bench.receive(right)) == ["committed"]


def test_a_receipt_whose_stamp_does_not_hold_is_refused(bench: Bench) -> None:
    right = bench.receipt("s1")
    assert only(bench.receive(right, mac_ok=False)).reason == "bad_mac"
    assert kinds(bench.receive(right)) == ["committed"]


def test_s003_s008_an_undecodable_receipt_is_refused_as_malformed(bench: Bench) -> None:
    refused = only(bench.receive(None, step="s1", attempt="s1.1", problem="missing `epoch`"))
    assert (refused.reason, refused.detail) == ("malformed", "missing `epoch`")
    assert bench.receive(None, step="s9", attempt="s9.1") == []
    assert kinds(bench.answer("s1")) == ["committed"]


def test_s008_a_receipt_for_a_sandbox_that_is_not_here_is_passed_over(bench: Bench) -> None:
    assert bench.receive(bench.receipt("s1"), "sbx9", gateway="gw1") == []


@pytest.mark.parametrize(
    "wire",
    [
        b'"7"', b"7.0", b"true", b"null", b"[]", b"1e2", b"7e400",
    ],
)  # fmt: skip
def test_s008_the_wire_takes_no_number_for_an_epoch_but_an_integer(
    bench: Bench, wire: bytes
) -> None:
    data = msgspec.json.encode(bench.receipt("s1"))
    assert msgspec.json.decode(data, type=Receipt, strict=True).epoch == 1
    wrong = data.replace(b'"epoch":1', b'"epoch":' + wire)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(wrong, type=Receipt, strict=True)
    for missing in (b'"epoch":1,', b'"session":"S1",', b'"after":'):
        if missing != b'"after":':
            with pytest.raises(msgspec.ValidationError):
                msgspec.json.decode(data.replace(missing, b""), type=Receipt, strict=True)


def test_a_fence_of_a_former_session_joins_nothing(bench: Bench) -> None:
    sandbox, step = bench.sandbox(), bench.open("s1")
    right = bench.receipt("s1")
    control = {"gateway": sandbox.gateway, "direction": "apply", "attempt": "s1.1"}
    control |= {"tool": step.spec.tool, "digest": step.spec.digest}
    assert join.why_not(sandbox, step, right, **control) == ""
    step.session = "S0"
    assert join.why_not(sandbox, step, right, **control) == "stale_fence"
    step.session, step.epoch = "S1", 0
    assert join.why_not(sandbox, step, right, **control) == "stale_fence"


def test_a_receipt_of_a_closed_epoch_or_without_a_session_is_refused(bench: Bench) -> None:
    right = bench.receipt("s1")
    bench.lost()
    assert only(bench.receive(right, gateway="gw1")).reason == "no_session"
    bench.reattach(marker=Marker(epoch=1, session="S1", nonce="N1", instance="i1"))
    right = bench.receipt("s1")
    bench.lose_lease()
    assert only(bench.receive(right, gateway="gw1")).reason == "epoch_closed"


def test_s008_every_reason_is_a_known_word(bench: Bench) -> None:
    for field, value, reason in WRONG:
        assert reason in join.REASONS, (field, value)
    bench.answer("s1", session="S0")
    assert last_refusal(bench).reason in join.REASONS


def test_refusals_are_recorded_up_to_a_bound_for_each_attempt(bench: Bench) -> None:
    right = bench.receipt("s1")
    wrong = msgspec.structs.replace(right, nonce="N0")
    for _ in range(limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX):
        assert kinds(bench.receive(wrong)) == ["receipt_refused"]
    assert bench.receive(wrong) == []
    assert bench.receive(msgspec.structs.replace(wrong, sandbox="sbx2")) == []
    assert bench.receive(right, mac_ok=False) == []
    bench.reattach()
    assert kinds(bench.receive(wrong, gateway="gw1")) == ["receipt_refused"]
    assert kinds(bench.answer("s1")) == ["committed"]


def test_what_a_receipt_says_of_itself_is_cut_to_size(bench: Bench) -> None:
    long = "x" * 100_000
    right = bench.receipt("s1")
    wrong = msgspec.structs.replace(
        right, attempt=long, session=long, detail=long, reason=long, epoch=1 << 64
    )
    refused = only(bench.receive(wrong))
    assert len(msgspec.json.encode(refused)) < 1000
    assert refused.epoch == -1
    passing = only(bench.answer("s1", verdict="fault", outcome="", reason=long, detail=long))
    assert len(msgspec.json.encode(passing)) < 1000


def test_brackets_inside_a_string_are_no_nesting(bench: Bench) -> None:
    text = msgspec.Raw(b'"' + b'\\"[' * 300 + b'"')
    assert kinds(bench.answer("s1", result=text)) == ["committed"]


def test_flat_results_with_many_brackets_commit(bench: Bench) -> None:
    assert kinds(bench.answer("s1", result=msgspec.Raw(b"[" + b"[],{}," * 90 + b"0]"))) == [
        "committed"
    ]


def test_s003_a_receipt_without_an_outcome_is_not_whole_for_attestations_too(bench: Bench) -> None:
    assert only(bench.answer("s1", verdict="attested", outcome="")).reason == "not_whole"
    assert kinds(bench.answer("s1", verdict="attested", of="s1.0")) == ["committed"]


def test_a_tool_that_ran_and_failed_is_a_committed_failure(bench: Bench) -> None:
    committed = only(bench.answer("s1", outcome="failed"))
    assert committed.receipt.outcome == "failed"


def test_s011_no_other_word_of_a_receipt_commits(bench: Bench) -> None:
    for verdict in ("running", "revoked", "already_done", "fault"):
        bench.answer("s1", verdict=verdict, outcome="ok", detail="success 200 OK", reason="ok")
        assert bench.open("s1").phase == "apply", verdict
    assert kinds(bench.answer("s1")) == ["committed"]


def test_a_patch_of_many_files_fits_as_long_as_its_receipt_does(bench: Bench) -> None:
    """A gateway cuts what is longer: anything between the two bounds would wait for ever."""
    right = bench.receipt("s1")
    path = "plugins/some-builder/share/some-builder/3.13.0-with-a-long-name-"
    many = [Change(f"{path}{n}", None, "sha256:" + "0" * 64) for n in range(120)]
    result = msgspec.Raw(b'"' + b"x" * 9_000 + b'"')
    receipt = msgspec.structs.replace(right, changes=many, result=result)
    size = len(msgspec.json.encode(receipt))
    assert limits.COMMAND_BYTES_MAX // 2 < size < limits.RECEIPT_BYTES_MAX
    assert kinds(bench.receive(receipt)) == ["committed"]
