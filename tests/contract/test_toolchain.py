"""The compiler that is needed at run time: found, checked while an image is built, and named where it is missing."""

import logging
import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vitwire_server.assembling import placing
from vitwire_server.runtime import toolchain

ROOT = Path(__file__).parents[2]
DRIVER = """
#include "cuda.h"
#include <dlfcn.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <Python.h>
PyMODINIT_FUNC PyInit_cuda_utils(void) { return cuInit(0) ? NULL : PyModule_New("cuda_utils"); }
"""


@pytest.fixture
def backend(tmp_path: Path) -> Path:
    """The files of Triton's that matter: its C file, with the same headers, and its own cuda.h."""
    installed = find_spec("triton")
    if installed and installed.origin:
        return Path(installed.origin).parent / "backends/nvidia"
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda.h").write_text("int cuInit(unsigned);\n")
    (tmp_path / "driver.c").write_text(DRIVER)
    return tmp_path


def test_the_image_has_the_compiler_and_is_checked_with_it(backend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the commands in the last stage, `gcc` compiles what Triton compiles, and nothing else would do."""
    stage = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2].replace("\\\n", " ")
    assert re.search(r'triton; then compiler="gcc libc6-dev"; fi.*apt-get install .* \$compiler ', stage)
    project, check = stage.index("COPY --from=builder /project"), stage.index("-m vitwire_server.runtime.toolchain")
    assert project < check < stage.index("\nUSER"), "after the last thing that is installed"
    monkeypatch.setenv("CC", "gcc")
    assert toolchain.driver_fault(backend) == ""


@pytest.mark.parametrize("compiler", [None, "/nowhere/cc", "without-headers"])
def test_what_is_missing_is_named(
    compiler: str | None, backend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "without-headers"
    script.write_text('#!/bin/sh\nexec /usr/bin/gcc -nostdinc "$@"\n')
    script.chmod(0o755)
    if compiler:
        monkeypatch.setenv("CC", str(tmp_path / compiler))
    else:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    fault = toolchain.driver_fault(backend)
    assert fault.endswith(toolchain.C_REMEDY)
    assert "no C compiler" in fault or "/nowhere/cc" in fault or ".h: No such file" in fault


def test_missing_headers_of_python_are_named(backend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's python3 has its headers in a package of their own."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CPATH", raising=False)
    fault = toolchain.driver_fault(backend)
    assert "Python.h" in fault.splitlines()[0]
    assert fault.endswith(toolchain.C_REMEDY)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), toolchain.C_REMEDY),
        (subprocess.CalledProcessError(1, ["gcc", "driver.c"]), toolchain.C_REMEDY),
        (ImportError("cuda_utils.so: failed to map segment from shared object"), toolchain.EXEC_REMEDY),
        (AssertionError("libcuda.so cannot found!"), "libcuda.so cannot found!"),
    ],
)
def test_blocks_that_cannot_be_fused_are_a_warning_with_a_remedy(
    error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What Triton 3.7 and 3.9 raised without a compiler, without headers, on a noexec directory, without a driver."""

    class Driver:
        @property
        def utils(self) -> object:
            raise error

    triton, runtime = ModuleType("triton"), ModuleType("triton.runtime")
    runtime.driver = SimpleNamespace(active=Driver())  # as Triton's own
    triton.__spec__ = SimpleNamespace()  # type: ignore[assignment] # there is one
    for module in (triton, runtime):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(placing, "kernel_fault", lambda _: "")
    tower: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    unused: Any = None
    placing.fuse_blocks(tower, unused)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"blocks are not fused, which is slower: {error}")
    assert record.getMessage().endswith(remedy)
