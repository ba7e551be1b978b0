"""First schema: jobs, attempts, events, points, logs, checkpoints, users, leases, the feed."""

# ruff: noqa: E501

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move up."""
    op.create_table(
        "changes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("topic", sa.String(length=16), nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_changes")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("name_folded", sa.Text(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("spec_yaml", sa.Text(), nullable=False),
        sa.Column("model_kind", sa.Text(), nullable=False),
        sa.Column("chunk", sa.BigInteger(), nullable=False),
        sa.Column("micro_batches", sa.BigInteger(), nullable=False),
        sa.Column("ranks", sa.BigInteger(), nullable=False),
        sa.Column("stage", sa.BigInteger(), nullable=True),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("cloned_from", sa.String(length=36), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("desired", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("reason_data", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("desired_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("user_failures", sa.BigInteger(), nullable=False),
        sa.Column("infrastructure_failures", sa.BigInteger(), nullable=False),
        sa.Column("progress_step", sa.BigInteger(), nullable=False),
        sa.Column("resume_checkpoint", sa.String(length=36), nullable=True),
        sa.Column("phase", sa.Text(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Float(precision=53), nullable=True),
        sa.Column("loss_flag", sa.SmallInteger(), nullable=False),
        sa.Column("tokens_per_second", sa.Float(precision=53), nullable=True),
        sa.Column("step_seconds", sa.Float(precision=53), nullable=True),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("last_report_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sparkline", sa.Text(), nullable=False),
        sa.Column("sparkline_stride", sa.BigInteger(), nullable=False),
        sa.Column("log_seq", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("desired IN ('run', 'pause', 'cancel', 'kill')", name=op.f("ck_jobs_desired")),
        sa.CheckConstraint(
            "status IN ('queued', 'starting', 'running', 'stopping', 'paused', 'cancelled', 'succeeded', 'failed', 'deleting', 'delete_failed')",
            name=op.f("ck_jobs_status"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_jobs_created_at_id_name_folded"), ["created_at", "id", "name_folded"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_jobs_loss_id"), ["loss", "id"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_name_folded_id"), ["name_folded", "id"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_status_created_at_id"), ["status", "created_at", "id"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_jobs_status_name_folded_id"), ["status", "name_folded", "id"], unique=False
        )
        batch_op.create_index(
            batch_op.f("ix_jobs_status_priority_queued_at"), ["status", "priority", "queued_at"], unique=False
        )

    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("alive", sa.Boolean(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("free_slots", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("device_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("devices", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "plan_requests",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plan_requests")),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("reason_data", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("ranks", sa.BigInteger(), nullable=False),
        sa.Column("stage", sa.BigInteger(), nullable=False),
        sa.Column("chunk", sa.BigInteger(), nullable=False),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("launched_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stop_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("kill_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("resume_step", sa.BigInteger(), nullable=True),
        sa.Column("resume_checkpoint", sa.String(length=36), nullable=True),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_report_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("token_hash", sa.Text(), nullable=True),
        sa.Column("plan_memory", sa.Text(), nullable=True),
        sa.Column("plan_traffic", sa.Text(), nullable=True),
        sa.Column("parameters", sa.BigInteger(), nullable=True),
        sa.Column("log_bytes", sa.BigInteger(), nullable=False),
        sa.Column("log_dropped_bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "status IN ('starting', 'running', 'stopping', 'released')", name=op.f("ck_attempts_status")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("job_id", "number", name=op.f("uq_attempts_job_id_number")),
    )
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_attempts_status"), ["status"], unique=False)

    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("ranks", sa.BigInteger(), nullable=False),
        sa.Column("stage", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("eval_loss", sa.Float(precision=53), nullable=True),
        sa.Column("eval_loss_flag", sa.SmallInteger(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("job_id", "folder", name=op.f("uq_checkpoints_job_id_folder")),
    )
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_checkpoints_job_id_step"), ["job_id", "step"], unique=False)

    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=True),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("old", sa.Text(), nullable=True),
        sa.Column("new", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_events_job_id_id"), ["job_id", "id"], unique=False)

    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_hash", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_idempotency_keys_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "job_tags",
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_tags_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("tag", "job_id", name=op.f("pk_job_tags")),
    )
    with op.batch_alter_table("job_tags", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_job_tags_job_id"), ["job_id"], unique=False)

    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("user_id", sa.String(length=36), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_tokens_user_id_users"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_tokens_hash")),
    )
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_tokens_user_id"), ["user_id"], unique=False)

    op.create_table(
        "checkpoint_shards",
        sa.Column("checkpoint_id", sa.String(length=36), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"],
            ["checkpoints.id"],
            name=op.f("fk_checkpoint_shards_checkpoint_id_checkpoints"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "rank", name=op.f("pk_checkpoint_shards")),
    )
    op.create_table(
        "ledger",
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_ledger_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "rank", name=op.f("pk_ledger")),
    )
    op.create_table(
        "log_chunk",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("meta", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_log_chunk_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_log_chunk_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "first_seq", name=op.f("pk_log_chunk")),
    )
    with op.batch_alter_table("log_chunk", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_log_chunk_attempt_id"), ["attempt_id"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_log_chunk_job_id_rank_first_seq"), ["job_id", "rank", "first_seq"], unique=False
        )

    op.create_table(
        "log_open_line",
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("carriage_return", sa.Boolean(), nullable=False),
        sa.Column("escape", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_log_open_line_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "rank", "stream", name=op.f("pk_log_open_line")),
    )
    op.create_table(
        "memory_sample",
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("params", sa.BigInteger(), nullable=False),
        sa.Column("grads", sa.BigInteger(), nullable=False),
        sa.Column("sums", sa.BigInteger(), nullable=False),
        sa.Column("master", sa.BigInteger(), nullable=False),
        sa.Column("moments", sa.BigInteger(), nullable=False),
        sa.Column("buckets", sa.BigInteger(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("activations", sa.BigInteger(), nullable=False),
        sa.Column("other", sa.BigInteger(), nullable=False),
        sa.Column("allocated", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.Column("rss", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_memory_sample_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "step", "rank", "phase", name=op.f("pk_memory_sample")),
    )
    op.create_table(
        "ranks",
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=True),
        sa.Column("phase_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("start_ticks", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_ranks_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "rank", name=op.f("pk_ranks")),
    )
    op.create_table(
        "reports",
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("closed", sa.Boolean(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_reports_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "rank", name=op.f("pk_reports")),
    )
    op.create_table(
        "series",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("attempt_id", sa.String(length=36), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_series_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_series_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_series")),
        sa.UniqueConstraint("attempt_id", "name", "rank", name=op.f("uq_series_attempt_id_name_rank")),
    )
    with op.batch_alter_table("series", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_series_job_id"), ["job_id"], unique=False)

    op.create_table(
        "point_chunk",
        sa.Column("series_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["series_id"], ["series.id"], name=op.f("fk_point_chunk_series_id_series"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("series_id", "number", name=op.f("pk_point_chunk")),
    )
    with op.batch_alter_table("point_chunk", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_point_chunk_series_id_last_step"), ["series_id", "last_step"], unique=False
        )

    op.create_table(
        "point_tail",
        sa.Column("series_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=True),
        sa.Column("flag", sa.SmallInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["series_id"], ["series.id"], name=op.f("fk_point_tail_series_id_series"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("series_id", "step", name=op.f("pk_point_tail")),
    )
    op.create_table(
        "rollup",
        sa.Column("series_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("level", sa.SmallInteger(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_at_us", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("nan", sa.BigInteger(), nullable=False),
        sa.Column("positive_infinity", sa.BigInteger(), nullable=False),
        sa.Column("negative_infinity", sa.BigInteger(), nullable=False),
        sa.Column("min", sa.Float(precision=53), nullable=True),
        sa.Column("max", sa.Float(precision=53), nullable=True),
        sa.Column("first", sa.Float(precision=53), nullable=True),
        sa.Column("last", sa.Float(precision=53), nullable=True),
        sa.Column("sum", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(
            ["series_id"], ["series.id"], name=op.f("fk_rollup_series_id_series"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("series_id", "level", "bucket", name=op.f("pk_rollup")),
    )
    op.create_table(
        "series_stats",
        sa.Column("series_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("num_chunks", sa.BigInteger(), nullable=False),
        sa.Column("tail_count", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("non_finite", sa.BigInteger(), nullable=False),
        sa.Column("out_of_order", sa.BigInteger(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("last", sa.Float(precision=53), nullable=True),
        sa.Column("last_flag", sa.SmallInteger(), nullable=False),
        sa.Column("min", sa.Float(precision=53), nullable=True),
        sa.Column("max", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(
            ["series_id"], ["series.id"], name=op.f("fk_series_stats_series_id_series"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("series_id", name=op.f("pk_series_stats")),
    )


def downgrade() -> None:
    """Move back."""
    op.drop_table("series_stats")
    op.drop_table("rollup")
    op.drop_table("point_tail")
    with op.batch_alter_table("point_chunk", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_point_chunk_series_id_last_step"))

    op.drop_table("point_chunk")
    with op.batch_alter_table("series", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_series_job_id"))

    op.drop_table("series")
    op.drop_table("reports")
    op.drop_table("ranks")
    op.drop_table("memory_sample")
    op.drop_table("log_open_line")
    with op.batch_alter_table("log_chunk", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_log_chunk_job_id_rank_first_seq"))
        batch_op.drop_index(batch_op.f("ix_log_chunk_attempt_id"))

    op.drop_table("log_chunk")
    op.drop_table("ledger")
    op.drop_table("checkpoint_shards")
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_tokens_user_id"))

    op.drop_table("tokens")
    with op.batch_alter_table("job_tags", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_job_tags_job_id"))

    op.drop_table("job_tags")
    op.drop_table("idempotency_keys")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_events_job_id_id"))

    op.drop_table("events")
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_checkpoints_job_id_step"))

    op.drop_table("checkpoints")
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_attempts_status"))

    op.drop_table("attempts")
    op.drop_table("users")
    op.drop_table("plan_requests")
    op.drop_table("nodes")
    op.drop_table("leases")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_jobs_status_priority_queued_at"))
        batch_op.drop_index(batch_op.f("ix_jobs_status_name_folded_id"))
        batch_op.drop_index(batch_op.f("ix_jobs_status_created_at_id"))
        batch_op.drop_index(batch_op.f("ix_jobs_name_folded_id"))
        batch_op.drop_index(batch_op.f("ix_jobs_loss_id"))
        batch_op.drop_index(batch_op.f("ix_jobs_created_at_id_name_folded"))

    op.drop_table("jobs")
    op.drop_table("changes")
