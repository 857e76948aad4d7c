"""Units of H.264 (ITU-T H.264, 7.3) and HEVC (H.265, 7.3) in MP4's form: lengths of four bytes in front.

NVDEC reserves memory by what a stream says of itself, not by what the file says, so both are compared here.
"""

from typing import NamedTuple

from vitwire_children.serving import Fault, NotDone

_START = b"\0\0\1"
"""Begins a unit in the form that NVDEC reads; no unit may contain it."""
_SEQUENCES = {"h264": (7, 15), "hevc": (33,)}
"""nal_unit_type of sequence parameter sets; the second of H.264 is for several views."""
_STARTS = {"h264": (5,), "hevc": range(16, 22)}
"""IDR pictures of H.264, and random access points of HEVC, in which a decoder can start."""
_SLICES = {"h264": range(1, 6), "hevc": range(32)}
_SLICE_AT = {"h264": 1, "hevc": 2}
"""The byte whose first bit says that a slice is the first of its frame."""
_HIGH = (44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244)
"""Profiles of H.264 whose sequence parameter sets say more of their samples."""
_HEAD = 12
"""Bytes of a slice that hold its number, whatever is in front of it."""
_UNITS, _UNIT_BYTES = 32, 64
"""Units that a frame may have, and bytes for each further one: to read one takes a microsecond."""
_PROFILE_AND_LEVEL = 96
"""Bits in HEVC, for a stream of one temporal layer."""


class _Bits:
    def __init__(self, unit: bytes) -> None:
        self._rest = "".join(f"{byte:08b}" for byte in unit.replace(b"\0\0\3", b"\0\0"))

    def take(self, count: int) -> int:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return int(taken, 2)

    def number(self) -> int:
        """Exp-Golomb coded: ue(v)."""
        zeros = self._rest.index("1")
        return self.take(2 * zeros + 1) - 1


class Coding(NamedTuple):
    """What a sequence parameter set says."""

    width: int
    height: int
    """With what is cropped, for which NVDEC reserves memory."""
    number_bits: int
    """Length of `frame_num` in H.264; 0 in HEVC."""


class Frame(NamedTuple):
    """What the units of a frame say."""

    starts: bool
    """Whether a decoder can start there, by the frame and not by the file, so that it shows nothing of another clip."""
    is_unneeded: bool
    """Whether it is an H.264 frame that no other refers to: `nal_ref_idc` is 0 (7.4.1)."""
    number: int
    """`frame_num` of H.264 (7.4.3), which counts frames that others refer to."""


def frame_of(codec: str, packet: bytes, sequence: bytes, number_bits: int) -> Frame:
    """Raises NotDone unless it is one frame, with no other sequence parameter set than the file's."""
    starts, is_unneeded = True, codec == "h264"
    firsts, end, left = [], 0, _UNITS + len(packet) // _UNIT_BYTES
    while end + 4 < len(packet):
        left -= 1
        if not left:
            raise NotDone(Fault.LOST, "it is in too small parts")
        begin = end + 4
        end = begin + int.from_bytes(packet[end:begin], "big")
        if begin == end:
            continue
        unit = packet[begin:end]
        kind = _kind(codec, unit)
        other = kind in _SEQUENCES[codec] and unit != sequence
        if other or _START in unit:
            raise NotDone(Fault.LOST, "its frames bring other settings than the file")
        if kind in _SLICES[codec]:
            starts, is_unneeded = starts and kind in _STARTS[codec], is_unneeded and not unit[0] >> 5 & 3
            if unit[_SLICE_AT[codec] :][:1] >= b"\x80":
                firsts.append(unit)
    if len(firsts) != 1:
        raise NotDone(Fault.LOST, "a part of it is not one frame")
    return Frame(starts, is_unneeded, _number(firsts[0], number_bits) if number_bits else 0)


def _number(unit: bytes, length: int) -> int:
    bits = _Bits(unit[1:_HEAD])
    for _ in ("first_mb_in_slice", "slice_type", "pic_parameter_set_id"):
        bits.number()
    return bits.take(length)


def _kind(codec: str, unit: bytes) -> int:
    """Its nal_unit_type."""
    return unit[0] & 31 if codec == "h264" else unit[0] >> 1 & 63


def sequence_of(codec: str, settings: bytes) -> bytes:
    """The sequence parameter set of a track's settings (ISO/IEC 14496-15). Raises NotDone unless it is the only one.

    The units say what they are: any list of units may hold any.
    """
    units: list[bytes] = []
    at, head, lists = (23, 3, len(settings)) if codec == "hevc" else (5, 1, 2)
    while lists and at + head <= len(settings):
        count = int.from_bytes(settings[at + head // 2 : at + head], "big") & (31 if at == 5 else -1)
        at, lists = at + head, lists - 1
        for _ in range(count):
            end = at + 2 + int.from_bytes(settings[at : at + 2], "big")
            units.append(settings[at + 2 : end])
            at = end
    found = [unit for unit in units if unit and _kind(codec, unit) in _SEQUENCES[codec]]
    if len(found) != 1 or _START in settings:
        raise NotDone(Fault.LOST, "it has not one sequence parameter set")
    return found[0]


def coding_of(codec: str, sequence: bytes) -> Coding:
    """Raises NotDone for what NVDEC does not decode as libavcodec does, or ValueError."""
    bits = _Bits(sequence)
    if codec == "hevc":
        bits.take(16 + 4)
        layers = bits.take(3)
        bits.take(1 + _PROFILE_AND_LEVEL)
        bits.number()
        if layers or bits.number() != 1:
            raise NotDone(Fault.LOST, "it has layers, or is not 4:2:0")
        width, height = bits.number(), bits.number()
        _refuse_moved(bits)
        return Coding(width, height, 0)
    bits.take(8)
    profile = bits.take(8)
    bits.take(16)
    bits.number()
    if profile in _HIGH and (bits.number() != 1 or bits.number() or bits.number() or bits.take(2)):
        raise NotDone(Fault.LOST, "it is not 4:2:0 of 8 bits, or has scaling matrices")
    number_bits = bits.number() + 4
    order = bits.number()
    if order == 1:
        raise NotDone(Fault.LOST, "the order of its frames is coded in a rare way")
    if order == 0:
        bits.number()
    bits.number()
    bits.take(1)
    width, height = bits.number() + 1, bits.number() + 1
    if not bits.take(1):
        raise NotDone(Fault.LOST, "its frames may be interlaced, and NVDEC would mix fields")
    bits.take(1)
    _refuse_moved(bits)
    return Coding(16 * width, 16 * height, number_bits)


def _refuse_moved(bits: _Bits) -> None:
    """Raises NotDone if what is shown begins elsewhere than what is coded, from where NVDEC's frames may be copied."""
    if bits.take(1):
        left, _, top = bits.number(), bits.number(), bits.number()
        if left or top:
            raise NotDone(Fault.LOST, "its frames are cropped on the left or above")
