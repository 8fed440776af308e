"""
Breaks one line of the core at a time, in a copy, and runs its tests: each must turn red.

`mutants.py [word …]` takes only those whose file or line has the word. Prints each survivor, then
`N killed, M survived`; fails when one survived. A line that is not there any more is an error too.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "libs" / "core" / "src"
PACKAGE = Path("fencepost/core/sandbox")
TESTS = (
    "tests/unit/core/test_join.py",
    "tests/unit/core/test_outcomes.py",
    "tests/unit/core/test_admission.py",
    "tests/unit/core/test_life.py",
    "tests/unit/core/test_machine.py",
    "tests/unit/core/test_transitions.py",
    "tests/scenarios/test_fencing.py",
    "tests/scenarios/test_holding.py",
    "tests/scenarios/test_releases.py",
    "tests/unit/core/dag",
    "tests/unit/core/test_checkpoints.py",
    "tests/unit/core/test_recovery.py",
)
AT_ONCE = 2

_OTHER_NONCE = "marker.nonce not in (sandbox.nonce, sandbox.nonce_on_disk)"

MUTANTS: tuple[tuple[str, str, str], ...] = (
    # --- the join
    ("join.py", "if receipt.attempt != attempt:", "if False:"),
    (
        "join.py",
        "    if receipt.direction != direction:\n        return",
        "    if False:\n        return",
    ),
    ("join.py", "type(receipt.epoch) is not int or", "False or"),
    ("join.py", "or type(receipt.after.epoch) is not int", "or False"),
    ("join.py", "if receipt.epoch != sandbox.epoch:", "if False:"),
    ("join.py", "if receipt.epoch != sandbox.epoch:", "if receipt.epoch < sandbox.epoch:"),
    ("join.py", "if not sandbox.open:", "if False:"),
    ("join.py", 'if sandbox.session == "":', "if False:"),
    ("join.py", "if step.epoch != sandbox.epoch or step.session != sandbox.session:", "if False:"),
    ("join.py", "step.epoch != sandbox.epoch or step.session", "step.session"),
    ("join.py", "if receipt.session != sandbox.session:", "if False:"),
    ("join.py", "if receipt.nonce != sandbox.nonce:", "if False:"),
    ("join.py", "if receipt.instance != sandbox.instance:", "if False:"),
    ("join.py", "after.epoch != receipt.epoch\n        or", "False\n        or"),
    ("join.py", "or after.session != receipt.session", "or False"),
    ("join.py", "or after.nonce != receipt.nonce", "or False"),
    ("join.py", "or after.instance != receipt.instance", "or False"),
    ("join.py", "if gateway != sandbox.gateway:", "if False:"),
    ("join.py", "if receipt.no != no:", "if receipt.no < no:"),
    ("join.py", "if receipt.no != no:", "if receipt.no > no:"),
    ("join.py", "if receipt.tool != tool:", "if False:"),
    ("join.py", "if receipt.digest != digest:", "if False:"),
    ("join.py", '("applied", "attested") and receipt.outcome', '("applied",) and receipt.outcome'),
    ("join.py", "if size > limits.RECEIPT_BYTES_MAX:", "if False:"),
    ("join.py", "and _is_deep(result)", "and False"),
    ("join.py", "quoted = escaped or byte != _QUOTE", "quoted = byte != _QUOTE"),
    ("join.py", "len(ordinal) < 10", "True"),
    # --- outcomes
    ("outcomes.py", "if got is None or not value.mac_ok:", "if got is None:"),
    ("outcomes.py", "if got.sandbox != sandbox.id:", "if False:"),
    (
        "outcomes.py",
        "if step is not None and step.refusals >= limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX:",
        "if False:",
    ),
    ("outcomes.py", 'ended_by_apply == (got.direction == "apply")', "True"),
    (
        "outcomes.py",
        "finished is None or finished.refusals >= limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX",
        "finished is None",
    ),
    ("outcomes.py", 'case "refused" if got.reason == "too_old":', 'case "refused" if False:'),
    ("outcomes.py", 'undone = got.reason in ("rolled_back", "undone")', "undone = False"),
    ("outcomes.py", "of = got.of if got.of.startswith", "of = step.attempt if got.of.startswith"),
    ("outcomes.py", 'got.of.startswith(f"{got.step}.")', "got.of"),
    (
        "outcomes.py",
        'case "applied" | "attested" if got.outcome == "ok":',
        'case "applied" | "attested":',
    ),
    ("outcomes.py", 'case "refused" if got.reason == "overwritten":', 'case "refused" if False:'),
    ("outcomes.py", "if step.undo_tries >= limits.UNDO_TRIES_MAX:", "if False:"),
    ("outcomes.py", "journal_seq=got.journal_seq,", "journal_seq=0,"),
    (
        "outcomes.py",
        "for queue in (sandbox.requeued, sandbox.parked):",
        "for queue in (sandbox.parked, sandbox.requeued):",
    ),
    ("outcomes.py", "if len(woken) >= room:", "if len(woken) > room:"),
    ("outcomes.py", '- len(sandbox.fenced) + (ended != "")', "- len(sandbox.fenced)"),
    ("outcomes.py", "- sandbox.fences_ahead(ended)", "- sandbox.fences_ahead()"),
    ("outcomes.py", "limits.FENCES_AHEAD_MAX - sandbox.fences_ahead(ended)", "1 << 20"),
    ("outcomes.py", "return no - step.since_no > limits.FENCES_BEHIND_MAX", "return False"),
    ("admission.py", "sandbox.fences_ahead() >= limits.FENCES_AHEAD_MAX", "False"),
    ("evolve.py", "if not entry.of:", "if True:"),
    ("recovery.py", "if behind <= limits.FENCES_BEHIND_MAX:", "if True:"),
    ("recovery.py", "behind = sandbox.next_no", "behind = 0"),
    ("recovery.py", "behind = sandbox.recovering.done", "behind = 0"),
    ("holding.py", 'if sandbox.capabilities.observes_gone else "stop_accepted"', ""),
    ("outcomes.py", "no=next_no + len(woken),", "no=next_no,"),
    (
        "outcomes.py",
        "            not final\n            and not step.ended",
        "            not step.ended",
    ),
    ("outcomes.py", "            and not step.ended\n", ""),
    ("outcomes.py", '            and step.spec.on_moved_epoch == "retry"\n', ""),
    ("outcomes.py", "            and step.tries < step.spec.attempts_max\n", ""),
    ("outcomes.py", "step.tries < step.spec.attempts_max", "step.tries <= step.spec.attempts_max"),
    ("outcomes.py", 'if step.spec.effect == "external":', "if False:"),
    (
        "outcomes.py",
        "reason=step.reason if step.ended and step.reason else reason,",
        "reason=reason,",
    ),
    ("outcomes.py", "            step.ended\n            or now_ms", "            now_ms"),
    ("outcomes.py", "or now_ms >= step.spec.deadline_at_ms\n            or", "or"),
    ("outcomes.py", 'moved == "epoch_moved" and step.spec', "step.spec"),
    ("outcomes.py", 'if step.phase == "undo" and moved == "epoch_moved":', "if False:"),
    ("outcomes.py", "no += 1", "no += 0"),
    ("outcomes.py", "            counted=False,\n        ),\n    ]", "        ),\n    ]"),
    ("outcomes.py", "    if step.ended:\n        return []\n", ""),
    ("outcomes.py", "if sandbox.live and (step", "if True and (step"),
    ("outcomes.py", 'step is None or step.phase != "indeterminate"', "step is None"),
    # --- admission
    ("admission.py", "if known == value.digest:", "if True:"),
    (
        "admission.py",
        "minted_ms <= sandbox.finished_floor_ms",
        "minted_ms < sandbox.finished_floor_ms",
    ),
    ("admission.py", "if sandbox.releasing or sandbox.gone:", "if sandbox.gone:"),
    ("admission.py", "not sandbox.capabilities.generation", "False"),
    ("admission.py", "len(sandbox.parked) >= limits.PARKED", "len(sandbox.parked) > limits.PARKED"),
    ("admission.py", "state.open_steps >= limits.OPEN", "state.open_steps > limits.OPEN"),
    ("admission.py", "if len(bytes(command.args)) > limits.INLINE_BYTES_MAX:", "if False:"),
    (
        "admission.py",
        "not 1 <= attempts <= limits.ATTEMPTS_MAX",
        "not 0 <= attempts <= limits.ATTEMPTS_MAX",
    ),
    (
        "admission.py",
        "limits.DEADLINE_MS_MIN <= deadline <= limits.DEADLINE_MS_MAX",
        "deadline <= limits.DEADLINE_MS_MAX",
    ),
    (
        "admission.py",
        'if command.commit_after != "receipt" and command.effect == "external":',
        "if False:",
    ),
    ("admission.py", "if not sandbox.live:", "if False:"),
    ("admission.py", "if sandbox.parked or sandbox.requeued:", "if sandbox.requeued:"),
    ("admission.py", "len(sandbox.fenced) >= limits.OPEN", "len(sandbox.fenced) > limits.OPEN"),
    # --- life
    ("life.py", "if created is None or created.gateway != value.gateway:", "if created is None:"),
    (
        "life.py",
        "if sandbox.releasing or sandbox.condemned or sandbox.ref is None:",
        "if sandbox.ref is None:",
    ),
    ("life.py", "value.asked is not None and value.asked != sandbox.asked", "False"),
    ("life.py", "if named != (ref.authority, ref.provider, ref.native_id):", "if False:"),
    (
        "life.py",
        "if value.session in (sandbox.session, marking.session if marking else None):",
        "if False:",
    ),
    ("life.py", "        and marking.gateway != value.gateway\n", ""),
    ("life.py", "and hints.is_alive(marking.gateway, now_ms)", "and True"),
    ("life.py", "if marker is None and sandbox.nonce_on_disk and", "if False and"),
    *(
        ("life.py", f"{before}    if {_OTHER_NONCE}:", f"{before}    if {after}:")
        for before in ('        return ""\n', '        return "cold", "no_marker"\n')
        for after in ("False", "marker.nonce != sandbox.nonce")
    ),
    ("life.py", "if value.journal_seq < sandbox.journal_seq:", "if False:"),
    ("life.py", "    if not instance_same:\n", "    if False:\n"),
    ("life.py", "    if not sandbox.open:\n        return", "    if False:\n        return"),
    ("life.py", "or value.session != marking.session", "or False"),
    ("life.py", "or value.gateway != marking.gateway", "or False"),
    ("life.py", "or value.epoch != marking.epoch", "or False"),
    ("life.py", "or value.nonce != marking.nonce", "or False"),
    ("life.py", "or value.instance != marking.ref.instance", "or False"),
    ("life.py", "value.condemned and value.ref == sandbox.ref", "value.condemned"),
    ("life.py", "    if ref != sandbox.ref:\n", "    if False:\n"),
    ("life.py", 'disk == "restored" or evidence == "other_instance"', 'disk == "restored"'),
    (
        "life.py",
        "if sandbox.open and sandbox.session and hints.lease_expired(sandbox, now_ms):",
        "if False:",
    ),
    ("life.py", "hints.lease_ms * _MARKING_LEASES", "hints.lease_ms * 100"),
    ("life.py", "and not capabilities.generation:", "and False:"),
    (
        "hints.py",
        "now_ms - lease.seen_ms > self.lease_ms",
        "now_ms - lease.seen_ms > 2 * self.lease_ms",
    ),
    ("hints.py", "if (beat.session, beat.gateway, beat.epoch) != (", "if () == ("),
    # --- evolve
    (
        "evolve.py",
        'if entry.direction == "undo" and entry.counted:',
        'if entry.direction == "undo":',
    ),
    (
        "evolve.py",
        "        if entry.counted:\n            step.tries += 1",
        "        step.tries += 1",
    ),
    (
        "evolve.py",
        "    sandbox.session = entry.session\n    sandbox.gateway",
        "    sandbox.gateway",
    ),
    ("evolve.py", 'if step.spec.effect == "workspace":', "if True:"),
    (
        "evolve.py",
        "sandbox.journal_seq = max(sandbox.journal_seq, entry.receipt.journal_seq)",
        "pass",
    ),
    ("evolve.py", "sandbox.journal_seq = max(sandbox.journal_seq, entry.journal_seq)", "pass"),
    (
        "evolve.py",
        "    sandbox.compensated += 1\n    sandbox.journal_seq = max",
        "    sandbox.compensated += 1\n    _ = max",
    ),
    ("evolve.py", "    sandbox.journal_seq = entry.journal_seq\n", ""),
    ("evolve.py", "    sandbox.nonce_on_disk = sandbox.nonce\n", ""),
    ("evolve.py", '    step.phase = "parked"\n', '    step.phase = "parked"\n    step.tries = 0\n'),
    ("evolve.py", "    step.no = entry.no\n", ""),
    ("evolve.py", "state.open_steps -= 1", "pass"),
    ("evolve.py", "len(sandbox.finished) > limits.FINISHED_WINDOW", "False"),
    (
        "evolve.py",
        "if sandbox.releasing and sandbox.ref is None and not sandbox.creates:",
        "if sandbox.releasing:",
    ),
    # --- effects
    ("effects.py", "or step.session != sandbox.session", "or False"),
    ("effects.py", "attempt = ids.undo_id(attempt, step.no)", "pass"),
    ("effects.py", "if sandbox.releasing or sandbox.condemned:", "if sandbox.releasing:"),
    # --- who holds a sandbox, and who is told
    ("holding.py", "if len(sandbox.holders) > 1 or sandbox.claims:", "if sandbox.claims:"),
    (
        "holding.py",
        "if len(sandbox.holders) > 1 or sandbox.claims:",
        "if len(sandbox.holders) > 1:",
    ),
    ("holding.py", "if sandbox.holders.get(value.dag) != value.acquisition:", "if False:"),
    (
        "holding.py",
        "    if sandbox.releasing or sandbox.gone:\n        return [_ref",
        "    if False:\n        return [_ref",
    ),
    ("holding.py", "or len(sandbox.debtors) >= limits.DEBTORS_PER_SANDBOX_MAX", "or False"),
    (
        "holding.py",
        "if not sandbox.holders and set(sandbox.claims) == {claim}:",
        "if not sandbox.holders:",
    ),
    ("holding.py", "if not sandbox.holders and set(sandbox.claims)", "if set(sandbox.claims)"),
    ("holding.py", "if made.gateway or made.failures or made.ambiguous:", "if made.failures:"),
    ("holding.py", "if sandbox.ref is None and not ordered:", "if not ordered:"),
    ("holding.py", "if sandbox.ref is None and not ordered:", "if sandbox.ref is None:"),
    ("holding.py", "return never if sandbox.capabilities is None", "return never if True"),
    ("holding.py", "    return tell(sandbox, found, sandbox.news)", "    return []"),
    ("news.py", 'return f"{dag}/{acquisition}"', "return dag"),
    (
        "news.py",
        '"refused_other_instance": "stop_refused"',
        '"refused_other_instance": "stop_accepted"',
    ),
    ("news.py", '"timeout": "stop_unreachable"', '"timeout": "stop_accepted"'),
    ("evolve.py", "        news.set_news(sandbox, news.gone(entry.evidence))\n", ""),
    ("life.py", "and not capabilities.observes_gone", "and True"),
    ("life.py", "    if sandbox.ref != value.ref:\n", "    if False:\n"),
    (
        "life.py",
        "ambiguous = not value.settled if sandbox.releasing",
        "ambiguous = value.ambiguous if sandbox.releasing",
    ),
    # --- checkpoints
    ("checkpoints.py", "len(sandbox.checkpoints_asked) >= limits", "len([]) >= limits"),
    (
        "checkpoints.py",
        "if sandbox.checkpointing is not None or not sandbox.whole:",
        "if sandbox.checkpointing is not None:",
    ),
    ("checkpoints.py", "    if now_ms < sandbox.checkpoint_retry_ms:\n        return []\n", ""),
    (
        "checkpoints.py",
        "sandbox.owed >= spec.checkpoint_every_steps",
        "sandbox.owed > spec.checkpoint_every_steps",
    ),
    (
        "checkpoints.py",
        "spec.checkpoint_every_s and sandbox.owed and",
        "spec.checkpoint_every_s and",
    ),
    ("checkpoints.py", "sandbox.preempted == value.ref.instance", "False"),
    ("checkpoints.py", "if value.ref != sandbox.ref or", "if"),
    (
        "checkpoints.py",
        '(step := sandbox.steps[name]).phase == "joined" and',
        "(step := sandbox.steps[name]) and",
    ),
    ("checkpoints.py", "value.checkpoint != taking.id or not _is_current", "not _is_current"),
    ("checkpoints.py", "if not is_quiet(sandbox) or", "if"),
    ("checkpoints.py", "or value.nonce != sandbox.nonce", "or False"),
    ("checkpoints.py", "not is_digest(value.manifest) or", "False or"),
    ("checkpoints.py", "or value.journal_seq < sandbox.journal_seq", "or False"),
    ("checkpoints.py", "and size > left", "and False"),
    ("checkpoints.py", "and lease.journal_seq >= receipt.journal_seq", "and True"),
    ("checkpoints.py", 'and step.spec.commit_after == "heartbeat"', "and True"),
    ("checkpoints.py", 'if value.reason == "busy":', "if False:"),
    ("checkpoints.py", "now_ms - taking.since_ms > limits.CHECKPOINT_MS", "False"),
    (
        "outcomes.py",
        "return [*checkpoints.abandon(sandbox), cancelled, fence]",
        "return [cancelled, fence]",
    ),
    (
        "outcomes.py",
        'if step.phase == "joined" and (got.attempt, got.no)',
        'if step.phase == "joined" and (got.attempt, step.no)',
    ),
    (
        "admission.py",
        '    if sandbox.checkpointing is not None:\n        return "checkpointing"\n',
        "",
    ),
    ("state.py", "return self.whole and self.checkpointing is None", "return self.whole"),
    (
        "effects.py",
        "if taking is None or not sandbox.whole or not checkpoints.is_quiet(sandbox):",
        "if taking is None:",
    ),
    (
        "effects.py",
        "own = newest is not None and newest.namespace == sandbox.id",
        "own = newest is not None",
    ),
    ("hints.py", "        if sandbox.joined:\n            self.unsettled[sandbox.id] = None\n", ""),
    # --- what is owed, and how it comes back
    ("owed.py", 'if receipt.verdict == "attested" and receipt.of_seq', "if False"),
    ("owed.py", "        if start < seq:\n", "        if True:\n"),
    (
        "owed.py",
        "    return line == _line_at(checkpoint.lines, seq, checkpoint.line)\n",
        "    return True\n",
    ),
    (
        "owed.py",
        "line == _line_at(checkpoint.lines, seq, checkpoint.line)",
        "line == checkpoint.line",
    ),
    ("owed.py", "    listed.sort()\n", ""),
    ("owed.py", "if one.key <= entry.kept]", "if True]"),
    (
        "owed.py",
        "case e.Replayed() if entry.accepted and entry.verdict:",
        "case e.Replayed() if False:",
    ),
    (
        "owed.py",
        "return sorted(one for one in self._owed if one.key > key)",
        "return [one for one in self._owed if one.key > key]",
    ),
    ("recovery.py", "return sandbox.recovering is not None or unproven", "return unproven"),
    (
        "recovery.py",
        "return sandbox.owed > 0 or sandbox.checkpoint is not None",
        "return sandbox.owed > 0",
    ),
    (
        "recovery.py",
        'or recovering.phase != "restore"\n        or not _is_current',
        "or not _is_current",
    ),
    (
        "recovery.py",
        "or (value.checkpoint, value.manifest) != (checkpoint.id, checkpoint.manifest)",
        "or False",
    ),
    ("recovery.py", "recovering.failures + 1 >= limits.RESTORE_TRIES_MAX", "False"),
    ("recovery.py", "or value.key <= recovering.key:", "or False:"),
    ("recovery.py", "        if one.key <= before:\n            return []\n", ""),
    ("recovery.py", "or total != sandbox.owed_sum", "or False"),
    ("recovery.py", "if done != sandbox.owed or", "if"),
    ("recovery.py", "if not owed.is_same(replay.effect, found):", "if False:"),
    ("recovery.py", 'if why or recovering.phase != "replay":', 'if recovering.phase != "replay":'),
    ("recovery.py", "sandbox.recoveries_failed < limits.REPLAY_DISCARDS_MAX", "True"),
    (
        "recovery.py",
        "if replay.refusals + 1 >= limits",
        "if False and replay.refusals + 1 >= limits",
    ),
    (
        "recovery.py",
        "    if replay.refusals >= limits.REFUSALS",
        "    if False and replay.refusals >= limits.REFUSALS",
    ),
    ("recovery.py", 'recovering is None or recovering.phase != "stopped":', "recovering is None:"),
    ("recovery.py", "effect=value.accepted or value.effect,", "effect=value.effect,"),
    (
        "recovery.py",
        "return recovering if sandbox.live and epoch == sandbox.epoch else None",
        "return recovering",
    ),
    ("life.py", "if value.journal_seq < sandbox.undone:", "if False:"),
    ("life.py", 'blank=disk == "cold",', "blank=False,"),
    ("evolve.py", "    sandbox.checkpointing = None\n    sandbox.waiting", "    sandbox.waiting"),
    (
        "evolve_recovery.py",
        "older = [line for line in sandbox.lines if line[1] < entry.journal_seq]",
        "older: list[tuple[int, int]] = []",
    ),
    ("evolve_recovery.py", "    sandbox.owed = 0\n    sandbox.owed_sum", "    sandbox.owed_sum"),
    (
        "evolve_recovery.py",
        "return min((step.at for step in sandbox.steps.values()), default=place.after)",
        "return place.after",
    ),
    (
        "evolve_recovery.py",
        "        sandbox.owed = recovering.kept\n",
        "        sandbox.owed = 0\n",
    ),
    (
        "evolve_recovery.py",
        "recovering.phase = sandbox.spec.recovery\n    sandbox",
        'recovering.phase = "replay"\n    sandbox',
    ),
    ("evolve_recovery.py", "    sandbox.recoveries_failed = 0\n", ""),
    ("admission.py", 'sandbox.spec.while_recovering == "refuse"', "True"),
    ("admission.py", '    if sandbox.recovering is not None:\n        return "recovering"\n', ""),
    (
        "machine.py",
        "    if sandbox.recovering is not None:\n        return recovery.settle(sandbox)\n",
        "",
    ),
    # --- DAGs
    (
        "../dag/deciding.py",
        'if dag.closed:\n        return _refuse(value, "dag_closed", "dag", "nothing',
        'if False:\n        return _refuse(value, "dag_closed", "dag", "nothing',
    ),
    ("../dag/deciding.py", "if sandbox in dag.held:", "if False:"),
    ("../dag/deciding.py", "        if not replace:\n", "        if False:\n"),
    ("../dag/deciding.py", 'if old.phase != "releasing":', "if False:"),
    ("../dag/deciding.py", "    if value.id in dag.acquisitions:\n", "    if False:\n"),
    (
        "../dag/deciding.py",
        "if value.id in dag.cancels or value.id in dag.answered:",
        "if value.id in dag.cancels:",
    ),
    (
        "../dag/deciding.py",
        "len(dag.cancels) >= limits.CANCELS",
        "len(dag.cancels) > limits.CANCELS",
    ),
    (
        "../dag/deciding.py",
        "max(0, min(asked.bound_ms, limits.CANCEL_BOUND_MS_MAX))",
        "max(0, asked.bound_ms)",
    ),
    ("../dag/deciding.py", "and acquisition.ref is None:", "and True:"),
    (
        "../dag/deciding.py",
        "(acquisition.reason, acquisition.evidence) == (value.reason, value.evidence)",
        "acquisition.reason == value.reason",
    ),
    ("../dag/deciding.py", "    if dag.held:\n", "    if False:\n"),
    (
        "../dag/deciding.py",
        "islice(dag.held.values(), limits.RELEASES_PER_TURN)",
        "dag.held.values()",
    ),
    ("../dag/deciding.py", "islice(due, limits.ANSWERS_PER_TURN)", "due"),
    ("../dag/deciding.py", "if now or now_ms >= by_ms", "if now_ms >= by_ms"),
    ("../dag/deciding.py", "if now or now_ms >= by_ms", "if now"),
    (
        "../dag/deciding.py",
        "not answers and not dag.cancels and dag.told",
        "not answers and dag.told",
    ),
    ("../dag/deciding.py", "minted_ms <= state.past_floor_ms", "minted_ms < state.past_floor_ms"),
    ("../dag/verdict.py", "if dag.held_ever == 0:", "if dag.gone == 0:"),
    ("../dag/verdict.py", "return _RANK.get(reason, 0)", "return _RANK.get(reason, 99)"),
    ("../dag/verdict.py", "    if dag.acquisitions:\n", "    if len(dag.acquisitions) > 1:\n"),
    (
        "../dag/evolve.py",
        "    _let_go(dag, acquisition)\n    acquisition.phase",
        "    acquisition.phase",
    ),
    ("../dag/evolve.py", "    if settled.ref is None:\n", "    if False:\n"),
    ("../dag/evolve.py", "if dag.evidence not in verdict.WEAK_EVIDENCE:", "if True:"),
    ("../dag/evolve.py", "    state.ended.pop(entry.dag, None)\n", ""),
    (
        "../dag/evolve.py",
        "dag.slots.setdefault(entry.slot, entry.acquisition)",
        "dag.slots[entry.slot] = entry.acquisition",
    ),
    (
        "../dag/evolve.py",
        "if dag.slots.get(acquisition.slot) == acquisition_id:",
        "if acquisition.slot in dag.slots:",
    ),
    ("../dag/machine.py", "        hints.touched.update(state.busy)\n", ""),
    (
        "../dag/machine.py",
        "                heapq.heappush(hints.bounds, (by_ms, name))\n",
        "                pass\n",
    ),
    (
        "../dag/machine.py",
        "                heapq.heappush(hints.bounds, (entry.answer_by_ms, dag.id))\n",
        "                pass\n",
    ),
)


def killed(number: int) -> bool:
    """Runs the tests on one mutant; True when they noticed."""
    file, old, new = MUTANTS[number]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCE, copy)
        path = copy / PACKAGE / file
        text = path.read_text()
        if old not in text:
            sys.exit(f"{file} has no such line any more: {old!r}")
        path.write_text(text.replace(old, new, 1))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            check=False,
        )
    if done.returncode not in (0, 1):
        sys.exit(f"{file}: {old!r}: the tests did not run:\n{done.stdout.decode()}")
    return done.returncode == 1


def main() -> None:
    words = sys.argv[1:]
    chosen = [n for n, m in enumerate(MUTANTS) if not words or any(w in m[0] + m[1] for w in words)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(killed, chosen))
    survivors = [MUTANTS[n] for n, dead in zip(chosen, results, strict=True) if not dead]
    for file, old, new in survivors:
        print(f"survived: {file}: {old!r} -> {new!r}")
    print(f"{len(chosen) - len(survivors)} killed, {len(survivors)} survived")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
