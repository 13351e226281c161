"""Define the verbs embed and rerank: vectors of files' lines, and lines by relevance."""

from __future__ import annotations

import base64
import json
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import typer

from appliance.cli import listings, terminal
from appliance.cli.new_file import appearing
from appliance.cli.tables import Format
from appliance.cli.terminal import Host, Output, ProgressLine
from appliance.client.calls import Client, GenerationFailed
from engine.errors import FileError, UsageError

AT_ONCE = 128
"""Lines of one request."""
_NPY = ".npy"
_NPY_BEGIN = b"\x93NUMPY\x01\x00"


class Line(NamedTuple):
    """A line that has more than space."""

    file: str
    number: int
    text: str


def embed(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Files of lines; - is stdin.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New file: NDJSON, or a NumPy array if it ends .npy."),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Numbers of each vector; default: all.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's prompt for this use, as query.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut lines that are longer than the model takes.")
    ] = False,
    host: Host = None,
) -> None:
    """Write a vector for each line of the files, as NDJSON.

    Lines with nothing but space are left out: each vector comes with its file and line. Rows of a
    NumPy array (float32) are in the same order.
    """
    lines = [line for file in files for line in _lines(file)]
    asked: dict[str, Any] = {"encoding_format": "base64"}
    asked |= {} if dimensions is None else {"dimensions": dimensions}
    asked |= {} if prompt is None else {"prompt_name": prompt}
    asked |= {"truncate_prompt_tokens": -1} if truncate else {}
    vectors = _vectors(terminal.client(host), lines, asked)
    if output is None:
        for line, vector in vectors:
            terminal.write(_row(line, vector))
        return
    with appearing(output, "the vectors") as unfinished, unfinished.open("wb") as file:
        if output.suffix == _NPY:
            _write_npy(file, len(lines), vectors)
        else:
            file.writelines(_row(line, vector).encode() for line, vector in vectors)


def rerank(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What the lines are to answer.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file of lines; - is stdin.")],
    top: Annotated[int | None, typer.Option(min=1, help="Only the best lines.")] = None,
    output: Output = Format.TABLE,
    host: Host = None,
) -> None:
    """Sort a file's lines by how well they answer a query, the best first.

    Scores are between 0 and 1. The end of a line that is longer than the model takes is left out.
    """
    lines, client = list(_lines(file)), terminal.client(host)
    rows: list[dict[str, Any]] = []
    for batch in _batches(lines):
        body = {"query": query, "documents": [line.text for line in batch]}
        answer = _asked(client, "/v1/rerank", body)
        with client.reading():
            scores = {each["index"]: float(each["relevance_score"]) for each in answer["results"]}
            for index, line in enumerate(batch):
                rows.append({"score": scores[index], "line": line.number, "text": line.text})
    rows.sort(key=lambda row: -row["score"])
    terminal.write(terminal.listing("rerank", listings.RANKING, output).render(rows[:top]))


def _lines(file: str) -> Iterator[Line]:
    """Read a file's lines.

    Raises:
        FileError: it cannot be read.
        UsageError: it is not UTF-8.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise FileError("cannot read", error, where=file, hint="name a file of lines") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8: {error}", where=file) from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Line(file, number, line.removesuffix("\r"))


def _batches(lines: Sequence[Line]) -> Iterator[Sequence[Line]]:
    """Cut lines into requests, and show how many are done."""
    progress, began_s = ProgressLine(), time.monotonic()
    try:
        for start in range(0, len(lines), AT_ONCE):
            progress.share(start, len(lines), "lines", time.monotonic() - began_s)
            yield lines[start : start + AT_ONCE]
    finally:
        progress.end()


def _asked(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask without a limit of time: how long it takes depends on the texts."""
    with client.stream(path, body) as reply:
        for answer in reply:
            return answer
    raise GenerationFailed("the reply is empty", where=path)


def _vectors(
    client: Client, lines: Sequence[Line], asked: dict[str, Any]
) -> Iterator[tuple[Line, array[float]]]:
    for batch in _batches(lines):
        body = {**asked, "input": [line.text for line in batch]}
        answer = _asked(client, "/v1/embeddings", body)
        with client.reading():
            found = [array("f", base64.b64decode(one["embedding"])) for one in answer["data"]]
            vectors = list(zip(batch, found, strict=True))
        yield from vectors


def _row(line: Line, vector: array[float]) -> str:
    """Write a vector as a line of JSON, with as many digits as a float32 has."""
    about = json.dumps({"file": line.file, "line": line.number})
    return f'{about[:-1]}, "embedding": [{", ".join(f"{number:.9g}" for number in vector)}]}}\n'


def _write_npy(
    file: IO[bytes], num_rows: int, vectors: Iterator[tuple[Line, array[float]]]
) -> None:
    """Write a NumPy array of float32, [num_rows, num_dimensions]."""
    first = next(vectors, None)
    size = 0 if first is None else len(first[1])
    about = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({num_rows}, {size}), }}"
    length = -(-(len(_NPY_BEGIN) + 2 + len(about) + 1) // 64) * 64 - len(_NPY_BEGIN) - 2
    file.write(_NPY_BEGIN + length.to_bytes(2, "little") + f"{about:<{length - 1}}\n".encode())
    if first is not None:
        file.write(first[1].tobytes())
    file.writelines(vector.tobytes() for _, vector in vectors)
