"""Explain the words on each page.

Invariant: every page has entries; each reads on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tui.lines import Line, Run, Tone, pad, wrap


class Entry(NamedTuple):
    """A word on a page, its meaning, and what to do about it."""

    word: str
    what: str
    advice: str = ""


_WORD_WIDTH = 18
REQUEST = "request"
"""The dialog of one request; all other keys are pages."""
_TTFT = Entry(
    "ttft",
    "time to first token (TTFT): tokenize + queue + restore + prefill",
    "if queue is the largest part: too much load; if prefill is: long prompts",
)
_USED = Entry(
    "used",
    "share of a pool's blocks that new requests cannot take: active, reserved and draining",
    "if near 100%: lower max_tokens, fewer requests, or more kv_memory",
)
_PAUSED = Entry(
    "paused, preempted",
    "a sequence whose KV blocks were taken for others; it is recomputed and continues",
    "fewer requests at a time, or more kv_memory",
)

GLOSSARY: Mapping[str, tuple[Entry, ...]] = MappingProxyType(
    {
        "overview": (
            Entry("running", "sequences in this phase now"),
            Entry(
                "queued",
                "requests accepted but not started, of the most that may wait",
                "if it grows: more load than the machine can serve; see the bottleneck",
            ),
            Entry(
                "oldest, waiting",
                "longest wait for a first token, in any phase; prompt tokens in the queue",
            ),
            Entry("callers", "users and API keys that have requests in the queue"),
            Entry("tok/s", "tokens of this phase in the last second"),
            Entry("step", "median time of a step; max: the longest in the last second"),
            Entry("busy", "share of the last second that the worker spent in steps"),
            Entry("batch", "mean number of sequences in a step"),
            Entry("in, out", "prompt tokens read and output tokens produced since the start"),
            Entry("handed off", "sequences that went from the prefill worker to the decode worker"),
            Entry("of 5,280", "under tok/s: the top of its graph"),
            Entry(
                "cpu 1 + cpu 0, lent:",
                "elastic roles lend an idle worker's core until it has work again",
            ),
            Entry(
                "stalls, !",
                "stalls: gaps over 4x their median and 100 ms; !: a second in which decode fell"
                " below a quarter of its median during a prefill",
                "elastic roles, or an itl target",
            ),
            Entry("restarts", "how often the worker was restarted", "see events"),
            _PAUSED,
            Entry("moving, done, moved", "handoffs now, handoffs so far, bytes they copied"),
            Entry("copied", "bytes a second that handoffs copy now"),
            _TTFT,
            Entry("itl", "inter-token latency (ITL): time between two tokens of a reply"),
            Entry("e2e", "end to end: from a request's arrival to its last token"),
            Entry("ok, target", "share within the target, where one is set; press T to set them"),
            Entry("ttft mean", "mean time of each stage before the first token"),
            _USED,
            Entry("cpu, cores", "load of the machine and of each core, with its worker"),
            Entry("rss", "memory of the worker process"),
            Entry("admitted, weights", "sequences the worker holds; bytes of the model it loaded"),
            Entry(
                "rank 0, bound by",
                "a process of a group: memory, and the time that it waits for the others; what most"
                " of a step's time goes into",
            ),
            Entry("daemon", "CPU and memory of the daemon itself"),
            Entry("others", "a core that other programs keep busy"),
            Entry("J/token", "energy per prompt token (in) and per output token (out)"),
            Entry("bottleneck", "what limits the throughput now"),
        ),
        "requests": (
            Entry(
                "PHASE",
                "queued, waiting, prefilling, handing off, decoding, paused; then how it ended:"
                " done (stop), done (length: max_tokens reached), done (tools), done, cancelled,"
                " failed. A waiting request has its KV blocks, and its worker computes other"
                " prompts first",
            ),
            Entry("CLIENT", "program and process id on the Unix socket, else the address"),
            Entry(
                "IN, OUT, MAX",
                "prompt tokens; output tokens so far, none of vectors and scores; max_tokens",
            ),
            Entry("TIME", "time since its arrival; of a finished request, its whole time"),
            _TTFT,
            Entry("TPOT", "mean time per output token (TPOT) after the first"),
            Entry("QUEUE, PREFILL, HANDOFF", "time in these stages, in ms"),
            Entry(
                "NOTE",
                "an error; or the prompt that is computed first, with all prompt tokens left ahead;"
                " or why the request is slow",
            ),
            Entry("BLOCKS, MOVED", "KV blocks it holds; bytes its handoff copied"),
            Entry("WORKER", "the worker that has it now"),
            Entry(
                "ROUTE",
                "move: prefilled by one worker, decoded by another; else one worker does both",
                "press r to change roles",
            ),
            Entry("J", "energy of its share of the steps; shown where a meter is"),
            Entry("today", "requests that ended since midnight UTC, with their tokens"),
            Entry("live, tok/s", "of each user: requests now, output tokens in the last second"),
        ),
        REQUEST: (
            Entry("tokenize", "from its arrival to its token ids", "long: a very long prompt"),
            Entry(
                "queue",
                "until a worker's first step with it",
                "long: more load than the machine can serve",
            ),
            Entry("restore", "wait for cached KV from DRAM or SSD"),
            Entry("prefill", "until its first token", "shorter prompts, or shared beginnings"),
            Entry("handoff", "until the decode worker has its KV", "long: see page handoff"),
            Entry("decode wait", "until the decode worker's first step with it"),
            Entry("decode", "all further tokens", "requests at the same time share the steps"),
            Entry("paused", "preempted, or its worker or the daemon restarted", "more kv_memory"),
            Entry("first itl", "the gap after the first token; includes the handoff"),
            Entry(
                "sum, end to end, unattributed",
                "all stages; the whole time; the difference",
                "unattributed is large where a client reads slowly",
            ),
            Entry("from the pool, from SSD, computed", "where the prompt's KV came from"),
            Entry("slow because", "the stage with the largest excess over its usual time"),
        ),
        "kv": (
            _USED,
            Entry("active", "blocks of running sequences"),
            Entry("reserved", "blocks set aside for sequences that are moving or starting"),
            Entry("cached", "blocks of earlier prompts, reused when a prompt begins alike"),
            Entry("draining", "freed blocks that a worker may still be reading"),
            Entry("free", "empty blocks"),
            Entry("owners, largest requests", "users with the most blocks, and their requests"),
            Entry("hit rate", "share of prompt tokens or blocks that were found in a cache"),
            Entry(
                "states",
                "what recurrent layers know; prompts can go on from a snapshot of them",
            ),
            Entry("hashing took", "time spent on finding cached blocks"),
            Entry(
                "evicted, fetched", "cached blocks dropped for room; tokens copied between pools"
            ),
            Entry("stored, loaded, tokens", "blocks written to and read from the cache"),
            Entry("reads at", "read speed measured when the cache was opened"),
            Entry("kept for MODEL", "KV of a model that is not served now"),
            Entry("loads, took", "prompts that waited for cached KV; their total wait"),
            Entry(
                "recomputing would take, time lost",
                "predicted time to compute the same tokens; how much longer loading took",
                "time lost is large: slow disk",
            ),
            Entry("waiting, declined, late", "loads now; skipped as slower; past their deadline"),
            Entry("expired, damaged, not stored", "dropped by age; bad checksum; failed writes"),
        ),
        "timeline": (
            Entry("prompt, output", "a request on the worker that computed it, by its id"),
            Entry(
                "waiting",
                "a request before its first step",
                "long bars: more load than the machine can serve",
            ),
            Entry("more", "requests for which the lane has no room"),
            Entry("busy", "share of the last second that the worker spent in steps"),
            Entry("events", "warnings and errors at their times", "page events has their words"),
        ),
        "handoff": (
            Entry("alias", "workers share one KV pool; a handoff copies nothing"),
            Entry("peer", "blocks are copied directly into the other worker's pool"),
            Entry("shm", "blocks are copied through a staging buffer in shared memory"),
            Entry("copies, at start", "copy speed now; copy speed measured at start"),
            Entry("down", "a failed or slow link; another path is used"),
            Entry("mean", "bytes per handoff"),
            Entry("failed", "handoffs whose blocks were lost; they were recomputed", "see events"),
            Entry("recovered", "sequences that continued after a worker died", "see events"),
            Entry("stale", "late messages of a worker about finished sequences; harmless"),
            Entry("routes", "how many sequences took which route, and why"),
            Entry(
                "predictions, error",
                "elastic roles predict the time of each route; error is the factor between"
                " prediction and outcome",
            ),
            Entry("moved away", "prompts that left a worker because its gaps grew too long"),
            Entry("not used", "a route with bad predictions, until its steps are measured again"),
            Entry("tuning", "what was chosen from measurements of this machine"),
            Entry("guesses", "tokens that speculation guessed, by source: how many were right"),
            Entry("wait", "time from the handoff to the decode worker's first step"),
            Entry("serves too, comes next, swaps", "other models; the next one; swaps so far"),
            Entry(
                "makes room at", "when the first model comes back, as a request's keep_alive asked"
            ),
            Entry("loaded: MODEL", "a model kept in memory beside the served one, and until when"),
        ),
        "events": (
            Entry("alert", "a reading beyond its threshold, and since when"),
            Entry("cleared alerts", "how often each was raised, for how long on average"),
            Entry("bottleneck", "what limits the throughput now"),
            Entry(
                "refused",
                "requests refused by caller: rate, last minute, since the start, reason",
            ),
            Entry("event", "something that happened once; all of them: penstock events"),
        ),
        "power": (
            Entry("throttle", "why the device runs below its clock", "power limit or cooling"),
            Entry("source, instant", "where the figure comes from; the reading of the moment"),
            Entry("util, sm, tensor, memory bandwidth", "utilisation as the driver reports it"),
            Entry("last xid", "the last error that the GPU driver reported"),
            Entry("unattributed", "energy outside steps: idle power and the rest of the machine"),
            Entry("method", "how energy was read and divided among requests"),
        ),
    }
)


def glossary(page: str, width: int) -> list[Line]:
    """Format the entries of a page, or of REQUEST, as lines."""
    lines: list[Line] = []
    for entry in GLOSSARY[page]:
        word = Run(pad(entry.word, _WORD_WIDTH), Tone.ACCENT)
        if len(entry.word) >= _WORD_WIDTH:
            lines.append([Run(entry.word, Tone.ACCENT)])
            word = Run(" " * _WORD_WIDTH)
        first, *others = wrap(entry.what, width, _WORD_WIDTH)
        lines += [[word, *first[1:]], *others]
        if entry.advice:
            lines += wrap(f"> {entry.advice}", width, _WORD_WIDTH, Tone.MUTED)
    return lines


def markdown() -> str:
    """Write the whole glossary for docs/console.md."""
    sections = []
    for page, entries in GLOSSARY.items():
        rows = (
            f"| {entry.word} | {'; '.join(filter(None, (entry.what, entry.advice)))} |"
            for entry in entries
        )
        title = "enter on a request" if page == REQUEST else page
        sections.append("\n".join([f"### {title}", "", "| word | meaning |", "|---|---|", *rows]))
    return "\n\n".join(sections) + "\n"
