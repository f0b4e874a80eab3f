"""One state folder opened by its settings: the store, the artefacts, the model, the locks.

Everything is opened at first use, so that a command pays only for what it touches.
"""

import json
import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rag_pipeline.errors import RefusedError
from rag_pipeline.index.manifest import RootEntry, digest_of, now_text
from rag_pipeline.records import ChunkBudget
from rag_pipeline.settings import Settings

if TYPE_CHECKING:
    from rag_pipeline.index.artifacts import ArtifactStore
    from rag_pipeline.index.embedding import Embedder
    from rag_pipeline.index.milvus import MilvusStore
    from rag_pipeline.index.models import ResolvedModel
    from rag_pipeline.index.versions import Versions
    from rag_pipeline.ingest.documents import Root
    from rag_pipeline.records import TokenCounter


class Workspace:
    """What the settings point to.

    Args:
        settings: See `rag_pipeline.settings.load_settings`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.settings.state

    @property
    def lite_folder(self) -> Path:
        """Where Milvus Lite keeps data, locks and address."""
        return self.state / "milvus"

    @property
    def spool_folder(self) -> Path:
        """Where records of lookups wait for their database."""
        return self.state / "spool"

    @cached_property
    def roots(self) -> "tuple[Root, ...]":
        """The knowledge folders, absolute; a blank name becomes the folder's own."""
        from rag_pipeline.ingest.documents import Root

        return tuple(
            Root(name=root.name or self.settings.path(root.path).name, path=self.settings.path(root.path))
            for root in self.settings.knowledge.roots
        )

    @cached_property
    def root_entries(self) -> tuple[RootEntry, ...]:
        """The knowledge folders as a manifest remembers them."""
        return tuple(RootEntry(name=root.name, path=str(root.path)) for root in self.roots)

    @cached_property
    def knowledge_base_id(self) -> str:
        """The setting ``knowledge.id``, else derived from where the roots lie, never from the working directory.

        A root inside a project (a folder with a ``pyproject.toml``) counts by the project's name and its path in it, so
        that every clone has the same id; any other root counts by its absolute path.
        """
        if self.settings.knowledge.id:
            return self.settings.knowledge.id
        places = sorted(_place(root.path.resolve()) for root in self.roots)
        return places[0] if len(places) == 1 and ":" in places[0] else f"kb-{digest_of(*places)[:12]}"

    @cached_property
    def store(self) -> "MilvusStore":
        """The vector store."""
        from rag_pipeline.index.milvus import MilvusStore

        return MilvusStore(self.settings.retrieval.milvus, lite_folder=self.lite_folder)

    @property
    def has_store(self) -> bool:
        """Whether there is a store to read; a reader must not make one (a mistyped state folder, say)."""
        return not self.store.is_lite or (self.lite_folder / "lite.db").exists()

    @cached_property
    def artifacts(self) -> "ArtifactStore":
        """The artefacts of all versions."""
        from upath import UPath

        from rag_pipeline.index.artifacts import ArtifactStore

        uri = self.settings.index.artifacts_uri
        if "://" in uri and not uri.startswith("file://"):
            return ArtifactStore(UPath(uri), cache=UPath(self.state / "cache" / "artifacts"))
        folder = self.settings.path(Path(uri.removeprefix("file://"))) if uri else self.state / "artifacts"
        return ArtifactStore(UPath(folder))

    @cached_property
    def versions(self) -> "Versions":
        """The versions of this knowledge base."""
        from rag_pipeline.index.versions import Versions

        return Versions(
            self.store,
            self.artifacts,
            alias=self.settings.index.alias,
            knowledge_base_id=self.knowledge_base_id,
            state=self.state,
        )

    def of_alias(self) -> "Workspace":
        """This workspace for whichever knowledge base the alias points to, whatever folders that was built from."""
        ws = Workspace(self.settings)
        ws.store, ws.artifacts = self.store, self.artifacts
        ws.knowledge_base_id = self.versions.owner_of_alias() or self.knowledge_base_id
        return ws

    @property
    def model_cache(self) -> Path:
        """Where bundled models are unpacked."""
        return self.state / "cache" / "models"

    @cached_property
    def model(self) -> "ResolvedModel":
        """The configured model: what the next reindex embeds with."""
        return self.model_named(self.settings.embedding.model)

    def model_named(self, name: str) -> "ResolvedModel":
        """A model by name, as a manifest gives it."""
        from rag_pipeline.index.models import resolve_model

        return resolve_model(name, cache_dir=self.model_cache)

    @cached_property
    def token_counter(self) -> "TokenCounter":
        """The configured model's token counter."""
        from rag_pipeline.index.models import load_token_counter

        return load_token_counter(self.model)

    @cached_property
    def embedder(self) -> "Embedder":
        """The configured model, loaded at its first text."""
        from rag_pipeline.index.embedding import Embedder

        embedding = self.settings.embedding
        return Embedder(self.model, threads=embedding.threads or None, batch_tokens=embedding.batch_tokens)

    @property
    def budget(self) -> ChunkBudget:
        """The chunk budget, capped at what the configured model takes."""
        hard = min(self.settings.chunking.hard_tokens, self.model.profile.max_tokens)
        return ChunkBudget(soft_tokens=min(self.settings.chunking.soft_tokens, hard), hard_tokens=hard)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the alias's write lock of this state folder.

        Raises:
            RefusedError: Another process holds it; the message names it.
        """
        from filelock import FileLock, Timeout

        alias = self.settings.index.alias
        folder = self.state / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / f"{alias}.json"
        lock = FileLock(folder / f"{alias}.lock", is_singleton=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise RefusedError(
                f"{_holder(note)} is changing the alias {alias!r} in {self.state}. Wait for it to end, then try again."
            ) from None
        try:
            if lock.lock_counter == 1:
                note.write_text(
                    json.dumps({"pid": os.getpid(), "command": Path(sys.argv[0]).name, "since": now_text()}),
                    encoding="utf-8",
                )
            yield
        finally:
            lock.release()


def _place(root: Path) -> str:
    for folder in root.parents:
        try:
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
            return f"{project['project']['name']}:{root.relative_to(folder).as_posix()}"
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            break
    return str(root)


def _holder(note: Path) -> str:
    try:
        values = json.loads(note.read_text(encoding="utf-8"))
        return f"Process {values['pid']} ({values['command']}, since {values['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "Another process"
