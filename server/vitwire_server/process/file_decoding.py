"""Preparation in a server process: decoders, and the files and pictures it offers to prepare."""

import asyncio
import logging
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec

import msgspec

from vitwire_children.jobs import Program, done_by
from vitwire_children.serving import NotDone
from vitwire_server.config.host import decode_processes
from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Encoding, ModelCard, NotOnDevice, Place, Preparation
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.preparing.files.decoders import FILMS, HARDWARE, OF_HARDWARE
from vitwire_server.preparing.files.messages import Setup, Sizes
from vitwire_server.preparing.files.pool import DecodePool
from vitwire_server.preparing.rules.recipe import Recipe, recipes_of
from vitwire_server.rpc.file_items import MAX_PICTURE_BYTES, Decoding, picture_bytes
from vitwire_server.scheduling.admission import Admission

_log = logging.getLogger(__name__)
_CLIPS = (Encoding.MP4, Encoding.WEBM, Encoding.AVI, Encoding.MPEG_TS)
_ALWAYS = tuple(each for each in Encoding if each not in (*_CLIPS, Encoding.AVIF))
_BYTES_PER_PIXEL = 32
"""Memory of Pillow for the largest images: coefficients of progressive JPEGs, and copies in other modes."""
_BASE_BYTES = 512 << 20
_COPIES = 3
"""Copies of a file and of the prepared pixels in a decoder."""
_CHECK_SECONDS = 120.0
_STEPS = 1
"""Version of the steps from a file to pixels that no setting names: counted up when files get other pixels."""


async def decoded_on(settings: ServeSettings, module: str, what: str) -> Preparation:
    """Choose where these files are decoded. A child process compares drawn ones on the device with the CPU's."""
    if not _may_use_device(settings):
        return Preparation(Place.CPU, NotOnDevice.ASKED if settings.decode == "cpu" else NotOnDevice.NO_DEVICE)
    program = Program(module, ("check", settings.device), OF_HARDWARE, stderr=DEVNULL)
    try:
        fault = await done_by(program, None, wall=_CHECK_SECONDS)
    except NotDone as error:
        fault = f"the check failed: {error}"
    if fault:
        _log.warning("%s are decoded on the CPU, which is slower: %s", what, fault)
        return Preparation(Place.CPU, NotOnDevice.UNVERIFIED, fault)
    return Preparation(Place.DEVICE, None)


async def all_decoded_on(settings: ServeSettings) -> tuple[Preparation, Preparation]:
    """Where JPEG files and clips are decoded."""
    jpegs = decoded_on(settings, HARDWARE, "JPEG files")
    needed = ("av",) if settings.device == "cpu" else ("av", "PyNvVideoCodec")
    if _may_use_device(settings) and (missing := [name for name in needed if not find_spec(name)]):
        fault = f"{missing[0]} is not installed: install the extra nvdec"
        return await jpegs, Preparation(Place.CPU, NotOnDevice.UNVERIFIED, fault)
    return await asyncio.gather(jpegs, decoded_on(settings, FILMS, "clips"))


def described(card: ModelCard, settings: ServeSettings) -> ModelCard:
    """The card with what is prepared, by the settings, the model and the installed libraries."""
    recipes = recipes_of(card.preprocessing, card.geometry)
    if not recipes or not _processes(settings):
        return card
    images = (*_ALWAYS, Encoding.AVIF) if find_spec("PIL._avif") else _ALWAYS
    encodings = images if Modality.IMAGE in recipes else ()
    clips = recipes.get(Modality.VIDEO)
    if clips and clips.settings.sampling and find_spec("av"):
        encodings += _CLIPS
    limits = replace(card.limits, encoded_bytes=settings.max_encoded_bytes, encoded_pixels=settings.max_image_pixels)
    fingerprint = _fingerprint(recipes, card.decoding, clips=Encoding.MP4 in encodings)
    card = replace(card, prepared=tuple(recipes), preparation_fingerprint=fingerprint)
    return replace(card, limits=limits, encodings=encodings)


def started(settings: ServeSettings, metrics: RpcMetrics, processes: int) -> DecodePool | None:
    """Decoders of one of `processes` that serve RPCs; None if there are to be none. Called on the event loop."""
    count = _processes(settings)
    if not count:
        return None
    modules = []
    if _may_use_device(settings):
        modules += [HARDWARE] if find_spec("nvidia") and find_spec("nvidia.nvimgcodec") else []
        modules += [FILMS] if find_spec("av") and (settings.device == "cpu" or find_spec("PyNvVideoCodec")) else []
    return DecodePool(max(1, count // processes), metrics, settings.device, modules)


def decoding(
    settings: ServeSettings, card: ModelCard, metrics: RpcMetrics, processes: int, pool: DecodePool | None
) -> Decoding | None:
    """The pool, set up; None if the card offers nothing."""
    if not pool or not card.prepared:
        return None
    geometry = card.geometry
    on_device = MAX_PICTURE_BYTES if card.preparation.place is Place.DEVICE else 0
    output = max(card.limits.patches_per_item * geometry.columns(frames=geometry.temporal), on_device)
    input_bytes = max(settings.max_encoded_bytes, picture_bytes(card.limits))
    sizes = Sizes(
        input_bytes=input_bytes,
        output_bytes=output,
        pixels=settings.max_image_pixels,
        seconds=settings.decode_seconds,
        memory=_BASE_BYTES
        + settings.max_image_pixels * _BYTES_PER_PIXEL
        + _COPIES * (settings.max_encoded_bytes + output),
    )
    recipes = dict(recipes_of(card.preprocessing, card.geometry))
    setup = Setup(recipes, sizes, clips=Encoding.MP4 in card.encodings)
    places = {HARDWARE: card.decoding.place, FILMS: card.clip_decoding.place if setup.clips else Place.CPU}
    pool.set_up(setup, [module for module, place in places.items() if place is Place.DEVICE])
    waiting = Admission(settings.max_queued_items, settings.max_queued_bytes // processes)
    return Decoding(pool, waiting, card.preparation, metrics)


def _fingerprint(recipes: Mapping[Modality, Recipe], jpegs: Preparation, *, clips: bool) -> str:
    names = ["pillow"] + ["av"] * clips + ["nvidia-nvimgcodec-cu13"] * (jpegs.place is Place.DEVICE)
    libraries = {name: version(name) for name in names}
    return sha256(msgspec.json.encode((_STEPS, libraries, recipes), order="sorted")).hexdigest()


def _may_use_device(settings: ServeSettings) -> bool:
    chosen = settings.decode == "device" or (settings.decode == "auto" and settings.device != "cpu")
    return chosen and _processes(settings) > 0


def _processes(settings: ServeSettings) -> int:
    """Decoders per device."""
    return decode_processes(settings.decode_process_count, devices=len(settings.device_list))
