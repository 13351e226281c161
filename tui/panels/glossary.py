"""What the words on each page, and in a request's dialog, mean; their source, and what helps.

Owns: the glossary.
Invariant: every page has entries; each says what the word is, its source, and what helps.
Never: repeats a number; thresholds are the daemon's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tui.lines import Line, Run, Tone, wrap


class Entry(NamedTuple):
    """What a word on a page means, where it comes from and what to do about it."""

    word: str
    what: str
    source: str
    remedy: str


REQUEST = "request"
"""The dialog of one request; all others are pages."""
_QUEUED = Entry(
    "queued", "sequences accepted but not yet placed, of the most that may wait",
    "router queue", "long and growing: more than the machine can do; see what limits it",
)  # fmt: skip
_TTFT = Entry(
    "ttft", "time to first token (TTFT): tokenize + queue + restore + prefill",
    "daemon's clock, exact over the window", "queue large: load; prefill large: long prompts",
)  # fmt: skip
_USED = Entry(
    "used", "blocks that new work cannot take",
    "the ledger", "near full: shorter max_tokens, fewer requests, more kv_memory",
)  # fmt: skip

GLOSSARY: Mapping[str, tuple[Entry, ...]] = MappingProxyType(
    {
        "overview": (
            _QUEUED,
            Entry("busy", "share of the last second that the worker spent in steps",
                  "worker's step times", "both near 100%: the machine is full"),
            Entry("!", "a tick: decode fell below a quarter of its median while a prompt ran",
                  "this console, from frames", "elastic roles or an itl target keep prompts away"),
            Entry("itl", "inter-token latency (ITL): time between two tokens of a reply",
                  "daemon's clock, exact over the window", "grows with the batch and stalls"),
            Entry("ttft mean", "its stages, each a mean; those that took no time are left out",
                  "daemon's clock, over the window", "see the largest"),
            _TTFT,
            Entry("ok", "goodput: share of ttft or itl within their target",
                  "daemon, over the window", "set targets with T; alerts follow them"),
            _USED,
            Entry("cores lent", "another worker computes on this one's cores while it has no work",
                  "router", "nothing: it takes them back with its first prompt"),
            Entry("stalls", "gaps longer than four times their median and 100 ms",
                  "daemon, over the window", "elastic roles, or an itl target"),
            Entry("paused", "without KV blocks, which others needed more; preempted: how often",
                  "router, when a pool is full", "fewer at a time, more kv_memory"),
            Entry("moved", "bytes that handoffs have copied; with alias none",
                  "the copies' reports", "see the page handoff"),
            Entry("J/token", "energy of a phase's steps by its tokens",
                  "device meters, shared by step time", "larger batches cost less a token"),
        ),
        "requests": (
            Entry("phase", "queued, waiting, prefilling, handing off, paused, decoding; then how "
                  "it ended; waiting: its worker computes others first, which counts as queue",
                  "the least advanced sequence", "enter shows where its time went"),
            _TTFT,
            Entry("time", "since its arrival; of one that has ended, how long it took",
                  "daemon's clock", "enter shows what of"),
            Entry("itl1", "the gap after its first token, with the handoff in it",
                  "daemon's clock", "large: see the page handoff"),
            Entry("wait", "until the decode worker's first step with it",
                  "daemon's clock", "large: decode steps are long"),
            Entry("route", "move: prefilled by one worker, decoded by another; or all of it at one",
                  "elastic roles, by prediction", "roles: r"),
            Entry("tpot", "time per output token (TPOT), the mean of a reply after its first",
                  "daemon's clock", "compare with itl"),
            Entry("blocks", "KV blocks held, for all tokens so far and some to come",
                  "the ledger", "ask for less at a time"),
            Entry("restore", "in the queue until its prefix had come from DRAM or the SSD",
                  "daemon's clock", "only where computing was predicted to take longer"),
            Entry("paused", "its KV blocks went to others; it is computed again and goes on",
                  "the router, when the pool is full", "fewer at a time, more kv_memory"),
            Entry("J", "energy of its share of the steps",
                  "device meters", "- means that no device reports power"),
        ),
        REQUEST: (
            Entry("tokenize", "from the body's arrival to its token ids", "daemon's clock",
                  "long: a very long prompt"),
            Entry("queue", "until a worker's first step with it, also once it has that worker",
                  "daemon's clock",
                  "large: more work than the machine does; fewer at a time"),
            Entry("prefill", "until its first token", "daemon's clock",
                  "shorter prompts, or ones that begin as earlier ones did"),
            Entry("handoff", "until its KV blocks were the decode worker's", "daemon's clock",
                  "large: see the page handoff"),
            Entry("decode_wait", "until the decode worker's first step with it", "daemon's clock",
                  "large: decode steps are long; fewer at a time"),
            Entry("decode", "the steps of all further tokens", "daemon's clock",
                  "many at a time share the steps"),
            Entry("paused", "without KV blocks, which others needed more", "daemon's clock",
                  "fewer at a time, more kv_memory"),
            Entry("unattributed", "end to end less the sum of the stages: time in none of them",
                  "daemon's clock", "large: a client that reads slowly"),
        ),
        "kv": (
            _USED,
            Entry("active", "blocks that hold keys and values now", "the ledger", "-"),
            Entry("reserved", "blocks of sequences on their way, or without a worker",
                  "the ledger", "large for long: a worker is down"),
            Entry("cached", "in use by nobody, found by prompts that begin alike",
                  "the ledger", "few hits: more kv_memory, or prompts that begin differently"),
            Entry("found", "of prompt tokens, the share that was computed already",
                  "prefix cache", "low: prompts that begin alike are cheap"),
            Entry("overhead", "time spent in hashing blocks and finding them",
                  "daemon's clock", "-"),
            Entry("stored", "blocks written to DRAM or to the disk since the start",
                  "each cache", "of use at the second use, or when the daemon ends"),
            Entry("loaded", "blocks that prompts got from there instead of computing them",
                  "each cache", "none: nothing was asked again that has left the pool"),
            Entry("computing", "what computing those blocks was predicted to take",
                  "measured prefills", "compare with took"),
            Entry("regret", "by how much loads took longer than computing would have",
                  "daemon's clock", "large: a slow disk"),
            Entry("reads at", "bytes a second that loads count on",
                  "a probe when the cache was opened", "-"),
            Entry("hit ratio", "of prompts' blocks, the share that a cache of this size finds",
                  "one block in eight, since the start", "-"),
            Entry("x0.5, x2, x4", "the same for a cache of half, twice, four times the size",
                  "one block in eight, since the start", "much more: a larger cache"),
            Entry("draining", "freed, but a command that names them is unanswered",
                  "the ledger", "large for long: a worker is stuck"),
        ),
        "power": (
            Entry("throttle", "why the device runs below its clock",
                  "driver", "power: raise the limit; thermal: cooling"),
            Entry("unattributed", "energy outside steps: idle power, the rest of the machine",
                  "total less both phases", "large: the machine idles"),
            Entry("instant", "power at the moment of reading; the other figure is a mean",
                  "driver", "-"),
            Entry("last xid", "the last error of the GPU that its driver reported",
                  "driver", "its manual lists the numbers"),
            Entry("method", "how energy was read and divided", "daemon", "-"),
        ),
        "handoff": (
            Entry("alias", "both workers map one pool; a handoff changes owners only",
                  "probed at start", "nothing to tune"),
            Entry("shm", "blocks are copied through a ring in shared memory",
                  "probed at start with a checksum", "rate below the probe's: memory bus is busy"),
            Entry("peer", "each worker has a pool; blocks are copied as they fill",
                  "probed at start", "rate below the probe's: memory bus is busy"),
            Entry("stale", "a worker's messages about what had moved on or ended meanwhile",
                  "router", "harmless"),
            Entry("recovered", "sequences that went on after a worker's death", "router",
                  "growing: read the log"),
            Entry("copies", "bytes a second while a copy runs; at start: when it was tried out",
                  "the copies' reports", "far below that at start: the memory bus is busy"),
            Entry("failed", "handoffs of which some blocks did not come, and were computed again",
                  "router", "growing: read the log"),
            Entry("routes", "which way sequences went, and why", "router", "roles: r"),
            Entry("predictions", "of elastic roles: how far off, by way and size of step",
                  "steps measured at start and since", "closed: not taken until measured anew"),
            Entry("gave way", "prompts that left a worker, as gaps there exceeded the promise",
                  "router", "many: set an itl target"),
            Entry("trials", "what timing this machine chose: products, steps of prompts, cores",
                  "at the daemon's start", "undecided: the machine was busy then"),
        ),
        "log": (
            Entry("alert", "a reading beyond its threshold for long enough",
                  "daemon's table of thresholds", "status --check exits by the same"),
            Entry("limit", "what holds the appliance up now", "daemon", "start there"),
            Entry("event", "something that happened once", "daemon; all in: penstock events", "-"),
        ),
    }
)  # fmt: skip


def glossary(page: str, width: int) -> list[Line]:
    """The entries of a page, or of REQUEST."""
    lines: list[Line] = []
    for entry in GLOSSARY[page]:
        lines += [[Run(entry.word, Tone.ACCENT)], *wrap(entry.what, width, 2)]
        lines += wrap(f"from {entry.source}", width, 2, Tone.MUTED)
        if entry.remedy != "-":
            lines += wrap(f"> {entry.remedy}", width, 2)
    return lines
