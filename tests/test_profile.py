"""A real daemon measures while idle, serves meanwhile, and its next start knows."""

from appliance.fleet.profile_store import ProfileStore
from tests.daemons import ARMS

ON = {"PENSTOCK_MEASURE": "1"}


def test_what_a_daemon_has_measured_its_next_start_knows(start_daemon, tmp_path):
    daemon = start_daemon(*ARMS["elastic"], folder=tmp_path / "d", env=ON).wait_ready()
    assert "15 s while idle" in daemon.stderr

    def is_over():  # on a slow machine the time for it may be spent first
        state = daemon.http.get("/v1/penstock/measure").json()
        return not state["num_unknown"] or not state["is_going_on"]

    daemon.http.post("/v1/penstock/measure")  # other tests keep the cores busy
    for _ in range(3):  # a request in between is answered, and measuring goes on after it
        asked = {"prompt": "Once upon", "max_tokens": 3, "temperature": 0}
        reply = daemon.http.post("/v1/completions", json=asked)
        assert reply.status_code == 200
    daemon.wait_for(is_over)
    daemon.stop()
    rows = ProfileStore(tmp_path / "d" / "state").rows()
    assert {"prompt_ms", "decode_ms"} <= {row.key.what for row in rows}
    again = start_daemon(*ARMS["elastic"], folder=tmp_path / "d", env=ON).wait_ready()
    assert "15 s while idle" not in again.stderr
    known = [row for row in rows if row.scope.model]
    assert again.http.get("/v1/penstock/measure").json()["num_facts"] >= len(known)
