"""The versions behind an alias: which there are, and how the alias moves between them.

A version is a collection plus its artefacts. The collection that an alias points to is never written to again; only
its manifest is. Every step can be killed: a version counts once its manifest says ``built``, and readers see it once
the alias moves. `reconcile` mends what a kill around that move leaves untrue in the manifests.
"""

import json
import socket
from collections.abc import Iterable
from pathlib import Path

from rag_pipeline.errors import RefusedError, StoreUnavailableError
from rag_pipeline.index.artifacts import ArtifactStore
from rag_pipeline.index.manifest import Manifest, Owner, is_version_name, now_text
from rag_pipeline.index.milvus import MilvusStore
from rag_pipeline.index.milvus_connection import StoreCallError


class Versions:
    """All versions of one knowledge base behind one alias.

    Args:
        store: Where the collections are.
        artifacts: Where their artefacts are.
        alias: The alias readers resolve.
        knowledge_base_id: Versions of another knowledge base are never touched.
        state: The state folder whose write lock protects what is done here.
    """

    def __init__(
        self, store: MilvusStore, artifacts: ArtifactStore, *, alias: str, knowledge_base_id: str, state: Path
    ) -> None:
        self.store = store
        self.artifacts = artifacts
        self.alias = alias
        self.knowledge_base_id = knowledge_base_id
        self.owner = Owner(host=socket.gethostname(), state=str(state))

    # What there is

    def read(self, collection: str) -> Manifest:
        """The manifest of a collection.

        Raises:
            StoreUnavailableError: It has none that this code can read.
        """
        return Manifest.from_json(self.store.manifest_json(collection), where=_where(collection))

    def promoted(self) -> Manifest | None:
        """The version that the alias points to, ``None`` without alias.

        Raises:
            StoreUnavailableError: It points to something whose manifest cannot be read.
        """
        target = self.store.alias_target(self.alias)
        return self.read(target) if target else None

    def own_target(self, *, take_over: bool) -> tuple[str, Manifest | None] | None:
        """What the alias points to, when that is a version of this knowledge base.

        Returns:
            Its collection, and its manifest unless this code cannot read it; ``None`` without alias, and when another
            knowledge base is taken over.

        Raises:
            RefusedError: The alias belongs to another knowledge base and ``take_over`` is False.
            StoreUnavailableError: The store does not answer.
        """
        target = self.store.alias_target(self.alias)
        if target is None:
            return None
        text = self.store.manifest_json(target)
        owner = _knowledge_base_of(text)
        if owner == self.knowledge_base_id:
            return target, _parsed(target, text)
        if not take_over:
            raise RefusedError(
                f"The alias {self.alias!r} points to {target}, which holds another knowledge base "
                f"({owner or 'not made by this project'}{_built_from(text)}; this one is {self.knowledge_base_id}). "
                "Pass its folders with --knowledge if you meant that one, set index.alias (--alias) to a name of your "
                "own, or pass --take-over to replace it."
            )
        return None

    def owner_of_alias(self) -> str:
        """The knowledge base whose version the alias points to; blank without alias or when nobody says."""
        target = self.store.alias_target(self.alias)
        return _knowledge_base_of(self.store.manifest_json(target)) if target else ""

    def all(self) -> list[Manifest]:
        """The manifests of this knowledge base's versions, oldest first; unreadable ones are left out.

        Raises:
            StoreUnavailableError: The store does not answer; then no version is taken for missing.
        """
        found = []
        for name in self.store.collections():
            if is_version_name(name, self.alias):
                try:
                    text = self.store.manifest_json(name)
                except StoreCallError:
                    continue  # dropped by another process since it was listed
                manifest = _parsed(name, text)
                if manifest is not None and manifest.knowledge_base_id == self.knowledge_base_id:
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
            usable = manifest.state == "built" and not manifest.lacking(required)
            if manifest.fingerprint == fingerprint and usable and self.artifacts.intact(manifest):
                return manifest
        return None

    # How the alias moves

    def promote(self, collection: str, *, required: Iterable[str], take_over: bool = False) -> Manifest:
        """Move the alias to a version that was staged upon what it points to now, and has passed every required check.

        Returns:
            Its manifest. Nothing happens when the alias points there already.

        Raises:
            RefusedError: The version does not exist, is not this knowledge base's, is not complete, lacks a pass, was
                rolled back, or was staged before the alias last moved; or the alias belongs to another knowledge base.
        """
        if not self.store.exists(collection):
            raise RefusedError(
                f"There is no version {collection} in {self.store.description}; run `rag-pipeline reindex`."
            )
        manifest = self.read(collection)
        if (manifest.alias, manifest.knowledge_base_id) != (self.alias, self.knowledge_base_id):
            raise RefusedError(
                f"{collection} is a version of {manifest.alias!r} ({manifest.knowledge_base_id}), not of "
                f"{self.alias!r} ({self.knowledge_base_id}); it is not promoted."
            )
        current = self.own_target(take_over=take_over)
        if current is not None and current[0] == collection:
            self.artifacts.write_promoted(self.alias, collection)
            return manifest
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
        if current is not None and current[0] != manifest.parent:
            raise RefusedError(
                f"{collection} is not promoted: it was staged upon {manifest.parent or 'no version'}, but the alias "
                f"{self.alias!r} points to {current[0]} by now. Run `rag-pipeline reindex`, or go back on purpose "
                f"with `rag-pipeline rollback --to {collection}`."
            )
        for held in self.all():
            if held.held and held.fingerprint == manifest.fingerprint:
                raise RefusedError(
                    f"{collection} is not promoted again: {held.held}. Change the knowledge or the settings, or go "
                    f"back to it on purpose with `rag-pipeline rollback --to {held.collection}`."
                )
        return self._move_alias(manifest)

    def rollback(self, *, to: str = "", required: Iterable[str] = ()) -> Manifest:
        """Move the alias back to the version that it left last, or to the one named.

        Equal knowledge is not promoted again by itself after its version was left this way.

        Raises:
            RefusedError: There is no such version, it lacks a pass, or its artefacts are gone.
        """
        current = self.store.alias_target(self.alias)
        if current is None:
            raise RefusedError(f"The alias {self.alias!r} points nowhere, so there is nothing to roll back.")
        required = list(required)
        if not to and (moved := self._finish_rollback(current)):
            return moved
        complete = [m for m in self.all() if m.state == "built" and not m.lacking(required)]
        served = [m for m in complete if m.left_at and not m.held and m.collection != current]
        if to:
            target = next((manifest for manifest in complete if manifest.collection == to), None)
        else:
            target = max(served, key=lambda manifest: manifest.left_at, default=None)
        if target is None:
            names = ", ".join(m.collection for m in complete if m.collection != current) or "none"
            raise RefusedError(
                f"No {'version ' + to if to else 'earlier version'} to roll back to; complete versions kept: {names}."
            )
        if target.collection == current:
            return target
        if not self.artifacts.intact(target):
            raise RefusedError(
                f"{target.collection} has lost its artefacts, so no reader could use it. Check index.artifacts_uri, "
                "or run `rag-pipeline reindex`."
            )
        # Going on to a version that was held, or never served, is no step back.
        backward = bool(target.left_at and not target.held)
        return self._move_alias(target, held=f"it was rolled back at {now_text()}" if backward else "")

    def _finish_rollback(self, current: str) -> Manifest | None:
        """Finish a rollback that was killed right after it moved the alias; asked for again, it must not go on."""
        copy = self.artifacts.read_promoted(self.alias)
        left = next((manifest for manifest in self.all() if manifest.collection == copy), None)
        if copy == current or left is None or not left.held:
            return None
        self.reconcile()
        return self.read(current)

    def _move_alias(self, manifest: Manifest, *, held: str = "") -> Manifest:
        """Move the alias, loaded first; ``held`` goes to the version that is left."""
        target = self.store.alias_target(self.alias)
        leaving = _parsed(target, self.store.manifest_json(target)) if target else None
        at = now_text()
        self.store.load(manifest.collection)
        if leaving is not None:
            self.record(leaving.model_copy(update={"left_at": at, "held": held}))
        self.store.point_alias(self.alias, manifest.collection)
        promoted = self.record(_serving(manifest, at=at))
        self.artifacts.write_promoted(self.alias, manifest.collection)
        return promoted

    def reconcile(self) -> None:
        """Make the manifest of what the alias points to say so, whatever a killed run left there."""
        target = self.store.alias_target(self.alias)
        manifest = _parsed(target, self.store.manifest_json(target)) if target else None
        if manifest is None or manifest.knowledge_base_id != self.knowledge_base_id:
            return
        serving = _serving(manifest, at=now_text())
        if serving != manifest:
            self.record(serving)
        self.artifacts.write_manifest(serving)
        self.artifacts.write_promoted(self.alias, manifest.collection)


def _serving(manifest: Manifest, *, at: str) -> Manifest:
    return manifest.model_copy(update={"promoted_at": manifest.promoted_at or at, "left_at": "", "held": ""})


def _where(collection: str) -> str:
    return f"The collection {collection}"


def _parsed(collection: str, text: str) -> Manifest | None:
    """A manifest that was fetched, ``None`` when this code cannot read it."""
    try:
        return Manifest.from_json(text, where=_where(collection))
    except StoreUnavailableError:
        return None


def _built_from(manifest: str) -> str:
    parsed = _parsed("it", manifest)
    return f", built from {', '.join(root.path for root in parsed.roots)}" if parsed and parsed.roots else ""


def _knowledge_base_of(manifest: str) -> str:
    try:
        values = json.loads(manifest)
    except ValueError:
        return ""
    return str(values.get("knowledge_base_id", "")) if isinstance(values, dict) else ""
