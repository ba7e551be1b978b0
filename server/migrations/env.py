"""Alembic's entry: migrates over the connection, and in the transaction, that `server.migrations` hands in."""

from __future__ import annotations

from alembic import context

from server.models import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, transactional_ddl=False)
context.run_migrations()
