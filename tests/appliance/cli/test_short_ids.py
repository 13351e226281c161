"""The beginnings of ids: which request they mean, and that nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.short_ids import AmbiguousId, the_one
from tests.appliance import logs
from tests.appliance.cli_data import REQUEST, ROW
from tests.appliance.cli_process import penstock
from tests.worlds.fake_daemon import FakeDaemon

LIVE = [{**REQUEST, "id": rid} for rid in ("cmpl-ab12cd34", "chatcmpl-ab99", "resp-ef56")]
MISSING = (404, {"error": {"message": "no live request", "code": "request_not_found"}})
ids = st.builds("{}-{}".format, st.sampled_from(["cmpl", "resp"]), st.text("0123", min_size=6))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "p.sock") as fake:
        fake.script.replies = {
            "GET /v1/requests": (200, {"data": LIVE}),
            "GET /v1/requests/cmpl-ab12cd34": (200, LIVE[0]),
            "GET /v1/penstock/log?limit=1000": (200, {"data": [{**ROW, "id": "cmpl-0ld"}]}),
            "GET /v1/requests/cmpl-0ld": (200, {**REQUEST, "id": "cmpl-0ld"}),
            **{f"POST /v1/requests/{text}/cancel": MISSING for text in ("ab", "ab1", "resp", "zz")},
        }
        yield fake


@given(st.lists(ids, unique=True), st.text("cmplresp-0123"))
def test_only_the_beginning_of_one_id_is_that_id(known, text):
    begun = [each for each in known if text and text in (each[: len(text)], each[5:][: len(text)])]
    try:
        found = the_one(text, known)
    except AmbiguousId:
        assert len(begun) > 1
    else:
        assert found == (begun[0] if len(begun) == 1 and text not in known else None)


@given(st.lists(ids, min_size=1), st.data())
def test_a_complete_id_is_no_beginning(known, data):
    assert the_one(data.draw(st.sampled_from(known)), known) is None


def test_without_an_id_the_newest_request_is_shown(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    times = zip(LIVE, ("2026-11-01", "2026-11-03", "2026-11-02"), strict=True)
    frames = [{**frame, "received_at": at} for frame, at in times]
    daemon.script.replies["GET /v1/requests"] = (200, {"data": frames})
    daemon.script.replies["GET /v1/requests/chatcmpl-ab99"] = (200, frames[1])
    for words in ([], ["last"]):
        assert "chatcmpl-ab99" in penstock(environ, "show", *words).stdout
    daemon.script.replies["GET /v1/requests"] = (200, {"data": []})
    assert "cmpl-0ld" in penstock(environ, "show").stdout
    daemon.script.replies["GET /v1/penstock/log?limit=1000"] = (200, {"data": []})
    ended = penstock(environ, "show")
    assert ended.returncode == 2
    assert "penstock run" in ended.stderr


def test_the_daemon_is_asked_for_the_id_that_is_meant(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    assert "cmpl-ab12cd34" in penstock(environ, "show", "ab1").stdout
    assert "cmpl-0ld" in penstock(environ, "show", "cmpl-0").stdout  # only in the log
    assert penstock(environ, "cancel", "ab1", "resp").stdout == (
        "cancelled cmpl-ab12cd34\ncancelled resp-ef56\n"
    )


def test_several_candidates_are_named_and_none_is_taken(
    daemon: FakeDaemon, environ: dict[str, str]
) -> None:
    for verb in ("show", "cancel"):
        ended = penstock(environ, verb, "ab")
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "cmpl-ab12cd34, chatcmpl-ab99" in ended.stderr
    ended = penstock(environ, "cancel", "zz", "ab1")
    assert (ended.returncode, ended.stdout) == (5, "cancelled cmpl-ab12cd34\n")
    assert ended.stderr.startswith("penstock: zz: ")


def test_the_file_knows_beginnings_too(tmp_path: Path, environ: dict[str, str]) -> None:
    logs.write(tmp_path / "state" / "requests.db", logs.row("cmpl-70"), logs.row("cmpl-71"))
    assert "cmpl-71" in penstock(environ, "show", "71").stdout
    assert penstock(environ, "show", "7").returncode == 2
    assert penstock(environ, "show", "8").returncode == 5
