"""An engine that breaks or hangs, and signals: what is in flight is answered, and the exit code shows it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import load
from checkpoints import Checkpoints
from faults import FAULTY, Note, scaled
from load import image, request
from servers import ServerProcess, serving
from vitwire import Client, EncodeFailed, Item, Unavailable
from waiting import until

COLUMNS = 3 * 2 * 14 * 14


def item() -> Item:
    return Item(np.ones((16, COLUMNS), np.float32), (1, 8, 2))


@pytest.mark.parametrize(
    ("kind", "message"), [("raise", "ZeroDivisionError: injected"), ("lost", "illegal memory access")]
)
def test_an_engine_that_breaks_answers_what_is_in_flight_and_ends_the_process(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, message: str
) -> None:
    fault = tmp_path / "fault"
    program = (FAULTY, str(fault))
    with serving(checkpoints("qwen2_vl"), "--canary-seconds", "0", program=program) as process:
        with Client(process.target) as client:
            client.encode([item()])
            fault.write_text(kind)
            with pytest.raises((EncodeFailed, Unavailable), match=r"the engine stopped|cannot encode|shutting"):
                client.encode([item()] * 8)
        assert process.process.wait(30) == 1
        assert message in process.log()


def test_a_server_that_hangs_still_ends_on_sigterm(checkpoints: Checkpoints, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    flags = ("--canary-seconds", "0.1", "--wedge-seconds", "0.5", "--drain-seconds", "1")
    with serving(checkpoints("qwen2_vl"), *flags, program=(FAULTY, str(fault))) as process:
        fault.write_text("hang")
        process.wait_for("engine failed: no progress")
        assert process.stop() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_as_process_1_a_signal_drains(checkpoints: Checkpoints, number: signal.Signals, note: Note) -> None:
    """PID 1 has no default handlers: a signal that is not handled is lost."""
    wrapped = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*wrapped, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine makes no PID namespaces")
    flags = ("--lame-duck-seconds", "1", "--drain-seconds", "240")  # on a busy machine the calls take long
    with serving(checkpoints("qwen2_vl"), *flags, wrapper=wrapped) as server:
        inside = int(Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()[0])
        status = Path(f"/proc/{inside}/status").read_text()
        assert status.split("NSpid:")[1].splitlines()[0].split()[-1] == "1"
        with Client(server.target) as client, ThreadPoolExecutor(4) as pool:
            large = Item(np.ones((1024, COLUMNS), np.float32), (1, 32, 32))
            calls = [pool.submit(client.encode, [large] * 24) for _ in range(4)]
            until(lambda: server.metric("vitwire_inflight_requests") >= 4)
            os.kill(inside, number)
            assert [len(call.result(240)) for call in calls] == [24] * 4
        assert server.process.wait(30) == 0
        note(signal=number.name)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("delay", [0.01, 0.05, 0.1, 0.2, 0.5])
def test_ctrl_c_at_the_very_start_leaves_no_traceback(checkpoints: Checkpoints, delay: float) -> None:
    words = [sys.executable, "-m", "vitwire_server", "serve", "--model", str(checkpoints("qwen2_vl"))]
    process = subprocess.Popen([*words, "--port", "0", "--metrics-port", "0"], stderr=subprocess.PIPE)
    while not catches(process.pid, signal.SIGTERM):  # before that, it is Python that starts
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1].decode()
    assert "Traceback" not in error
    assert process.returncode == 0


@pytest.mark.parametrize("rounds", [scaled(5)])
def test_sigterm_under_load_loses_nothing(checkpoints: Checkpoints, rounds: int, note: Note) -> None:
    """Requests that arrive before the lame duck ends are answered."""

    async def drained(server: ServerProcess) -> load.Tally:
        stop = asyncio.Event()
        loading = asyncio.create_task(load.closed(server.target, request(image(16, 16)), workers=8, stop=stop))
        while server.metric("vitwire_items_total") < 50:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(0.05)
        server.process.terminate()
        await asyncio.to_thread(server.wait_for, "draining")
        stop.set()
        return await loading

    total = load.Tally()
    for _ in range(rounds):
        with serving(checkpoints("qwen2_vl"), "--lame-duck-seconds", "2") as server:
            total.codes += asyncio.run(drained(server)).codes
            assert server.process.wait(30) == 0
    note(rounds=rounds, codes=total.codes)
    assert set(total.codes) == {"OK"}
