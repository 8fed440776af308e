"""
Faithful one-line mutations of the runtime, the services and the toolhost, each with its tests.

Each is what somebody could have written. The simulator has its own runtime and its own toolhost,
so it cannot see these: the tests that are named beside a mutation must turn red, and they alone.
`scripts/kill_mutants.py` runs them.
"""

from typing import NamedTuple

RUNTIME = "libs/runtime/src/fencepost/runtime/"
TOOLHOST = "libs/toolhost/src/fencepost/toolhost/toolhost.py"
PLANNER = "services/planner/src/fencepost/planner/"
GATEWAY = "services/sandbox-gateway/src/fencepost/sandbox_gateway/"
SWEEPER = "services/sweeper/src/fencepost/sweeper/"
TRACKER = "services/release-tracker/src/fencepost/release_tracker/"

RUNNER_TESTS = "tests/unit/runtime/test_shard_runner.py"
EXCHANGE_TESTS = "tests/unit/runtime/test_exchange.py"
SNAPSHOT_TESTS = "tests/unit/runtime/test_snapshots.py"
JETSTREAM_TESTS = "tests/integration/runtime/test_jetstream_contracts.py"
ORDER_TESTS = "tests/integration/sandbox_gateway/test_orders.py"
LEASE_TESTS = "tests/integration/sandbox_gateway/test_leases.py"
TICKING_TESTS = "tests/unit/sweeper/test_ticking.py"
RECEIPT_TESTS = "tests/unit/planner/test_receipts.py"
FENCE_TESTS = "tests/unit/toolhost/test_fence.py"


class EdgeMutant(NamedTuple):
    """`only` is pytest's `-k`: which tests of the file must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    only: str = ""


MUTANTS: tuple[EdgeMutant, ...] = (
    # --- the log
    EdgeMutant(
        "drop the expected-sequence header",
        RUNTIME + "ledger.py",
        'b"NATS/1.0\\r\\nNats-Expected-Last-Subject-Sequence: %d\\r\\n" % (\n'
        "            expected_last_subject_seq\n        )",
        'b"NATS/1.0\\r\\n"',
        JETSTREAM_TESTS,
        "s16",
    ),
    EdgeMutant(
        "take a refused append for an unanswered one",
        RUNTIME + "ledger.py",
        "if ack.error is not None and ack.error.err_code in WRONG_LAST_SEQUENCE:",
        "if False:",
        JETSTREAM_TESTS,
        "s16",
    ),
    EdgeMutant(
        "take any error of a read for an absence",
        RUNTIME + "ledger.py",
        "if got.error.err_code == NO_MESSAGE:",
        "if got.error.err_code:",
        "tests/unit/runtime/test_reading.py",
    ),
    EdgeMutant(
        "believe a replica that lags",
        RUNTIME + "ledger.py",
        "            if isinstance(got, Absent):\n                return\n",
        "            return\n",
        JETSTREAM_TESTS,
        "lags",
    ),
    # --- one batch: append, then everything else
    EdgeMutant(
        "acknowledge before the append",
        RUNTIME + "shard_runner.py",
        "        if turn.entries or forced:\n            return turn\n",
        "        if turn.entries or forced:\n"
        "            [accepted(shard.head) for accepted in turn.accepted]\n"
        "            turn.accepted.clear()\n            return turn\n",
        RUNNER_TESTS,
        "accepted_callbacks",
    ),
    EdgeMutant(
        "make effects before the append",
        RUNTIME + "shard_runner.py",
        "seq = 0 if turn is None else await self._append(turn)",
        "(turn is None or [self._perform_safely(list(self.machine.effects_of(\n"
        "                self.shard.state, self.shard.hints, e))) for e in turn.entries])\n"
        "            seq = 0 if turn is None else await self._append(turn)",
        RUNNER_TESTS,
        "s216 or s217 or evolve",
    ),
    EdgeMutant(
        "take any batch that stands there for one's own",
        RUNTIME + "shard_runner.py",
        "if there.id == batch.id:",
        "if True:",
        RUNNER_TESTS,
        "s16 or s216",
    ),
    EdgeMutant(
        "keep the state after a lost term",
        RUNTIME + "shard_runner.py",
        'self.log.info("ownership_lost", detail=str(error))\n            await self._end(error)',
        'self.log.info("ownership_lost", detail=str(error))',
        RUNNER_TESTS,
        "s216",
    ),
    EdgeMutant(
        "take silence for an accepted append",
        RUNTIME + "shard_runner.py",
        '                refused = ""\n            # Read',
        "                return batch.prev + 1\n            # Read",
        RUNNER_TESTS,
        "never_arrived or s211",
    ),
    EdgeMutant(
        "append on the newest head instead of the decided one",
        RUNTIME + "shard_runner.py",
        "await self._log.append(shard.subject, payload, batch.prev)",
        "await self._log.append(\n                    shard.subject, payload,\n"
        "                    getattr(await self._log.last(shard.subject), 'seq', 0))",
        RUNNER_TESTS,
        "s16 or s216",
    ),
    EdgeMutant(
        "answer without a proof",
        RUNTIME + "shard_runner.py",
        "if now_ms - self._proven_ms > ask.max_age_ms and self._proven_batch <= ask.after:",
        "if False:",
        RUNNER_TESTS,
        "s227 or s216",
    ),
    EdgeMutant(
        "record no position",
        RUNTIME + "shard_runner.py",
        "            positions[lane.durable.stream] = position\n",
        "            positions.setdefault(lane.durable.stream, position)\n",
        RUNNER_TESTS,
        "s207 or positions",
    ),
    EdgeMutant(
        "record the position before its last input was taken",
        RUNTIME + "shard_runner.py",
        "            lane.taking = message\n            if not lane.left:\n",
        "            lane.taking = message\n            self._done(lane, message)\n"
        "            lane.taking = message\n            if not lane.left:\n",
        RUNNER_TESTS,
        "several_batches or s207",
    ),
    EdgeMutant(
        "let time go back at a takeover",
        RUNTIME + "shard_runner.py",
        "turn = _Turn(max(self._clock.now_ms(), shard.now_ms))\n        mono_ms",
        "turn = _Turn(self._clock.now_ms())\n        mono_ms",
        RUNNER_TESTS,
        "s228",
    ),
    EdgeMutant(
        "own with a clock that is behind",
        RUNTIME + "shard_runner.py",
        "if abs(skew_ms) > CLOCK_SKEW_MS_MAX:",
        "if skew_ms > CLOCK_SKEW_MS_MAX:",
        RUNNER_TESTS,
        "s228",
    ),
    EdgeMutant(
        "pass over a poison input in silence",
        RUNTIME + "shard_runner.py",
        "            self._poison(turn, source, subject, seq, error)\n            return\n"
        "        if entries:",
        "            return\n        if entries:",
        RUNNER_TESTS,
        "s221 or too_large",
    ),
    EdgeMutant(
        "let time come after other inputs",
        RUNTIME + "shard_runner.py",
        "        self._tick(turn, mono_ms)\n        # Whoever",
        "        self._take_volatile(turn)\n        self._tick(turn, mono_ms)\n        # Whoever",
        RUNNER_TESTS,
        "time_comes_before",
    ),
    EdgeMutant(
        "make an owed effect once only",
        RUNTIME + "shard_runner.py",
        "elif known[0] <= now_ms:",
        "elif False:",
        RUNNER_TESTS,
        "made_again",
    ),
    # --- taking over
    EdgeMutant(
        "own another number of shards",
        RUNTIME + "fold.py",
        "if entry.shards != self.shards or entry.hash != HASH:",
        "if entry.hash != HASH:",
        RUNNER_TESTS,
        "another_number",
    ),
    EdgeMutant(
        "own what a newer machine wrote",
        RUNTIME + "fold.py",
        "if entry.machine > self.machine.version:",
        "if False:",
        RUNNER_TESTS,
        "s220",
    ),
    EdgeMutant(
        "fold over a gap",
        RUNTIME + "fold.py",
        "if seq > start and batch.prev != shard.head:",
        "if False:",
        SNAPSHOT_TESTS,
        "gap",
    ),
    EdgeMutant(
        "read over a gap below a snapshot",
        RUNTIME + "fold.py",
        "if prev is not None and batch.prev != prev:",
        "if False:",
        SNAPSHOT_TESTS,
        "gap",
    ),
    EdgeMutant(
        "own when a read ends short of the head",
        RUNTIME + "fold.py",
        "if shard.head < end:",
        "if False:",
        RUNNER_TESTS,
        "short",
    ),
    EdgeMutant(
        "take an unreadable end of the log for an empty log",
        RUNTIME + "fold.py",
        "if isinstance(last, Unknown):",
        "if False:",
        RUNNER_TESTS,
        "cannot_be_read",
    ),
    EdgeMutant(
        "take a term that goes back",
        RUNTIME + "fold.py",
        "if batch.term < shard.term:",
        "if False:",
        RUNNER_TESTS,
        "s220",
    ),
    EdgeMutant(
        "start from a torn snapshot",
        RUNTIME + "fold.py",
        "if data is not None and snapshots.digest(data) == sha256:",
        "if data is not None:",
        SNAPSHOT_TESTS,
        "s218",
    ),
    EdgeMutant(
        "start from a torn former snapshot",
        RUNTIME + "fold.py",
        "if snapshots.digest(data) != sha256:",
        "if False:",
        SNAPSHOT_TESTS,
        "s218",
    ),
    EdgeMutant(
        "start from a snapshot that is newer than the log",
        RUNTIME + "fold.py",
        "if seq > end:",
        "if False:",
        SNAPSHOT_TESTS,
        "s218",
    ),
    EdgeMutant(
        "start from another version's snapshot",
        RUNTIME + "snapshots.py",
        "if want != have:",
        "if want[2:] != have[2:]:",
        SNAPSHOT_TESTS,
        "s218",
    ),
    # --- between shards
    EdgeMutant(
        "take a message out of its turn",
        RUNTIME + "exchange.py",
        "if (envelope.prev_seq, envelope.prev_index) == (seen.seq, seen.index):",
        "if True:",
        EXCHANGE_TESTS,
        "s225",
    ),
    EdgeMutant(
        "take a message twice",
        RUNTIME + "exchange.py",
        "if (envelope.seq, envelope.index) <= (seen.seq, seen.index):\n            return None",
        "if False:\n            return None",
        EXCHANGE_TESTS,
        "s219",
    ),
    EdgeMutant(
        "do not ask for a message that is missing",
        RUNTIME + "exchange.py",
        "        self._ask(envelope.family, envelope.shard, seen)\n        return None",
        "        return None",
        EXCHANGE_TESTS,
        "s225",
    ),
    EdgeMutant(
        "record the position past a message that waits",
        RUNTIME + "shard_runner.py",
        "if lowest is not None and lowest <= position.seq:",
        "if False:",
        EXCHANGE_TESTS,
        "below_it",
    ),
    EdgeMutant(
        "call a publication sent that nobody took",
        RUNTIME + "outbox.py",
        "if not ok or record.items[index] is None:",
        "if record.items[index] is None:",
        "tests/unit/runtime/test_outbox.py",
    ),
    EdgeMutant(
        "call everything sent that was made",
        RUNTIME + "outbox.py",
        "            self.sent = record.seq\n",
        "            self.sent = self.kept\n",
        "tests/unit/runtime/test_outbox.py",
    ),
    # --- planner
    EdgeMutant(
        "believe any stamp",
        PLANNER + "receipts.py",
        "mac_ok = stamp_holds(self._key(stamped.gateway, stamped.sandbox), stamped)",
        "mac_ok = True",
        RECEIPT_TESTS,
    ),
    EdgeMutant(
        "check a stamp under whichever sandbox's key",
        PLANNER + "receipts.py",
        "lambda gateway, sandbox: receipt_key(master, gateway, sandbox)",
        'lambda gateway, sandbox: receipt_key(master, gateway, "")',
        RECEIPT_TESTS,
    ),
    EdgeMutant(
        "take true for 1 in a receipt",
        PLANNER + "receipts.py",
        "_RECEIPT = msgspec.json.Decoder(Receipt, strict=True)",
        "_RECEIPT = msgspec.json.Decoder(Receipt, strict=False)",
        RECEIPT_TESTS,
    ),
    EdgeMutant(
        "drop a receipt of wrong shape",
        PLANNER + "receipts.py",
        "            received.append(self._received(stamped))",
        "            got = self._received(stamped)\n"
        "            received.extend([got] if got.receipt is not None else [])",
        RECEIPT_TESTS,
    ),
    # --- sandbox-gateway
    EdgeMutant(
        "count a lease from when its answer came",
        GATEWAY + "lease.py",
        "if self._renewed_at_ms is None or sent_at_ms > self._renewed_at_ms:",
        "if self._renewed_at_ms is None or True:",
        "tests/unit/sandbox_gateway/test_lease.py",
    ),
    EdgeMutant(
        "write to the very end of the lease",
        GATEWAY + "lease.py",
        "WRITES_STOP_PERCENT: Final = 60",
        "WRITES_STOP_PERCENT: Final = 100",
        "tests/unit/sandbox_gateway/test_lease.py",
    ),
    EdgeMutant(
        "let a lease come back",
        GATEWAY + "lease.py",
        "        if self._over:\n            return False\n        if self._renewed",
        "        self._over = False\n        if self._renewed",
        "tests/unit/sandbox_gateway/test_lease.py",
    ),
    EdgeMutant(
        "dispatch on a stale lease",
        GATEWAY + "session.py",
        "            elif not may_write:\n",
        "            elif False:\n",
        LEASE_TESTS,
        "writes_stop",
    ),
    EdgeMutant(
        "hand a call to whatever session is there",
        GATEWAY + "session.py",
        "if attachment is None or attachment.session != order.fence.session:",
        "if attachment is None:",
        ORDER_TESTS,
        "another_session",
    ),
    EdgeMutant(
        "stop whatever instance has the name",
        GATEWAY + "session.py",
        "said = await provider.stop(ref, ref.instance)",
        "said = await provider.stop(ref, '')",
        ORDER_TESTS,
        "s167",
    ),
    EdgeMutant(
        "call what accepted its stop gone",
        GATEWAY + "session.py",
        'while (await provider.observe(ref)).state != "gone":',
        "while False:",
        ORDER_TESTS,
        "s168",
    ),
    EdgeMutant(
        "call a create settled that its provider cannot settle",
        GATEWAY + "session.py",
        "if isinstance(found, Unknown) or not promised:",
        "if False:",
        "tests/integration/sandbox_gateway/test_orders.py",
        "without_a_ref",
    ),
    # --- sweeper
    EdgeMutant(
        "propose after the lead was lost",
        SWEEPER + "ticking.py",
        "if not await self._leads():",
        "if False:",
        TICKING_TESTS,
        "s161",
    ),
    EdgeMutant(
        "propose in a census",
        SWEEPER + "ticking.py",
        'self._sweep(is_census=census or mode != "on")',
        "self._sweep(is_census=census)",
        TICKING_TESTS,
        "switch",
    ),
    EdgeMutant(
        "read the shards before the listings",
        SWEEPER + "ticking.py",
        "        listings = [await sources.listing(name) for name in sources.authorities()]\n"
        "        ledger = await sources.ledger()\n",
        "        ledger = await sources.ledger()\n"
        "        listings = [await sources.listing(name) for name in sources.authorities()]\n",
        TICKING_TESTS,
        "before_the_ledger",
    ),
    EdgeMutant(
        "give every authority the whole budget",
        SWEEPER + "ticking.py",
        "            left -= len(result.proposals)\n",
        "",
        TICKING_TESTS,
        "budget",
    ),
    EdgeMutant(
        "sweep when the switch cannot be read",
        SWEEPER + "reading.py",
        'return "off" if setting == "off" else "census"  # the switch may be off',
        "return setting",
        TICKING_TESTS,
        "switch",
    ),
    EdgeMutant(
        "take an unanswered page for the end of a list",
        SWEEPER + "reading.py",
        'problem = "no_answer" if reply is None else reply.problem',
        'problem = "" if reply is None else reply.problem',
        "tests/unit/sweeper/test_reading.py",
    ),
    EdgeMutant(
        "take an incomplete list for a whole one",
        SWEEPER + "reading.py",
        'problem = "" if reply.complete else "incomplete_listing"',
        'problem = ""',
        "tests/unit/sweeper/test_reading.py",
    ),
    EdgeMutant(
        "take a shard that does not answer for an empty one",
        SWEEPER + "reading.py",
        "                ledger.silent.add(shard)\n",
        "",
        "tests/unit/sweeper/test_reading.py",
    ),
    # --- release-tracker
    EdgeMutant(
        "project a batch again",
        TRACKER + "projector.py",
        "if message.seq <= reached:",
        "if False:",
        "tests/integration/release_tracker/test_projection.py",
        "read_again",
    ),
    # --- toolhost
    EdgeMutant(
        "apply under another epoch than the disk's",
        TOOLHOST,
        "    def check_fence(self, call):\n        marker = self.read_marker()\n"
        "        if marker is None:\n            self.last_marker = NO_MARKER\n"
        '            raise Refusal("no_generation", "no marker on this disk")\n'
        "        if marker.epoch != call.epoch:\n",
        "    def check_fence(self, call):\n        marker = self.read_marker()\n"
        "        if marker is None:\n            self.last_marker = NO_MARKER\n"
        '            raise Refusal("no_generation", "no marker on this disk")\n'
        "        if False:\n",
        FENCE_TESTS,
    ),
    EdgeMutant(
        "apply under another session than the disk's",
        TOOLHOST,
        '        if marker.session != call.session:\n            raise Refusal("stale_session"',
        '        if False:\n            raise Refusal("stale_session"',
        FENCE_TESTS,
    ),
    EdgeMutant(
        "skip the second marker read",
        TOOLHOST,
        "        if after is None or after.raw != marker.raw:\n"
        '            raise Fault("marker_moved"',
        '        if after is None:\n            raise Fault("marker_moved"',
        "tests/unit/toolhost/test_inside.py",
        "marker",
    ),
    EdgeMutant(
        "apply again what the journal has",
        TOOLHOST,
        '            if entry.state == "done":\n                self.resend(call, entry)',
        '            if entry.state == "never":\n                self.resend(call, entry)',
        FENCE_TESTS,
    ),
    EdgeMutant(
        "apply what was revoked",
        TOOLHOST,
        "        if self.is_revoked(call.attempt):\n"
        '            raise Refusal("revoked", "this fence was revoked")',
        '        if False:\n            raise Refusal("revoked", "this fence was revoked")',
        FENCE_TESTS,
    ),
    EdgeMutant(
        "apply a fence that was forgotten",
        TOOLHOST,
        "if entry is None and call.no <= self.journal.forgotten_no:",
        "if False:",
        FENCE_TESTS,
        "forgotten",
    ),
    EdgeMutant(
        "apply after the gateway's grant is over",
        TOOLHOST,
        "if self.grant_until is not None and _monotonic() > self.grant_until:",
        "if False:",
        FENCE_TESTS,
        "grant",
    ),
)
