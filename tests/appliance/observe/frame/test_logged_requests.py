"""A request of the log is shown as it was while it was live."""

from __future__ import annotations

from contextlib import closing

import pytest

from appliance.daemon.requests.row import kept_frame
from appliance.observe.frame.logged_requests import ended_frame
from appliance.observe.log.reader import read_row
from tests.recordings import request_row, write_log

TWO = {"num_sequences": 2, "max_tokens": 200, "recoveries": 3}


@pytest.fixture
def logged(tmp_path):
    with closing(write_log(tmp_path / "requests.db", [], [request_row("cmpl-1", 0, **TWO)])) as log:
        return read_row(log.path, "cmpl-1")


def test_it_might_output_what_all_its_sequences_might(logged):
    shown = ended_frame(logged)
    assert (shown.max_tokens, shown.recoveries) == (400, 3)
    assert kept_frame(request_row("cmpl-1", 0, **TWO), None, 0.0).max_tokens == 400


def test_all_but_the_last_output_token_are_computed(logged):
    shown = ended_frame(logged)
    assert (shown.output_tokens, shown.computed_tokens) == (101, 400 + 100)
    unknown = ended_frame({**logged, "completion_tokens": None, "e2e_ms": None})
    assert (unknown.output_tokens, unknown.computed_tokens, unknown.age_ms) == (None, None, 0.0)


def test_what_an_older_row_lacks_is_as_by_default(logged):
    older = {name: logged[name] for name in logged if name not in ("client", "recoveries")}
    shown = ended_frame(older)
    assert (shown.client, shown.recoveries, shown.worker) == (None, 0, None)
