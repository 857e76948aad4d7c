"""The client's description of a checkpoint, by way of the message that answers GetModel."""

from dataclasses import replace
from pathlib import Path

from broken import load
from cards import CARD
from vitwire.model import Model
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.pooling import Pooling
from vitwire_server.preparing.rules.recipe import recipes_of
from vitwire_server.rpc.response_messages import model_message
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint


def client_model(folder: Path, pooling: Pooling = Pooling.NONE) -> Model:
    """The client's description of a checkpoint."""
    checkpoint = open_checkpoint(str(folder)).pooled(pooling)
    tower = load(folder, pooling).tower
    card = replace(
        CARD,
        model_type=checkpoint.family.model_type,
        geometry=tower.geometry,
        preprocessing=checkpoint.preprocessing(),
        pooling=checkpoint.pooling,
        poolings=checkpoint.poolings,
        prepared=tuple(recipes_of(checkpoint.preprocessing(), tower.geometry)),
    )
    return Model.from_message(model_message(card))


def described(*, tiling: bool) -> Model:
    """A client's description of a model with patches of 14, by hand; with tiling, each image is one tile."""
    tiles = pb.Tiles(tile=pb.PixelSize(height=56, width=56), single=True) if tiling else None
    message = pb.GetModelResponse(
        embedding_width=8,
        patch_size=14,
        merge_size=1,
        temporal_patch_size=1,
        prepared=[pb.MODALITY_IMAGE],
        tiles=tiles,
        rows_by_grid=[] if tiling else [pb.MODALITY_IMAGE],
    )
    return Model.from_message(message)
