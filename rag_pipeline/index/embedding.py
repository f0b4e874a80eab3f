"""Turns texts into unit vectors: batches by real token count, and never the same text twice."""

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rag_pipeline.errors import CheckFailedError, ModelUnavailableError
from rag_pipeline.index.embedding_cache import EmbeddingCache
from rag_pipeline.index.models import ResolvedModel, load_token_counter
from rag_pipeline.records import TokenCounter

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = ["Embedder", "EmbeddingCache", "EmbeddingResult", "TextEmbedder", "embed_texts", "embedding_digest"]

Vectors = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with (texts done, texts in all)."""

_PIECE_TEXTS = 256
_PIECE_TOKENS = 16_384
"""A piece of the work is written to the cache when it is done; a killed run loses one, some seconds."""

_log = logging.getLogger(__name__)


class TextEmbedder(Protocol):
    """What `embed_texts` and the retrieval need of an embedder."""

    @property
    def model(self) -> ResolvedModel:
        """The model that the vectors are of."""
        ...

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    def embed_documents(
        self, texts: Sequence[str], *, token_counts: Sequence[int] | None = None, progress: Progress | None = None
    ) -> Vectors:
        """One float32 unit vector a text, shape (n, dimension), in input order."""
        ...

    def embed_query(self, text: str) -> Vectors:
        """The float32 unit vector of a query, shape (dimension,)."""
        ...


class Embedder:
    """One sentence-transformers model, loaded at the first use; may be shared by threads, which then take turns.

    Args:
        model: What to load.
        threads: CPU threads of one call; None leaves torch's own choice (all cores).
        batch_tokens: Most padded tokens (rows times the longest row) of one forward pass. About 1,024 is best on a CPU;
            a GPU wants more.
    """

    def __init__(self, model: ResolvedModel, *, threads: int | None = None, batch_tokens: int = 1024) -> None:
        self._model = model
        self._threads = threads
        self._batch_tokens = batch_tokens
        # Held over tokenizing too: a fast tokenizer cannot be used by two threads at once ("Already borrowed").
        self._lock = threading.Lock()
        self._loaded: SentenceTransformer | None = None
        self._counter: TokenCounter | None = None

    @property
    def model(self) -> ResolvedModel:
        """The model that the vectors are of."""
        return self._model

    @property
    def dimension(self) -> int:
        """Length of a vector, by the model's profile."""
        return self._model.profile.dimension

    def embed_documents(
        self, texts: Sequence[str], *, token_counts: Sequence[int] | None = None, progress: Progress | None = None
    ) -> Vectors:
        """Embeds texts with the document prompt.

        Args:
            texts: Embedding texts, without the prompt.
            token_counts: Tokens of each whole input, as `TokenCounter.count_inputs` gives them; counted here when left
                out. They decide about batches only: wrong ones cost time, not correctness.
            progress: Called after every batch.

        Returns:
            Float32 of shape (n, dimension) in input order, each row of norm 1. A vector without a direction stays as
            the model gave it (zeros or NaN): `embed_texts` refuses it. (0, dimension) for no texts.

        Raises:
            ModelUnavailableError: The model cannot be loaded.
            ValueError: There are not as many counts as texts.
        """
        vectors = np.empty((len(texts), self.dimension), np.float32)
        if not texts:
            return vectors
        counts = self._token_counter().count_inputs(texts) if token_counts is None else token_counts
        limit = self._model.profile.max_tokens
        if cut := sum(count > limit for count in counts):
            _log.warning(
                "%d of %d texts are longer than the %d tokens that '%s' takes; the model does not see their ends.",
                cut,
                len(texts),
                limit,
                self._model.name,
            )
        done = 0
        for batch in plan_batches(counts, texts=len(texts), batch_tokens=self._batch_tokens, max_tokens=limit):
            vectors[batch] = self._encode([texts[index] for index in batch], query=False)
            done += len(batch)
            if progress is not None:
                progress(done, len(texts))
        return vectors

    def embed_query(self, text: str) -> Vectors:
        """The float32 unit vector of shape (dimension,) of one query, with the query prompt.

        A query longer than the model takes is cut, with a warning in the log.

        Raises:
            ModelUnavailableError: The model cannot be loaded.
        """
        profile = self._model.profile
        # A token is at least one byte, near enough to tell that most queries need no counting.
        if len(text.encode("utf-8", "replace")) > profile.max_tokens - 16:
            counter = self._token_counter()
            if (count := counter.count([profile.query_prompt + text])[0] + 2) > profile.max_tokens:
                _log.warning(
                    "The query has %d tokens and '%s' takes %d; it does not see the end.",
                    count,
                    self._model.name,
                    profile.max_tokens,
                )
        vector: Vectors = self._encode([text], query=True)[0]
        return vector

    def _encode(self, texts: list[str], *, query: bool) -> Vectors:
        profile = self._model.profile
        with self._lock:
            loaded = self._load()
            encode = loaded.encode_query if query else loaded.encode_document
            # The prompt is given by text, so that what is counted, fingerprinted and embedded is the same.
            prompt = profile.query_prompt if query else profile.document_prompt
            with _torch_threads(self._threads):
                raw = encode(
                    texts, prompt=prompt, batch_size=len(texts), show_progress_bar=False, convert_to_numpy=True
                )
        return normalised(np.asarray(raw, dtype=np.float32))

    def _load(self) -> "SentenceTransformer":
        if self._loaded is None:
            # The weights are here by now: nothing may go to a network, not even to ask.
            model = _load_sentence_transformer(self._model)
            get_dimension = getattr(model, "get_embedding_dimension", model.get_sentence_embedding_dimension)
            if (found := get_dimension()) != self.dimension:
                raise ModelUnavailableError(
                    f"The model '{self._model.name}' in {self._model.path} gives vectors of {found} numbers, but its "
                    f"configuration says {self.dimension}. Mend the folder, or choose another embedding model."
                )
            self._loaded = model
        return self._loaded

    def _token_counter(self) -> TokenCounter:
        with self._lock:
            if self._counter is None:
                self._counter = load_token_counter(self._model)
            return self._counter


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """What `embed_texts` did.

    Attributes:
        vectors: Float32 unit vectors, shape (n, dimension), in input order.
        embedded: Texts that went through the model.
        reused: Texts that did not: found in the cache, or equal to one before them. ``embedded + reused`` is n.
        truncated: Texts with more tokens than the model takes, embedded now or earlier.
        seconds: Wall-clock time.
    """

    vectors: Vectors
    embedded: int
    reused: int
    truncated: int
    seconds: float


def embed_texts(
    texts: Sequence[str],
    *,
    token_counts: Sequence[int],
    embedder: TextEmbedder,
    cache: EmbeddingCache | None,
    refresh: bool = False,
    progress: Progress | None = None,
) -> EmbeddingResult:
    """Embeds each distinct text at most once, ever.

    Args:
        texts: Embedding texts.
        token_counts: Tokens of each whole model input, prompt and special tokens included.
        embedder: Makes the missing vectors.
        cache: Where vectors are looked up and kept; None keeps nothing.
        refresh: Embeds everything anew and replaces what the cache has.
        progress: Called with (texts embedded, texts to embed); never when nothing is to be embedded.

    Raises:
        CheckFailedError: The model gave a vector with NaN, infinity or zero norm; it is not kept.
        ValueError: There are not as many counts as texts.
    """
    started = time.perf_counter()
    if len(token_counts) != len(texts):
        raise ValueError(f"{len(texts)} texts come with {len(token_counts)} token counts")
    digests = [embedding_digest(text) for text in texts]
    longest_first: dict[str, int] = {}
    for index in sorted(range(len(texts)), key=lambda i: (-token_counts[i], i)):
        longest_first.setdefault(digests[index], index)
    found: dict[str, Vectors] = {}
    if cache is not None and not refresh:
        found.update(cache.get_many(list(longest_first)))
    missing = [index for digest, index in longest_first.items() if digest not in found]

    done = 0
    for piece in _pieces(missing, token_counts):
        vectors = embedder.embed_documents(
            [texts[index] for index in piece],
            token_counts=[token_counts[index] for index in piece],
            progress=None if progress is None else _shifted(progress, done, len(missing)),
        )
        _refuse_without_direction(vectors, [texts[index] for index in piece], embedder.model.name)
        fresh = {digests[index]: vectors[row] for row, index in enumerate(piece)}
        if cache is not None:
            cache.put_many(fresh)
        found.update(fresh)
        done += len(piece)

    result = np.empty((len(texts), embedder.dimension), np.float32)
    for row, digest in enumerate(digests):
        result[row] = found[digest]
    limit = embedder.model.profile.max_tokens
    return EmbeddingResult(
        vectors=result,
        embedded=len(missing),
        reused=len(texts) - len(missing),
        truncated=sum(count > limit for count in token_counts),
        seconds=time.perf_counter() - started,
    )


def embedding_digest(embedding_text: str) -> str:
    """SHA-256 of the text in UTF-8, hex; with the model's fingerprint the key of a vector."""
    return hashlib.sha256(embedding_text.encode("utf-8", "surrogatepass")).hexdigest()


def plan_batches(token_counts: Sequence[int], *, texts: int, batch_tokens: int, max_tokens: int) -> list[list[int]]:
    """Indices of each forward pass: longest first, ties in input order, rows times longest row within the budget.

    A text beyond the budget is a batch of its own. Counts beyond ``max_tokens`` are taken as that, since the model cuts
    there.

    Raises:
        ValueError: There are not as many counts as texts.
    """
    if len(token_counts) != texts:
        raise ValueError(f"{texts} texts come with {len(token_counts)} token counts")
    lengths = [min(max(count, 1), max_tokens) for count in token_counts]
    batches: list[list[int]] = []
    for index in sorted(range(texts), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def normalised(vectors: Vectors) -> Vectors:
    """Rows divided by their L2 norm; a row of zeros stays one, NaN stays NaN."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: Vectors = np.divide(vectors, norms, out=vectors.copy(), where=norms > 0)
    return result


def _pieces(indices: Sequence[int], token_counts: Sequence[int]) -> Iterator[list[int]]:
    piece: list[int] = []
    tokens = 0
    for index in indices:
        piece.append(index)
        tokens += token_counts[index]
        if len(piece) >= _PIECE_TEXTS or tokens >= _PIECE_TOKENS:
            yield piece
            piece, tokens = [], 0
    if piece:
        yield piece


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


def _refuse_without_direction(vectors: Vectors, texts: Sequence[str], model: str) -> None:
    norms = np.linalg.norm(vectors, axis=1)
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if bad.size:
        first = texts[int(bad[0])]
        raise CheckFailedError(
            f"The model '{model}' gave a vector with NaN, infinity or zero norm for {bad.size} of {len(texts)} texts, "
            f"first for {first[:80]!r} (SHA-256 {embedding_digest(first)[:12]}). Its weights may be damaged: install "
            "them anew, or choose another embedding model."
        )


@contextlib.contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Runs the block with that many of torch's threads; the setting is process-wide, so it is put back."""
    if threads is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_sentence_transformer(model: ResolvedModel) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return SentenceTransformer(str(model.path), local_files_only=True, model_kwargs={"dtype": "float32"})
    except Exception as error:  # each library behind it has its own errors
        raise ModelUnavailableError(
            f"The embedding model '{model.name}' in {model.path} cannot be loaded ({type(error).__name__}: {error}). "
            "Mend the folder, or choose another embedding model."
        ) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
