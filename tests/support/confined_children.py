"""Run as a program by any user: a server's children that read strangers' bytes try acts, and then do their work.

Arguments are a folder, and which children: `decoder`, `worker` of the gateway, `device:NAME` or `clips:NAME`. Writes
JSON: by child, what came of the acts, the lines of its status, and the files that it decoded afterwards.
"""

import asyncio
import json
import os
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

import acts
from acting_decoder import ACT, WIDE
from prepared import MODELS
from vitwire_children.confine import be_private
from vitwire_children.serving import NotDone
from vitwire_server.core.items import Modality
from vitwire_server.preparing.files import decoders
from vitwire_server.preparing.files.decoders import Decoder
from vitwire_server.preparing.files.messages import Decode, Decoded, Measure, Measured, Setup, Sizes
from vitwire_server.preparing.rules.forms import form_of

CODECS = {
    "libx264": "mp4",
    "libx265": "mp4",
    "mpeg4": "mp4",
    "libsvtav1": "mp4",
    "libvpx": "webm",
    "libvpx-vp9": "webm",
}
WIDTHS = (600, 2000, 7000, 600)
"""Of pictures for a device, which needs more memory for larger ones."""
IMAGES = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
RECIPES = MODELS["patches"]
_KEPT = ("NoNewPrivs", "Seccomp", "CapEff", "CapPrm", "Uid")
_SIZES = Sizes(input_bytes=32 << 20, output_bytes=64 << 20, pixels=1 << 26, seconds=60.0, memory=2 << 30)


def status(pid: int) -> dict[str, str]:
    """Of a process, by the kernel."""
    lines = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return {name: lines[name].strip() for name in _KEPT} | {
        "oom_score_adj": Path(f"/proc/{pid}/oom_score_adj").read_text().strip(),
        "owner": str(Path(f"/proc/{pid}/mem").stat().st_uid),
    }


async def started(device: str = "", module: str = "") -> Decoder:
    ready: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
    ready.set_result(Setup(dict(RECIPES), _SIZES, clips=not device))
    return await Decoder.begin(ready, device, module or (decoders.HARDWARE if device else decoders._WORKER))


async def answered(of: Decoder, data: bytes, message: Measure | Decode) -> object:
    await of.write(data)
    try:
        made = of.do(message, 120, Measured) if isinstance(message, Measure) else of.do(message, 120, Decoded)
        return await made
    except NotDone as error:
        return str(error)


async def decoded(of: Decoder, data: bytes, modality: Modality) -> bool:
    """Whether a file has pixels, by the decoder on the CPU."""
    found = await answered(of, data, Measure(len(data), modality, 60.0))
    assert isinstance(found, Measured), found
    nbytes = int(np.prod(found.pixels))
    return isinstance(await answered(of, data, Decode(len(data), modality, 60.0, nbytes)), Decoded)


async def on_cpu() -> dict[str, object]:
    from encoded_files import clip, moving, photograph, saved  # noqa: PLC0415 - not installed beside a GPU

    of = await started()
    found = json.loads(str(await answered(of, ACT, Measure(len(ACT), Modality.IMAGE, 60.0))))
    images = [kind for kind in IMAGES if await decoded(of, saved(photograph(), kind), Modality.IMAGE)]
    clips = []
    for codec, kind in CODECS.items():
        if await decoded(of, clip(moving(20), 15.0, kind, codec), Modality.VIDEO):
            clips.append(codec)
    done: dict[str, object] = {"acts": found, "status": status(of.process.pid), "decoded": images + clips}
    await of.close()
    return done


def drawn(width: int, orientation: int = 1) -> bytes:
    """A JPEG file of two thirds of the height."""
    noise = np.random.default_rng(width).integers(0, 256, (width // 30, width // 20, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    with BytesIO() as file:
        Image.fromarray(noise).resize((width, width * 2 // 3)).save(file, "JPEG", exif=exif)
        return file.getvalue()


async def on_device(device: str) -> dict[str, object]:
    of = await started(device)
    wide = drawn(WIDE)
    found = json.loads(str(await answered(of, wide, Decode(len(wide), Modality.IMAGE, 60.0, 1))))
    done: dict[str, object] = {"acts": found, "status": status(of.process.pid)}
    made = []
    for number, width in enumerate(WIDTHS):
        data, sides = drawn(width, 1 + 5 * (number % 2)), (width * 2 // 3, width)
        form = form_of((*(reversed(sides) if number % 2 else sides), 3), RECIPES[Modality.IMAGE])
        job = Decode(len(data), Modality.IMAGE, 60.0, int(np.prod(form.pixels)), orientation=1 + 5 * (number % 2))
        answer = await answered(of, data, job)
        made.append("" if isinstance(answer, Decoded) else str(answer))
    await of.close()
    return done | {"decoded": made}


async def clips_on_device(device: str) -> dict[str, object]:
    from vitwire_server.preparing.device import films  # noqa: PLC0415 - needs PyAV
    from vitwire_server.preparing.files import clips  # noqa: PLC0415 - as above

    def job(data: bytes) -> Decode:
        found = clips.measure(data, RECIPES[Modality.VIDEO], _SIZES.pixels)
        return Decode(len(data), Modality.VIDEO, 60.0, int(np.prod(found.pixels)), film=found.film)

    of = await started(device, decoders.FILMS)
    (high, *_), files = films.drawn(64, WIDE), films.drawn()
    found = json.loads(str(await answered(of, high, job(high))))
    done: dict[str, object] = {"acts": found, "status": status(of.process.pid)}
    made = []
    for data in files:
        answer = await answered(of, data, job(data))
        made.append("" if isinstance(answer, Decoded) else str(answer))
    await of.close()
    return done | {"decoded": made}


async def in_worker() -> dict[str, object]:
    from acting_jobs import acted, header_of  # noqa: PLC0415 - not installed beside a GPU
    from encoded_files import photograph, saved  # noqa: PLC0415 - as above
    from vitwire_gateway.callers import Caller  # noqa: PLC0415 - as above
    from vitwire_gateway.workers import Workers  # noqa: PLC0415 - as above

    workers = Workers("acting_jobs", 512 << 20)
    caller = Caller.of("a")
    try:
        found = json.loads(await workers.run(caller, acted, b"", 0))
        (worker,) = workers._pool._idle
        kinds = [(await workers.run(caller, header_of, saved(photograph(), kind), 0, 1 << 24))[0] for kind in IMAGES]
        assert workers._pool._idle == [worker]
        return {"acts": found, "status": status(worker.process.pid), "decoded": kinds}
    finally:
        await workers.close()


async def main(folder: Path, *children: str) -> None:
    acts.prepared(folder)
    os.environ["HOME"] = str(folder)
    decoders._WORKER = decoders.HARDWARE = "acting_decoder"
    decoders.FILMS = "acting_films"
    be_private()
    found: dict[str, object] = {}
    for name in children:
        kind, _, device = name.partition(":")
        on = {"device": on_device, "clips": clips_on_device}.get(kind)
        found[kind] = await (on(device) if on else in_worker() if kind == "worker" else on_cpu())
    files = {name: (folder / name).read_text() for name in (acts.TOKEN, acts.OPEN_TO_ALL)}
    print(json.dumps(found | {"files": files, "names": sorted(os.listdir(folder))}))  # noqa: PTH208


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
