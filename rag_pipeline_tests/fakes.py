"""Stand-ins for the embedding model: a tiny random one with real files, and a deterministic one to rank by."""

import json
import re
import string
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rag_pipeline.index.embedding import Progress, Vectors, normalised
from rag_pipeline.index.models import ModelProfile, ResolvedModel, resolve_model

_WORDS = re.compile(r"[a-z0-9_]+|[\u3400-\u9fff]")


def build_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    dimension: int = 32,
    max_tokens: int = 64,
    query_prompt: str = "query: ",
    document_prompt: str = "passage: ",
    normalize: bool = True,
    poison: bool = False,
) -> Path:
    """Writes a one-layer random BERT (under 1 MB, about 0.1 s once torch is loaded) that sentence-transformers loads.

    Its tokenizer knows ASCII characters and common words of one piece; Chinese characters are unknown tokens, one each.

    Args:
        folder: Created; its path is returned.
        seed: Other seeds give other vectors.
        poison: Makes every vector NaN.
    """
    import safetensors.numpy
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    folder.mkdir(parents=True)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    characters = [c for c in string.printable if not c.isspace()]
    words = ["the", "pod", "node", "disk", "restart", "query", "passage", "error"]
    pieces = [*specials, *characters, *(f"##{c}" for c in characters), *words]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))

    random = np.random.default_rng(seed)
    wide = 2 * dimension
    weights = {
        "embeddings.word_embeddings.weight": random.normal(0, 1, (len(vocabulary), dimension)),
        "embeddings.position_embeddings.weight": random.normal(0, 0.1, (max_tokens, dimension)),
        "embeddings.token_type_embeddings.weight": np.zeros((2, dimension)),
        "pooler.dense.weight": np.zeros((dimension, dimension)),
        "pooler.dense.bias": np.zeros(dimension),
    }
    layer = "encoder.layer.0."
    for name, rows, columns in (
        ("attention.self.query", dimension, dimension),
        ("attention.self.key", dimension, dimension),
        ("attention.self.value", dimension, dimension),
        ("attention.output.dense", dimension, dimension),
        ("intermediate.dense", wide, dimension),
        ("output.dense", dimension, wide),
    ):
        weights[f"{layer}{name}.weight"] = random.normal(0, 0.2, (rows, columns))
        weights[f"{layer}{name}.bias"] = np.zeros(rows)
    for name in ("embeddings.LayerNorm", f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"):
        weights[f"{name}.weight"] = np.full(dimension, np.nan if poison else 1.0)
        weights[f"{name}.bias"] = np.zeros(dimension)
    safetensors.numpy.save_file(
        {name: value.astype(np.float32) for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )

    modules = ["", "1_Pooling", "2_Normalize"] if normalize else ["", "1_Pooling"]
    kinds = ("Transformer", "Pooling", "Normalize")
    files: dict[str, object] = {
        "config.json": {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": dimension,
            "intermediate_size": wide,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "max_position_embeddings": max_tokens,
            "type_vocab_size": 2,
            "vocab_size": len(vocabulary),
            "pad_token_id": 0,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_tokens,
            "model_input_names": ["input_ids", "attention_mask"],
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
        },
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kinds[i]}"}
            for i, path in enumerate(modules)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": dimension, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": query_prompt, "document": document_prompt}},
    }
    for file, value in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(value), encoding="utf-8")
    return folder


def tiny_model(folder: Path, *, cache_dir: Path, **options: object) -> ResolvedModel:
    """`build_tiny_model`, resolved."""
    return resolve_model(str(build_tiny_model(folder, **options)), cache_dir=cache_dir)  # type: ignore[arg-type]


class HashingEmbedder:
    """A `TextEmbedder` by counting hashed words (Latin) and characters (Chinese); L2-normalised.

    The more words two texts share, for their lengths, the nearer they are; texts that share none are at distance 2
    (barring a hash collision, unlikely in 1,024 dimensions). ``calls`` has the texts of each call, in order.
    """

    def __init__(self, *, dimension: int = 1024, fingerprint: str = "fa5ecafe00000001", max_tokens: int = 512) -> None:
        profile = ModelProfile(
            name="hashing",
            query_prompt="",
            document_prompt="",
            max_tokens=max_tokens,
            dimension=dimension,
            pooling="sum",
            normalize=True,
        )
        self._model = ResolvedModel(
            name="fake:hashing", path=Path("fake-hashing"), profile=profile, fingerprint=fingerprint
        )
        self.calls: list[list[str]] = []

    @property
    def model(self) -> ResolvedModel:
        return self._model

    @property
    def dimension(self) -> int:
        return self._model.profile.dimension

    def embed_documents(
        self, texts: Sequence[str], *, token_counts: Sequence[int] | None = None, progress: Progress | None = None
    ) -> Vectors:
        self.calls.append(list(texts))
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            # A text without a word still needs a direction.
            for word in _WORDS.findall(text.lower()) or ["(no word)"]:
                vectors[row, zlib.crc32(word.encode()) % self.dimension] += 1.0
        if progress is not None and texts:
            progress(len(texts), len(texts))
        return normalised(vectors)

    def embed_query(self, text: str) -> Vectors:
        vector: Vectors = self.embed_documents([text])[0]
        return vector
