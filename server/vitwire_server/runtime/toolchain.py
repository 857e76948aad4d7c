"""The compilers that Triton and torch need at run time, and what to install if they are missing.

Triton (3.7 to 3.9) compiles one C file, `driver.c`, at its first launch: it includes Python.h and the C library's
headers, and links with libcuda.so.1. Everything else, including cuda.h and ptxas, is in its wheel. torch.compile
compiles C++ on CPU. `python -m vitwire_server.runtime.toolchain` checks an image for both, without a GPU.
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
CXX_REMEDY = "install a C++ compiler (Debian: g++) or name one in CXX, or serve with --compile off"
HEADERS_REMEDY = "install Python's headers (Debian: libpython3-dev for its own Python), or serve with --compile off"
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


def cxx_fault() -> str:
    """Why torch.compile cannot compile C++, and the remedy; empty if it can: it needs a compiler and Python.h."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415 - loads torch
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415 - as above

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return f"there is no C++ compiler; {CXX_REMEDY}"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.exists() else f"there is no {header}; {HEADERS_REMEDY}"


def main() -> int:
    """Check what the installed torch needs: Triton's C file where Triton is installed, a C++ compiler elsewhere."""
    triton = find_spec("triton")
    fault = driver_fault(Path(str(triton.origin)).parent / "backends/nvidia") if triton else cxx_fault()
    sys.stderr.write(f"{fault}\n" if fault else "")
    return int(bool(fault))


if __name__ == "__main__":
    sys.exit(main())
