"""Which step an attempt saves now, and how long each part of a checkpoint's save took."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move up."""
    with op.batch_alter_table("attempts") as table:
        table.add_column(sa.Column("saving_step", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("saving_since", sa.DateTime(timezone=True), nullable=True))
    with op.batch_alter_table("checkpoints") as table:
        table.add_column(sa.Column("seconds_by", sa.Text(), nullable=True))


def downgrade() -> None:
    """Move down."""
    with op.batch_alter_table("checkpoints") as table:
        table.drop_column("seconds_by")
    with op.batch_alter_table("attempts") as table:
        table.drop_column("saving_since")
        table.drop_column("saving_step")
