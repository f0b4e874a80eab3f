"""Which versions stay, and how the others go: collection first, then artefacts."""

from collections.abc import Iterable
from datetime import UTC, datetime

from rag_pipeline.errors import RefusedError
from rag_pipeline.index.manifest import Manifest
from rag_pipeline.index.versions import Versions

# A half-built version of another state folder may still be growing; this old it is debris.
_FOREIGN_BUILD_S = 24 * 3600.0


def prune(versions: Versions, *, keep: int, grace_s: float) -> list[str]:
    """Drop what nobody needs: debris of killed runs, failed versions, and old ones past their grace.

    Kept are the promoted version; the ``keep - 1`` that the alias left last; as many again that were rolled back,
    since they hold back their knowledge; and the newest complete one that was not promoted yet. A version that some
    other alias points to stays as well.

    Call it with the write lock held: a half-built version of this state folder is then nobody's.

    Returns:
        Names of the collections dropped, oldest first.
    """
    versions.reconcile()
    target = versions.store.alias_target(versions.alias)
    others = [manifest for manifest in versions.all() if manifest.collection != target]
    kept = _kept(others, keep=keep, target=target or "")
    dropped = []
    for manifest in others:
        if manifest.collection in kept or not _may_go(versions, manifest, grace_s=grace_s):
            continue
        try:
            versions.store.drop(manifest.collection)
        except RefusedError:
            # Another alias points to it, or another process dropped it since.
            if versions.store.exists(manifest.collection):
                continue
        versions.artifacts.remove(manifest.collection)
        dropped.append(manifest.collection)
    _remove_orphans(versions)
    return dropped


def _kept(others: Iterable[Manifest], *, keep: int, target: str) -> set[str]:
    complete = [manifest for manifest in others if manifest.state == "built"]
    served = sorted((m for m in complete if m.left_at), key=lambda manifest: manifest.left_at, reverse=True)
    kept = [m.collection for m in served if not m.held][: keep - 1] + [m.collection for m in served if m.held][:keep]
    waiting = [m.collection for m in complete if not m.left_at and not m.failed and m.collection > target]
    return {*kept, *waiting[-1:]}


def _may_go(versions: Versions, manifest: Manifest, *, grace_s: float) -> bool:
    if manifest.state == "building":
        return manifest.owner == versions.owner or _age_s(manifest.created_at) > _FOREIGN_BUILD_S
    return not manifest.left_at or _age_s(manifest.left_at) >= grace_s


def _remove_orphans(versions: Versions) -> None:
    """Remove artefacts whose collection is gone from this very store (a prune or a build was killed half way)."""
    names = set(versions.store.collections())
    for manifest in versions.artifacts.manifests():
        ours = (manifest.alias, manifest.knowledge_base_id, manifest.store) == (
            versions.alias, versions.knowledge_base_id, versions.store.identity,
        )  # fmt: skip
        if ours and manifest.collection not in names:
            versions.artifacts.remove(manifest.collection)


def _age_s(at: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()
