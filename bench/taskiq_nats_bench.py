"""
A plain task queue doing the same file work: taskiq on a synced JetStream stream.

The task does the file work of Fencepost's toolhost, without its fence: in one of 64 folders it
appends a record to a journal (begun), writes 200 bytes to a temporary file, renames it over the
target and appends another record (done). It promises nothing about effects: a task that is
delivered twice writes twice. Set up to be as fast as it gets: a pull consumer with batches of 64,
an asynchronous task that works in the event loop (no threads), uvloop, no result store, and the end
told to the client by one core-NATS message from the task. Workers are processes of their own: one
up to 64 in flight, two above. (Two are 5 to 10 % faster at 256, no faster at 64, and at 16 one of
them waits out its pull while the other has nothing left, which costs most of the rate.)
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

import nats
import uvloop
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, StorageType, StreamConfig
from taskiq import AsyncTaskiqDecoratedTask
from taskiq.api import run_receiver_task
from taskiq_nats import PullBasedJetStreamBroker

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import rig

CONTENT_BYTES = 200
FOLDERS = 64
PULL_BATCH = 64
IN_FLIGHT_PER_WORKER = 64
TASKS_AT_ONCE = 256
ACK_WAIT_SECONDS = 60


def work(root: Path, folder: int, step_id: str, content: str) -> None:
    """Writes the file whole or not at all; the folder's journal says so before and after."""
    place = root / f"{folder:02d}"
    temporary = f"{place}/.{step_id}.tmp"
    journal = os.open(f"{place}/journal.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _append(journal, {"begun": step_id, "path": "file.txt"})
        with open(temporary, "wb", buffering=0) as file:
            file.write(content.encode())
        os.rename(temporary, f"{place}/file.txt")
        _append(journal, {"done": step_id, "path": "file.txt", "size": len(content)})
    finally:
        os.close(journal)


def _append(journal: int, record: dict[str, object]) -> None:
    os.write(journal, json.dumps(record).encode() + b"\n")


def broker_for(nats_url: str, tag: str) -> PullBasedJetStreamBroker:
    return PullBasedJetStreamBroker(
        [nats_url],
        subject=f"taskiq.{tag}",
        stream_name=f"TASKIQ_{tag}",
        durable=f"taskiq_{tag}",
        stream_config=StreamConfig(storage=StorageType.FILE),
        consumer_config=ConsumerConfig(
            durable_name=f"taskiq_{tag}", ack_wait=ACK_WAIT_SECONDS, max_ack_pending=10_000
        ),
        pull_consume_batch=PULL_BATCH,
        pull_consume_timeout=1.0,
    )


def task_on(
    broker: PullBasedJetStreamBroker, tag: str, root: Path
) -> AsyncTaskiqDecoratedTask[[int, str, str], Coroutine[None, None, None]]:
    async def write_file(folder: int, step_id: str, content: str) -> None:
        work(root, folder, step_id, content)
        await broker.client.publish(f"taskiq.done.{tag}", step_id.encode())

    return broker.register_task(write_file, task_name="write_file")


async def serve(nats_url: str, tag: str, root: Path) -> None:
    """Is one worker process; ends on SIGTERM."""
    logging.disable(logging.WARNING)
    broker = broker_for(nats_url, tag)
    broker.is_worker_process = True
    task_on(broker, tag, root)
    await broker.startup()
    receiver = asyncio.create_task(
        run_receiver_task(
            broker,
            validate_params=False,
            max_async_tasks=TASKS_AT_ONCE,
            max_prefetch=PULL_BATCH,
        )
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, receiver.cancel)
    await broker.client.publish(f"taskiq.up.{tag}", b"")
    with contextlib.suppress(asyncio.CancelledError):
        await receiver
    await broker.shutdown()


@contextlib.asynccontextmanager
async def workers(nats_url: str, tag: str, root: Path, count: int) -> AsyncIterator[list[int]]:
    """Runs `count` worker processes and gives their ids, once each has said that it is ready."""
    client = await nats.connect(nats_url)
    ups = await client.subscribe(f"taskiq.up.{tag}")
    await client.flush()
    argv = [sys.executable, __file__, "--worker", "--nats-url", nats_url, "--tag", tag]
    processes = [
        await asyncio.create_subprocess_exec(*argv, "--root", str(root)) for _ in range(count)
    ]
    try:
        for _ in processes:
            await ups.next_msg(timeout=30)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        for process in processes:
            await process.wait()
        await client.close()


async def run(
    server: rig.Server,
    in_flight: int,
    seconds: float,
    *,
    worker_count: int | None = None,
    content_bytes: int = CONTENT_BYTES,
) -> rig.Measurement:
    """Measures from before the task is sent until its end was told to the client."""
    count = worker_count or (1 if in_flight <= IN_FLIGHT_PER_WORKER else 2)
    tag = uuid.uuid4().hex[:12]
    content = "x" * content_bytes
    waiting: dict[str, asyncio.Future[None]] = {}
    broker = broker_for(server.url, tag)

    async def on_done(message: Msg) -> None:
        waiting.pop(message.data.decode()).set_result(None)

    with tempfile.TemporaryDirectory(prefix="fencepost-taskiq-") as folder:
        root = Path(folder)
        for number in range(FOLDERS):
            (root / f"{number:02d}").mkdir()
        task = task_on(broker, tag, root)
        await broker.startup()
        await broker.client.subscribe(f"taskiq.done.{tag}", cb=on_done)

        async def step(lane: int, number: int) -> None:
            step_id = f"{lane}-{number}"
            done = waiting[step_id] = asyncio.get_running_loop().create_future()
            await task.kiq((lane + number) % FOLDERS, step_id, content)
            await done

        try:
            async with workers(server.url, tag, root, count) as pids:
                processes = [("nats", server.pid), *(("worker", pid) for pid in pids)]
                return await rig.measure(
                    step, in_flight=in_flight, seconds=seconds, processes=lambda: processes
                )
        finally:
            await broker.js.delete_stream(f"TASKIQ_{tag}")
            await broker.shutdown()


async def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256])
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--workers", type=int, help="worker processes")
    options.add_argument("--json", action="store_true")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name in ("--nats-url", "--tag", "--root"):
        options.add_argument(name, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.worker:
        await serve(chosen.nats_url, chosen.tag, Path(chosen.root))
        return
    async with rig.nats_server() as server:
        rows = [
            await run(server, count, chosen.seconds, worker_count=chosen.workers)
            for count in chosen.in_flight
        ]
    print(json.dumps({"taskiq_nats": rows}) if chosen.json else rig.table(rows))


if __name__ == "__main__":
    uvloop.run(main())
