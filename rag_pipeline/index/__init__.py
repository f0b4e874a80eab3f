"""Model profiles, embeddings, the Milvus store and the versions of a collection."""
