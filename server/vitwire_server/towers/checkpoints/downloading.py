"""A model's files from the Hugging Face Hub in a directory: only those that `vitwire-server serve` reads."""

import json
import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined] # of the HTTP library that it uses

from vitwire_flags.regular_files import replace_file
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint
from vitwire_server.towers.checkpoints.weights import refused, vision_shards
from vitwire_server.towers.files import CheckpointError, local_folder, optional_json

RECORD = ".vitwire-download.json"
"""The file that says which commit of which model the directory holds; written when all files have arrived."""
_SETTINGS = "*.json"
_FAULTS = (HTTPError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of the Hub's client; ValueError for ids other than owner/name, the last three for answers of another form."""
Say = Callable[[str], object]


def download_model(model: str, revision: str, folder: Path, say: Say) -> None:
    """Fetch configuration and vision weights of a model into a directory; `say` gets a line for each step.

    Files of this commit are kept, a file that was cut off continues where it ended, and files of an earlier download
    that this one does not need are removed. If the Hub cannot be reached, a directory that holds this revision already
    is left as it is. Raises CheckpointError.
    """
    if local_folder(model):
        raise CheckpointError(f"{model} is a local directory: serve it as it is")
    recorded = _recorded(folder / RECORD)
    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
    except _FAULTS as error:
        if (recorded.get("model"), recorded.get("revision")) == (model, revision) and _holds(folder, recorded):
            say(f"the Hub cannot be reached; {folder} holds {model} at {recorded.get('commit')} already")
            return
        raise CheckpointError(f"{model} at {revision} could not be found on the Hub: {_line(error)}") from error
    sizes = {each.rfilename: each.size for each in info.siblings or () if _is_plain(each.rfilename)}
    fetched: dict[str, int] = {}
    with refused(f"{folder} cannot be written", OSError):
        (folder / RECORD).unlink(missing_ok=True)

    def fetch(names: list[str]) -> None:
        wanted = {name: _announced(name, sizes[name]) for name in names if name in sizes and name not in fetched}
        _fetch(model, str(info.sha), folder, wanted, say)
        fetched.update(wanted)

    fetch([name for name in sizes if fnmatch(name, _SETTINGS)])
    checkpoint = open_checkpoint(str(folder))
    for pooling in checkpoint.poolings:
        vision_shards(folder, checkpoint.pooled(pooling).family.modules, checkpoint.config, fetch)
    record = {"model": model, "revision": revision, "commit": info.sha, "files": fetched}
    with refused(f"{folder} cannot be written", OSError):
        for name in _files(recorded).keys() - fetched.keys():
            if (folder / name).is_file():
                (folder / name).unlink()
        replace_file(folder / RECORD, json.dumps(record, indent=2).encode() + b"\n")
    say(f"{folder} holds {model} at {info.sha}: {len(fetched)} files, {_size(sum(fetched.values()))}")


def _fetch(model: str, commit: str, folder: Path, wanted: Mapping[str, int], say: Say) -> None:
    """Fetch these files, unless they are there in the version of this commit. Raises CheckpointError."""
    missing = {name: size for name, size in wanted.items() if not _is_complete(folder / name, size)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = sum(missing.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise CheckpointError(f"{folder} has {_size(free)} free, but {_size(needed)} are needed")
        for name in wanted:
            if name in missing:
                say(f"fetching {name} ({_size(missing[name])})")
            hf_hub_download(model, name, revision=commit, local_dir=folder)
    except _FAULTS as error:
        raise CheckpointError(f"{model} at {commit} could not be fetched: {_line(error)}") from error
    # Offline, the Hub's client returns a file of another revision as if it were this one.
    if wrong := [name for name, size in wanted.items() if not _is_complete(folder / name, size)]:
        raise CheckpointError(f"{folder / wrong[0]} does not have the {wanted[wrong[0]]} bytes that the Hub announced")


def _holds(folder: Path, recorded: Mapping[str, object]) -> bool:
    files = _files(recorded)
    return bool(files) and all(_is_complete(folder / name, size) for name, size in files.items())


def _recorded(path: Path) -> Mapping[str, object]:
    """The record of an earlier download; empty if there is none, or it cannot be read."""
    try:
        return optional_json(path)
    except CheckpointError:
        return {}


def _files(recorded: Mapping[str, object]) -> Mapping[str, int]:
    """Sizes of the files that a record lists; empty if it is damaged."""
    files = recorded.get("files")
    if isinstance(files, dict) and all(_is_plain(name) and type(size) is int for name, size in files.items()):
        return files
    return {}


def _is_plain(name: object) -> bool:
    """Whether this names a file within the directory, and no hidden one: a mirror or a record may hold anything."""
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > 255:
        return False
    return "\\" not in name and all(part and part[0] != "." for part in name.split("/"))


def _announced(name: str, size: object) -> int:
    """The size of a file, as the Hub announced it. Raises CheckpointError."""
    if type(size) is not int or size < 0:
        raise CheckpointError(f"the Hub announces {size!r} bytes for {name}")
    return size


def _is_complete(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _line(error: Exception) -> str:
    """The first line: the Hub's client adds advice about tokens and caches."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
