"""Host memory that an offloaded update holds, among the bytes of a rank."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move up."""
    with op.batch_alter_table("memory_sample") as table:
        table.add_column(sa.Column("pinned", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Move down."""
    with op.batch_alter_table("memory_sample") as table:
        table.drop_column("pinned")
