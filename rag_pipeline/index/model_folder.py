"""Reads what a sentence-transformers folder says about its model, without loading it."""

import hashlib
import json
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_pipeline.errors import ModelUnavailableError

_TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_HIDDEN_SIZES = ("hidden_size", "d_model", "dim", "n_embd")
_CONTENT_ENDINGS = {".safetensors", ".bin", ".pt", ".json", ".txt", ".model", ".vocab", ".py", ".npy"}
_NO_CONTENT = {"SOURCE.json", "README.md"}
_OTHER_RUNTIMES = {"onnx", "openvino"}
_UNLIMITED_TOKENS = 100_000
"""Above this a tokenizer's ``model_max_length`` means that none was set."""
_DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What the folder's configuration says; see `rag_pipeline.index.models.ModelProfile`."""

    query_prompt: str
    document_prompt: str
    max_tokens: int
    dimension: int
    pooling: str
    normalize: bool


@dataclass(frozen=True, slots=True)
class _Module:
    kind: str
    path: str


def is_model_folder(folder: Path) -> bool:
    """Whether the folder has a model's configuration at its top."""
    return (folder / "modules.json").is_file() or (folder / "config.json").is_file()


def transformer_folder(folder: Path) -> Path:
    """Where the tokenizer and the transformer's configuration lie: the first module's folder."""
    return folder / _modules(folder)[0].path


def lowers_case(transformer: Path) -> bool:
    """Whether sentence-transformers lowers the text before the tokenizer sees it."""
    return bool(_transformer_config(transformer).get("do_lower_case", False))


def read_facts(folder: Path) -> FolderFacts:
    """Prompts, maximum length, dimension, pooling and normalisation by the folder's configuration files.

    Raises:
        ModelUnavailableError: It is no model folder, a file cannot be read, or the dimension cannot be told.
    """
    if not is_model_folder(folder):
        raise ModelUnavailableError(
            f"The folder {folder} holds no embedding model: it has neither modules.json nor config.json. Name the "
            "folder that SentenceTransformer.save_pretrained wrote."
        )
    modules = _modules(folder)
    settings = _read_object(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    pooling, dimension = _pooling_and_dimension(folder, modules)
    if truncated := settings.get("truncate_dim"):
        dimension = min(dimension, int(truncated))
    return FolderFacts(
        query_prompt=str(prompts.get("query") or ""),
        document_prompt=next((str(prompts[key]) for key in ("document", "passage", "corpus") if prompts.get(key)), ""),
        max_tokens=_max_tokens(folder / modules[0].path),
        dimension=dimension,
        pooling=pooling,
        normalize=any(module.kind == "Normalize" for module in modules),
    )


def content_digests(folder: Path, *, cache_dir: Path) -> dict[str, str]:
    """SHA-256 of each file that decides the model's vectors, by POSIX path inside the folder.

    A file is read again only when its size or modification time changed; the digests are remembered in ``cache_dir``,
    if that can be written.
    """
    memory = cache_dir / "fingerprints" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.json"
    known = _recall(memory)
    files: dict[str, tuple[int, int, str]] = {}
    for path in sorted(_content_files(folder)):
        name = path.relative_to(folder).as_posix()
        state = path.stat()
        before = known.get(name)
        if before is not None and before[:2] == (state.st_size, state.st_mtime_ns):
            files[name] = before
            continue
        with path.open("rb") as file:
            files[name] = (state.st_size, state.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest())
    if files != known:
        _remember(memory, {"folder": str(folder), "files": files})
    return {name: digest for name, (_, _, digest) in files.items()}


def _recall(memory: Path) -> dict[str, tuple[int, int, str]]:
    """Size, modification time in ns and digest by file; empty if there is no memory or it is damaged."""
    try:
        rows = json.loads(memory.read_text(encoding="utf-8"))["files"]
        return {str(name): (int(size), int(modified), str(digest)) for name, (size, modified, digest) in rows.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _remember(memory: Path, value: object) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=memory.parent, prefix=memory.name, suffix=".tmp", delete=False
        ) as file:
            json.dump(value, file, sort_keys=True)
        Path(file.name).replace(memory)
    except OSError:
        # Without the memory each start reads the weights once more; nothing else changes.
        return


def _content_files(folder: Path) -> Iterator[Path]:
    inner = {module.path for module in _modules(folder) if module.path}
    candidates = [*folder.iterdir(), *(path for name in inner for path in (folder / name).rglob("*"))]
    for path in candidates:
        relative = path.relative_to(folder)
        if (
            path.suffix in _CONTENT_ENDINGS
            and path.name not in _NO_CONTENT
            and not path.name.startswith(".")
            and not _OTHER_RUNTIMES.intersection(relative.parts)
            and path.is_file()
        ):
            yield path


def _modules(folder: Path) -> list[_Module]:
    path = folder / "modules.json"
    if not path.is_file():
        # sentence-transformers takes a plain transformers folder with mean pooling.
        return [_Module("Transformer", ""), _Module("Pooling", "")]
    rows = _read(path)
    try:
        modules = [_Module(str(row["type"]).rpartition(".")[2], str(row["path"])) for row in rows]
    except (LookupError, TypeError) as error:
        raise ModelUnavailableError(f"{path} is not a list of modules ({error!r}); the model is damaged.") from error
    if not modules:
        raise ModelUnavailableError(f"{path} lists no module; the model is damaged.")
    return modules


def _pooling_and_dimension(folder: Path, modules: list[_Module]) -> tuple[str, int]:
    pooling, dimension = "none", 0
    for module in modules:
        place = folder / module.path
        config = _read_object(place / "config.json")
        if module.kind in {"Transformer", "CLIPModel"}:
            inner = config.get("text_config") or {}
            sizes = [source[key] for source in (config, inner) for key in _HIDDEN_SIZES if source.get(key)]
            dimension = int(sizes[0]) if sizes else 0
        elif module.kind == "Pooling":
            modes = ["mean"]
            if module.path:
                chosen = config.get("pooling_mode") or [
                    mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)
                ]
                modes = [chosen] if isinstance(chosen, str) else list(chosen) or modes
                width = config.get("embedding_dimension") or config.get("word_embedding_dimension") or dimension
                dimension = int(width) * len(modes)
            pooling = "+".join(modes)
        elif module.kind == "StaticEmbedding":
            pooling, dimension = "mean", _static_dimension(place)
        elif config.get("out_features"):
            dimension = int(config["out_features"])
    if dimension <= 0:
        raise ModelUnavailableError(
            f"The folder {folder} does not say how long its vectors are (modules: "
            f"{', '.join(module.kind for module in modules)}). Choose a model of a transformer with pooling."
        )
    return pooling, dimension


def _static_dimension(place: Path) -> int:
    """Columns of the only matrix in a safetensors file, by its header."""
    try:
        with (place / "model.safetensors").open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 20)))
        return int(header["embedding.weight"]["shape"][1])
    except (OSError, ValueError, LookupError, TypeError, struct.error):
        return 0


def _max_tokens(transformer: Path) -> int:
    if explicit := _transformer_config(transformer).get("max_seq_length"):
        return int(explicit)
    config = _read_object(transformer / "config.json")
    config = config.get("text_config") or config
    limits = [
        int(value)
        for value in (
            _read_object(transformer / "tokenizer_config.json").get("model_max_length"),
            config.get("max_position_embeddings"),
        )
        if isinstance(value, int | float) and 0 < value < _UNLIMITED_TOKENS
    ]
    return min(limits, default=_DEFAULT_MAX_TOKENS)


def _transformer_config(transformer: Path) -> dict[str, Any]:
    for name in _TRANSFORMER_CONFIGS:
        if config := _read_object(transformer / name):
            return config
    return {}


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty when there is no such file."""
    if not path.is_file():
        return {}
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelUnavailableError(f"{path} is not a JSON object; the model is damaged.")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"{path} cannot be read ({error}); the model is damaged.") from error
