"""The versions behind an alias: stage aside, record verdicts, promote, roll back, prune.

A version is a collection plus its artefacts. The collection that an alias points to is never written to again; only
its manifest is. Every step can be killed: a version counts once its manifest says ``built``, and readers see it once
the alias moves, which is the last thing that happens to it.
"""

import json
import os
import socket
from collections.abc import Iterable
from datetime import UTC, datetime

from rag_pipeline.errors import RefusedError, StoreUnavailableError
from rag_pipeline.index.artifacts import ArtifactStore
from rag_pipeline.index.manifest import Manifest, Owner, is_version_name, now_text
from rag_pipeline.index.milvus import MilvusStore

# A half-built version of another host may still be growing; this old it is debris.
_FOREIGN_BUILD_S = 24 * 3600.0


class Versions:
    """All versions of one knowledge base behind one alias.

    Args:
        store: Where the collections are.
        artifacts: Where their artefacts are.
        alias: The alias readers resolve.
        knowledge_base_id: Versions of another knowledge base are never touched.
    """

    def __init__(self, store: MilvusStore, artifacts: ArtifactStore, *, alias: str, knowledge_base_id: str) -> None:
        self.store = store
        self.artifacts = artifacts
        self.alias = alias
        self.knowledge_base_id = knowledge_base_id

    def read(self, collection: str) -> Manifest:
        """The manifest of a collection.

        Raises:
            StoreUnavailableError: It has none that this code can read.
        """
        return Manifest.from_json(self.store.manifest_json(collection), where=f"The collection {collection}")

    def promoted(self) -> Manifest | None:
        """The version that the alias points to, ``None`` without alias.

        Raises:
            StoreUnavailableError: It points to something whose manifest cannot be read.
        """
        target = self.store.alias_target(self.alias)
        return self.read(target) if target else None

    def parent(self, *, take_over: bool) -> Manifest | None:
        """The promoted version that a reindex of this knowledge base builds upon.

        ``None`` when there is none, when its schema is unknown, or when another knowledge base is taken over.

        Raises:
            RefusedError: The alias belongs to another knowledge base and ``take_over`` is False.
        """
        target = self.store.alias_target(self.alias)
        if target is None:
            return None
        owner = _knowledge_base_of(self.store.manifest_json(target))
        if owner != self.knowledge_base_id and not take_over:
            raise RefusedError(
                f"The alias {self.alias!r} points to {target}, which holds another knowledge base "
                f"({owner or 'not made by this project'}; this one is {self.knowledge_base_id}). Set index.alias "
                "(--alias) to a name of your own, or pass --take-over to replace it."
            )
        if owner != self.knowledge_base_id:
            return None
        try:
            return self.read(target)
        except StoreUnavailableError:
            return None

    def all(self) -> list[Manifest]:
        """The manifests of this knowledge base's versions, oldest first."""
        found = []
        for name in self.store.collections():
            if is_version_name(name, self.alias):
                try:
                    manifest = self.read(name)
                except StoreUnavailableError:
                    continue
                if manifest.knowledge_base_id == self.knowledge_base_id:
                    found.append(manifest)
        return found

    def record(self, manifest: Manifest) -> Manifest:
        """Write a manifest to its collection and to the artefacts."""
        self.store.set_manifest_json(manifest.collection, manifest.to_json())
        self.artifacts.write_manifest(manifest)
        return manifest

    def reusable(self, fingerprint: str, *, required: Iterable[str]) -> Manifest | None:
        """The newest complete version with this fingerprint that has passed every required check."""
        required = list(required)
        for manifest in reversed(self.all()):
            if manifest.fingerprint == fingerprint and manifest.state == "built" and not manifest.lacking(required):
                return manifest
        return None

    def promote(self, collection: str, *, required: Iterable[str], take_over: bool = False) -> Manifest:
        """Move the alias to a version that has passed every required check.

        Returns:
            Its manifest. Nothing happens when the alias points there already.

        Raises:
            RefusedError: The version does not exist, is not complete, lacks a pass, was rolled back, or the alias
                belongs to another knowledge base.
        """
        if not self.store.exists(collection):
            raise RefusedError(
                f"There is no version {collection} in {self.store.description}; run `rag-pipeline reindex`."
            )
        manifest = self.read(collection)
        if self.store.alias_target(self.alias) == collection:
            self.artifacts.write_promoted(self.alias, collection)
            return manifest
        self.parent(take_over=take_over)
        if manifest.state != "built":
            raise RefusedError(f"{collection} was never completed; run `rag-pipeline reindex`.")
        if lacking := manifest.lacking(required):
            said = "; ".join(
                f"{name}: {manifest.checks[name].description if name in manifest.checks else 'never run'}"
                for name in lacking
            )
            raise RefusedError(
                f"{collection} is not promoted, the alias {self.alias!r} stays: it lacks a pass of {said} "
                "Mend the cause and run `rag-pipeline reindex`."
            )
        if manifest.held:
            raise RefusedError(
                f"{collection} is not promoted again: {manifest.held}. Change the knowledge or the settings, or go "
                f"back to it on purpose with `rag-pipeline rollback --to {collection}`."
            )
        return self._move_alias(manifest)

    def rollback(self, *, to: str = "", required: Iterable[str] = ()) -> Manifest:
        """Move the alias back to the newest earlier complete version, or to the one named.

        The version that is left is held: no later run promotes it again by itself.

        Raises:
            RefusedError: There is no such version, or it lacks a pass.
        """
        current = self.promoted()
        if current is None:
            raise RefusedError(f"The alias {self.alias!r} points nowhere, so there is nothing to roll back.")
        required = list(required)
        complete = [manifest for manifest in self.all() if manifest.state == "built" and not manifest.lacking(required)]
        if to:
            target = next((manifest for manifest in complete if manifest.collection == to), None)
        else:
            earlier = [m for m in complete if m.promoted_at and m.collection < current.collection]
            target = earlier[-1] if earlier else None
        if target is None:
            names = ", ".join(m.collection for m in complete if m.collection != current.collection) or "none"
            raise RefusedError(
                f"No {'version ' + to if to else 'earlier version'} to roll back to; complete versions kept: {names}."
            )
        if target.collection == current.collection:
            return current
        if target.collection < current.collection:
            current = current.model_copy(update={"held": f"it was rolled back at {now_text()}"})
        return self._move_alias(target.model_copy(update={"held": ""}), leaving=current)

    def _move_alias(self, manifest: Manifest, *, leaving: Manifest | None = None) -> Manifest:
        if leaving is None:
            try:
                leaving = self.promoted()
            except StoreUnavailableError:
                leaving = None
        at = now_text()
        if leaving is not None:
            # Before the move: killed in between, this only delays a prune, never hastens one.
            self.record(leaving.model_copy(update={"left_at": at}))
        promoted = self.record(manifest.model_copy(update={"promoted_at": manifest.promoted_at or at, "left_at": ""}))
        self.store.point_alias(self.alias, manifest.collection)
        self.artifacts.write_promoted(self.alias, manifest.collection)
        return promoted

    def prune(self, *, keep: int, grace_s: float) -> list[str]:
        """Drop what nobody needs: debris of killed runs, failed versions, and old ones past their grace.

        Kept are the promoted version, the ``keep - 1`` newest others that were promoted once, and the newest complete
        one that was not promoted yet.

        Returns:
            Names of the collections dropped, oldest first.
        """
        target = self.store.alias_target(self.alias)
        manifests = self.all()
        others = [manifest for manifest in manifests if manifest.collection != target]
        once = [m for m in others if m.state == "built" and m.promoted_at]
        waiting = [m for m in others if m.state == "built" and not m.promoted_at and _passed(m)]
        kept = {m.collection for m in once[max(len(once) - (keep - 1), 0) :]}
        if waiting and waiting[-1].collection > (target or ""):
            kept.add(waiting[-1].collection)
        dropped = []
        for manifest in others:
            if manifest.collection in kept or not _may_go(manifest, grace_s=grace_s):
                continue
            self.store.drop(manifest.collection)
            self.artifacts.remove(manifest.collection)
            dropped.append(manifest.collection)
        self._remove_orphans()
        return dropped

    def _remove_orphans(self) -> None:
        """Remove artefacts whose collection is gone (a prune or a build was killed half way)."""
        names = set(self.store.collections())
        for manifest in self.artifacts.manifests():
            ours = manifest.alias == self.alias and manifest.knowledge_base_id == self.knowledge_base_id
            if ours and manifest.collection not in names:
                self.artifacts.remove(manifest.collection)


def me() -> Owner:
    """This process, as the owner of what it builds."""
    return Owner(host=socket.gethostname(), pid=os.getpid())


def _passed(manifest: Manifest) -> bool:
    return all(verdict.passed for verdict in manifest.checks.values() if verdict.severity == "error")


def _may_go(manifest: Manifest, *, grace_s: float) -> bool:
    if manifest.state == "building":
        return manifest.owner.host == socket.gethostname() or _age_s(manifest.created_at) > _FOREIGN_BUILD_S
    return not manifest.left_at or _age_s(manifest.left_at) >= grace_s


def _age_s(at: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()


def _knowledge_base_of(manifest: str) -> str:
    try:
        values = json.loads(manifest)
    except ValueError:
        return ""
    return str(values.get("knowledge_base_id", "")) if isinstance(values, dict) else ""
