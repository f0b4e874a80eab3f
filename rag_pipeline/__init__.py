"""Keep a Markdown knowledge base searchable for AI agents, and prove after every change that it still is.

Read the modules in the order in which the data flows:

1. ``settings``, ``errors``, ``records``: what everything else is made of.
2. ``ingest``: Markdown files to documents, documents to chunks, documents to the L0 knowledge index.
3. ``index``: model profiles, embeddings, the Milvus store, versions of a collection.
4. ``retrieval``: a query to candidates.
5. ``contracts``: what must hold of every table on the way.
6. ``reindex``: plan, build, check, promote; what the Dagster assets and the command both call.
7. ``cli`` and ``definitions`` with ``defs``: the two thin shells.

A module imports only from those above it; only ``definitions`` and ``defs`` import Dagster.
"""
