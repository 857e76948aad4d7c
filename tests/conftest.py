"""Fixtures that every tier shares."""

import gc
import os
import signal
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
os.environ.setdefault("SAMPLE_DAY", datetime.now(UTC).date().isoformat())  # the same in all workers

import pytest
import torch
from filelock import FileLock
from packaging.version import Version

from checkpoints import Checkpoints
from reference import Reference
from references import reference_of
from rigs import Yardstick
from vitwire_server.demo.checkpoint import write_demo_checkpoint
from vitwire_server.towers.registry import FAMILIES

with suppress(ModuleNotFoundError):  # an interpreter for tests/gpu may lack it
    import hypothesis

    # On a machine that others use, what takes milliseconds may take seconds: no time fails a test.
    patience: Any = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("patient", **patience)
    hypothesis.settings.load_profile("patient")


SHARES = ("VITWIRE_MATRIX_SHARE", "VITWIRE_MODEL_SHARE")
"""Shares of the tests that are marked `matrix`, and of the model types. SAMPLE_DAY decides which they are."""


def pytest_configure() -> None:
    """Processes that tests interrupt must not inherit what a session in the background, or under nohup, ignores."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # a program that is started gets the default


def pytest_report_header() -> list[str]:
    """How to repeat a run of a sample."""
    shares = [f"{name}={os.environ[name]}" for name in SHARES if name in os.environ]
    return [f"sample: {' '.join(shares)} SAMPLE_DAY={os.environ['SAMPLE_DAY']}"] if shares else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A share of 0.1 runs a tenth: another one each day, all within ten days."""
    tests, models = (float(os.environ.get(name, "1")) for name in SHARES)
    kept = [
        item
        for item in items
        if (not item.get_closest_marker("matrix") or _is_due(item.nodeid, tests))
        and ((model_type := _model_type(item)) is None or _is_due(model_type, models))
    ]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_collection_finish() -> None:
    """What imports left lives as long as the process: a collection of garbage would take half a second to see so."""
    gc.collect()
    gc.freeze()


def _is_due(name: str, share: float) -> bool:
    """Whether a name belongs to the day's share, which begins where that of the day before ends."""
    begin = date.fromisoformat(os.environ["SAMPLE_DAY"]).toordinal() * share
    return (zlib.crc32(name.encode()) / 2**32 - begin) % 1 < share


def _model_type(item: pytest.Item) -> str | None:
    """The model type that a test is about, if it is about one."""
    call = getattr(item, "callspec", None)
    found = call.params.get("model_type") if call else None
    return found if isinstance(found, str) else None


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny whole VLMs by model_type, each written once a session, by the worker of pytest-xdist that asks first.

    Whoever asks for one that the installed transformers is too old for is skipped.
    """
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "checkpoints"
    shared.mkdir(exist_ok=True)

    def checkpoint(model_type: str) -> Path:
        import transformers  # noqa: PLC0415 - it puts another module in its place while it is imported

        if Version(transformers.__version__) < Version(floor := FAMILIES[model_type].transformers):
            pytest.skip(f"{model_type} needs transformers {floor}, {transformers.__version__} is installed")
        return written(model_type)

    @cache
    def written(model_type: str) -> Path:
        folder = shared / f"tiny-{model_type}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                unfinished = folder.with_suffix(".unfinished")
                try:
                    write_demo_checkpoint(model_type, unfinished)
                except ImportError as error:  # of some processors before 5.23
                    if "Torchvision" not in str(error):
                        raise
                    pytest.skip(f"{model_type}: its processor in this release of transformers needs torchvision")
                unfinished.rename(folder)
        return folder

    return checkpoint


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints) -> Callable[[str, torch.dtype], Reference]:
    """Plain transformers by model_type and dtype, loaded once a session."""

    @cache
    def reference(model_type: str, dtype: torch.dtype = torch.float32) -> Reference:
        return reference_of(model_type, checkpoints(model_type), dtype)

    return reference


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written here breaks the engine of the module's server, see `faulty_server.py`."""
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where engines run; tests/gpu puts a GPU here."""
    return torch.device("cpu")


@pytest.fixture(scope="session")
def yardsticks(checkpoints: Checkpoints, device: torch.device) -> Callable[[str, torch.dtype], Yardstick]:
    """What rows of a model_type and dtype are judged by, loaded once a session."""

    @cache
    def yardstick(model_type: str, dtype: torch.dtype) -> Yardstick:
        exact = reference_of(model_type, checkpoints(model_type))
        return Yardstick(exact, reference_of(model_type, checkpoints(model_type), dtype, str(device)))

    return yardstick
