"""Define the profile's schema as append-only steps.

Invariant: a step that has been released is never edited; each runs in one transaction.
"""

from __future__ import annotations

# no executescript(): it would commit the transaction half-way
from sqlite_utils import Database, Migrations

migration = Migrations("profile")

_FACTS = """
CREATE TABLE facts (
  machine    TEXT NOT NULL,
  build      TEXT NOT NULL,
  model      TEXT NOT NULL,
  dtype      TEXT NOT NULL,
  placement  TEXT NOT NULL,
  what       TEXT NOT NULL,
  size       INTEGER NOT NULL,
  depth      INTEGER NOT NULL,
  place      TEXT NOT NULL,
  samples    TEXT NOT NULL,
  value      REAL NOT NULL,
  low        REAL NOT NULL,
  high       REAL NOT NULL,
  at         TEXT NOT NULL,
  PRIMARY KEY (machine, build, model, dtype, placement, what, size, depth, place)
) STRICT, WITHOUT ROWID
"""


@migration()
def m001_facts(db: Database) -> None:
    """Create facts: newest samples as a JSON list, with their median and spread."""
    db.conn.execute(_FACTS)


@migration()
def m002_no_products(db: Database) -> None:
    """Forget how products were timed: a rule chooses them now, whatever a first start found."""
    db.conn.execute("DELETE FROM facts WHERE what IN ('product_us', 'attention_us', 'is_wrong')")
