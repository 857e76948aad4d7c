"""The client's description of a checkpoint, by way of the message that answers GetModel."""

from pathlib import Path

import torch

from vitwire._model import Model
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.items import DType
from vitwire_server.core.models import Limits, ModelCard
from vitwire_server.rpc.responses import model_message
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint


def client_model(folder: Path) -> Model:
    """The client's description of a checkpoint."""
    checkpoint = open_checkpoint(str(folder))
    tower = load_tower(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), track=lambda shards, *_: shards
    ).tower
    card = ModelCard(
        model_id="tiny",
        model_type=checkpoint.family.model_type,
        fingerprint="",
        dtype=DType.FLOAT32,
        geometry=tower.geometry,
        preprocessing=checkpoint.preprocessing(),
        ladder=Ladder(),
        dropped={},
        limits=Limits(1, 1, 1, 1, 1),
        graphs="off",
        attention="sdpa",
        device="cpu",
        version="0",
    )
    return Model.from_message(model_message(card))
