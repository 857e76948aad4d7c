"""Encode photographs, and save the embedding of each as an array of float32.

python encode_photographs.py localhost:50051 cat.jpg dog.png
"""

import sys
from pathlib import Path

import numpy as np

from vitwire import Client, InvalidItem


def main(target: str, *photographs: str) -> int:
    """Write `NAME.npy` of shape (tokens, width) next to each photograph; returns the exit code."""
    with Client(target) as client:
        print(f"{client.model().model_id}: vectors of {client.model().embedding_width} values")
        try:
            embeddings = client.encode_images(photographs)  # the server decodes and prepares the files
        except InvalidItem as error:
            print(f"{photographs[error.item or 0]}: {error}", file=sys.stderr)
            return 1
    for photograph, embedding in zip(photographs, embeddings, strict=True):
        np.save(Path(photograph).with_suffix(".npy"), embedding.numpy())
        print(f"{photograph}: {embedding.shape[0]} tokens, grid {embedding.grid}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
