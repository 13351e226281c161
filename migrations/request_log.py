"""Define the request log's schema as append-only steps.

Invariant: a step that has been released is never edited; each runs in one transaction with its
record, so it is applied whole or not at all. The first step makes what fourteen steps made, by the
name of the fourteenth: a log that records it lacks nothing, one that does not is of before.
"""

from __future__ import annotations

# no executescript(): it would commit the transaction half-way
from sqlite_utils import Database, Migrations

migration = Migrations("request_log")
FIRST = "m014_speculation"
JOINED = (
    "m001_first_schema", "m002_users", "m003_routes", "m004_energy", "m005_frames", "m006_pauses",
    "m007_cached_tokens", "m008_restores", "m009_legs", "m010_output_offset",
    "m011_unknown_tokens", "m012_changes", "m013_cache_miss",
)  # fmt: skip
"""The steps before it: a version before 0.2 that misses one calls the log damaged, not newer."""

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
# The user is as `Peer.name` of appliance.daemon.requests.request writes it; computed, so that the
# two cannot differ. What is behind the comma came later: the text is the one that older logs have.
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
, key_name TEXT, user TEXT GENERATED ALWAYS AS (
  CASE WHEN key_name IS NOT NULL THEN 'key:' || key_name
    ELSE coalesce(peer_user, 'uid:' || peer_uid, 'unknown')
  END
) VIRTUAL, \
route TEXT, route_reason TEXT, prefill_j REAL, decode_j REAL, \
preemptions INTEGER NOT NULL DEFAULT 0, paused_us INTEGER, cached_tokens INTEGER, \
restored_tokens INTEGER NOT NULL DEFAULT 0, restored_us INTEGER, restore_reason TEXT, \
workers TEXT, links TEXT, output_offset INTEGER, completion_tokens INTEGER, changes TEXT, \
cache_miss TEXT, speculation TEXT) STRICT
"""

_EVENTS = """
CREATE TABLE events (
  id       INTEGER PRIMARY KEY,
  run_id   INTEGER NOT NULL REFERENCES runs(run_id),
  at       TEXT NOT NULL,
  severity TEXT NOT NULL,
  code     TEXT NOT NULL,
  message  TEXT NOT NULL
, actor TEXT) STRICT
"""

_REQUEST_TEXT = """
CREATE TABLE request_text (
  request_id INTEGER PRIMARY KEY REFERENCES requests(id) ON DELETE CASCADE,
  prompt     TEXT NOT NULL
) STRICT
"""

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

_QUEUE_US = """CASE
    WHEN t_started_us IS NOT NULL THEN t_started_us - coalesce(t_tokenized_us, 0)
    WHEN coalesce(t_first_token_us, t_attached_us, t_decode_started_us) IS NULL
      THEN t_finished_us - t_tokenized_us
  END"""

# The same cut as appliance.observe.frame.latency.stages: the finish closes the stage that was open.
_V_REQUESTS = f"""
CREATE VIEW v_requests AS SELECT
  id, rid, client_rid, run_id, received_at, endpoint, model,
  peer_uid, peer_gid, peer_pid, peer_user, key_name, user, stream, num_sequences,
  prompt_tokens, cached_tokens, restored_tokens, completion_tokens, max_tokens, output_offset, \
changes, cache_miss, speculation, temperature, top_p, seed,
  http_status, finish_reason, error, cancelled_by,
  transport, workers, links, route, route_reason, restore_reason, handoff_bytes, \
handoff_blocks, recoveries, preemptions, prefill_j, decode_j,
  CASE
    WHEN t_tokenized_us IS NOT NULL THEN t_tokenized_us
    WHEN coalesce(t_started_us, t_first_token_us, t_attached_us, t_decode_started_us) IS NULL
      THEN t_finished_us
  END / 1000.0 AS tokenize_ms,
  max({_QUEUE_US} - coalesce(restored_us, 0), 0) / 1000.0 AS queue_ms, min(restored_us, \
{_QUEUE_US}) / 1000.0 AS restore_ms,
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
  max(t_finished_us - t_decode_started_us - coalesce(paused_us, 0), 0) / 1000.0 AS decode_ms, \
min(paused_us, t_finished_us - t_decode_started_us) / 1000.0 AS paused_ms,
  (t_second_token_us - t_first_token_us) / 1000.0 AS first_itl_ms,
  CASE WHEN num_timed_tokens >= 2
    THEN (t_last_token_us - t_first_token_us) / 1000.0 / (num_timed_tokens - 1)
  END AS tpot_ms,
  t_finished_us / 1000.0 AS e2e_ms
FROM requests"""


@migration(name=FIRST)
def first(db: Database) -> None:
    """Create runs, requests, events, text on demand, frames, and the view with the stages."""
    tables = _RUNS, _REQUESTS, _EVENTS, _REQUEST_TEXT, _FRAMES, _FRAME_TEMPLATES
    for statement in (
        *tables,
        _V_REQUESTS,
        "CREATE INDEX ix_requests_received ON requests(received_at)",
        "CREATE INDEX ix_events_at ON events(at)",
        "CREATE INDEX ix_requests_user ON requests(user, received_at)",
        "CREATE INDEX ix_requests_failed ON requests(received_at)"
        " WHERE http_status >= 400 OR finish_reason IN ('error', 'abort')",
    ):
        db.conn.execute(statement)
    db.conn.executemany(
        "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES (?, ?, '')",
        [(migration.name, name) for name in JOINED],
    )


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
    for statement in (
        "DROP VIEW v_requests",
        "ALTER TABLE requests ADD COLUMN client TEXT",
        "ALTER TABLE requests ADD COLUMN waited_for TEXT",
        _V_REQUESTS.replace("speculation,", "speculation, client, waited_for,"),
        _REFUSALS,
        "CREATE INDEX ix_refusals_at ON refusals(at)",
    ):
        db.conn.execute(statement)
