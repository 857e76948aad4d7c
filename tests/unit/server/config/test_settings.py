"""Where a setting comes from, and what is said of a wrong one."""

import re
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from tools.tables import flags_table

from vitwire_flags.options import options_of
from vitwire_flags.variables import with_variables
from vitwire_server.assembling.device_share import outbox_bytes, torch_bytes, with_room_for_graphs
from vitwire_server.config import resolving
from vitwire_server.config.resolving import resolve, warnings
from vitwire_server.config.settings import ServeSettings, UsageError

GIB, PROCESS = 1 << 30, 640 << 20


def test_flag_beats_variable_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toml = tmp_path / "vitwire.toml"
    toml.write_text('model = "m"\nport = 1\nmax_queued_items = 1\nlame_duck_seconds = 1\nbudgets = [64, 32]\n')
    monkeypatch.setenv("VITWIRE_PORT", "2")
    monkeypatch.setenv("VITWIRE_MAX_QUEUED_ITEMS", "2")
    settings = resolve(["--config", str(toml), "--port", "3"])
    assert (settings.port, settings.max_queued_items, settings.lame_duck_seconds) == (3, 2, 1.0)
    assert settings.budget_sizes == [32, 64]
    assert settings.drain_seconds == 30.0
    monkeypatch.setenv("VITWIRE_CONFIG", str(toml))
    assert resolve([]).port == 2


def test_a_ladder_that_learns_has_no_sizes_of_its_own(tmp_path: Path) -> None:
    settings = resolve(["--model", "m", "--budgets", "learn", "--state-dir", str(tmp_path)])
    assert (settings.learns, settings.budget_sizes, settings.state_dir) == (True, None, tmp_path)
    assert settings.must_learn
    default = resolve(["--model", "m"])
    assert (default.learns, default.must_learn) == (True, False)
    assert not resolve(["--model", "m", "--budgets", "auto"]).learns


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "99999"], "'--port' .*: .* less than or equal to 65535$"),
        (["--pooling", "max"], "'--pooling' .*: .*'max' is not one of 'none', 'cls', 'mean', 'attention'"),
        (["--devices", "cpu,tpu"], "--devices: .*'cpu,tpu'"),
        (["--devices", "cpu,cpu", "--device", "cpu"], "--device cpu and --devices cpu,cpu cannot be used together"),
        (["--devices", "cpu,cpu", "--port", "65535"], "--devices: .* end at 65536"),
        (
            ["--devices", "cpu,cpu", "--port", "9463"],
            "port 9464 is needed twice: --port 9463 to 9464, --metrics-port 9464 to 9465",
        ),
        (["--port", "9464", "--host", "0.0.0.0"], "port 9464 is needed twice: --port 9464, "),
        (["--http-port", "9464"], "^port 9464 .*: --metrics-port 9464, --http-port 9464$"),
        (["--http-host", "127.0.0.2"], "^--http-host needs --http-port$"),
        (["--http-port", "65535", "--devices", "cpu,cpu"], "--devices: .* end at 65536"),
        (["--budgets", "64,many"], "--budgets: .*auto.*'64,many'"),
        (["--budgets", "nofile.json"], r"^--budgets: expected auto, .*'nofile\.json'"),
        (["--budgets", "0"], "--budgets: .*at least 1"),
        (["--budgets", ",".join(map(str, range(4000, 4100)))], "--budgets: 4099 is more"),
        (["--budgets", "64,9999"], "--budgets: 9999 is more than --max-budget-tokens 4096"),
        (["--max-patches-per-item", "99999999999999"], "'--max-patches-per-item' .*: .* 1048576"),
        (["--max-budget-tokens", "99999999999999"], "'--max-budget-tokens' .*: .* 1048576"),
        (
            ["--cache-bytes", "-1"],
            "'--cache-bytes' .*: '-1' is not a size; write a number of bytes, or a size such as 500MB or 4GiB",
        ),
        (["--idle-seconds", "0"], "'--idle-seconds' .*: .* greater than or equal to 0.001"),
        (["--wedge-seconds", "inf"], "'--wedge-seconds' .*: .* less than or equal to 1"),
        (["--config", "/nowhere.toml"], "/nowhere.toml: no such file"),
        (["--config", "/dev/null"], "/dev/null: not a regular file"),
        (["--port", "many"], "'--port' .env var: 'VITWIRE_PORT'.: .* a valid integer"),
        (["--max-queued-items", "0"], "'--max-queued-items' .*: .* greater than or equal to 1"),
        (["--drain-seconds", "nan"], "'--drain-seconds' .*: Input should be "),
        (["--device", "tpu"], r"^--device: expected auto, cpu, cuda or cuda:N \(got 'tpu'\)$"),
        (["--port"], "^Option '--port' requires an argument"),
        (["--modle", "x"], "^No such option: --modle .*--model"),
        (["--cache-byte=1", "--zzz"], "^No such option: --(cache-byte .*--cache-bytes|zzz$)"),
        (["again"], "unexpected extra argument.* .again"),
        (["--metrics=maybe"], "^Option '--metrics' does not take a value"),
        *(([flag, "a"], "must be set together") for flag in ("--tls-cert", "--tls-key")),
        (["--tls-client-ca", "a"], "needs --tls-cert"),
        (["--http-port=1", "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a"], "--http-port .* --auth-tokens-file"),
        (["--otlp-endpoint", "grpc://collector:4317"], "--otlp-endpoint"),
        (["--otlp-endpoint", "http://collector:4317/v1 traces"], "--otlp-endpoint"),
        *(
            ([f"--rpc-processes={text}"], f"^--rpc-processes: expected auto or a number from 1 to 64 .got '{text}'")
            for text in ("0", "65", "-1", "two", "1.5")
        ),
        *(
            (["--store-bytes", text], r"'--store-bytes' .*: .* is not a size")
            for text in ("", "GiB", "1e9", "4 GiBs", "4GiB/s", "0x10", "inf")
        ),
    ],
)
def test_a_wrong_setting_is_named(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(["--model", "m", *flags])


def test_the_variable_behind_a_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is not read."""
    monkeypatch.setenv("VITWIRE_BUDGETS", "9999")
    with pytest.raises(UsageError, match=r"^--budgets \(VITWIRE_BUDGETS\): 9999 is more than --max-budget-tokens "):
        resolve(["--model", "m"])
    monkeypatch.setenv("PORT", "1")
    monkeypatch.setenv("VITWIRE_PORT", "tcp://10.0.0.1:50051")
    assert [with_variables("--port 1 is taken", each) for each in ("", "VITWIRE_")] == ["--port 1 is taken"] * 2


def test_a_model_is_needed() -> None:
    with pytest.raises(UsageError, match=r"^Missing option '--model'"):
        resolve([])


def test_every_number_has_bounds() -> None:
    """A number without one is an OverflowError somewhere."""
    numbers = [
        name
        for name, kind in get_type_hints(ServeSettings).items()
        if any(each in (int, float) for each in (kind, *get_args(kind)))
    ]
    assert {"max_queued_bytes", "max_request_bytes", "drain_seconds"} <= set(numbers)
    for name in numbers:
        for value in (10**400, 1 << 62, -1):
            flag = f"--{name.replace('_', '-')}"
            with pytest.raises(UsageError, match=flag):
                resolve(["--model", "m", f"{flag}={value}"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port = \n", r"vitwire\.toml"),
        ("colour = 3\n", r"vitwire\.toml: unknown key colour$"),
        ("cache_byte = 3\n", r"vitwire\.toml: unknown key cache_byte; did you mean cache_bytes\?$"),
        ("port = 1.5\n", r"'--port' .*: .* a valid integer, .*\(.*vitwire\.toml\)$"),
        ("max-queued-items = 3\n", "unknown key max-queued-items; keys have underscores: max_queued_items$"),
        ("port = " + "[" * 20000, r"vitwire\.toml: "),
        *(
            (f"{line}\n", f"{line.split()[0]}: expected a number, a string, or a list of")
            for line in ("budgets = [[1]]", "budgets = []", "budgets = [true]", "devices = [{ cpu = 1 }]")
        ),
        ("port = true\n", r"vitwire\.toml: port: expected a number or a string, not a boolean$"),
        ("graphs = false\n", "graphs: expected a number or a string, not a boolean"),
    ],
)
def test_a_wrong_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    toml = tmp_path / "vitwire.toml"
    toml.write_text(content)
    with pytest.raises(UsageError, match=message):
        resolve(["--model", "m", "--config", str(toml)])


def test_the_table_of_flags_has_defaults_in_whole_units() -> None:
    defaults = {line.split(" | ")[0]: line.split(" | ")[1] for line in flags_table(ServeSettings) if "`" in line}
    assert (defaults["| `--max-encoded-bytes`"], defaults["| `--graph-memory`"]) == ("32 MiB", "4 GiB")


def test_help_has_every_flag_under_a_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        resolve(["--help"])
    headings: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        if title := re.match(r"╭─ ([^─]+) ─", line):
            heading = title[1]
        elif flag := re.match(r"│ [* ]*--([\w-]+)", line):
            headings[flag[1]] = heading
    names = {name.replace("_", "-") for name in options_of(ServeSettings)}
    assert headings.keys() == {"help", "install-completion", "show-completion", *names}
    assert {headings[name] for name in names}.isdisjoint({"Options"})
    chosen = [headings[name] for name in ("config", "tls-key", "port")]
    assert chosen == ["configuration", "TLS and tokens", "addresses"]
    assert len(set(headings.values())) > 10


def test_switches_are_booleans_in_a_file_and_words_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toml = tmp_path / "vitwire.toml"
    toml.write_text('model = "m"\nmetrics = false\nreflection = false\nnixl = true\n')
    settings = resolve(["--config", str(toml), "--reflection"])
    assert (settings.metrics, settings.reflection, settings.nixl) == (False, True, True)
    for name, value in (("REFLECTION", "false"), ("NIXL", "1"), ("PORT", "1"), ("DRAIN_SECONDS", "2.5")):
        monkeypatch.setenv(f"VITWIRE_{name}", value)
    settings = resolve(["--model", "m"])
    assert (settings.reflection, settings.nixl, settings.port, settings.drain_seconds) == (False, True, 1, 2.5)


@pytest.mark.parametrize("name", ["METRICS", "REFLECTION", "NIXL"])
def test_a_variable_that_negates_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"VITWIRE_NO_{name}", "1")
    with pytest.raises(UsageError, match=rf"^VITWIRE_NO_{name}: .*; set VITWIRE_{name}=off instead$"):
        resolve(["--model", "m"])
    monkeypatch.delenv(f"VITWIRE_NO_{name}")
    monkeypatch.setenv(f"VITWIRE_{name}", "off")
    assert getattr(resolve(["--model", "m"]), name.lower()) is False


def test_equal_ports_are_no_conflict_where_they_cannot_meet() -> None:
    for flags in (["--no-metrics"], ["--metrics-host", "10.0.0.1"], ["--port", "0", "--metrics-port", "0"]):
        assert resolve(["--model", "m", "--devices", "cpu,cpu", "--port", "9463", *flags]).device_list


def test_an_unknown_variable_is_named_with_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITWIRE_MAX_QUEUE_BYTES", "1")
    monkeypatch.setenv("VITWIRE_XYZ", "1")
    monkeypatch.setenv("VITWIRE_TOKEN", "the client's")
    monkeypatch.setenv("VITWIRE_ROUTER_MAX_IMAGES", "1")
    monkeypatch.setenv("VITWIRE_MODLE", "")
    message = warnings(resolve(["--model", "m"]))
    assert message == [
        "ignored: VITWIRE_MAX_QUEUE_BYTES is not a setting; did you mean VITWIRE_MAX_QUEUED_BYTES?",
        "ignored: VITWIRE_XYZ is not a setting",
    ]
    monkeypatch.setenv("VITWIRE_STRICT_CONFIG", "1")
    with pytest.raises(UsageError, match=r"^VITWIRE_MAX_QUEUE_BYTES is not .*; VITWIRE_XYZ is not a setting$"):
        resolve(["--model", "m"])


def test_what_kubernetes_injects_for_a_service_named_vitwire_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    injected = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "50051",
        "SERVICE_PORT_GRPC": "50051",
        "PORT": "tcp://10.0.0.1:50051",
        "PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "PORT_50051_TCP_PROTO": "tcp",
        "PORT_50051_TCP_PORT": "50051",
        "PORT_50051_TCP_ADDR": "10.0.0.1",
        "METRICS_PORT": "tcp://10.0.0.2:9464",
        "CANARY_GRPC_PORT": "tcp://10.0.0.3:1",
        "HTTP_PORT": "tcp://10.0.0.4:80",
    }
    for name, value in injected.items():
        monkeypatch.setenv(f"VITWIRE_{name}", value)
    settings = resolve(["--model", "m", "--strict-config"])
    assert (settings.port, settings.metrics_port, settings.http_port) == (50051, 9464, None)
    message = warnings(settings)
    assert [each.partition("=")[0] for each in message] == [f"VITWIRE_{name}PORT" for name in ("HTTP_", "METRICS_", "")]
    assert "is ignored: Kubernetes set it for a Service of that name; set enableServiceLinks: false" in message[1]


def test_bounds_beyond_the_memory_limit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "memory_limit", lambda: 6 << 30)
    assert warnings(resolve(["--model", "m", "--graph-memory", "99999999999"])) == [], "those are a GPU's"
    flags = ["--model", "m", "--cache-bytes", str(3 << 30), "--devices", "cpu,cpu"]
    (message,) = warnings(resolve(flags))
    assert message.startswith("the memory limit of this cgroup is 6 GiB, less than --max-queued-bytes 4 GiB + --cache-")
    assert "--cache-bytes 3 GiB in each of 2 processes: " in message
    assert "--graph-memory 4 GiB" in warnings(resolve(["--model", "m", "--graphs", "simulated"]))[0]
    stored = ["--model", "m", "--device", "cpu", "--cache-bytes", "1", "--store-bytes", str(3 << 30)]
    assert warnings(resolve(stored)) == [], "nothing is stored without NIXL"
    assert "--store-bytes 3 GiB: " in warnings(resolve([*stored, "--nixl"]))[0]
    monkeypatch.setattr(resolving, "memory_limit", lambda: None)
    assert warnings(resolve(flags)) == []


def test_embeddings_wait_on_the_device_only_with_nixl_and_a_cache() -> None:
    flags = ["--nixl", "--cache-bytes", "5", "--store-bytes", "7"]
    assert resolve(["--model", "m", *flags]).stored_bytes == 7
    assert resolve(["--model", "m", *flags[1:]]).stored_bytes == 0
    assert resolve(["--model", "m", "--nixl", "--store-bytes", "7"]).stored_bytes == 0
    assert resolve(["--model", "m", "--nixl", "--cache-bytes", "5"]).stored_bytes == 2 << 30


@pytest.mark.parametrize("ladder", ['{"budgets": []}', '{"budgets": ["many"]}', "{}"])
def test_a_file_without_budgets_is_not_reported_as_missing(ladder: str, tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text(ladder)
    with pytest.raises(UsageError, match="--budgets: not a file written by vitwire-server budgets"):
        resolve(["--model", "m", "--budgets", str(tmp_path / "ladder.json")])


def test_devices_are_a_list_that_a_flag_can_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toml = tmp_path / "vitwire.toml"
    toml.write_text('model = "m"\ndevices = ["cuda:0", "cpu"]\n')
    assert resolve(["--config", str(toml)]).device_list == ["cuda:0", "cpu"]
    monkeypatch.setenv("VITWIRE_DEVICES", "cpu,cpu")
    assert resolve(["--config", str(toml)]).device_list == ["cpu", "cpu"]
    assert resolve(["--model", "m", "--devices", "none", "--device", "cpu"]).device_list == []


def test_settings_are_frozen_and_every_flag_explains_itself() -> None:
    settings = resolve(["--model", "m", "--no-reflection"])
    assert settings.reflection is False
    with pytest.raises(FrozenInstanceError):
        settings.port = 1
    helps = [option.help for option in options_of(ServeSettings).values()]
    assert all(each and "[" not in each for each in helps), "Rich takes [words] as markup"
    assert {each.name for each in fields(ServeSettings)} - options_of(ServeSettings).keys() == {"given", "http_token"}


def test_rpc_processes_are_auto_or_a_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve(["--model", "m"]).rpc_process_count is None
    assert resolve(["--model", "m", "--rpc-processes", "auto"]).rpc_process_count is None
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\nrpc_processes = 1\n')
    assert resolve(["--config", str(file)]).rpc_process_count == 1
    if sys.platform == "linux":
        monkeypatch.setenv("VITWIRE_RPC_PROCESSES", "4")
        assert resolve(["--config", str(file)]).rpc_process_count == 4


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("500MB", 500_000_000), ("1.5 GiB", 3 << 29), ("4g", 4_000_000_000), ("2KiB", 2048)],
)
def test_sizes_may_have_units(text: str, nbytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve(["--model", "m", "--cache-bytes", text]).cache_bytes == nbytes
    monkeypatch.setenv("VITWIRE_CACHE_BYTES", text)
    assert resolve(["--model", "m"]).cache_bytes == nbytes
    (tmp_path / "vitwire.toml").write_text(f'model = "m"\nstore_bytes = "{text}"\n')
    assert resolve(["--config", str(tmp_path / "vitwire.toml")]).store_bytes == nbytes


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--rpc-processes", "1"], 8 * GIB - 2 * PROCESS),
        (["--rpc-processes", "6"], 8 * GIB - 7 * PROCESS),
        (["--rpc-processes", "6", "--decode", "cpu"], 8 * GIB - PROCESS),
        (["--rpc-processes", "6", "--decode-processes", "0"], 8 * GIB - PROCESS),
        (["--rpc-processes", "1", "--nixl", "--cache-bytes", "1GiB"], 8 * GIB - 4 * PROCESS),
    ],
)
def test_memory_of_a_shared_device(flags: list[str], left: int) -> None:
    """Torch gets what contexts leave; graphs half of what weights and stored embeddings leave of that."""
    settings = resolve(["--model", "m", "--device-memory", "8GiB", *flags])
    assert torch_bytes(settings, free=9 * GIB) == left
    stored = outbox_bytes(settings, torch.device("cuda"))
    assert stored == (5 * GIB // 2 if "--nixl" in flags else 0)
    weights = left - stored - 2 * GIB
    assert with_room_for_graphs(settings, left, weights).graph_memory == GIB
    assert with_room_for_graphs(settings, left, 0).graph_memory == min(4 * GIB, (left - stored) // 2)
    with pytest.raises(UsageError, match=r"the weights take .*; raise it by more than 1 MiB$"):
        with_room_for_graphs(settings, left, left - stored + (1 << 20))
    with pytest.raises(UsageError, match="the device has only 7 GiB free; other processes hold the rest"):
        torch_bytes(settings, free=7 * GIB)


def test_memory_of_a_shared_device_that_is_too_small() -> None:
    flags = ["--device-memory", "4GiB", "--nixl", "--cache-bytes", "1GiB", "--rpc-processes", "2"]
    settings = resolve(["--model", "m", *flags])
    with pytest.raises(UsageError, match=r"5 processes and embeddings on the device \(--store-bytes\) take 5.6 GiB"):
        torch_bytes(settings, free=80 * GIB)
