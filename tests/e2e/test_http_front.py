"""Embeddings over HTTP by `vitwire-server serve --http-port`: its front end, which is another process."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from certificates import Authority
from checkpoints import Checkpoints
from embedding_calls import FLAGS, embedded
from routers import RouterProcess, client_of, picture
from servers import finished, serving

TOKEN = "a-token-of-24-characters"


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.matrix)])
def test_a_front_end_behind_tls_and_tokens(checkpoints: Checkpoints, tmp_path: Path, processes: str) -> None:
    """It comes back on its port when it dies, and drains first: what it has read is answered."""
    authority, tokens = Authority(tmp_path / "authority").issue("vitwire.example"), tmp_path / "tokens"
    tokens.write_text(f"{TOKEN} alice\n")
    flags = [*FLAGS, "--pooling=cls", "--http-port=0", "--log-format=json", f"--rpc-processes={processes}"]
    flags += [f"--tls-cert={authority.cert}", f"--tls-key={authority.key}", f"--auth-tokens-file={tokens}"]
    with serving(checkpoints("clip"), *flags) as server:
        port = int(server.wait_for(r"HTTP on 127\.0\.0\.1:(\d+)")[1])
        front = RouterProcess(server.process, server.output, port, port)
        with client_of(front, TOKEN) as client, client_of(front, "another") as stranger, ThreadPoolExecutor(8) as pool:
            assert (
                [each.id for each in client.models.list()] == [client.models.retrieve("tiny-clip").id] == ["tiny-clip"]
            )
            with pytest.raises(openai.AuthenticationError):
                embedded(stranger, picture())
            children = psutil.Process(server.process.pid).children(recursive=True)
            (process,) = (each for each in children if "vitwire_cli" in each.cmdline())
            process.kill()
            process.wait(10)
            urls = [picture(seed=seed) for seed in range(8)]
            answers = [pool.submit(embedded, client, *urls) for _ in range(24)]
            assert len(answers[0].result(60)) == 8, "it waited for the next process"
            server.process.send_signal(signal.SIGTERM)
            assert {type(each.exception(60)) for each in answers} <= {type(None), openai.APIConnectionError}
        assert server.process.wait(60) == 0
        lines = [json.loads(line) for line in server.log().splitlines()]
        said = [each["message"] for each in lines if each.get("process") == "http"]
        assert all(" 200 done " in each for each in said if " POST " in each and "invalid_api_key" not in each)
        assert said[-1] == "ended"
        assert TOKEN not in server.log()


@pytest.mark.parametrize(("name", "value", "message"), [
    ("MODE", "reference", "--mode (VITWIRE_ROUTER_MODE) needs an engine: leave it out where there is none"),
    ("MAX_IMAGES", "x", "Invalid value for VITWIRE_ROUTER_MAX_IMAGES: Input should be a valid integer, unable to parse "
                        "string as an integer"),
    ("ALLOW_IMAGE_HOST", "http://a", "--allow-image-host (VITWIRE_ROUTER_ALLOW_IMAGE_HOST) 'http://a': expected host, "
                                     "host:port or *.domain"),
])  # fmt: skip
def test_a_front_end_that_cannot_run_ends_the_server(
    name: str, value: str, message: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""
    monkeypatch.setenv(f"VITWIRE_ROUTER_{name}", value)
    done = finished("serve", "--model", checkpoints("clip"), "--port=0", "--no-metrics", "--http-port=0")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"vitwire-server: http: {message}")
    assert "loading" not in done.stderr
    assert "ready:" not in done.stdout
