"""Run in place of a decoder: its program on a machine for which there is no filter of system calls."""

import platform
import runpy

if __name__ == "__main__":
    setattr(platform, "machine", lambda: "riscv64")  # noqa: B010
    runpy.run_module("vitwire_server.preparing.files.worker", run_name="__main__", alter_sys=True)
