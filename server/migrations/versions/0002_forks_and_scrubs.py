"""Which checkpoint a job was forked from, and when the bytes of a checkpoint and of each shard were last read back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TIMES = ("checkpoints", "checkpoint_shards")


def upgrade() -> None:
    """Move up."""
    with op.batch_alter_table("jobs") as table:
        table.add_column(sa.Column("forked_from", sa.String(length=36), nullable=True))
        table.add_column(sa.Column("fork_step", sa.BigInteger(), nullable=True))
        table.create_index("ix_jobs_forked_from", ["forked_from"])
        table.create_index("ix_jobs_cloned_from", ["cloned_from"])
    for name in _TIMES:
        with op.batch_alter_table(name) as table:
            table.add_column(sa.Column("verified_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Move down."""
    for name in _TIMES:
        with op.batch_alter_table(name) as table:
            table.drop_column("verified_at")
    with op.batch_alter_table("jobs") as table:
        table.drop_index("ix_jobs_cloned_from")
        table.drop_index("ix_jobs_forked_from")
        table.drop_column("fork_step")
        table.drop_column("forked_from")
