"""The commands, by what they are about; `rag_pipeline.cli` puts them together."""
