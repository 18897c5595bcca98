"""Problems, GPUs, environments, measurements, sweeps, winners, builds and the view `best`."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

# An imported measurement's artifact keys name nothing here until `tuner build` has made them: a
# file must not choose which local binary is launched.
BEST = """
CREATE VIEW best AS
SELECT w.id AS winner_id, r.position AS position, w.sweep AS decided_by,
       w.decided_at AS decided_at, m.origin AS origin,
       p.op AS op, w.gpu AS gpu_identity,
       p.key AS problem, m.config AS config, g.facts AS gpu, w.regime AS regime,
       m.status AS status, w.provenance AS provenance, e.facts AS environment,
       m.latency_us AS latency_us, m.std_us AS std_us, m.rounds AS rounds,
       m.is_final AS is_final, m.flags AS flags, m.error AS error,
       m.workspace_bytes AS workspace_bytes,
       COALESCE(b.artifacts, CASE WHEN m.origin = '' THEN m.artifacts ELSE '{}' END) AS artifacts,
       m.resources AS resources, m.compile_cpu_s AS compile_cpu_s, m.clocks AS clocks,
       m.log AS log, m.sweep AS sweep, m.created_at AS created_at
FROM problems p
JOIN winners w ON w.problem_id = p.id
JOIN rankings r ON r.winner_id = w.id
JOIN measurements m ON m.id = r.measurement_id
JOIN gpus g ON g.id = m.gpu_id
JOIN environments e ON e.id = m.environment_id
LEFT JOIN builds b ON b.problem_id = m.problem_id AND b.config_digest = m.config_digest
"""

#: Measurements are evidence: no program changes one, it deletes or adds.
IMMUTABLE = {
    "sqlite": [
        """
        CREATE TRIGGER measurements_immutable BEFORE UPDATE ON measurements
        BEGIN SELECT RAISE(ABORT, 'measurements are immutable'); END
        """
    ],
    "postgresql": [
        """
        CREATE FUNCTION measurements_immutable() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'measurements are immutable'; END $$
        """,
        """
        CREATE TRIGGER measurements_immutable BEFORE UPDATE ON measurements
        FOR EACH ROW EXECUTE FUNCTION measurements_immutable()
        """,
    ],
}


def _text(name: str, length: int) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _document(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _identities() -> None:
    op.create_table(
        "problems",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.String(512), nullable=False, unique=True),
        _text("op", 64),
    )
    op.create_table(
        "gpus",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("facts", sa.String(512), nullable=False, unique=True),
        _text("identity", 128),
    )
    op.create_index("ix_gpus_identity", "gpus", ["identity"])
    op.create_table(
        "environments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(16), nullable=False, unique=True),
        _document("facts"),
    )


def _measurements() -> None:
    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), nullable=False),
        sa.Column("gpu_id", sa.Integer, sa.ForeignKey("gpus.id"), nullable=False),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environments.id"), nullable=False),
        _text("regime", 32),
        _text("family", 64),
        _text("config_digest", 16),
        _document("config"),
        _text("status", 32),
        _text("provenance", 16),
        sa.Column("latency_us", sa.Double),
        sa.Column("std_us", sa.Double),
        sa.Column("rounds", sa.Integer, nullable=False),
        sa.Column("is_final", sa.Boolean, nullable=False),
        _document("flags"),
        sa.Column("error", sa.Double),
        sa.Column("workspace_bytes", sa.BigInteger, nullable=False),
        _document("artifacts"),
        _document("resources"),
        sa.Column("compile_cpu_s", sa.Double),
        _document("clocks"),
        _document("log"),
        _text("sweep", 64),
        _text("origin", 64),
        _text("created_at", 40),
    )
    op.create_index("ix_measurements_of", "measurements", ["problem_id", "regime", "is_final"])
    for statement in IMMUTABLE.get(op.get_bind().dialect.name, []):
        op.execute(statement)


def _decisions() -> None:
    op.create_table(
        "sweeps",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), nullable=False),
        sa.Column("gpu_id", sa.Integer, sa.ForeignKey("gpus.id"), nullable=False),
        _text("regime", 32),
        _text("environment", 16),
        _text("settings", 64),
        _text("state", 16),
        _text("created_at", 40),
        _text("finished_at", 40),
    )
    op.create_index("ix_sweeps_of", "sweeps", ["problem_id", "regime", "environment", "settings"])
    op.create_table(
        "winners",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), nullable=False),
        _text("gpu", 128),
        _text("regime", 32),
        _text("provenance", 16),
        _text("sweep", 64),
        _text("decided_at", 40),
        sa.UniqueConstraint("problem_id", "regime", "gpu", "provenance", name="uq_winners_of"),
    )
    op.create_table(
        "rankings",
        sa.Column(
            "winner_id",
            sa.Integer,
            sa.ForeignKey("winners.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("measurement_id", sa.Integer, sa.ForeignKey("measurements.id"), nullable=False),
    )
    op.create_index("ix_rankings_measurement_id", "rankings", ["measurement_id"])
    op.create_table(
        "builds",
        sa.Column("problem_id", sa.Integer, sa.ForeignKey("problems.id"), primary_key=True),
        sa.Column("config_digest", sa.String(16), primary_key=True),
        _document("artifacts"),
    )


def upgrade() -> None:
    """Make an empty store."""
    _identities()
    _measurements()
    _decisions()
    op.execute(BEST)
