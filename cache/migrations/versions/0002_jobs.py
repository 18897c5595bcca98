"""Jobs, their problems and events; mirrored services; a number that every decision raises."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

#: Tables that decisions are made of: a change of one is a new version of what is served.
DECISIONS = ("winners", "rankings", "builds")
RAISE = "UPDATE versions SET number = number + 1 WHERE name = 'decisions'"


def _text(name: str, length: int) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _document(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        _document("options"),
        _text("created_at", 40),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("job_id", sa.String(16), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), nullable=False),
        _text("state", 16),
        sa.Column("attempt", sa.Integer, nullable=False),
        _document("reason"),
        sa.Column("token", sa.Integer, nullable=False),
        _text("holder", 128),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("not_before", sa.Double, nullable=False),
        _text("sweep", 64),
        _document("progress"),
    )
    op.create_index("ix_tasks_job_id", "tasks", ["job_id"])
    op.create_index("ix_tasks_state", "tasks", ["state"])
    op.create_index("ix_tasks_sweep", "tasks", ["sweep"])
    # One controller per problem, whatever the jobs that ask for it.
    is_running = sa.text("state = 'running'")
    op.create_index(
        "uq_tasks_running",
        "tasks",
        ["problem_id"],
        unique=True,
        sqlite_where=is_running,
        postgresql_where=is_running,
    )
    op.create_table(
        "job_events",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("job_id", sa.String(16), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("task_id", sa.Integer, sa.ForeignKey("tasks.id")),
        _text("at", 40),
        _document("text"),
    )
    op.create_index("ix_job_events_job_id", "job_events", ["job_id"])
    op.create_index("ix_measurements_sweep", "measurements", ["sweep"])


def _versions() -> None:
    op.create_table(
        "versions",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("number", sa.Integer, nullable=False),
    )
    op.execute("INSERT INTO versions VALUES ('decisions', 0)")
    dialect = op.get_bind().dialect.name
    if dialect == "sqlite":
        for table in DECISIONS:
            for event in ("INSERT", "UPDATE", "DELETE"):
                op.execute(
                    f"CREATE TRIGGER version_{table}_{event.lower()} AFTER {event} ON {table} "
                    f"BEGIN {RAISE}; END"
                )
    elif dialect == "postgresql":
        op.execute(
            "CREATE FUNCTION raise_decisions() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN {RAISE}; RETURN NULL; END $$"
        )
        for table in DECISIONS:
            op.execute(
                f"CREATE TRIGGER version_{table} AFTER INSERT OR UPDATE OR DELETE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION raise_decisions()"
            )


def upgrade() -> None:
    """Add the tables of jobs, mirrors and versions."""
    _jobs()
    op.create_table(
        "mirrors",
        sa.Column("url", sa.String(512), primary_key=True),
        _text("etag", 80),
        _text("synced_at", 40),
    )
    _versions()
