"""What a grammar costs: compiling it, and a mask for each token.

usage: python -m tests.benchmarks.grammar TOKENIZER.json [--library xgrammar] [--rounds 5]

The texts below are said token by token, with a mask before each; by default as workers do it,
through engine.text.grammar, or by another library if it is installed. Printed for each grammar, in
CPU time: the median to compile it anew, and of the masks the median, p99 and maximum of all rounds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string", "pattern": "^[a-z0-9._-]{1,32}@[a-z0-9-]{1,32}\\.[a-z]{2,6}$"},
    },
    "required": ["name", "age", "email"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "number"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v", "kids"],
    "additionalProperties": False,
}
ALICE = {"name": 'Alice "A" Müller', "age": 43, "email": "alice.m@example.org"}
COUNTRIES = [f"Country of the number {i}" for i in range(200)]


def closed(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


CASES = {
    "flat": (PERSON, ALICE),
    "nested": (
        closed(a=closed(b=closed(c=closed(d=PERSON)), note={"type": "string"})),
        {"a": {"b": {"c": {"d": ALICE}}, "note": "as deep as this"}},
    ),
    "enum of 200": (closed(country={"enum": COUNTRIES}), {"country": COUNTRIES[137]}),
    "recursive $ref": (
        TREE,
        {"v": 1.5, "kids": [{"v": 2, "kids": [{"v": -3e8, "kids": []}]}, {"v": 4, "kids": []}]},
    ),
    "array of objects": ({"type": "array", "items": PERSON, "maxItems": 50}, [ALICE] * 12),
    "any object": ({"type": "object"}, {"text": "word " * 60, "list": [1, 2, {"x": None}]}),
}


def ours(path: str):
    """compile(schema) -> (mask, consume), through engine.text.grammar."""
    from tokenizers import Tokenizer as Backend

    from engine.text.grammar import GrammarTokenizer, Matcher, json_grammar
    from engine.text.tokenizer import Tokenizer

    backend = Backend.from_file(path)
    tokens = GrammarTokenizer(Tokenizer(backend), backend.get_vocab_size(), [1])

    def compile(schema):
        matcher, said = Matcher(tokens, json_grammar(schema)), []
        return lambda: matcher.allowed(said), said.append

    return compile


def xgrammar(path: str):
    """The same through xgrammar."""
    import torch
    import xgrammar as xgr
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path, eos_token="</s>")
    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bitmask = xgr.allocate_token_bitmask(1, info.vocab_size)
    assert bitmask.dtype is torch.int32

    def compile(schema):
        matcher = xgr.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
        return lambda: matcher.fill_next_token_bitmask(bitmask), matcher.accept_token

    return compile


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--library", choices=["llguidance", "xgrammar"], default="llguidance")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(options.tokenizer))
    started = time.process_time()
    load = ours if options.library == "llguidance" else xgrammar
    compile = load(str(options.tokenizer))
    load_s = time.process_time() - started
    print(f"{options.library}: {backend.get_vocab_size()} tokens, {load_s:.2f} s to load")
    for name, (schema, value) in CASES.items():
        text = json.dumps(value, ensure_ascii=False)
        ids = backend.encode(text, add_special_tokens=False).ids
        compile_ms, mask_ms = [], []
        for _ in range(options.rounds):
            before = time.process_time()
            mask, consume = compile(schema)
            compile_ms.append((time.process_time() - before) * 1e3)
            for token_id in ids:
                before = time.process_time()
                mask()
                mask_ms.append((time.process_time() - before) * 1e3)
                consume(token_id)
        ranked = sorted(mask_ms)
        print(
            f"{name:17} compile {statistics.median(compile_ms):8.2f} ms   "
            f"mask p50 {statistics.median(ranked):7.3f}  p99 {ranked[int(len(ranked) * 0.99)]:7.3f}"
            f"  max {ranked[-1]:8.3f} ms   ({len(ids)} tokens)"
        )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{peak_mib} MiB at most")


if __name__ == "__main__":
    main()
