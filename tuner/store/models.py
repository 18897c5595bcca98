"""Tables (SQLAlchemy Core) and the `best` view.

The migrations under ``cache/migrations`` create them, and a test keeps both equal. JSON is stored
as canonical text, so that equal values are equal rows on every database.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tuner.store.entry import BEST_COLUMNS

ORIGIN_CHARACTERS = 64
"""Maximum length of an imported measurement's origin."""

metadata = sa.MetaData()

problems = sa.Table(
    "problems",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.String(512), nullable=False, unique=True),
    sa.Column("op", sa.String(64), nullable=False),
)

gpus = sa.Table(
    "gpus",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("facts", sa.String(512), nullable=False, unique=True),
    sa.Column("identity", sa.String(128), nullable=False, index=True),
)

environments = sa.Table(
    "environments",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("digest", sa.String(16), nullable=False, unique=True),
    sa.Column("facts", sa.Text, nullable=False),
)

measurements = sa.Table(
    "measurements",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    # SHA-256 of the whole row: an equal measurement is stored once.
    sa.Column("digest", sa.String(64), nullable=False, unique=True),
    sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), nullable=False),
    sa.Column("gpu_id", sa.Integer, sa.ForeignKey("gpus.id"), nullable=False),
    sa.Column("environment_id", sa.Integer, sa.ForeignKey("environments.id"), nullable=False),
    sa.Column("regime", sa.String(32), nullable=False),
    sa.Column("family", sa.String(64), nullable=False),
    sa.Column("config_digest", sa.String(16), nullable=False),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("status", sa.String(32), nullable=False),
    sa.Column("provenance", sa.String(16), nullable=False),
    sa.Column("latency_us", sa.Double),
    sa.Column("std_us", sa.Double),
    sa.Column("rounds", sa.Integer, nullable=False),
    sa.Column("is_final", sa.Boolean, nullable=False),
    sa.Column("flags", sa.Text, nullable=False),
    sa.Column("error", sa.Double),
    sa.Column("workspace_bytes", sa.BigInteger, nullable=False),
    sa.Column("artifacts", sa.Text, nullable=False),
    sa.Column("resources", sa.Text, nullable=False),
    sa.Column("compile_cpu_s", sa.Double),
    sa.Column("clocks", sa.Text, nullable=False),
    sa.Column("log", sa.Text, nullable=False),
    sa.Column("sweep", sa.String(64), nullable=False),
    sa.Column("origin", sa.String(ORIGIN_CHARACTERS), nullable=False),
    sa.Column("created_at", sa.String(40), nullable=False),
    sa.Index("ix_measurements_of", "problem_id", "regime", "is_final"),
    sa.Index("ix_measurements_sweep", "sweep"),
)

sweeps = sa.Table(
    "sweeps",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), nullable=False),
    sa.Column("gpu_id", sa.Integer, sa.ForeignKey("gpus.id"), nullable=False),
    sa.Column("regime", sa.String(32), nullable=False),
    sa.Column("environment", sa.String(16), nullable=False),
    sa.Column("settings", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("created_at", sa.String(40), nullable=False),
    sa.Column("finished_at", sa.String(40), nullable=False),
    sa.Index("ix_sweeps_of", "problem_id", "regime", "environment", "settings"),
)

winners = sa.Table(
    "winners",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), nullable=False),
    sa.Column("gpu", sa.String(128), nullable=False),
    sa.Column("regime", sa.String(32), nullable=False),
    sa.Column("provenance", sa.String(16), nullable=False),
    sa.Column("sweep", sa.String(64), nullable=False),
    sa.Column("decided_at", sa.String(40), nullable=False),
    sa.UniqueConstraint("problem_id", "regime", "gpu", "provenance", name="uq_winners_of"),
)

rankings = sa.Table(
    "rankings",
    metadata,
    sa.Column(
        "winner_id", sa.Integer, sa.ForeignKey("winners.id", ondelete="CASCADE"), primary_key=True
    ),
    # 0 is the best; entry.PINNED (-1) is the user's own choice.
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column(
        "measurement_id", sa.Integer, sa.ForeignKey("measurements.id"), nullable=False, index=True
    ),
)

#: Artifacts that `tuner build` made on this machine for an imported or pruned kernel. The view
#: shows them instead of the measurement's own.
builds = sa.Table(
    "builds",
    metadata,
    sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), primary_key=True),
    sa.Column("config_digest", sa.String(16), primary_key=True),
    sa.Column("artifacts", sa.Text, nullable=False),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("priority", sa.Integer, nullable=False),
    # Maximum attempts for each of its problems.
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("options", sa.Text, nullable=False),
    sa.Column("created_at", sa.String(40), nullable=False),
)

#: One problem of one job each.
tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("job_id", sa.String(16), sa.ForeignKey("jobs.id"), nullable=False, index=True),
    sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    # Reason why the last attempt ended without a decision.
    sa.Column("reason", sa.Text, nullable=False),
    # The lease: its number, which every claim raises, its holder and its end (seconds since 1970 on
    # the database's clock).
    sa.Column("token", sa.Integer, nullable=False),
    sa.Column("holder", sa.String(128), nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
    # A retry waits until then.
    sa.Column("not_before", sa.Double, nullable=False),
    sa.Column("sweep", sa.String(64), nullable=False, index=True),
    sa.Column("progress", sa.Text, nullable=False),
    sa.Index(
        "uq_tasks_running",
        "problem_id",
        unique=True,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    ),
)

job_events = sa.Table(
    "job_events",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("job_id", sa.String(16), sa.ForeignKey("jobs.id"), nullable=False, index=True),
    sa.Column("task_id", sa.Integer, sa.ForeignKey("tasks.id")),
    sa.Column("at", sa.String(40), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)

#: Services whose decisions `Store.mirror` has taken over.
mirrors = sa.Table(
    "mirrors",
    metadata,
    sa.Column("url", sa.String(512), primary_key=True),
    sa.Column("etag", sa.String(80), nullable=False),
    sa.Column("synced_at", sa.String(40), nullable=False),
)

#: Triggers raise ``decisions`` whenever a served decision may have changed.
versions = sa.Table(
    "versions",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("number", sa.Integer, nullable=False),
)

#: The view, created by the migrations.
best = sa.table("best", sa.column("op"), sa.column("gpu_identity"), *map(sa.column, BEST_COLUMNS))

#: The view with `entry.CHECKED_COLUMNS`.
checked_best: sa.Select[Any] = sa.select(
    best,
    measurements.c.digest,
    measurements.c.artifacts.label("measured_artifacts"),
).select_from(
    best.join(
        rankings,
        sa.and_(rankings.c.winner_id == best.c.winner_id, rankings.c.position == best.c.position),
    ).join(measurements, measurements.c.id == rankings.c.measurement_id)
)
