"""The programs of examples/python, each in a process of its own against a real server."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from checkpoints import Checkpoints
from engine import WORDS
from entered import entered
from routers import engine, router
from servers import ServerProcess, finished, serving
from vitwire import Client, Item
from vlms import language_model

FOLDER = Path(__file__).parents[2] / "examples" / "python"
PROGRAMS = {path.name for path in FOLDER.glob("*.py")}
DATA = Path(skimage.__file__).parent / "data"
TOKENS, IMAGE = 512, 500
"""Size of the vocabulary of the tiny LLaVA, and the id of its placeholder."""
FLAGS = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "1024", "--cache-bytes", "100000000")
TEMPLATE = "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else '<image> ' }}{% endfor %}"

server = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), *FLAGS))


def ran(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A run of an example."""
    assert program in PROGRAMS
    return finished(*arguments, program=(str(FOLDER / program),))


def printed(program: str, *arguments: str | Path) -> list[str]:
    """The lines that an example prints."""
    process = ran(program, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.fixture
def photograph(tmp_path: Path) -> Path:
    return Path(shutil.copy(DATA / "rocket.jpg", tmp_path / "rocket.jpg"))


def test_photographs_become_arrays(server: ServerProcess, photograph: Path) -> None:
    model, line = printed("encode_photographs.py", server.target, photograph)
    assert model.startswith("tiny-qwen3_vl: vectors of ")
    with Client(server.target) as client:
        (expected,) = client.encode_images([photograph])
    assert line == f"{photograph}: {expected.shape[0]} tokens, grid {expected.grid}"
    np.testing.assert_array_equal(np.load(photograph.with_suffix(".npy")), expected.numpy())


def test_a_file_that_is_no_photograph_is_named(server: ServerProcess, photograph: Path) -> None:
    photograph.write_text("no photograph")
    process = ran("encode_photographs.py", server.target, photograph)
    assert process.returncode == 1
    assert process.stderr.startswith(f"{photograph}: ")
    assert "Traceback" not in process.stderr


def test_a_folder_is_encoded_but_for_the_file_that_fails(server: ServerProcess, photograph: Path) -> None:
    (photograph.parent / "notes.txt").write_text("no photograph")
    shutil.copy(DATA / "coffee.png", photograph.parent)
    process = ran("async_batches.py", server.target, photograph.parent)
    assert process.returncode == 1, process.stderr
    lines = dict(line.split(": ", 1) for line in process.stdout.splitlines())
    assert lines.keys() == {"rocket.jpg", "coffee.png", "notes.txt"}
    assert {name for name, text in lines.items() if re.fullmatch(r"\d+ tokens", text)} == {"rocket.jpg", "coffee.png"}


def test_equal_files_are_encoded_once(server: ServerProcess, photograph: Path) -> None:
    photograph.write_bytes(photograph.read_bytes() + b"\0")  # content that no other test has sent
    first, second = printed("cached_embeddings.py", server.target, photograph, photograph)
    assert first.endswith((", graph", ", eager"))
    assert second.endswith(", cache")
    with Client(server.target) as client:
        digest = hashlib.sha256(photograph.read_bytes()).hexdigest()
        (embedding,) = client.encode_cached([Item(content_id=digest)])
    assert embedding.report.path == "cache"


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with a processor of text as well, which checkpoints of the demo lack."""
    folder = Path(shutil.copytree(checkpoints("llava"), tmp_path_factory.mktemp("llava") / "checkpoint"))
    words = {"<image>" if number == IMAGE else f"word{number}": number for number in range(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = AutoConfig.from_pretrained(folder, dtype="float32")  # tokens are compared
    config.save_pretrained(folder)
    LlavaProcessor(
        image_processor=AutoImageProcessor.from_pretrained(folder),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="word1", additional_special_tokens=["<image>"]
        ),
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def test_transformers_generates_the_tokens_of_the_local_tower(checkpoint: Path, photograph: Path) -> None:
    processor = LlavaProcessor.from_pretrained(checkpoint)
    content = [{"type": "image", "path": str(photograph)}, {"type": "text", "text": "word7 word8"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        tokens = language_model("llava", checkpoint).generate(**inputs, max_new_tokens=32, do_sample=False)
    answer = processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer
    with serving(checkpoint, "--dtype", "float32") as server:
        assert printed("generate.py", server.target, checkpoint, photograph, "word7 word8") == [answer]
        assert server.metric("vitwire_requests_total", code="OK", method="Encode") == 1


def test_the_openai_client_streams_an_answer_through_the_router(server: ServerProcess, photograph: Path) -> None:
    with engine() as stand_in, router(server.target, stand_in.url) as proxy:
        lines = printed("ask_router.py", f"{proxy.url}/v1", "any", photograph, "What is this?")
        (request,) = stand_in.requests()
    assert lines == ["".join(WORDS)]
    assert "image_embeds" in str(request)


def test_a_photograph_is_found_by_a_smaller_copy(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "photographs"
    folder.mkdir()
    for file in (*DATA.glob("*.png"), *DATA.glob("*.jpg")):
        shutil.copy(file, folder)
    assert len(list(folder.iterdir())) > 16, "more than one request"
    (folder / "notes.txt").write_text("no photograph")
    (folder / "a broken one.jpg").write_bytes((DATA / "coffee.png").read_bytes()[:2000])
    with (
        serving(checkpoints("clip"), "--dtype", "float32", "--graphs", "simulated", "--pooling", "cls") as server,
        router(server.target, None) as proxy,
    ):
        for name in ("chelsea.png", "coffee.png"):
            query = tmp_path / "query.jpg"
            with Image.open(DATA / name) as opened:
                opened.convert("RGB").resize((opened.width // 2, opened.height // 2)).save(query)
            lines = printed("search_photographs.py", f"{proxy.url}/v1", folder, query)
            similarities = [float(line.split()[0]) for line in lines]
            assert (lines[0].split()[1], similarities) == (name, sorted(similarities, reverse=True))
            assert similarities[0] > similarities[1]


def test_every_example_is_described() -> None:
    described = set(re.findall(r"\]\((\w+\.py)\)", (FOLDER / "README.md").read_text(encoding="utf-8")))
    assert described == PROGRAMS
