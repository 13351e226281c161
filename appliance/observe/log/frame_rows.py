"""Insert packed frames into the request log.

Invariant: a frame's template is written before it or with it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from appliance.observe.frame.protocol import Frame
from appliance.observe.frame.recording import FramePacker, template_of

TEMPLATE_FRAMES = 600
"""Maximum frames per template: ten minutes."""


class Recorder:
    """Write the frames of one run."""

    def __init__(self) -> None:
        self._packer: FramePacker | None = None
        self._template_id = 0
        self._state = ""
        self._num_packed = 0

    def reset(self) -> None:
        """Start a new template with the next frame: the old one may not be in the file."""
        self._packer = None

    def insert(self, db: sqlite3.Connection, run_id: int, frames: Iterable[Frame]) -> None:
        """Insert frames in their order; after an error, reset()."""
        for frame in frames:
            packer = self._packer_for(db, frame)
            db.execute(
                "INSERT OR IGNORE INTO frames VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    frame.at,
                    run_id,
                    frame.seq,
                    round(frame.uptime_s * 1000),
                    frame.version,
                    self._template_id,
                    packer.pack(frame),
                ),
            )

    def _packer_for(self, db: sqlite3.Connection, frame: Frame) -> FramePacker:
        # A frame of another state, such as loading, hardly resembles the following ones.
        is_stale = self._num_packed == TEMPLATE_FRAMES or frame.state != self._state
        if self._packer is None or is_stale:
            template = template_of(frame)
            inserted = db.execute("INSERT INTO frame_templates (frame) VALUES (?)", (template,))
            self._packer = FramePacker(template)
            self._template_id = inserted.lastrowid or 0
            self._state = frame.state
            self._num_packed = 0
        self._num_packed += 1
        return self._packer
