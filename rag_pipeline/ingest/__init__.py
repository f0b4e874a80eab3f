"""Markdown files to documents, documents to chunks and to the L0 knowledge index."""
