"""Encode files that the server may have seen before: only content that it has not cached is sent.

vitwire-server serve --model ... --cache-bytes 1000000000
python cached_embeddings.py localhost:50051 cat.jpg cat.jpg dog.png
"""

import hashlib
import sys
from pathlib import Path

from vitwire import Client, Item


def item(file: Path) -> Item:
    """The digest of the bytes is the name of the content, for every client of the server."""
    content = file.read_bytes()
    return Item.from_file(content, content_id=hashlib.sha256(content).hexdigest())


def main(target: str, *files: str) -> None:
    """Print where each embedding comes from: `graph` and `eager` are forwards, `cache` needs none."""
    with Client(target) as client:
        for file in files:
            (embedding,) = client.encode_cached([item(Path(file))])
            print(f"{file}: {embedding.shape[0]} tokens, {embedding.report.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
