"""Search a folder for the photographs that look most like another one, with the openai client and faiss.

vitwire-server serve --model openai/clip-vit-base-patch32 --pooling cls
vitwire router --no-engine --target localhost:50051 --port 8080
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


def vectors(client: OpenAI, files: Sequence[Path]) -> npt.NDArray[np.float32]:
    """A vector of length 1 for each photograph, `(photographs, columns)`."""
    uris = ["data:image/jpeg;base64," + base64.b64encode(file.read_bytes()).decode() for file in files]
    answer = client.embeddings.create(model="any", input=uris)
    if "shape" in (answer.data[0].model_extra or {}):
        sys.exit("each photograph has several vectors: start the encoder with --pooling")
    return np.array([each.embedding for each in answer.data], np.float32)


def main(base_url: str, folder: str, query: str) -> None:
    """Print the five photographs with the highest cosine similarity."""
    files = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        sys.exit(f"{folder} has no photographs ({', '.join(SUFFIXES)})")
    with OpenAI(base_url=base_url, api_key="-") as client:
        wanted = vectors(client, [Path(query)])
        index = faiss.IndexFlatIP(wanted.shape[1])  # of vectors of length 1, the inner product is the cosine
        for start in range(0, len(files), BATCH):
            index.add(vectors(client, files[start : start + BATCH]))
        similarities, found = index.search(wanted, min(5, len(files)))
    for similarity, number in zip(similarities[0], found[0], strict=True):
        print(f"{similarity:.3f} {files[number].name}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: search_photographs.py BASE_URL FOLDER QUERY")
    main(*sys.argv[1:])
