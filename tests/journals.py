"""The journal of a request with two sequences, for tests and for the fixtures of each version."""

from __future__ import annotations

from appliance.daemon.survival import journal as journals
from appliance.daemon.survival.journal import End, Head, Tokens
from engine.wire.sampling import TokenLogprob

REQUEST = [b"POST / HTTP/1.1\r\n\r\n", b"body"]
HEAD = Head(journals.VERSION, b"event: error", b": ping", "tiny", (0, 0, 7, (0, 4)))
BATCH = [
    Tokens(0, [5, 6], [TokenLogprob(-0.5, [5], [-0.5])] * 2, 0, None, None),
    Tokens(1, [], [], 1, None, End("error", "no way on", True, None, {"what": "x", "status": 503})),
]
