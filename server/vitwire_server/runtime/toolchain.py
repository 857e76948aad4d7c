"""The compiler that Triton needs at run time, and what to install if it is missing.

Triton (3.7 to 3.9) compiles one C file, `driver.c`, at its first launch: it includes Python.h and the C library's
headers, and links with libcuda.so.1. Everything else, including cuda.h and ptxas, is in its wheel.
`python -m vitwire_server.runtime.toolchain` checks an image for it, without a GPU.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

C_REMEDY = (
    "install a C compiler and the headers of the C library and of Python (Debian: gcc, libc6-dev, and python3-dev for "
    "its own Python), or name a compiler in CC"
)
EXEC_REMEDY = (
    "the directory of compiled code must allow execution: docker run --tmpfs /tmp:exec, or TRITON_CACHE_DIR elsewhere"
)

_FLAGS = ("-O3", "-shared", "-fPIC", "-Wno-psabi")


def triton_fault() -> str:
    """Why Triton cannot launch kernels on this machine's GPU, and the remedy; empty if it can."""
    try:
        from triton.runtime import driver  # noqa: PLC0415 - comes with CUDA builds of torch only

        driver.active.utils  # noqa: B018 - compiled at first access
    except ImportError as error:
        return f"{error}; {EXEC_REMEDY}" if find_spec("triton") else str(error)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"{error}; {C_REMEDY}"
    except (RuntimeError, AssertionError) as error:
        return f"{error} {C_REMEDY}" if "compiler" in str(error) else str(error)
    return ""


def driver_fault(backend: Path) -> str:
    """Why Triton's `driver.c` does not compile here, and the remedy; empty if it does. `backend` is its folder."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # in Triton's order
    if not compiler:
        return f"there is no C compiler; {C_REMEDY}"
    with tempfile.TemporaryDirectory() as folder:
        stub, module = Path(folder, "libcuda.so.1"), Path(folder, "cuda_utils.so")
        includes = (f"-I{backend / 'include'}", f"-I{sysconfig.get_paths()['include']}")
        commands = (
            (compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", stub),
            (compiler, backend / "driver.c", *_FLAGS, "-o", module, "-l:libcuda.so.1", f"-L{folder}", *includes),
        )
        try:
            for command in commands:
                subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - as Triton does
        except OSError as error:
            return f"{error}; {C_REMEDY}"
        except subprocess.CalledProcessError as error:
            return f"{error.stderr.strip()}\n{C_REMEDY}"
    return ""


def main() -> int:
    """Check whether Triton's C file compiles, where Triton is installed."""
    triton = find_spec("triton")
    fault = driver_fault(Path(str(triton.origin)).parent / "backends/nvidia") if triton else ""
    sys.stderr.write(f"{fault}\n" if fault else "")
    return int(bool(fault))


if __name__ == "__main__":
    sys.exit(main())
