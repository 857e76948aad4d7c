"""`vllm serve` with the engine of `in_process.py`, as a program: vLLM's own command line, front end and HTTP."""

import sys
from typing import Any

import tests.engines.vllm.cpu_platform  # noqa: F401  # before the rest of vLLM
from tests.engines.vllm.in_process import CoreClient
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core_client import EngineCoreClient


def client(**arguments: Any) -> CoreClient:
    """In place of vLLM's own process, which needs a GPU."""
    return CoreClient(**arguments)


if __name__ == "__main__":
    EngineCoreClient.make_async_mp_client = client
    command = ServeSubcommand()
    parser = FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    chosen = parser.parse_args(["serve", *sys.argv[1:]])
    command.validate(chosen)
    command.cmd(chosen)
