"""List every parser of foreign bytes: valid examples, and which errors it may raise."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from appliance.api.core.output_parser import OutputParser
from appliance.api.core.tools import Tools
from appliance.api.formats.format_choice import THOUGHTS, OutputFormat
from appliance.api.formats.tool_format import FORMATS
from appliance.bench.reply_events import ReceivedReply, ReplyReader
from appliance.daemon.survival.journal import anew
from appliance.daemon.survival.open_requests import OpenRequests
from appliance.hub.names import STARTER_FOLDER
from appliance.observe.frame.protocol import Frame
from appliance.observe.frame.recording import FramePacker, template_of
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf import GgufModel
from engine.checkpoint.text_model import TextModelConfig
from engine.checkpoint.written_models import written
from engine.errors import ChannelClosed, CheckpointError, PenstockError
from engine.scheduler.offload.files import check_records, survey
from engine.scheduler.offload.records import (
    RecordHead,
    SlabHead,
    payload_crc,
    record_bytes,
    seal_record,
    seal_slab,
)
from engine.text.jinja_templates import JinjaTemplate
from engine.text.read_models import read_checkpoint, read_text_model, read_tokenizer
from engine.text.tokenizer import TRIAL_TEXT, Tokenizer, TokenizerFiles
from engine.wire.channel import DaemonChannel, WorkerChannel, frame
from engine.wire.messages import (
    Admit,
    Begun,
    Copied,
    Copy,
    Extend,
    Extension,
    Failed,
    FilledBy,
    LoadingProgress,
    Release,
    SequenceStep,
    Stepped,
)
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.appliance.api.core.test_output_parser import NOTATIONS
from tests.appliance.api_server import serving
from tests.appliance.logs import row
from tests.benchmarks.hostile import GENERATING, body_of
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.recordings import frame_at, make_recording, request_row
from tests.text_checkpoints import add_modules, make_text_checkpoint
from tests.tui.frames import busy
from tests.worlds.daemon_parts import FakeAppliance
from tests.worlds.fake_encoders import FakeEncoder
from tui.feed import FeedIncompatible
from tui.feed import _decoded as decode_frame
from tui.replay import Replay

TEMPLATES = Path(__file__).parents[1] / "chat_templates"

APART = 50
"""Of so many models one is read by the process with limits, too."""
MAX_SILENCE_S = 120
"""Real seconds, which a busy machine needs more of."""

Parse = Callable[[bytes], object]


@dataclass(slots=True)
class Parser:
    """Something that reads bytes which others made."""

    parse: Parse
    examples: list[bytes]
    may_raise: tuple[type[BaseException], ...] = ()
    is_json: bool = False
    fragments: list[bytes] = field(default_factory=list)
    """What to insert besides random bytes."""
    share: int = 1
    """Of the inputs: the quicker, the more."""
    is_measured: bool = False
    """Its memory is compared with the file's length, which takes time."""
    file_bytes: int = 0
    """Length of the file that an input is the beginning of."""


@functools.cache
def scratch() -> Path:
    """Make a folder in memory for files that are read by their paths."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=shm if shm.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# files of models

PIECES = Path(__file__).parents[1] / "fixtures" / "sentencepiece"


def _model_folder(name: str, but_for: str) -> Path:
    """Make a folder of links to the starter's files but for one, with a short tokenizer."""
    folder = scratch() / name
    folder.mkdir()
    for path in STARTER_FOLDER.iterdir():
        if path.name not in (but_for, "tokenizer.json"):
            (folder / path.name).symlink_to(path)
    whole = (STARTER_FOLDER / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(_shortened(whole))
    return folder


def _headers(path: Path, data: bytes) -> None:
    """Read a model as the daemon's reader does; of some inputs in that process, too."""
    if zlib.crc32(data) % APART == 0:
        assert _outcome(read_checkpoint, path) == _outcome(Checkpoint.open, path)
    written(Checkpoint.open(path))


def _tokenizer(path: Path, data: bytes) -> None:
    if zlib.crc32(data) % APART == 0:
        assert _outcome(_ids_there, path) == _outcome(_ids_here, path)
    TokenizerFiles.read(path).build_on_trial()


def _ids_there(path: Path) -> list[int]:
    return read_tokenizer(path).encode(TRIAL_TEXT)


def _ids_here(path: Path) -> list[int]:
    TokenizerFiles.read(path).build_on_trial()
    return Tokenizer.from_folder(path).encode(TRIAL_TEXT)


def _outcome(read: Callable[[Path], object], path: Path) -> object:
    try:
        return read(path)
    except CheckpointError:
        return CheckpointError


def _file_of_model(file: str, read: Callable[[Path, bytes], object]) -> Parser:
    folder = _model_folder(file, but_for=file)

    def parse(data: bytes) -> None:
        (folder / file).write_bytes(data)
        read(folder, data)

    is_there = (folder / file).exists()
    original = ((folder if is_there else STARTER_FOLDER) / file).read_bytes()
    return Parser(parse, [original], (PenstockError,), is_json=True, is_measured=True)


def _pieces() -> Parser:
    """Read SentencePiece's models, in a folder without another tokenizer."""
    folder = scratch() / "pieces"
    folder.mkdir()
    originals = [path.read_bytes() for path in sorted(PIECES.glob("*.model"))]

    def parse(data: bytes) -> None:
        (folder / "tokenizer.model").write_bytes(data)
        _tokenizer(folder, data)

    return Parser(parse, originals, (PenstockError,), is_measured=True)


def _safetensors(name: str, *, is_json: bool) -> Parser:
    """Read a header, of which the bytes or the JSON within are changed."""
    folder = _model_folder(name, but_for="model.safetensors")
    weights, path = STARTER_FOLDER / "model.safetensors", folder / "model.safetensors"
    with weights.open("rb") as file:
        length = file.read(8)
        head = file.read(int.from_bytes(length, "little"))

    def parse(data: bytes) -> None:
        path.write_bytes(struct.pack("<Q", len(data)) + data if is_json else data)
        os.truncate(path, weights.stat().st_size)
        _headers(folder, data)

    return Parser(
        parse,
        [head if is_json else length + head],
        (PenstockError,),
        is_json=is_json,
        is_measured=True,
        file_bytes=weights.stat().st_size,
    )


def _gguf() -> Parser:
    """Read the header of a GGUF file, and all that serving takes from it."""
    path = scratch() / "model.gguf"
    whole = write_gguf(_tiny_folder(), path).read_bytes()
    listed = GgufModel.open(path).tensors.values()
    head = whole[: min(each.start for each in listed)]

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        os.truncate(path, len(whole))
        _headers(path, data)
        _tokenizer(path, data)

    fragments = [struct.pack("<Q", 1 << bits) for bits in (16, 28, 33, 40, 62)]
    return Parser(parse, [head], (PenstockError,), fragments=fragments, is_measured=True)


def _file_of_texts(file: str) -> Parser:
    """Read a model of whole texts of which one file is changed."""
    folder = make_text_checkpoint(scratch() / f"texts-{file.replace('/', '-')}", "modernbert")
    add_modules(folder, dense=(8,), max_seq_length=64)

    def parse(data: bytes) -> None:
        (folder / file).write_bytes(data)
        if zlib.crc32(data) % APART == 0:
            here, there = TextModelConfig.from_folder, read_text_model
            read = [functools.partial(one, kind="embedding") for one in (here, there)]
            assert _outcome(read[0], folder) == _outcome(read[1], folder)
        TextModelConfig.from_folder(folder, "embedding")

    original = (folder / file).read_bytes()
    return Parser(parse, [original], (PenstockError,), is_json=True, is_measured=True)


def _tiny_folder() -> Path:
    """Make a checkpoint whose vocabulary has few entries, so that other bytes are changed, too."""
    return make_checkpoint(scratch() / "tiny")


def _shortened(document: bytes) -> bytes:
    """Leave of a tokenizer's vocabulary what its first merges need."""
    values = json.loads(document)
    model = values["model"]
    model["merges"] = model["merges"][:100]
    model["vocab"] = {piece: i for piece, i in model["vocab"].items() if i < 400}
    kept = set(model["vocab"])
    model["merges"] = [
        merge
        for merge in model["merges"]
        if {*(pair := merge if isinstance(merge, list) else merge.split(" ")), "".join(pair)}
        <= kept
    ]
    return json.dumps(values).encode()


def _size(path: Path) -> int:
    return path.stat().st_size


def _chat_template() -> Parser:
    source = json.loads((STARTER_FOLDER / "tokenizer_config.json").read_text())["chat_template"]
    examples = [source.encode()]
    examples += [path.read_bytes() for path in sorted(TEMPLATES.glob("*.jinja"), key=_size)[:5]]
    messages = [{"role": "user", "content": "u"}]

    def parse(data: bytes) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        JinjaTemplate(data.decode(errors="replace")).render({"messages": messages, "tools": tools})

    fragments = [
        b"{{",
        b"}}",
        b"{%",
        b"%}",
        b"{% for m in messages %}",
        b"[1:]",
        b"|tojson",
        b"-%}",
    ]
    fragments += [
        b"messages[0]['role'] ",
        b"raise_exception('x')",
        b"loop.",
        b"{% set x = x ~ x %}",
    ]
    return Parser(parse, examples, (PenstockError,), fragments=fragments)


# what the daemon and its workers leave and send


def _slabs() -> Parser:
    """Survey a slab file and its records."""
    folder = scratch() / "slabs"
    folder.mkdir()
    head = SlabHead(7, record_bytes(400), 3, bytes(32), "model")
    whole = bytearray(head.num_bytes)
    whole[:4096] = seal_slab(head)
    for index in range(3):
        payload = bytes([index]) * 400
        record = RecordHead(index, 1, 400, bytes([index]) * 32, bytes(32), payload_crc(payload))
        start = head.offset(index)
        sealed = seal_record(record, 7, index)
        whole[start : start + 128 + 400] = sealed + payload
    path = folder / "slab-000007.kv"
    starts = [0, *(head.offset(index) for index in range(3))]
    heads = b"".join(whole[start : start + 128] for start in starts)

    def parse(data: bytes) -> None:
        changed = bytearray(whole)
        for index, start in enumerate(starts):
            part = data[128 * index : 128 * (index + 1)]
            changed[start : start + len(part)] = part
        path.write_bytes(changed)
        for found, contents in survey(folder):
            if contents is not None:
                list(check_records(found, contents))

    return Parser(parse, [heads], share=12)


def _messages(kinds: list[msgspec.Struct]) -> list[bytes]:
    """Return messages without and with their frames: both are read as bodies and as frames."""
    bodies = [msgspec.msgpack.encode(kind) for kind in kinds]
    framed = [frame(body) for body in bodies]
    return [*bodies, *framed, b"".join(framed)]


def _commands() -> Parser:
    """Read a worker's end of its channel."""
    spec = RunSpec(SamplingParams(max_tokens=1, seed=0))
    admit = Admit(1, 1, [1, 2, 3], 3, 0, [1], spec, 1)
    extend = Extend([Extension(1, 1, [2, 3])])
    copy = Copy(1, "prefill", "decode", [(1, 2)], FilledBy(1, 1, 0))

    def parse(data: bytes) -> None:
        for sent in (data[:100_000], frame(data[:100_000])):
            ours, theirs = socket.socketpair()
            with ours, theirs, contextlib.suppress(ChannelClosed):
                ours.sendall(sent)
                ours.shutdown(socket.SHUT_WR)
                WorkerChannel(theirs).receive(wait=True)

    return Parser(parse, _messages([admit, Release(1, 1), extend, copy]), share=20)


def _reports() -> Parser:
    """Read the daemon's end of a channel."""
    entry = SequenceStep(1, 1, 3, [5], [], None, None, 3, 0)
    stepped = Stepped(1, 2, 3, 0, [entry])
    copied, failed = Copied(1, 1, 9, 1, 2, True), Failed("what", "", "")
    kinds = [LoadingProgress(1, 2), Begun(1, 1), stepped, copied, failed]

    async def receive(data: bytes) -> None:
        for sent in (data, frame(data)):
            reader = asyncio.StreamReader()
            reader.feed_data(sent)
            reader.feed_eof()
            channel = DaemonChannel(reader, None)  # type: ignore[arg-type]
            with contextlib.suppress(ChannelClosed):
                while not reader.at_eof():
                    await channel.receive()

    return Parser(lambda data: loop().run_until_complete(receive(data)), _messages(kinds), share=20)


def _open_requests() -> Parser:
    folder = scratch() / "open"
    folder.mkdir()
    rows = [row("cmpl-1"), row("cmpl-2", finish_reason="stop"), row("cmpl-1", prompt="x")]
    example = b"".join(msgspec.json.encode(each) + b"\n" for each in rows)

    def parse(data: bytes) -> None:
        (folder / "requests.open").write_bytes(data)
        OpenRequests(folder / "requests.db")

    return Parser(parse, [example], fragments=[b"\n", b"\xff", b"{", b'"'], share=12)


# frames and recordings


def _packed_frames() -> Parser:
    packer = FramePacker(template_of(busy()))
    examples = [packer.pack(busy(seq)) for seq in range(3)]

    def parse(data: bytes) -> None:
        packer.unpack(data, at="2026-11-23T00:00:00.000Z", seq=1, uptime_ms=1)

    return Parser(parse, examples, (ValueError,), share=20)


def _frame_templates() -> Parser:
    template = template_of(busy())
    packed = FramePacker(template).pack(busy())

    def parse(data: bytes) -> None:
        FramePacker(data).unpack(packed, at="2026-11-23T00:00:00.000Z", seq=1, uptime_ms=1)

    return Parser(parse, [template], (ValueError,), is_json=True)


def _frames() -> Parser:
    decoder = msgspec.json.Decoder(Frame)
    errors = (msgspec.MsgspecError, ValueError, RecursionError, FeedIncompatible)
    return Parser(
        lambda data: decode_frame(decoder, data), [msgspec.json.encode(busy())], errors,
        is_json=True, share=4,
    )  # fmt: skip


def _recordings() -> Parser:
    """Play a recording from its first frame to its last."""
    folder = scratch() / "recording"
    folder.mkdir()
    rows = [request_row("cmpl-1", 0), request_row("cmpl-2", 1)]
    example = make_recording(folder, [frame_at(second) for second in range(4)], rows).read_bytes()
    path = folder / "fuzzed.penstock"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        replay = Replay(path)
        try:
            for _ in replay.views():
                pass
            replay.finished_at(len(list(replay.views())) - 1)
        finally:
            replay.close()

    return Parser(parse, [example], (PenstockError,))


# what models write, and what servers answer


def _output_parsers() -> Parser:
    """Read calls and reasoning in every form that models write."""
    names, thoughts = sorted(FORMATS), [None, *THOUGHTS.values()]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = Tools([], {"f": None, "get.weather": schema}, False, True, strict=frozenset())
    examples = [bytes([names.index(case[0])]) + case[1].encode() for case in NOTATIONS]

    def parse(data: bytes) -> None:
        number = data[0] if data else 0
        marks = thoughts[number // len(names) % len(thoughts)]
        known = OutputFormat(FORMATS[names[number % len(names)]], marks)
        parser = OutputParser(known, tools, anew, is_reasoning=number % 2 == 1)
        text, rng = data[1:].decode(errors="replace"), Random(data)
        while text:
            size = rng.randint(1, 1 + len(text) // 3)
            parser.push(text[:size])
            text = text[size:]
        parser.flush()

    marks = {mark for each in FORMATS.values() for mark in (*each.tokens, *each.signs)}
    marks |= {"{", "}", '"', "\\u12", "<", ">", "[", "]", "'", "\n"}
    return Parser(parse, examples, fragments=sorted(mark.encode() for mark in marks), share=8)


def _reply_events() -> Parser:
    """Read another server's streamed reply, as `penstock bench` does."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    event = b'data: {"choices":[{"text":"a","token_ids":[1]}],"usage":null}\n\n'
    last = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    body = event + last + b"data: [DONE]\n\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    sized = b"content-length: %d\r\n\r\n" % len(body) + body

    def parse(data: bytes) -> None:
        reader = ReplyReader(ReceivedReply(0))
        for start in range(0, len(data), 50):
            if not reader.is_over:
                reader.feed(data[start : start + 50], start)
        reader.close()

    return Parser(parse, [head + chunked, head + sized], share=20)


# HTTP


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """Make the loop on which asynchronous parsers run."""
    return asyncio.new_event_loop()


@functools.cache
def _server() -> Path:
    """Serve a stand-in on a socket, for as long as this process lives."""
    path = scratch() / "p.sock"
    tokenizer = Tokenizer.from_folder(STARTER_FOLDER)
    appliance = FakeAppliance(tokenizer, max_model_len=1000, eos_token_ids=(1,))
    encoders = (
        FakeEncoder(tokenizer, "embedding", end_id=1),
        FakeEncoder(tokenizer, "rerank", end_id=1),
    )
    appliance.text_encoders = {one.name: one for one in encoders}
    _served.append(serving(appliance, path))
    loop().run_until_complete(_served[0].__aenter__())
    return path


_served: list[AbstractAsyncContextManager[Any]] = []
"""It ends with this process."""


async def _exchange(path: Path, data: bytes) -> bytes:
    """Send bytes and the end; whatever the server answers, it is no fault of its own."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            writer.write_eof()
            reply = await asyncio.wait_for(reader.read(), MAX_SILENCE_S)
            heads = reply.split(b"HTTP/1.1 ")[1:]
            assert not reply or heads, reply[:200]
            assert not any(head.startswith(b"500") for head in heads), reply[-500:]
            assert b'"internal"' not in reply, reply[-500:]
            return reply
        return b""
    finally:
        writer.close()


def _http() -> Parser:
    rng, examples = Random(0), []
    for _ in range(24):
        path, body = body_of(rng)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        examples.append(head.encode() + content)
    paths = ("/v1/models", "/v1/requests", "/v1/penstock/log?limit=3", "/metrics")
    examples += [f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for path in paths]
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    examples.append(chunked + b'e\r\n{"prompt":"a"}\r\n0\r\n\r\n')
    fragments = [b"\r\n", b"\n", b": ", b"Content-Length: 5\r\n", b"Expect: 100-continue\r\n"]
    fragments += [b"Connection: close\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0"]
    return Parser(lambda data: loop().run_until_complete(_exchange(_server(), data)), examples,
                  fragments=fragments)  # fmt: skip


def _bodies(path: str) -> Parser:
    """Send changed bodies to one endpoint."""
    rng = Random(1)
    examples = [
        json.dumps(body).encode() for p, body in (body_of(rng) for _ in range(60)) if p == path
    ]
    examples += [json.dumps(body).encode() for body in RICH.get(path, [])]

    def parse(data: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        reply = loop().run_until_complete(_exchange(_server(), head.encode() + data))
        if data in examples:
            assert reply.startswith(b"HTTP/1.1 200"), reply

    return Parser(parse, examples, is_json=True)


_FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]  # fmt: skip
RICH: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": [[1, 2], [3]], "n": 2, "best_of": 2, "logprobs": 2, "max_tokens": 3,
         "stop": ["a"], "logit_bias": {"5": 1.5}, "seed": 3, "stream_options": {}, "stream": True},
    ],
    "/v1/chat/completions": [
        {"messages": _SAID, "tools": [_FUNCTION], "tool_choice": "auto", "max_tokens": 3},
        {"messages": _SAID[:2], "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2,
         "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
             "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}},
    ],
    "/v1/responses": [
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "u"}]},
                   {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "42"}],
         "tools": [_FUNCTION["function"] | {"type": "function"}], "max_output_tokens": 16,
         "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "stream": True},
    ],
    "/v1/messages": [
        {"model": "fake/tiny-model", "max_tokens": 3, "system": [{"type": "text", "text": "s"}],
         "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": [
             {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}}]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
                                           "content": [{"type": "text", "text": "42"}]}]}],
         "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
         "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}},
    ],
    "/api/chat": [
        {"model": "fake/tiny-model", "messages": _SAID[:1], "tools": [_FUNCTION], "format": "json",
         "options": {"num_predict": 3, "stop": ["x"], "top_k": 4}, "keep_alive": "5m"},
    ],
    "/api/generate": [
        {"model": "fake/tiny-model", "prompt": "p", "suffix": "", "system": "s", "raw": False,
         "options": {"num_predict": 3}, "think": False},
    ],
}  # fmt: skip
TEXTS: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [
        {"input": ["a", "b"], "dimensions": 3, "encoding_format": "base64", "prompt_name": "query"},
        {"input": [[1, 2], [3]], "truncate_prompt_tokens": 1},
    ],
    "/v1/rerank": [
        {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True,
         "max_tokens_per_doc": 2},
    ],
    "/v1/score": [{"text_1": ["a", "b"], "text_2": ["c", "d"], "truncate_prompt_tokens": -1}],
    "/api/embed": [{"input": ["a", "b"], "truncate": True, "dimensions": 2, "keep_alive": "5m"}],
    "/api/embeddings": [{"prompt": "a", "options": {"num_ctx": 5}}],
}  # fmt: skip
RICH |= TEXTS


PARSERS: dict[str, Callable[[], Parser]] = {
    "http": _http,
    **{path: functools.partial(_bodies, path) for path in (*GENERATING.split(), *TEXTS)},
    "gguf": _gguf,
    "safetensors": functools.partial(_safetensors, "safetensors", is_json=False),
    "safetensors json": functools.partial(_safetensors, "safetensors-json", is_json=True),
    "config.json": lambda: _file_of_model("config.json", _headers),
    "config.json of texts": lambda: _file_of_texts("config.json"),
    "modules.json": lambda: _file_of_texts("modules.json"),
    "pooling": lambda: _file_of_texts("1_Pooling/config.json"),
    "generation_config.json": lambda: _file_of_model("generation_config.json", _headers),
    "tokenizer.json": lambda: _file_of_model("tokenizer.json", _tokenizer),
    "tokenizer.model": _pieces,
    "tokenizer_config.json": lambda: _file_of_model("tokenizer_config.json", _tokenizer),
    "chat template": _chat_template,
    "slab": _slabs,
    "commands": _commands,
    "reports": _reports,
    "open requests": _open_requests,
    "packed frames": _packed_frames,
    "frame templates": _frame_templates,
    "frames": _frames,
    "recordings": _recordings,
    "output parsers": _output_parsers,
    "reply events": _reply_events,
}
