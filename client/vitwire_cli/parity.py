"""`vitwire parity`."""

import json
import re
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import typer
from rich.console import Console
from rich.progress import track

from vitwire_cli.bench import report
from vitwire_cli.connection import warn
from vitwire_cli.files import found, printable

_Engine: TypeAlias = partial[tuple[int, str]]
_TEXT = {"type": "text", "text": "What does this show? Answer with one word."}
_CHAT = {"temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
_OF_VLLM = {"return_token_ids": True, "return_tokens_as_token_ids": True}


class _Answer(NamedTuple):
    status: int
    text: str
    """The first token, or an error."""
    tokens: int = 0
    prompt: Sequence[int] = ()
    """Token ids, which engines other than vLLM do not return."""
    logprobs: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class _Compared:
    """A file. Lists have what the engine answers with its own tower, and with the encoder."""

    file: str
    differs: str
    status: list[int]
    prompt_tokens: list[int]
    answer: list[str]
    difference: float | None
    control: float | None
    encoder: str
    """What became of it there, if that was counted."""


def parity(
    engine: Annotated[str, typer.Option(help="URL of vLLM with its own tower, without Vitwire's connector.")],
    with_encoder: Annotated[str, typer.Option(help="URL of vLLM with the connector, or of `vitwire router`.")],
    images: Annotated[Path, typer.Option(help="Folder with images and clips.", exists=True, file_okay=False)],
    tolerance: Annotated[float, typer.Option(min=0.0, help="Largest difference of log probabilities.")] = 0.25,
    timeout: Annotated[float, typer.Option(min=0.001, help="Timeout of each request, in seconds.")] = 120.0,
    api_key: Annotated[str, typer.Option(envvar="VITWIRE_ENGINE_API_KEY", help="API key of both.")] = "",
) -> None:
    """Compare what an engine answers about files with its own tower and with the encoder.

    Pairs are listed in this order; the control is the difference of the engine from itself. Neither engine should have
    other traffic. The last line of output is one JSON document. The exit code is 0 if all files agree, 1 if one
    differs, and 2 if they could not be compared.
    """
    named = (("--engine", engine), ("--with-encoder", with_encoder))
    tower, encoder = (partial(_sent, *each, api_key, timeout) for each in named)
    rows: list[_Compared] = []
    ended = ""
    try:
        files = list(zip(*found([images]), strict=True))
        quiet = not sys.stderr.isatty()
        for file, shown in track(files, "comparing", console=Console(stderr=True), transient=True, disable=quiet):
            one, again = _asked(tower, file, uuid4().hex), _asked(tower, file, uuid4().hex)
            before, other = _outcomes(encoder), _asked(encoder, file)
            outcomes = _outcomes(encoder) - before
            differs, apart = _differs(one, other, tolerance)
            pairs = ([one.status, other.status], [one.tokens, other.tokens], [one.text, other.text])
            outcome = ", ".join(sorted(name for _, name, _ in outcomes))
            control = _apart(one.logprobs, again.logprobs)
            rows.append(_Compared(printable(shown), ", ".join(differs), *pairs, apart, control, outcome))
        ended = f"--engine {engine} has Vitwire's connector too" if _outcomes(tower) else ""
    except (OSError, ValueError) as error:
        ended = str(error)
    rows.sort(key=lambda row: (not row.differs, "status" not in row.differs, -(row.difference or 0.0)))
    summary: dict[str, object] = {
        "tolerance": tolerance,
        "largest_difference": max((row.difference for row in rows if row.difference is not None), default=None),
        "largest_control": max((row.control for row in rows if row.control is not None), default=None),
        "answered": sum(row.status == [200, 200] for row in rows),
        "encoded": sum(row.encoder == "accepted" for row in rows),
        "differing": sum(bool(row.differs) for row in rows),
    }
    if rows:
        Console().print(report.list_table(rows), report.table(summary))
        typer.echo(json.dumps(summary | {"files": list(map(asdict, rows)), "error": ended or None}))
    if not ended and not summary["answered"] and not summary["differing"]:
        ended = f"no file was answered: {rows[0].answer[0]}"
    if not ended and not summary["encoded"] and any(row.encoder for row in rows):
        ended = "the encoder encoded no file: the tower was compared with itself"
    if ended or not summary["encoded"]:
        warn(ended or "the /metrics of --with-encoder does not say what the encoder encoded")
    raise typer.Exit(2 if ended else int(bool(summary["differing"])))


def _differs(one: _Answer, other: _Answer, tolerance: float) -> tuple[list[str], float | None]:
    """What differs, and by how much. Another first token, with log probabilities within the tolerance, is a tie."""
    apart, answered = _apart(one.logprobs, other.logprobs), one.status == other.status == 200
    is_far = answered and not (apart is not None and apart <= tolerance)  # NaN is far
    found = {
        "status": one.status != other.status,
        "prompt": answered and (one.tokens, one.prompt) != (other.tokens, other.prompt),
        "log probabilities": is_far and bool(one.logprobs or other.logprobs),
        "first token": is_far and one.text != other.text,
    }
    return [name for name, holds in found.items() if holds], apart


def _apart(one: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """The largest difference of a token's log probability, to four digits; None without log probabilities.

    A token that a list lacks is there at most as likely as the least likely one that it has.
    """
    if not one or not other:
        return None
    apart = [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    for full, short in ((one, other), (other, one)):
        least = min(short.values())
        apart += [max(0.0, full[token] - least) for token in full.keys() - short.keys()]
    return round(max(apart), 4)


def _asked(engine: _Engine, file: Path, uuid: str | None = None) -> _Answer:
    """What it answers about a file, without cached prompts, and under a new `uuid` without cached embeddings.

    After a 503 a request may be repeated.
    """
    kind = "video_url" if file.suffix.lower() in (".mp4", ".webm") else "image_url"
    url = f"data:{kind[:5]}/{file.suffix[1:]};base64,{b64encode(file.read_bytes()).decode()}"
    parts = [{"type": kind, kind: {"url": url}} | ({"uuid": uuid} if uuid else {}), _TEXT]
    body = _CHAT | _OF_VLLM | {"messages": [{"role": "user", "content": parts}], "cache_salt": uuid4().hex}
    content = json.dumps(body).encode()
    status, text = engine("/v1/chat/completions", content)
    if status == 503:
        status, text = engine("/v1/chat/completions", content)
    if status != 200:
        message = re.search(r'"message": ?"((?:[^"\\]|\\.)*)"', text)
        return _Answer(status, " ".join((message[1] if message else text).split())[:300])
    try:
        answer = json.loads(text)
        (choice,), tokens = answer["choices"], answer["usage"]["prompt_tokens"]
        first = ((choice.get("logprobs") or {}).get("content") or [{}])[0]
        logprobs = {each["token"]: float(each["logprob"]) for each in first.get("top_logprobs", ())}
        shown = choice["message"]["content"] or first.get("token", "")
        return _Answer(status, shown, tokens, answer.get("prompt_token_ids") or (), logprobs)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise OSError(f"{engine.args[0]} {engine.args[1]}: not a chat completion: {text[:300]}") from None


def _outcomes(engine: _Engine) -> set[tuple[str, str, str]]:
    """What became of images and clips, and how often, counted by a front end that has our connector."""
    counter = r'^vitwire_front_end_(images|clips)_total{outcome="(\w+)"} (\S+)'
    return set(re.findall(counter, engine("/metrics")[1], re.MULTILINE))


def _sent(
    option: str, url: str, api_key: str, timeout: float, path: str, content: bytes | None = None
) -> tuple[int, str]:
    """Status and text of an answer. Raises OSError, which names the option."""
    try:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        request = Request(url.rstrip("/").removesuffix("/v1") + path, content, headers)  # noqa: S310  # the user's own
        with urlopen(request, timeout=timeout) as answer:  # noqa: S310  # as above
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, HTTPException, ValueError) as error:
        raise OSError(f"{option} {url}: {getattr(error, 'reason', error)}") from error
