import msgspec
import pytest

from appliance.daemon.requests.request import Peer
from appliance.daemon.requests.row import LogRow
from appliance.daemon.requests.text_request import TextRequest

ANN = Peer(uid=1000, user="ann")


def make(**changes):
    fields = {
        "request_id": "embd-1",
        "endpoint": "/v1/embeddings",
        "model": "m",
        "peer": ANN,
        "received_at": "2026-11-01T00:00:00.000Z",
        "arrived_ns": 1_000_000,
        "tokenized_ns": 3_000_000,
        "num_texts": 2,
        "prompt_tokens": 9,
        "stop": lambda: None,
    }
    return TextRequest(**(fields | changes))


def read_again(row):
    return msgspec.json.decode(msgspec.json.encode(row), type=LogRow)


def test_its_row_is_read_again_after_a_crash_while_it_is_open_and_afterwards():
    request = make()
    row = LogRow.from_texts(request, 5_000_000, http_status=200)
    assert read_again(row) == row
    assert (row.t_finished_us, row.finish_reason) == (None, None)
    request.finished_ns = 7_000_000
    row = LogRow.from_texts(request, 7_000_000, http_status=200)
    assert read_again(row) == row
    assert (row.t_tokenized_us, row.t_started_us, row.t_finished_us) == (2000, 2000, 6000)
    assert (row.prompt_tokens, row.completion_tokens, row.num_sequences) == (9, None, 2)


def test_the_row_of_a_request_that_waited_for_its_model_is_read_again():
    row = LogRow.of_waiting(make(finished_ns=9).frame(9), ANN, None, 499)
    assert read_again(row) == row


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({}, "computed"), ({"cancelled_by": "client"}, "abort"), ({"error": "no"}, "error")],
)
def test_its_end_has_a_reason(changes, reason):
    assert make(finished_ns=9, **changes).finish_reason == reason
    assert make(**changes).finish_reason is None
