"""Clips in chat completions: the openai client, `vitwire router`, a real server and a stand-in engine."""

import base64
from typing import Any

import numpy as np
import openai
import pytest

from checkpoints import Checkpoints
from encoded_files import clip, cut, moving, photograph, saved, sound
from entered import entered
from routers import EngineProcess, RouterProcess, client_of, decoded, leaving, router, serving_file
from servers import ServerProcess, serving
from vitwire import Client, Embedding, Item
from waiting import until

MP4 = clip(moving(30), 10.0)
WEBM = clip(moving(20, 64, 96), 5.0, "webm", "libvpx-vp9")
FLAGS = ("--cache-bytes", "100000000", "--dtype", "float32")
Json = dict[str, Any]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag by which routers give contents the same ids."""
    file = tmp_path_factory.mktemp("keys") / "content"
    file.write_text("0123456789abcdef" * 4)
    return f"--content-key-file={file}"


server = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), *FLAGS))
inline = entered(lambda server, stand_in, key: router(server.target, stand_in.url, key))
reference = entered(lambda server, stand_in, key: router(server.target, stand_in.url, "--mode=reference", key))


def data_uri(file: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64," + base64.b64encode(file).decode()


def part(url: str, **fields: Any) -> Json:
    return {"type": "video_url", "video_url": {"url": url}} | fields


def image(file: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": data_uri(file, "image/jpeg")}}


def asked(proxy: RouterProcess, *parts: Json, model: str = "tiny", **body: Any) -> str:
    """The engine's answer to a question about these parts."""
    text = {"type": "text", "text": "What happens here?"}
    messages: list[Any] = [{"role": "user", "content": [*parts, text]}]
    with client_of(proxy) as llm:
        answer = llm.chat.completions.create(model=model, messages=messages, extra_body=body)
    return answer.choices[0].message.content or ""


def parts_of(engine: EngineProcess) -> list[Json]:
    """The parts of the last request."""
    found: list[Json] = engine.requests()[-1]["body"]["messages"][0]["content"]
    return found


def encoded(server: ServerProcess, *files: bytes) -> list[Embedding]:
    with Client(server.target) as client:
        return client.encode([Item(encoded=file, modality="video") for file in files])


def refusal(proxy: RouterProcess, *parts: Json, **body: Any) -> tuple[int, str | None, str | None, str]:
    """Status, code, param and message of the error."""
    with pytest.raises(openai.APIStatusError) as caught:
        asked(proxy, *parts, **body)
    return caught.value.status_code, caught.value.code, caught.value.param, caught.value.message


def test_clips_become_embeddings_with_their_times(
    inline: RouterProcess, stand_in: EngineProcess, server: ServerProcess
) -> None:
    photo = saved(photograph(96, 64))
    assert asked(inline, part(data_uri(MP4)), image(photo), part(data_uri(WEBM, "video/webm"), cache_control=1))
    found = parts_of(stand_in)
    assert [each["type"] for each in found] == ["video_embeds", "image_embeds", "video_embeds", "text"]
    assert found[2]["cache_control"] == 1
    with Client(server.target) as client:
        model = client.model()
    for sent, expected in zip((found[0], found[2]), encoded(server, MP4, WEBM), strict=True):
        fields = sent["video_embeds"]
        rows = decoded(fields["video_embeds"])
        np.testing.assert_allclose(rows.float().numpy(), expected.numpy(), rtol=0, atol=1e-5)
        assert decoded(fields["video_grid_thw"]).tolist() == list(expected.grid)
        seconds = model.group_seconds(expected.report.frame_seconds)
        assert decoded(fields["timestamps"]).tolist() == seconds
        assert len(seconds) == expected.grid[0] > 1
    assert found[0]["uuid"] != found[2]["uuid"]
    assert asked(inline, image(saved(photograph(6336, 9504)))), "61 megapixels"


def test_references_are_fetched_under_the_id_of_the_clip(
    reference: RouterProcess, inline: RouterProcess, stand_in: EngineProcess, server: ServerProcess
) -> None:
    file = clip(moving(24), 8.0)
    (expected,) = encoded(server, file)
    for expected_hits in (0, 1):
        hits = server.metric("vitwire_cache_hits_total")
        assert asked(reference, part(data_uri(file)), model=f"rows-from-{server.target}")
        (sent, _) = parts_of(stand_in)
        assert sent["type"] == "video_embeds"
        assert sent["video_embeds"]["video_grid_thw"] == list(expected.grid)
        assert sent["video_embeds"].keys() == {"video_grid_thw", "timestamps"}
        assert len(sent["video_embeds"]["timestamps"]) == expected.grid[0]
        assert server.metric("vitwire_cache_hits_total") >= hits + expected_hits
    with Client(server.target) as client:
        (rows,) = client.encode([Item(content_id=sent["uuid"], modality="video")])
    np.testing.assert_allclose(rows.numpy(), expected.numpy(), rtol=0, atol=1e-5)
    assert asked(inline, part(data_uri(file)))
    assert parts_of(stand_in)[0]["uuid"] == sent["uuid"], "of the content, whatever the mode"


@pytest.mark.parametrize("mode", ["inline", "reference"])
def test_what_is_no_clip_is_refused_and_others_are_served(
    mode: str, request: pytest.FixtureRequest, stand_in: EngineProcess
) -> None:
    proxy: RouterProcess = request.getfixturevalue(mode)
    stand_in.requests()
    photo = saved(photograph(96, 64))
    for content, reason in (
        (photo, "neither an MP4, WebM, AVI nor MPEG-TS file"),
        (b"\0\0\0\x18ftypmp42" + bytes(1000), ""),
        (MP4[: len(MP4) // 2], ""),
        (sound(), "has no video"),
    ):
        status, code, param, message = refusal(proxy, part(data_uri(content)))
        assert (status, code, param) == (400, "invalid_clip", "messages[0].content[0].video_url")
        assert reason in message
    status, code, param, _ = refusal(proxy, image(MP4))
    assert (status, code, param) == (400, "invalid_image", "messages[0].content[0].image_url")
    assert stand_in.requests() == []
    assert asked(proxy, part(data_uri(MP4)))


def test_urls_and_options_are_refused(inline: RouterProcess, stand_in: EngineProcess) -> None:
    stand_in.requests()
    where = "messages[0].content[0].video_url"
    for url, code in (
        ("http://127.0.0.1:1/clip.mp4", "clip_url_refused"),
        ("file:///etc/passwd", "clip_url_refused"),
        ("upload:nothing", "clip_url_refused"),
        ("data:video/mp4,abc", "invalid_clip_url"),
        ("data:video/mp4;base64,%%%", "invalid_base64"),
    ):
        assert refusal(inline, part(url))[:3] == (400, code, where)
    assert refusal(inline, part(data_uri(MP4)), mm_processor_kwargs={"fps": 1})[:3] == (
        400, "unsupported_option", "mm_processor_kwargs",
    )  # fmt: skip
    assert stand_in.requests() == []
    assert inline.metric('vitwire_router_clips_total{result="refused",source="url"}') == 3


def test_clips_of_allowed_hosts_are_fetched(server: ServerProcess, stand_in: EngineProcess) -> None:
    with serving_file(MP4) as site:
        host = f"127.0.0.1:{site}"
        flags = (f"--allow-image-host={host}", "--allow-image-network=127.0.0.0/8", f"--max-image-bytes={len(MP4)}")
        with router(server.target, stand_in.url, *flags) as proxy:
            assert asked(proxy, part(f"http://{host}/clip.mp4"))
            assert parts_of(stand_in)[0]["type"] == "video_embeds"
            assert refusal(proxy, part(f"http://{host}/away"))[1] == "clip_url_refused"
            assert refusal(proxy, part(data_uri(MP4 + b"x")))[1] == "clip_too_large"
        with router(server.target, stand_in.url, *flags[:1]) as proxy:
            status, code, _, message = refusal(proxy, part(f"http://{host}/clip.mp4"))
            assert (status, code) == (400, "clip_url_refused")
            assert "no public address" in message


def test_odd_clips_are_encoded(inline: RouterProcess, stand_in: EngineProcess) -> None:
    """Without its first keyframe, and of an odd number of frames."""
    headless = cut(clip(moving(30), 10.0, options={"g": "5"}), 1)
    assert asked(inline, part(data_uri(headless)), part(data_uri(clip(moving(3), 10.0))))
    for sent in parts_of(stand_in)[:2]:
        fields = sent["video_embeds"]
        assert len(decoded(fields["timestamps"])) == decoded(fields["video_grid_thw"]).tolist()[0]


@pytest.mark.parametrize("stream", [False, True])
def test_frames_that_cannot_be_decoded_are_noticed_late(
    reference: RouterProcess, server: ServerProcess, stand_in: EngineProcess, stream: bool
) -> None:
    """The encoder accepts the clip by its index, and the engine already has the request."""
    broken = bytearray(clip(moving(40, 128, 160), 10.0))
    start = broken.index(b"mdat") + 900
    broken[start : start + 12000] = np.random.default_rng(1).bytes(12000)
    stand_in.requests()
    status, code, param, _ = refusal(
        reference, part(data_uri(bytes(broken))), model=f"rows-from-{server.target}", stream=stream
    )
    assert (status, code, param) == (400, "invalid_clip", "messages[0].content[0].video_url")
    assert len(stand_in.requests()) == 1
    assert server.metric("vitwire_decode_failures_total") > 0


def test_a_clip_in_many_places_is_encoded_once(
    inline: RouterProcess, stand_in: EngineProcess, server: ServerProcess
) -> None:
    uri = data_uri(clip(moving(9), 6.0))
    items = server.metric("vitwire_items_total")
    assert asked(inline, *[part(uri)] * 20)
    assert server.metric("vitwire_items_total") == items + 1
    sent = parts_of(stand_in)
    assert [each["type"] for each in sent] == ["video_embeds"] * 20 + ["text"]
    assert all(each == sent[0] for each in sent[:20])


def test_a_caller_that_leaves_cancels_its_clip(reference: RouterProcess, server: ServerProcess) -> None:
    for number in range(4):
        body = {"model": "tiny", "messages": [{"role": "user", "content": [part(data_uri(clip(moving(60 + number))))]}]}
        leaving(reference, body).close()
    until(lambda: reference.metric("vitwire_router_buffered_bytes") == 0)
    until(lambda: server.metric("vitwire_admitted_bytes") == 0)
    assert asked(reference, part(data_uri(MP4)))


def test_clips_can_be_left_to_the_engine(server: ServerProcess, stand_in: EngineProcess) -> None:
    with router(server.target, stand_in.url, "--clips=engine") as proxy:
        sent = part("https://example.com/clip.mp4", uuid="u")
        assert asked(proxy, sent, image(saved(photograph(96, 64))), mm_processor_kwargs={"fps": 1})
    assert [each["type"] for each in parts_of(stand_in)][1:] == ["image_embeds", "text"]


def test_the_engine_encodes_clips_if_the_encoder_is_gone(stand_in: EngineProcess) -> None:
    with router("127.0.0.1:1", stand_in.url, "--on-encoder-failure=engine", "--encoder-retries=0") as proxy:
        assert asked(proxy, part(data_uri(WEBM, "video/mp4")))
        assert parts_of(stand_in)[0] == part(data_uri(WEBM, "video/webm")), "by its content"
        assert refusal(proxy, part(data_uri(b"nonsense")))[1] == "invalid_clip"


def test_models_and_servers_without_clips_are_named(checkpoints: Checkpoints, stand_in: EngineProcess) -> None:
    for kind, flags, code, reason in (
        ("internvl", (), "unsupported_model", "send frames as images"),
        ("qwen3_vl", ("--decode-processes", "0"), "encoder_without_decoders", "prepares no clips"),
    ):
        with serving(checkpoints(kind), *flags) as process, router(process.target, stand_in.url) as proxy:
            status, found, _, message = refusal(proxy, part(data_uri(MP4)))
            assert (status, found) == (502, code)
            assert reason in message
