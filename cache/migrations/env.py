"""Alembic's environment: `tuner.store.migrate` hands over an open transaction."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=context.config.attributes.get("metadata"),
    version_table="tuner_version",
)
with context.begin_transaction():
    context.run_migrations()
