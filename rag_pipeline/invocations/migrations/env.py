"""How Alembic runs these migrations: on the connection, and in the transaction, of `invocations.upgrading`."""

from alembic import context

from rag_pipeline.invocations.tables import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
