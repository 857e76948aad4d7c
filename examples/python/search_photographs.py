"""Search a folder for the photographs that look most like another one, with the openai client and faiss.

vitwire-server serve --model openai/clip-vit-base-patch32 --pooling cls --http-port 8080
python search_photographs.py http://localhost:8080/v1 photographs query.jpg
"""

import base64
import sys
from collections.abc import Sequence
from pathlib import Path

import faiss
import numpy as np
import numpy.typing as npt
from openai import OpenAI

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
BATCH = 16
"""Photographs in a request; the router's --max-images and --max-body-bytes limit it."""


def vectors(client: OpenAI, files: Sequence[Path]) -> tuple[list[Path], npt.NDArray[np.float32]]:
    """The photographs that could be read, and a vector of length 1 for each, `(photographs, columns)`."""
    uris = ["data:image/jpeg;base64," + base64.b64encode(file.read_bytes()).decode() for file in files]
    answer = client.embeddings.create(model="any", input=uris, extra_body={"errors": "item"})
    found = []
    for file, each in zip(files, answer.data, strict=True):
        if error := (each.model_extra or {}).get("error"):
            print(f"{file.name}: {error['message'].partition(': ')[2]}", file=sys.stderr)
        elif "shape" in (each.model_extra or {}):
            sys.exit("each photograph has several vectors: start the encoder with --pooling")
        else:
            found.append((file, each.embedding))
    return [file for file, _ in found], np.array([vector for _, vector in found], np.float32)


def main(base_url: str, folder: str, query: str) -> None:
    """Print the five photographs with the highest cosine similarity. Those that cannot be read are named."""
    if not Path(folder).is_dir():
        sys.exit(f"{folder} is not a directory")
    files = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        sys.exit(f"{folder} has no photographs ({', '.join(SUFFIXES)})")
    with OpenAI(base_url=base_url, api_key="-") as client:
        _, wanted = vectors(client, [Path(query)])
        if not len(wanted):
            sys.exit(1)
        index, names = faiss.IndexFlatIP(wanted.shape[1]), []  # of vectors of length 1: the cosine
        for start in range(0, len(files), BATCH):
            kept, rows = vectors(client, files[start : start + BATCH])
            if kept:
                index.add(rows)
                names += [file.name for file in kept]
        if not names:
            sys.exit(f"none of the photographs in {folder} can be read")
        similarities, found = index.search(wanted, min(5, len(names)))
    for similarity, number in zip(similarities[0], found[0], strict=True):
        print(f"{similarity:.3f} {names[number]}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: search_photographs.py BASE_URL FOLDER QUERY")
    main(*sys.argv[1:])
