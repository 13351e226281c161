"""A step on an accelerator computes what it computes on the CPU, and nothing of it on the host."""

import contextlib
import dataclasses

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.wire.sampling import SamplingParams
from engine.worker.model.attention import StepBatch
from engine.worker.model.sampler import NO_TOKEN, sample_rows
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight
from engine.worker.model.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.engine.draws import drawn, draws_tensor
from tests.worlds.accelerator import DEVICE, Accelerator

BLOCK_SIZE = 16
TABLES = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


@pytest.fixture(scope="module", params=["llama", "gemma2", "phi3", "olmo2", "qwen3_moe"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    return Checkpoint.open(make_checkpoint(folder, request.param, max_position_embeddings=256))


def batch_of(lens, query_lens):
    """Sequences of so many tokens, so many of them new; the last token of each is asked for."""
    places = [
        (i, p)
        for i, (end, new) in enumerate(zip(lens, query_lens, strict=True))
        for p in range(end - new, end)
    ]
    slots = [TABLES[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in places]
    ends = torch.tensor(query_lens).cumsum(0) - 1
    return StepBatch(
        input_ids=torch.tensor([(p * 7 + 3 * i) % 250 for i, p in places]),
        positions=torch.tensor([p for _, p in places]),
        token_slots=torch.tensor(slots),
        query_lens=query_lens,
        seq_lens=lens,
        block_tables=TABLES[: len(lens)],
        logit_rows=ends.tolist(),
    )


def to_device(batch, *, is_captured=False):
    tables, lens = torch.tensor(batch.block_tables, dtype=torch.int32), torch.tensor(batch.seq_lens)
    rows = torch.tensor(batch.logit_rows)
    batch = dataclasses.replace(
        batch,
        input_ids=batch.input_ids.to(DEVICE),
        positions=batch.positions.to(DEVICE),
        token_slots=batch.token_slots.to(DEVICE),
        device_tables=tables.to(DEVICE),
        device_lens=lens.int().to(DEVICE),
        device_logit_rows=rows.to(DEVICE),
    )
    if is_captured:
        longest = tables.shape[1] * BLOCK_SIZE
        batch = dataclasses.replace(batch, block_tables=(), seq_lens=[longest] * len(tables))
    return batch


def pool_of(config):
    shape = (13, config.num_kv_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape)


@pytest.fixture(scope="module")
def models(checkpoint):
    """The model on the CPU and on the accelerator."""
    weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
    with Accelerator().on():
        on_device = {name: Weight.plain(w.values.to(DEVICE)) for name, w in weights.items()}
        there = Transformer(checkpoint.config, on_device, "float32", 64)
        there._backend.is_paged = True  # of a model so small that a graph keeps little
    return Transformer(checkpoint.config, weights, "float32", 64), there


def test_prompts_and_decode_steps_agree_with_the_cpu(checkpoint, models):
    here, there = models
    kv = pool_of(checkpoint.config)
    with Accelerator().on() as accelerator:
        device_kv = pool_of(checkpoint.config).to(DEVICE)
        for lens, query_lens in ([(20, 33, 1), (20, 33, 1)], [(21, 40, 2), (1, 7, 1)]):
            batch = batch_of(list(lens), list(query_lens))
            expected = here.forward(batch, kv)
            torch.testing.assert_close(
                there.forward(to_device(batch), device_kv).cpu(), expected, atol=1e-4, rtol=1e-4
            )
        batch = batch_of([22, 41, 3], [1, 1, 1])
        expected = here.forward(batch, kv)
        assert there.is_capturable == (checkpoint.config.experts is None)
        decode = to_device(batch, is_captured=there.is_capturable)
        with accelerator.capturing() if there.is_capturable else contextlib.nullcontext():
            logits = there.forward(decode, device_kv)
        torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(device_kv.cpu()[1:], kv[1:], atol=1e-4, rtol=1e-4)


def params(**changes):
    return SamplingParams(**({"max_tokens": 8, "seed": 5} | changes))


@pytest.mark.parametrize("vocab_size", [1, 40, 900])
def test_rows_drawn_together_on_the_device_are_those_drawn_one_by_one(vocab_size):
    every = [
        params(temperature=t, top_p=p, top_k=k, min_p=m, seed=seed)
        for seed, (t, p, k, m) in enumerate(
            [(0.0, 1.0, 0, 0.0), (0.0, 0.5, 3, 0.1), (1.0, 1.0, 0, 0.0), (3.0, 0.9, 0, 0.0)]
            + [(0.7, 0.5, 40, 0.0), (2.0, 1.0, 2, 0.0), (1.5, 0.99, 2000, 0.05)] * 5
        )
    ]
    logits = torch.randn(len(every), vocab_size, generator=torch.Generator().manual_seed(3)) * 3
    logits[1, 0], logits[2] = torch.nan, -torch.inf
    logits[3, -1] = torch.inf
    for index in range(20):
        expected = [drawn(logits[i : i + 1], [p], [index])[0] for i, p in enumerate(every)]
        assert NO_TOKEN in expected
        draws = draws_tensor(every, [index] * len(every))
        with Accelerator().on() as accelerator:
            rows, chosen_by = logits.to(DEVICE), draws.to(DEVICE)
            with accelerator.capturing():
                tokens = sample_rows(rows, chosen_by)
                likeliest = sample_rows(rows)
            assert tokens.tolist() == expected
            assert likeliest.tolist()[:2] == expected[:2]
