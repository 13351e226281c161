"""Define the request log's schema as append-only steps.

Owns: tables, indexes and views.
Invariant: a step that has been released is never edited; each runs in one transaction with its
record, so it is applied whole or not at all.
Never: executescript(), which would commit that transaction half-way.
"""

from __future__ import annotations

from sqlite_utils import Database, Migrations

migration = Migrations("request_log")

_RUNS = """
CREATE TABLE runs (
  run_id      INTEGER PRIMARY KEY,
  boot_id     TEXT,
  started_at  TEXT NOT NULL,
  stopped_at  TEXT,
  stop_reason TEXT,
  version     TEXT NOT NULL,
  model       TEXT NOT NULL,
  dtype       TEXT NOT NULL,
  roles       TEXT NOT NULL,
  transport   TEXT
) STRICT
"""

# t_*_us are offsets from the arrival, on the monotonic clock, ordered; NULL is a stage not reached.
_REQUESTS = """
CREATE TABLE requests (
  id                INTEGER PRIMARY KEY,
  rid               TEXT NOT NULL UNIQUE,
  client_rid        TEXT,
  run_id            INTEGER NOT NULL REFERENCES runs(run_id),
  received_at       TEXT NOT NULL,
  endpoint          TEXT NOT NULL,
  model             TEXT NOT NULL,
  peer_uid          INTEGER,
  peer_gid          INTEGER,
  peer_pid          INTEGER,
  peer_user         TEXT,
  stream            INTEGER NOT NULL,
  num_sequences     INTEGER NOT NULL,
  prompt_tokens     INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  max_tokens        INTEGER,
  temperature       REAL,
  top_p             REAL,
  seed              INTEGER,
  http_status       INTEGER NOT NULL,
  finish_reason     TEXT,
  error             TEXT,
  cancelled_by      TEXT,
  transport         TEXT,
  handoff_bytes     INTEGER,
  handoff_blocks    INTEGER,
  recoveries        INTEGER NOT NULL,
  t_tokenized_us      INTEGER,
  t_started_us        INTEGER,
  t_first_token_us    INTEGER,
  t_attached_us       INTEGER,
  t_decode_started_us INTEGER,
  t_second_token_us   INTEGER,
  t_last_token_us     INTEGER,
  t_finished_us       INTEGER,
  num_timed_tokens    INTEGER
) STRICT
"""

_EVENTS = """
CREATE TABLE events (
  id       INTEGER PRIMARY KEY,
  run_id   INTEGER NOT NULL REFERENCES runs(run_id),
  at       TEXT NOT NULL,
  severity TEXT NOT NULL,
  code     TEXT NOT NULL,
  message  TEXT NOT NULL
) STRICT
"""

_REQUEST_TEXT = """
CREATE TABLE request_text (
  request_id INTEGER PRIMARY KEY REFERENCES requests(id) ON DELETE CASCADE,
  prompt     TEXT NOT NULL
) STRICT
"""

# The same cut as appliance.observe.frame.latency.stages: the finish closes the stage that was open.
_V_REQUESTS = """
CREATE VIEW v_requests AS SELECT
  id, rid, client_rid, run_id, received_at, endpoint, model,
  peer_uid, peer_gid, peer_pid, peer_user, stream, num_sequences,
  prompt_tokens, completion_tokens, max_tokens, temperature, top_p, seed,
  http_status, finish_reason, error, cancelled_by,
  transport, handoff_bytes, handoff_blocks, recoveries,
  CASE
    WHEN t_tokenized_us IS NOT NULL THEN t_tokenized_us
    WHEN coalesce(t_started_us, t_first_token_us, t_attached_us, t_decode_started_us) IS NULL
      THEN t_finished_us
  END / 1000.0 AS tokenize_ms,
  CASE
    WHEN t_started_us IS NOT NULL THEN t_started_us - coalesce(t_tokenized_us, 0)
    WHEN coalesce(t_first_token_us, t_attached_us, t_decode_started_us) IS NULL
      THEN t_finished_us - t_tokenized_us
  END / 1000.0 AS queue_ms,
  CASE
    WHEN t_first_token_us IS NOT NULL
      THEN t_first_token_us - coalesce(t_started_us, t_tokenized_us, 0)
    WHEN coalesce(t_attached_us, t_decode_started_us) IS NULL THEN t_finished_us - t_started_us
  END / 1000.0 AS prefill_ms,
  t_first_token_us / 1000.0 AS ttft_ms,
  (t_attached_us - coalesce(t_first_token_us, t_started_us, t_tokenized_us, 0)) / 1000.0
    AS handoff_ms,
  CASE
    WHEN t_decode_started_us IS NOT NULL THEN t_decode_started_us
      - coalesce(t_attached_us, t_first_token_us, t_started_us, t_tokenized_us, 0)
    ELSE t_finished_us - coalesce(t_attached_us, t_first_token_us)
  END / 1000.0 AS decode_wait_ms,
  (t_finished_us - t_decode_started_us) / 1000.0 AS decode_ms,
  (t_second_token_us - t_first_token_us) / 1000.0 AS first_itl_ms,
  CASE WHEN num_timed_tokens >= 2
    THEN (t_last_token_us - t_first_token_us) / 1000.0 / (num_timed_tokens - 1)
  END AS tpot_ms,
  t_finished_us / 1000.0 AS e2e_ms
FROM requests
"""


@migration()
def m001_first_schema(db: Database) -> None:
    """Create runs, requests, events, text on demand, and the view with the stages."""
    for statement in (_RUNS, _REQUESTS, _EVENTS, _REQUEST_TEXT, _V_REQUESTS):
        db.conn.execute(statement)
    db.conn.execute("CREATE INDEX ix_requests_received ON requests(received_at)")
    db.conn.execute("CREATE INDEX ix_requests_peer ON requests(peer_uid, received_at)")
    db.conn.execute("CREATE INDEX ix_events_at ON events(at)")


# The user as `Peer.name` of appliance.daemon.requests.request writes it; computed, so that the two
# cannot differ.
_USER = """
ALTER TABLE requests ADD COLUMN user TEXT GENERATED ALWAYS AS (
  CASE WHEN key_name IS NOT NULL THEN 'key:' || key_name
    ELSE coalesce(peer_user, 'uid:' || peer_uid, 'unknown')
  END
) VIRTUAL
"""


@migration()
def m002_users(db: Database) -> None:
    """Add the API key, the user in one word, the cause of an event, and indexes."""
    for statement in (
        "ALTER TABLE requests ADD COLUMN key_name TEXT",
        _USER,
        "ALTER TABLE events ADD COLUMN actor TEXT",
        "DROP VIEW v_requests",
        _V_REQUESTS.replace("peer_user,", "peer_user, key_name, user,"),
        "DROP INDEX ix_requests_peer",
        "CREATE INDEX ix_requests_user ON requests(user, received_at)",
        "CREATE INDEX ix_requests_failed ON requests(received_at)"
        " WHERE http_status >= 400 OR finish_reason IN ('error', 'abort')",
    ):
        db.conn.execute(statement)


@migration()
def m003_routes(db: Database) -> None:
    """Add the workers of a request and the reason for the choice."""
    for statement in (
        "ALTER TABLE requests ADD COLUMN route TEXT",
        "ALTER TABLE requests ADD COLUMN route_reason TEXT",
        "DROP VIEW v_requests",
        _V_REQUESTS.replace("peer_user,", "peer_user, key_name, user,").replace(
            "transport,", "transport, route, route_reason,"
        ),
    ):
        db.conn.execute(statement)


@migration()
def m004_energy(db: Database) -> None:
    """Add joules by phase; NULL if no device reported its power."""
    for statement in (
        "ALTER TABLE requests ADD COLUMN prefill_j REAL",
        "ALTER TABLE requests ADD COLUMN decode_j REAL",
        "DROP VIEW v_requests",
        _V_REQUESTS.replace("peer_user,", "peer_user, key_name, user,")
        .replace("transport,", "transport, route, route_reason,")
        .replace("recoveries,", "recoveries, prefill_j, decode_j,"),
    ):
        db.conn.execute(statement)


# Packed by appliance.observe.frame.recording. Ordered by time without an index of its own: there
# are many.
_FRAMES = """
CREATE TABLE frames (
  at          TEXT NOT NULL,
  run_id      INTEGER NOT NULL REFERENCES runs(run_id),
  seq         INTEGER NOT NULL,
  uptime_ms   INTEGER NOT NULL,
  version     INTEGER NOT NULL,
  template_id INTEGER NOT NULL,
  data        BLOB NOT NULL,
  PRIMARY KEY (at, run_id, seq)
) STRICT, WITHOUT ROWID
"""

_FRAME_TEMPLATES = """
CREATE TABLE frame_templates (
  template_id INTEGER PRIMARY KEY,
  frame       BLOB NOT NULL
) STRICT
"""


@migration()
def m005_frames(db: Database) -> None:
    """Add frames, one a second, and the templates that they are packed against."""
    db.conn.execute(_FRAMES)
    db.conn.execute(_FRAME_TEMPLATES)


_WITH_PAUSES = (
    _V_REQUESTS.replace("peer_user,", "peer_user, key_name, user,")
    .replace("transport,", "transport, route, route_reason,")
    .replace("recoveries,", "recoveries, preemptions, prefill_j, decode_j,")
    .replace(
        "(t_finished_us - t_decode_started_us) / 1000.0 AS decode_ms",
        "max(t_finished_us - t_decode_started_us - coalesce(paused_us, 0), 0) / 1000.0"
        " AS decode_ms,"
        " min(paused_us, t_finished_us - t_decode_started_us) / 1000.0 AS paused_ms",
    )
)


@migration()
def m006_pauses(db: Database) -> None:
    """Add how often a request was preempted, and for how long."""
    for statement in (
        "ALTER TABLE requests ADD COLUMN preemptions INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE requests ADD COLUMN paused_us INTEGER",
        "DROP VIEW v_requests",
        _WITH_PAUSES,
    ):
        db.conn.execute(statement)


@migration()
def m007_cached_tokens(db: Database) -> None:
    """Add prompt tokens found computed; NULL while the prefix cache is off."""
    for statement in (
        "ALTER TABLE requests ADD COLUMN cached_tokens INTEGER",
        "DROP VIEW v_requests",
        _WITH_PAUSES.replace("prompt_tokens,", "prompt_tokens, cached_tokens,"),
    ):
        db.conn.execute(statement)


_QUEUE_US = """CASE
    WHEN t_started_us IS NOT NULL THEN t_started_us - coalesce(t_tokenized_us, 0)
    WHEN coalesce(t_first_token_us, t_attached_us, t_decode_started_us) IS NULL
      THEN t_finished_us - t_tokenized_us
  END"""


_WITH_RESTORES = (
    _WITH_PAUSES.replace("prompt_tokens,", "prompt_tokens, cached_tokens, restored_tokens,")
    .replace("route_reason,", "route_reason, restore_reason,")
    .replace(
        f"{_QUEUE_US} / 1000.0 AS queue_ms",
        f"max({_QUEUE_US} - coalesce(restored_us, 0), 0) / 1000.0 AS queue_ms,"
        f" min(restored_us, {_QUEUE_US}) / 1000.0 AS restore_ms",
    )
)


@migration()
def m008_restores(db: Database) -> None:
    """Add prompt tokens loaded from disk, and the wait for them."""
    for statement in (
        "ALTER TABLE requests ADD COLUMN restored_tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE requests ADD COLUMN restored_us INTEGER",
        "ALTER TABLE requests ADD COLUMN restore_reason TEXT",
        "DROP VIEW v_requests",
        _WITH_RESTORES,
    ):
        db.conn.execute(statement)


_WITH_LEGS = _WITH_RESTORES.replace("transport,", "transport, workers, links,")


@migration()
def m009_legs(db: Database) -> None:
    """Add the workers that ran a request, in order, and the transports of its KV."""
    for statement in (
        "ALTER TABLE requests ADD COLUMN workers TEXT",
        "ALTER TABLE requests ADD COLUMN links TEXT",
        "DROP VIEW v_requests",
        _WITH_LEGS,
    ):
        db.conn.execute(statement)


@migration()
def m010_output_offset(db: Database) -> None:
    """Add how much of a prompt was output of an earlier request; draws depend on it."""
    for statement in (
        "ALTER TABLE requests ADD COLUMN output_offset INTEGER",
        "DROP VIEW v_requests",
        _WITH_LEGS.replace("max_tokens,", "max_tokens, output_offset,"),
    ):
        db.conn.execute(statement)


@migration()
def m011_unknown_tokens(db: Database) -> None:
    """Set the output of a request whose daemon was killed to NULL; it was 0."""
    cut = "the daemon ended before the reply did"
    for statement in (
        "DROP VIEW v_requests",
        "ALTER TABLE requests RENAME COLUMN completion_tokens TO counted",
        "ALTER TABLE requests ADD COLUMN completion_tokens INTEGER",
        f"UPDATE requests SET completion_tokens = counted WHERE error IS NOT '{cut}'",
        "ALTER TABLE requests DROP COLUMN counted",
        _WITH_LEGS.replace("max_tokens,", "max_tokens, output_offset,"),
    ):
        db.conn.execute(statement)


@migration()
def m012_changes(db: Database) -> None:
    """Add what was changed to serve a request: its token limit, its messages."""
    for statement in (
        "DROP VIEW v_requests",
        "ALTER TABLE requests ADD COLUMN changes TEXT",
        _WITH_LEGS.replace("max_tokens,", "max_tokens, output_offset, changes,"),
    ):
        db.conn.execute(statement)


@migration()
def m013_cache_miss(db: Database) -> None:
    """Keep at which token a prompt's cached prefix ended, and why."""
    for statement in (
        "DROP VIEW v_requests",
        "ALTER TABLE requests ADD COLUMN cache_miss TEXT",
        _WITH_LEGS.replace("max_tokens,", "max_tokens, output_offset, changes, cache_miss,"),
    ):
        db.conn.execute(statement)


@migration()
def m014_speculation(db: Database) -> None:
    """Keep a request's tokens per step, and how many of its guessed tokens were right."""
    columns = "max_tokens, output_offset, changes, cache_miss, speculation,"
    for statement in (
        "DROP VIEW v_requests",
        "ALTER TABLE requests ADD COLUMN speculation TEXT",
        _WITH_LEGS.replace("max_tokens,", columns),
    ):
        db.conn.execute(statement)


# Some rows a minute at most, whatever floods: refusals are counted by caller and reason before.
_REFUSALS = """
CREATE TABLE refusals (
  id      INTEGER PRIMARY KEY,
  run_id  INTEGER NOT NULL REFERENCES runs(run_id),
  at      TEXT NOT NULL,
  user    TEXT NOT NULL,
  client  TEXT NOT NULL,
  status  INTEGER NOT NULL,
  code    TEXT NOT NULL,
  number  INTEGER NOT NULL
) STRICT
"""


@migration()
def m015_clients(db: Database) -> None:
    """Add a request's program or address and what it waited for; count refused requests."""
    columns = "max_tokens, output_offset, changes, cache_miss, speculation, client, waited_for,"
    for statement in (
        "DROP VIEW v_requests",
        "ALTER TABLE requests ADD COLUMN client TEXT",
        "ALTER TABLE requests ADD COLUMN waited_for TEXT",
        _WITH_LEGS.replace("max_tokens,", columns),
        _REFUSALS,
        "CREATE INDEX ix_refusals_at ON refusals(at)",
    ):
        db.conn.execute(statement)
