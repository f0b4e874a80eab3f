"""Keep a Markdown knowledge base searchable for AI agents, and prove after every change that it still is.

Read the modules in the order in which the data flows:

1. ``settings``, ``errors``, ``records``: what everything else is made of.
2. ``ingest``: Markdown files to documents, documents to chunks, documents to the L0 knowledge index.
3. ``index``: model profiles, embeddings, the Milvus store, versions of a collection.
4. ``invocations``: the record of each lookup, and what sessions were given.
5. ``retrieval``: a query to evidence; ``lookup_knowledge`` and ``tool_declarations`` are what agents import.
6. ``contracts``: what must hold of every table on the way.
7. ``reindex``: plan, build, check, promote; what the Dagster assets and the command both call.
8. ``cli`` with ``commands``, and ``definitions`` with ``defs``: the two thin shells.

A module imports only from those above it; only ``definitions`` and ``defs`` import Dagster.
"""
