"""Which job a plan is made for, and the jobs on their way whose model nobody has planned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_UNPLANNED = """
INSERT INTO plan_requests (id, job_id, owner, spec, status, created_at)
SELECT id, id, owner, spec, 'pending', created_at FROM jobs
WHERE plan IS NULL AND status IN ('queued', 'starting', 'running', 'stopping')
"""


def upgrade() -> None:
    """Move up."""
    with op.batch_alter_table("plan_requests") as table:
        table.add_column(sa.Column("job_id", sa.String(length=36), nullable=True))
        table.create_foreign_key("fk_plan_requests_job_id_jobs", "jobs", ["job_id"], ["id"], ondelete="CASCADE")
        table.create_unique_constraint("uq_plan_requests_job_id", ["job_id"])
        table.create_index("ix_plan_requests_status", ["status"])
    op.execute(_UNPLANNED)


def downgrade() -> None:
    """Move down."""
    op.execute("DELETE FROM plan_requests WHERE job_id IS NOT NULL")
    with op.batch_alter_table("plan_requests") as table:
        table.drop_index("ix_plan_requests_status")
        table.drop_constraint("uq_plan_requests_job_id", type_="unique")
        table.drop_constraint("fk_plan_requests_job_id_jobs", type_="foreignkey")
        table.drop_column("job_id")
