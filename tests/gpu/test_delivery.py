"""Delivery through NIXL between devices, and from pinned memory to the host. Needs CUDA and NIXL."""

import io
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client import CollectorRegistry

from checkpoints import Checkpoints
from nixl_consumer import ConsumerProcess, consuming
from servers import serving
from vitwire import Client, Item
from vitwire._delivery.leases import DeviceMemory
from vitwire.shared.agents import is_installed
from vitwire.shared.regions import Region as Part
from vitwire_server.core.delivery import Delivered, MemoryKind, NotDelivered, Placing, Region
from vitwire_server.delivery.courier import Courier
from vitwire_server.delivery.transfers import Bounds
from vitwire_server.observe.metrics.series import Series
from vitwire_server.observe.metrics.sessions import DeliveryMetrics
from vitwire_server.runtime.memory.outbox import DeviceRows, Outbox
from vitwire_server.sessions.outcomes import SharedRows

MIB = 1 << 20
SECONDS = 60


@pytest.fixture(autouse=True)
def needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    if not is_installed():
        pytest.skip("NIXL is not installed")


@pytest.fixture
def outbox(device: torch.device) -> Outbox:
    return Outbox(device, 256 * MIB)


def delivering(outbox: Outbox) -> Courier:
    series = Series(CollectorRegistry())
    courier = Courier(DeliveryMetrics(series), Bounds(seconds=SECONDS / 6, waiting_seconds=SECONDS))
    courier.add_device(outbox.memory, outbox.exported(), outbox.uploaded)
    return courier


def deliver(
    courier: Courier, process: ConsumerProcess, rows: DeviceRows, offset: int, **forged: object
) -> Delivered | NotDelivered:
    outcomes: SimpleQueue[Delivered | NotDelivered] = SimpleQueue()
    consumer = process.consumer(memory=MemoryKind.DEVICE, device=rows.device, **forged)
    courier.deliver(Placing(consumer, Region(offset, rows.nbytes)), SharedRows(rows), outcomes.put)
    return outcomes.get(timeout=SECONDS)


def test_rows_go_from_device_to_device(device: torch.device, outbox: Outbox) -> None:
    courier = delivering(outbox)
    with consuming(64 * MIB, device.index) as process:
        taken = []
        for turn in range(20):
            rows = outbox.copied(torch.full((1 << 20, 16), turn % 7 + 1, dtype=torch.bfloat16, device=device))
            assert rows
            torch.cuda.synchronize()
            start = time.perf_counter()
            assert isinstance(deliver(courier, process, rows, 8 * MIB), Delivered)
            taken.append(time.perf_counter() - start)
        expected = torch.full((1,), 19 % 7 + 1, dtype=torch.bfloat16).view(torch.uint8).tolist()
        assert set(process.sums(8 * MIB, 32 * MIB)) == {str(value) for value in expected}
        assert set(process.sums(0, 8 * MIB)) == {"0"}
        uploaded = outbox.uploaded(memoryview(bytes([5]) * MIB))
        assert uploaded
        assert isinstance(deliver(courier, process, uploaded, 0), Delivered)
        assert process.sums(0, MIB) == {"5": MIB}
        print(f"32 MiB to a device: median {sorted(taken)[10] * 1e3:.3f} ms")
    courier.close()


def test_forged_keys_of_cuda_ipc_reach_nobody(device: torch.device, outbox: Outbox) -> None:
    """Bases, lengths and handles that the client does not have."""
    courier = delivering(outbox)
    random = np.random.default_rng(1)
    with (
        consuming(64 * MIB, device.index) as forger,
        consuming(MIB, device.index) as bystander,
        consuming(MIB, device.index) as honest,
    ):
        address = forger.address.to_bytes(8, "little")
        start = forger.metadata.index(address) + 24
        base, key = forger.metadata.find(address, start), len(forger.metadata) - start
        outcomes = []
        for number, change in enumerate((-2 * MIB, 2 * MIB, 1 << 40, None, None, None, None, None)):
            name = f"{number:032x}"
            forged = bytearray(forger.metadata)
            if change is not None and base >= 0:
                forged[base : base + 8] = (forger.address + change).to_bytes(8, "little")
            else:
                for at in random.integers(key, size=3):
                    forged[start + at] = random.integers(256)
            metadata = bytes(forged).replace(forger.agent.encode(), name.encode())
            rows = outbox.copied(torch.full((MIB,), 9, dtype=torch.uint8, device=device))
            assert rows
            outcomes.append(deliver(courier, forger, rows, 0, agent=name, metadata=metadata))
        print(f"base of the key found: {base >= 0}; {outcomes}")
        assert bystander.sums(0, MIB) == {"0": MIB}
        rows = outbox.copied(torch.full((MIB,), 3, dtype=torch.uint8, device=device))
        assert rows
        assert isinstance(deliver(courier, honest, rows, 0), Delivered)
        assert honest.sums(0, MIB) == {"3": MIB}
        assert int(torch.full((4,), 2, device=device).sum()) == 8
    courier.close()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_server_delivers_to_the_device_of_a_client(
    checkpoints: Checkpoints, device: torch.device, processes: str
) -> None:
    flags = ("--device", str(device), "--nixl", "--rpc-processes", processes, "--cache-bytes", str(64 * MIB))
    with (
        serving(checkpoints("qwen3_vl"), *flags, "--budgets", "64,256") as server,
        Client(server.target, delivery="stream") as plain,
        Client(server.target, delivery="nixl", device=str(device)) as client,
        Client(server.target, delivery="nixl") as host,
    ):
        images = [*patches(4, seed=1), *pictures(seed=1)]
        for _ in range(2):  # the second time from the cache
            expected = plain.encode(images)
            got = zip(client.encode(images), host.encode(images), expected, strict=True)
            for each, same, rows in got:
                assert each.torch().device == device
                assert torch.equal(each.torch().cpu(), rows.torch())
                assert torch.equal(same.torch(), rows.torch())
                np.testing.assert_array_equal(each.numpy(), rows.numpy())
        for item in (*patches(1, seed=2), *pictures(seed=2)):  # encoded for the device, and cached from there
            (direct,), (rows,) = client.encode([item]), plain.encode([item])
            assert direct.report.path != "cache"
            assert direct.torch().device == device
            assert torch.equal(direct.torch().cpu(), rows.torch())
        assert server.metric("vitwire_delivery_fallbacks_total") == 0, server.log()[-3000:]


def pictures(seed: int) -> list[Item]:
    """What the server prepares: a picture, one for a decoder, and a file."""
    pixels = np.random.default_rng(seed).integers(0, 255, (320, 448, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return [Item(pixels), Item(np.dstack([pixels, pixels[..., :1]])), Item(encoded=file.getvalue())]


def patches(count: int, seed: int) -> list[Item]:
    """Images of 64 to 256 tokens."""
    random, grids = np.random.default_rng(seed), [(1, 16, 16 * (1 + index % 4)) for index in range(count)]
    return [
        Item(random.standard_normal((h * w, 1536), dtype=np.float32), (t, h, w), content_id=f"{seed}: image {index}")
        for index, (t, h, w) in enumerate(grids)
    ]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_stored_rows_reach_the_device_of_a_client_without_the_host(
    checkpoints: Checkpoints, device: torch.device, processes: str
) -> None:
    """Those without room wait on the host; no batch copies rows to it."""
    flags = ("--device", str(device), "--nixl", "--rpc-processes", processes, "--cache-bytes", str(64 * MIB))
    items = patches(4, 2)
    asked = [Item(None, each.grid, content_id=each.content_id) for each in items]
    with (
        serving(checkpoints("qwen3_vl"), *flags, "--budgets", "64,256", "--canary-seconds", "0") as server,
        Client(server.target, delivery="stream") as plain,
        Client(server.target, delivery="nixl", device=str(device)) as client,
        Client(server.target, delivery="nixl") as host,
    ):
        metric = server.metric
        plain.store(items)
        assert metric("vitwire_store_bytes") > 0
        got = [each for _ in range(3) for each in client.encode(asked)]
        assert all(each.report.path == "cache" and each.torch().device == device for each in got)
        assert metric("vitwire_store_hits_total") == len(got)
        (direct,) = client.encode(patches(1, 3))
        assert direct.report.path != "cache"
        assert direct.torch().device == device
        assert metric("vitwire_copied_bytes_total") == 0, "neither by a batch, nor for a client"
        nbytes = sum(each.torch().nbytes for each in got[: len(asked)])
        expected = plain.encode(asked)
        assert metric("vitwire_copied_bytes_total", to="host") == nbytes
        for number, each in enumerate([*got, *host.encode(asked)]):
            assert torch.equal(each.torch().cpu(), expected[number % len(asked)].torch())
        assert metric("vitwire_copied_bytes_total") == nbytes
        assert metric("vitwire_delivery_fallbacks_total") == 0, server.log()[-3000:]


def test_rows_that_moved_to_the_host_return_to_the_device(checkpoints: Checkpoints, device: torch.device) -> None:
    flags = ("--device", str(device), "--nixl", "--cache-bytes", str(64 * MIB), "--store-bytes", str(MIB // 4))
    items = patches(24, 4)
    asked = [Item(None, each.grid, content_id=each.content_id) for each in items]
    with (
        serving(checkpoints("qwen3_vl"), *flags, "--budgets", "64,256", "--canary-seconds", "0") as server,
        Client(server.target, delivery="stream") as plain,
        Client(server.target, delivery="nixl", device=str(device)) as client,
    ):
        plain.store(items)
        got = client.encode(asked)
        assert 0 < server.metric("vitwire_store_bytes") <= MIB // 4
        for each, rows in zip(got, plain.encode(asked), strict=True):
            assert torch.equal(each.torch().cpu(), rows.torch())
        assert server.metric("vitwire_copied_bytes_total", to="host") == sum(each.torch().nbytes for each in got)
        assert server.metric("vitwire_delivery_fallbacks_total") == 0, server.log()[-3000:]


def test_leases_on_a_device_are_free_once_work_on_them_is_done(device: torch.device) -> None:
    memory = DeviceMemory(MIB, str(device))
    released = threading.Event()
    rows = memory.rows(Part(4096, 8192), (16, 128), "<u2", released.set)
    assert rows.dtype is torch.bfloat16
    assert rows.data_ptr() == memory.memory.address + 4096
    view = rows[3:].t()
    del rows
    memory.collect()
    assert not released.is_set()
    view.fill_(0)  # the first launch of a kernel loads it, which may wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    view.fill_(1)
    del view
    memory.collect()
    assert not released.is_set(), "work on the device is still queued"
    torch.cuda.synchronize()
    memory.collect()
    assert released.is_set()
