"""Models whose files claim or hold more than can be read, each made in a second or less."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from appliance.hub.names import STARTER_FOLDER

_UINT8, _FLOAT32, _STRING, _ARRAY = 0, 6, 8, 9


def _starter_but(folder: Path, name: str, data: bytes) -> Path:
    """Make a folder of links to the starter's files, but for one."""
    folder.mkdir()
    for path in STARTER_FOLDER.iterdir():
        if path.is_file() and path.name != name:
            (folder / path.name).symlink_to(path)
    (folder / name).write_bytes(data)
    return folder


def _tokenizer(folder: Path, **parts: object) -> Path:
    whole = json.loads((STARTER_FOLDER / "tokenizer.json").read_bytes())
    return _starter_but(folder, "tokenizer.json", json.dumps(whole | parts).encode())


def _endless_header(folder: Path) -> Path:
    data = struct.pack("<Q", 1 << 63) + b"{}" * 100
    return _starter_but(folder, "model.safetensors", data)


def _million_tensors(folder: Path) -> Path:
    entry = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % each for each in range(1_000_000)) + "}").encode()
    return _starter_but(folder, "model.safetensors", struct.pack("<Q", len(header)) + header)


def _long_config(folder: Path) -> Path:
    _starter_but(folder, "config.json", b"[[],")
    os.truncate(folder / "config.json", 200 << 20)
    return folder


def nested_config(folder: Path) -> Path:
    """Hold lists that take twenty times the file's length."""
    return _starter_but(folder, "config.json", b'{"a":[' + b"[]," * 20_000_000 + b"[]]}")


def _long_vocabulary(folder: Path) -> Path:
    """Have the length of ten million entries."""
    _starter_but(folder, "tokenizer.json", b'{"model":{"vocab":{"a":0,')
    os.truncate(folder / "tokenizer.json", 10_000_000 * 15)
    return folder


def large_vocabulary(folder: Path) -> Path:
    entries = ",".join(f'"{each:x}":0' for each in range(3_000_000))
    data = f'{{"model":{{"type":"WordLevel","unk_token":"0","vocab":{{{entries}}}}}}}'
    return _starter_but(folder, "tokenizer.json", data.encode())


def _growing_text(folder: Path) -> Path:
    twice = {"type": "Replace", "pattern": {"Regex": "."}, "content": "ab"}
    return _tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [twice] * 40})


def _endless_text(folder: Path) -> Path:
    empty = {"type": "Replace", "pattern": {"String": ""}, "content": "a"}
    return _tokenizer(folder, normalizer=empty)


def endless_template(folder: Path) -> Path:
    """Make a folder whose template computes a constant for minutes."""
    source = "{{ ('ab' * 10 ** 6) | wordwrap(1) | wordwrap(1) | length }}"
    data = json.dumps({"chat_template": source}).encode()
    return _starter_but(folder, "tokenizer_config.json", data)


def _gguf(folder: Path, *pairs: bytes, num_tensors: int = 0, num_bytes: int = 0) -> Path:
    folder.mkdir()
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(pairs))
    path = folder / "model.gguf"
    path.write_bytes(head + b"".join(pairs))
    os.truncate(path, max(num_bytes, path.stat().st_size))
    return path


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _said(key: str, value: str) -> bytes:
    return _text(key) + struct.pack("<I", _STRING) + _text(value)


def _list(key: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return _text(key) + struct.pack("<IIQ", _ARRAY, kind, count) + data


def _claimed_array(folder: Path) -> Path:
    return _gguf(folder, _list("a", _FLOAT32, 1 << 40))


def _long_array(folder: Path) -> Path:
    size = 200 << 20
    return _gguf(folder, _list("a", _UINT8, size), num_tensors=1, num_bytes=size + 1000)


HOSTILE: dict[str, Callable[[Path], Path]] = {
    "header of 2^63 bytes": _endless_header,
    "million tensors": _million_tensors,
    "config of 200 MB": _long_config,
    "config of nested lists": nested_config,
    "array of 2^40 numbers": _claimed_array,
    "array of 200 MB": _long_array,
}
"""Makers of a folder or file whose headers cannot be read."""
HOSTILE_TOKENIZERS: dict[str, Callable[[Path], Path]] = {
    "vocabulary of ten millions": _long_vocabulary,
    "vocabulary of three millions": large_vocabulary,
    "text that doubles": _growing_text,
    "text that never ends": _endless_text,
}
"""Makers of a folder whose tokenizer cannot be used."""


HOSTILE_TEXTS = {
    "letter that doubles": "Q",
    "match that is given up": "X" * 64 + " yv",
    "match that takes long": ("Z" * 300 + " ") * 10 + "z",
}
"""What greedy_tokenizer() takes too much for."""


def greedy_tokenizer(folder: Path) -> Path:
    """Make a folder whose tokenizer does what the starter's does, but for those texts."""
    whole = json.loads((STARTER_FOLDER / "tokenizer.json").read_bytes())
    twice = {"type": "Replace", "pattern": {"String": "Q"}, "content": "QQ"}
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in ("(?:X|XX)+[yw]v", "Z*Z*Z*z")
    ]
    return _tokenizer(
        folder,
        normalizer={"type": "Sequence", "normalizers": [twice] * 50},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, whole["pre_tokenizer"]]},
    )


SLOW_AT_LOAD = {
    "match that is given up": "(?:[^%]|[^%][^%])+[ez]c",
    "match that takes long": "[^%]*[^%]*[^%]*[^%]{0,12}[ez]c",
}
"""Expressions that take too long for any text; the second one with half a second, not with 20."""


def slow_tokenizer(folder: Path, expression: str) -> Path:
    """Make a folder whose tokenizer first cuts a text by an expression."""
    cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    return _tokenizer(folder, pre_tokenizer=cut | {"invert": False})


def _decoder(folder: Path, *stages: dict[str, object]) -> Path:
    return _tokenizer(folder, decoder={"type": "Sequence", "decoders": [*stages]})


def _growing_token(folder: Path) -> Path:
    stage = {"type": "Replace", "pattern": {"String": "Q"}, "content": "QQQQQQQQQQ"}
    return _decoder(folder, *[stage] * 20)


def _token_expression(folder: Path) -> Path:
    stage = {"type": "Replace", "pattern": {"Regex": "(Q*)*z"}, "content": ""}
    return _decoder(folder, stage)


def _long_token(folder: Path) -> Path:
    whole = json.loads((STARTER_FOLDER / "tokenizer.json").read_bytes())
    model = whole["model"]
    model["vocab"]["Q" * 100_000] = len(model["vocab"]) + len(whole["added_tokens"])
    return _tokenizer(folder, model=model)


def _many_added(folder: Path) -> Path:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = [{"id": each, "content": f"<{each}>"} | flags for each in range(40_000)]
    return _tokenizer(folder, added_tokens=added)


HOSTILE_TOKENIZERS |= {
    "token that grows": _growing_token,
    "token that is matched": _token_expression,
    "token of 100,000 letters": _long_token,
    "40,000 added tokens": _many_added,
}


def sentence_piece_bomb(folder: Path) -> Path:
    """Make a GGUF file with a token whose parts are tried for a day."""
    tokens = _text("a" * 2_000_000) + _text("a")
    pairs = (
        _said("tokenizer.ggml.model", "llama"),
        _list("tokenizer.ggml.tokens", _STRING, 2, tokens),
        _list("tokenizer.ggml.scores", _FLOAT32, 2, bytes(8)),
    )
    return _gguf(folder, *pairs)


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{folder}/{path.name}")  # however long the folder's own path is
    os.close(folder)


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "endless link": lambda path: path.symlink_to(path),
}
"""Makers of what stands in the place of a file and cannot be read to its end."""
