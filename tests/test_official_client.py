"""OpenAI's own client, unmodified, against the running daemon, through both its doors."""

import openai
import pytest

from tests.daemons import DOORS, open_by_both_doors


@pytest.fixture(scope="module")
def opened(tiny_llama, tmp_path_factory):
    with open_by_both_doors(tmp_path_factory.mktemp("official"), tiny_llama) as opened:
        yield opened


@pytest.fixture
def served(opened):
    return opened[0]


@pytest.fixture(params=DOORS)
def client(opened, request):
    return opened[1][request.param]


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert model.id == "tiny-llama"
    assert client.models.retrieve("tiny-llama").id == "tiny-llama"


def test_streamed_text_equals_the_whole(client):
    options = {"model": "tiny-llama", "prompt": "To be or", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**options)
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(**options, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == whole.choices[0].text
    assert len(pieces) > 1
    assert whole.usage.completion_tokens <= 24


def test_a_seed_repeats_and_another_differs(client):
    def text(seed):
        reply = client.completions.create(
            model="tiny-llama", prompt="a", max_tokens=30, seed=seed, temperature=1.5
        )
        return reply.choices[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_stop_strings_end_the_text_before_them(client):
    options = {"model": "tiny-llama", "prompt": "x", "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[10:13]
    choice = client.completions.create(**options, stop=stop).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
    ],
)
def test_bad_requests_name_the_field_and_the_next_is_served(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny-llama", **fields)
    assert refused.value.param == param
    assert isinstance(refused.value.code, str)
    reply = client.completions.create(model="tiny-llama", prompt="fine", max_tokens=1)
    assert reply.usage.completion_tokens == 1


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")


def test_garbage_on_the_socket_hurts_nobody(client, served):
    import socket

    for garbage in (
        b"\x00" * 4096,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
    ):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(served.socket))
            raw.sendall(garbage)
    reply = served.http.post("/v1/completions", content=b'{"prompt": ')
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"
    assert client.completions.create(model="tiny-llama", prompt="x", max_tokens=1).choices
