"""The supervisor over processes that only pretend to serve."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from threading import Thread

import psutil
import pytest

from vitwire_children import heartbeat, restarts
from vitwire_server.config import host
from vitwire_server.config.resolving import resolve
from vitwire_server.process import children, device_supervisor
from vitwire_server.process.device_supervisor import supervise

WORDS = ["--model", "m", "--devices", "cpu,cuda:1", "--port", "0", "--metrics-port", "0", "--unix-socket", "s"]
LISTENING = 'echo "listening on 127.0.0.1:4001, metrics on 127.0.0.1:4002"\n'
READY = 'echo "ready: m"\n'
WAITING = "exec sleep 60\n"
DYING = "kill -9 $$\n"
BEAT = "printf . > /proc/self/fd/$VITWIRE_HEARTBEAT_FD\n"
Pretend = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pretend:
    """Runs the supervisor; `cpu` and `cuda` are what the two processes do. Returns exit code and their flags."""
    calls = tmp_path / "calls"
    monkeypatch.setattr(device_supervisor, "configure_logs", lambda *_: None)  # pytest's own handlers stay
    failed = restarts.Restarts.failed
    monkeypatch.setattr(restarts.Restarts, "failed", lambda self: failed(self) / 50)

    def run(
        cpu: str, cuda: str = WAITING, *, signals: int = 0, after: int = 2, apart: float = 0.7, words: list[str] = WORDS
    ) -> tuple[int, list[str]]:
        script = tmp_path / "python"
        record = f'echo "$@" >> {calls}\n'
        script.write_text(f'#!/bin/sh\n{record}case "$*" in\n*"--device cuda"*)\n{cuda};;\n*)\n{cpu};;\nesac\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

        def interrupt() -> None:
            for _ in range(signals):
                while not calls.exists() or len(calls.read_text().splitlines()) < after:
                    time.sleep(0.01)
                time.sleep(apart)
                os.kill(os.getpid(), signal.SIGTERM)

        Thread(target=interrupt, daemon=True).start()
        code = asyncio.run(supervise(words, resolve(words)))
        return code, calls.read_text().splitlines()

    return run


def test_a_child_that_keeps_dying_ends_all(pretend: Pretend, capfd: pytest.CaptureFixture[str]) -> None:
    code, calls = pretend(LISTENING + READY + DYING)
    assert code == 1
    message = "vitwire-server: cpu: failed 5 starts; last exit: SIGKILL\n"
    assert capfd.readouterr().err == message
    own = [call for call in calls if "--device cpu" in call]
    assert len(own) == 5
    assert own[0].endswith("--devices none --device cpu --unix-socket s.0 --port 0 --metrics-port 0")
    assert own[4].endswith("--port 4001 --metrics-port 4002"), "free ports stay the same"
    assert len([call for call in calls if "--device cuda:1 --unix-socket s.1 --port 0" in call]) == 1


def test_the_others_drain_when_one_keeps_dying(pretend: Pretend, capfd: pytest.CaptureFixture[str]) -> None:
    serving = "trap 'echo drained; exit 0' TERM\nwhile :; do sleep 0.05; done\n"
    code, calls = pretend(f"{READY}sleep 0.3\n{DYING}", serving)
    assert code == 1
    assert len([call for call in calls if "--device cpu" in call]) == 5
    assert "[cuda:1] drained\n" in capfd.readouterr().out


def test_a_steady_life_forgives_earlier_deaths(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "STEADY_SECONDS", 0.0)
    _, calls = pretend(READY + DYING, signals=1, after=9)
    assert len(calls) >= 9


def test_a_refusal_before_the_first_readiness_ends_all(pretend: Pretend, capfd: pytest.CaptureFixture[str]) -> None:
    code, calls = pretend('echo "vitwire-server: no such model" >&2\nexit 1\n')
    assert code == 1
    assert capfd.readouterr().err == "[cpu] vitwire-server: no such model\nvitwire-server: cpu: no such model\n"
    assert len([call for call in calls if "--device cpu" in call]) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are opened by /proc")
@pytest.mark.parametrize(
    ("life", "fault"),
    [
        (f"{BEAT}kill -STOP $$\n", "was stopped (SIGSTOP)"),
        (BEAT + WAITING, "did not respond"),
    ],
)
def test_a_stopped_or_mute_process_is_replaced(
    life: str, fault: str, pretend: Pretend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.05)
    _, calls = pretend(READY + life, words=[*WORDS, "--unresponsive-seconds", "0.2"])
    assert len([call for call in calls if "--device cpu" in call]) == 5, "killed each time, and given up in the end"
    assert f"cpu {fault} for 0.2 s; killing it" in caplog.messages


def test_an_orphan_that_keeps_the_output_open_ends_with_its_process(
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(children, "_OUTPUT_SECONDS", 0.2)
    orphans = tmp_path / "orphans"
    life = f"sleep 60 &\necho $! >> {orphans}\necho last words\n"
    _, calls = pretend(READY + life + DYING)
    assert len([call for call in calls if "--device cpu" in call]) == 5
    assert capfd.readouterr().out.count("[cpu] last words\n") == 5
    assert all("exited unexpectedly (SIGKILL)" in message for message in caplog.messages), "not killed as unresponsive"
    _, alive = psutil.wait_procs(
        [psutil.Process(int(pid)) for pid in orphans.read_text().split() if psutil.pid_exists(int(pid))], timeout=10
    )
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are opened by /proc")
def test_a_process_that_starts_slowly_or_was_stopped_for_a_moment_stays(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a heartbeat a process is still importing; a stop is forgiven if the heartbeat comes back in time."""
    monkeypatch.setattr(heartbeat, "SECONDS", 0.05)
    beating = f"{BEAT}(sleep 0.2; kill -CONT $$) &\nkill -STOP $$\nwhile :; do {BEAT.strip()}; sleep 0.02; done\n"
    _, calls = pretend(beating, WAITING, signals=1, apart=2.0, words=[*WORDS, "--unresponsive-seconds", "1.5"])
    assert len(calls) == 2
    assert not caplog.messages


def test_children_on_cpu_share_the_cores(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One core is left to the process of the CUDA device, which limits itself."""
    monkeypatch.setattr(host, "cores", lambda _: 9)
    monkeypatch.delenv(host.THREADS, raising=False)
    words = [*WORDS, "--devices", "cpu,cuda:0,cpu"]
    show = 'echo "threads ${OMP_NUM_THREADS-none}"\n' + WAITING
    pretend(show, show, signals=1, after=3, words=words)
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == [
        "[cpu.0] threads 4",
        "[cpu.2] threads 4",
        "[cuda:0] threads none",
    ]
    monkeypatch.setenv(host.THREADS, "3")
    pretend(show, show, signals=1, after=6, words=words)
    assert capfd.readouterr().out.count("threads 3") == 3


@pytest.mark.skipif(sys.platform != "linux", reason="1 elsewhere")
def test_children_share_the_cores_for_rpc_processes(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda _: 16)
    words = [*WORDS, "--devices", "cpu,cuda:0,cuda:1"]
    shared = {"cpu": "1", "cuda:0": "3", "cuda:1": "3"}
    for after, flags, expected in ((3, [], shared), (6, ["--rpc-processes", "2"], None)):
        _, calls = pretend(WAITING, signals=1, after=after, words=[*words, *flags])
        found = {}
        for call in calls[-3:]:
            last = dict(pairwise(call.split()))
            found[last["--device"]] = last["--rpc-processes"]
        assert found == (expected or dict.fromkeys(found, "2"))


def test_a_second_signal_kills(pretend: Pretend, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = pretend(f"trap '' TERM\n{WAITING}", signals=2)
    assert code == 1
    assert "second signal: killing all processes" in capfd.readouterr().err


def test_a_signal_that_comes_twice_drains(pretend: Pretend, capfd: pytest.CaptureFixture[str]) -> None:
    slow = "trap 'sleep 1; exit 0' TERM\nwhile :; do sleep 0.1; done\n"
    assert pretend(slow, slow, signals=2, apart=0.1)[0] == 0
    assert not capfd.readouterr().err


def test_a_drain_without_end_is_cut(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_supervisor, "_GRACE_SECONDS", 0.2)
    words = [*WORDS, "--lame-duck-seconds", "0", "--drain-seconds", "0"]
    assert pretend(f"trap '' TERM\n{WAITING}", signals=1, words=words)[0] == 1


def test_lines_carry_their_process(pretend: Pretend, capfd: pytest.CaptureFixture[str]) -> None:
    many = "head -c 3000000 /dev/zero | tr '\\0' x\necho\n"
    said = "echo '{\"level\": \"info\"}' >&2\nprintf 'no newline'\n"
    words = [*WORDS, "--devices", "cpu,cpu", "--log-format", "json"]
    assert pretend(many + said + "exit 1", words=words)[0] == 1
    out, err = ([json.loads(line) for line in text.splitlines()] for text in capfd.readouterr())
    labels = [each["process"] for each in out if each["message"] == "no newline"]
    assert labels, "the first to end has written everything; the other one may have been stopped before"
    assert any(each == {"process": label, "level": "info"} for label in labels for each in err)
    assert err[-1]["message"].startswith("vitwire-server: cpu.")


def test_ports_are_kept_where_metrics_are_off(pretend: Pretend, capfd: pytest.CaptureFixture[str]) -> None:
    off = 'echo "listening on 127.0.0.1:4001, metrics off"\n'
    _, calls = pretend(off + READY + DYING)
    flags = [call.split() for call in calls if "--device cpu" in call]
    ports = [(each[each.index("--port", 12) + 1], each[-1]) for each in flags]
    assert ports[0] == ("0", "0")
    assert set(ports[1:]) == {("4001", "0")}
