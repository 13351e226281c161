"""The model computes what transformers computes, however its work is cut into steps."""

import json
import math
import mmap

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights_layout import weights_layout
from engine.worker.model.attention import StepBatch
from engine.worker.model.layers import rope_frequencies
from engine.worker.model.records import RecordBlocks
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from tests.checkpoints import (
    FAMILIES,
    GEMMA4_E,
    GEMMA4_MOE,
    load_oracle,
    make_checkpoint,
    make_seeing_checkpoint,
    pack_experts,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}

VARIANTS = {
    "llama": ("llama", {}),
    "llama mha tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama mqa biased": (
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama explicit head_dim": ("llama", {"head_dim": 24}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral window": ("mistral", {"sliding_window": 12}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2 yarn": (
        "qwen2",
        {"rope_parameters": YARN | {"truncate": False, "mscale": 1.2, "mscale_all_dim": 0.8}},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 biased window": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3 text": ("gemma3_text", {"num_hidden_layers": 4}),
    "phi3": ("phi3", {"sliding_window": 20}),
    "smollm3": ("smollm3", {"use_sliding_window": True, "sliding_window": 11, "mlp_bias": True}),
    "granite": ("granite", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2 biased": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "mixtral": ("mixtral", {}),
    "mixtral window": ("mixtral", {"sliding_window": 14}),
    "gpt-oss": ("gpt_oss", {}),
    "ministral 3": ("ministral3", {}),
    "gemma4 text": ("gemma4_text", {}),
    "gemma4 wide globals": (
        "gemma4_text",
        {"attention_k_eq_v": False, "num_key_value_heads": 2, "global_head_dim": 32},
    ),
    "gemma4 experts": ("gemma4_text", GEMMA4_MOE),
    "gemma4 e": ("gemma4_text", GEMMA4_E),
    "gemma4 e of one width": (
        "gemma4_text",
        GEMMA4_E | {"global_head_dim": 16, "num_kv_shared_layers": 4},
    ),
    "muse glimmer": ("muse_glimmer", {}),
    "muse glimmer of even layers": (
        "muse_glimmer",
        {"num_hidden_layers": 4, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "qwen3 moe": ("qwen3_moe", {"head_dim": 32}),
    "qwen3 moe normalized": (
        "qwen3_moe",
        {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
}
VARIANTS |= {each: (each, {}) for each in FAMILIES if each not in [v[0] for v in VARIANTS.values()]}


def load(folder, dtype="float32", max_model_len=None):
    checkpoint = Checkpoint.open(folder)
    layout = weights_layout(checkpoint, dtype)
    arena = None if layout is None else mmap.mmap(-1, layout.num_bytes)
    weights = load_weights(checkpoint, dtype, arena, arena and (0, 1), lambda done, total: None)
    return Transformer(checkpoint.config, weights, dtype, max_model_len)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def pair(request, tmp_path_factory):
    """One variant as we load it and as transformers does."""
    family, overrides = VARIANTS[request.param]
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), family, **overrides)
    return load(folder), load_oracle(folder)


class Pool:
    """Sequences with shuffled blocks, stepped by hand."""

    def __init__(self, model, block_size, generator, num_blocks=200):
        config = model.config
        shape = (config.num_kv_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self.model = model
        self.kv = torch.randn(num_blocks, *shape, generator=generator).to(model.dtype)
        self.block_size = block_size
        self._free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        dtype = str(model.dtype).removeprefix("torch.")
        self._record_blocks = config.record_blocks(block_size, dtype)
        self._records = {}
        """By a table's first block: the record before the next step, and the other."""

    def table(self, num_tokens):
        return [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def _turned(self, start, table):
        """Turn a sequence's two records: what the last step wrote, this one reads."""
        size = self._record_blocks
        if not size:
            return RecordBlocks()
        new = lambda: [self._free.pop() for _ in range(size)]  # noqa: E731
        written, read = self._records.get(table[0]) or (new(), new())
        self._records[table[0]] = (read, written)
        return RecordBlocks(written if start else (), read)

    def step(self, parts):
        """Run (token ids, first position, block table) parts; logits of every new token."""
        size = self.block_size
        positions = [p for ids, start, _ in parts for p in range(start, start + len(ids))]
        batch = StepBatch(
            input_ids=torch.tensor([i for ids, _, _ in parts for i in ids]),
            positions=torch.tensor(positions),
            token_slots=torch.tensor(
                [
                    table[p // size] * size + p % size
                    for ids, start, table in parts
                    for p in range(start, start + len(ids))
                ]
            ),
            query_lens=[len(ids) for ids, _, _ in parts],
            seq_lens=[start + len(ids) for ids, start, _ in parts],
            block_tables=[table for _, _, table in parts],
            logit_rows=range(len(positions)),
            records=[self._turned(start, table) for _, start, table in parts],
        )
        return self.model.forward(batch, self.kv)


@torch.inference_mode()
def oracle_logits(oracle, ids):
    return oracle(torch.tensor([ids])).logits[0].float()


def random_ids(generator, length):
    return torch.randint(0, 296, (length,), generator=generator).tolist()


def assert_same_predictions(logits, expected, tolerance=1e-4):
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        logits.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=tolerance
    )


def test_a_whole_prompt_has_the_oracles_logits(pair):
    model, oracle = pair
    generator = torch.Generator().manual_seed(1)
    ids = random_ids(generator, 150)
    pool = Pool(model, 16, generator)
    assert_same_predictions(pool.step([(ids, 0, pool.table(150))]), oracle_logits(oracle, ids))


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_chunks_and_neighbours_change_nothing(pair, block_size):
    """Several prompts advance by random chunks, some already decoding, in shuffled blocks."""
    model, oracle = pair
    generator = torch.Generator().manual_seed(block_size)
    pool = Pool(model, block_size, generator)
    prompts = [random_ids(generator, length) for length in (1, 7, 40, 63, 100)]
    tables = [pool.table(len(prompt)) for prompt in prompts]
    done = [0] * len(prompts)
    logits = [[] for _ in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        step = []
        for i, prompt in enumerate(prompts):
            size = int(torch.randint(0, 34, (), generator=generator))
            # the last tokens one by one, as decoding goes
            size = min(size, max(len(prompt) - 5 - done[i], 1))
            if size and done[i] < len(prompt):
                step.append((i, done[i], prompt[done[i] : done[i] + size]))
        if not step:
            continue
        rows = pool.step([(ids, start, tables[i]) for i, start, ids in step])
        for (i, _, ids), part in zip(step, rows.split([len(s[2]) for s in step]), strict=True):
            logits[i].append(part)
            done[i] += len(ids)
    for prompt, parts in zip(prompts, logits, strict=True):
        assert_same_predictions(torch.cat(parts), oracle_logits(oracle, prompt))


def test_greedy_text_is_what_generate_gives(pair):
    model, oracle = pair
    generator = torch.Generator().manual_seed(3)
    pool = Pool(model, 16, generator)
    prompts = [random_ids(generator, length) for length in (3, 16, 61)]
    tables = [pool.table(len(prompt) + 24) for prompt in prompts]
    rows = pool.step([(p, 0, t) for p, t in zip(prompts, tables, strict=True)])
    last = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    outputs = [[token] for token in rows[last].argmax(-1).tolist()]
    for _ in range(23):
        parts = [
            (o[-1:], len(p) + len(o) - 1, t)
            for o, p, t in zip(outputs, prompts, tables, strict=True)
        ]
        for output, token in zip(outputs, pool.step(parts).argmax(-1).tolist(), strict=True):
            output.append(token)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert output == expected
    assert len({token for output in outputs for token in output}) > 12  # no stuck decoding


def test_rope_frequencies_equal_the_oracles_to_the_last_bit(pair):
    model, oracle = pair
    expected = getattr(oracle.model, "language_model", oracle.model).rotary_emb
    for rope, window in zip(model.config.ropes, model.config.sliding_windows, strict=True):
        if rope is None:
            continue
        kind = ""
        if model.config.family.has_local_rope:
            kind = "full_attention_" if window is None else "sliding_attention_"
        frequencies = rope_frequencies(rope, model.config.max_position_embeddings)
        assert torch.equal(frequencies, getattr(expected, f"{kind}inv_freq"))
        assert math.isclose(rope.attention_factor, getattr(expected, f"{kind}attention_scaling"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.01)])
def test_half_precision_stays_near_the_oracles(tmp_path, family, dtype, tolerance):
    """Within 0.15 of the logits' standard deviation (0.01 in float16), the largest of thousands.

    Sums are rounded at other places than the oracle's, so no smaller distance is a mistake; what
    would be one is a larger distance from float32 than the oracle's own.
    """
    folder = make_checkpoint(tmp_path, family, dtype, initializer_range=0.15)
    model, oracle = load(folder, dtype), load_oracle(folder, dtype)
    generator = torch.Generator().manual_seed(4)
    pool = Pool(model, 16, generator)
    ids, table = random_ids(generator, 90), pool.table(90)
    expected = oracle_logits(oracle, ids)
    assert expected.std() > 1
    logits = torch.cat([pool.step([(ids[:50], 0, table)]), pool.step([(ids[50:], 50, table)])])
    atol = tolerance * float(expected.std())
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
    exact = oracle_logits(load_oracle(folder), ids)
    assert (logits - exact).square().mean() < 1.2 * (expected - exact).square().mean()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_mixture_in_bfloat16_is_as_near_to_float32_as_the_oracle_is(tmp_path, family):
    """Rounding sends some tokens to another expert than float32 does, here as there."""
    folder = make_checkpoint(tmp_path, family, "bfloat16")
    model, oracle = load(folder, "bfloat16"), load_oracle(folder, "bfloat16")
    generator = torch.Generator().manual_seed(4)
    pool, ids = Pool(model, 16, generator), random_ids(generator, 90)
    logits, theirs = pool.step([(ids, 0, pool.table(90))]), oracle_logits(oracle, ids)
    exact = oracle_logits(load_oracle(folder), ids)
    assert (logits - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()
    distance_by_token = (logits - theirs).abs().amax(-1)
    assert distance_by_token.median() < 0.1


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3", "mixtral"])
def test_a_sharded_bfloat16_checkpoint_served_in_float32_is_exact(tmp_path, family):
    folder = make_checkpoint(tmp_path, family, "bfloat16", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    model, oracle = load(folder), load_oracle(folder)
    generator = torch.Generator().manual_seed(5)
    pool, ids = Pool(model, 16, generator), random_ids(generator, 40)
    assert_same_predictions(pool.step([(ids, 0, pool.table(40))]), oracle_logits(oracle, ids))


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.2],
    "long_factor": [1.2, 2.0, 4.0, 8.0, 12.0, 16.0],
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    """A Phi-3 trained on 64 positions and stretched to 512."""
    overrides = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "phi3", **overrides)


@pytest.mark.parametrize(("max_model_len", "length"), [(64, 64), (65, 65), (None, 150)])
def test_the_longest_request_decides_which_longrope_factors_serve_all(
    longrope, max_model_len, length
):
    model, oracle = load(longrope, max_model_len=max_model_len), load_oracle(longrope)
    generator = torch.Generator().manual_seed(7)
    pool, ids = Pool(model, 16, generator), random_ids(generator, length)
    table = pool.table(length)
    logits = torch.cat([pool.step([(ids[:20], 0, table)]), pool.step([(ids[20:], 20, table)])])
    assert_same_predictions(logits, oracle_logits(oracle, ids))


def test_longrope_factors_do_not_change_under_a_running_sequence(longrope):
    """The oracle takes the short ones for a prompt of 40; a server that goes further does not."""
    model, oracle = load(longrope), load_oracle(longrope)
    generator = torch.Generator().manual_seed(8)
    ids = random_ids(generator, 100)
    pool = Pool(model, 16, generator)
    table = pool.table(100)
    start = pool.step([(ids[:40], 0, table)])
    assert (start - oracle_logits(oracle, ids[:40])).abs().max() > 0.01
    logits = torch.cat([start, pool.step([(ids[40:], 40, table)])])
    assert_same_predictions(logits, oracle_logits(oracle, ids))


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_the_language_model_of_a_seeing_checkpoint_is_exact(tmp_path, family):
    from transformers import AutoModelForImageTextToText

    folder = make_seeing_checkpoint(tmp_path, family)
    model = load(folder)
    oracle = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(9)
    pool, ids = Pool(model, 16, generator), random_ids(generator, 150)
    assert_same_predictions(pool.step([(ids, 0, pool.table(150))]), oracle_logits(oracle, ids))


def test_gemma_4s_language_model_is_found_among_the_parts_of_one_that_sees(tmp_path):
    folder = make_checkpoint(tmp_path, "gemma4_text")
    oracle = load_oracle(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    ids = random_ids(torch.Generator().manual_seed(14), 60)
    pool = Pool(load(folder), 16, torch.Generator().manual_seed(15))
    assert_same_predictions(pool.step([(ids, 0, pool.table(60))]), oracle_logits(oracle, ids))


def test_experts_as_gpt_oss_publishes_them_are_exact(tmp_path):
    folder = make_checkpoint(tmp_path, "gpt_oss")
    pack_experts(folder)
    oracle = load_oracle(folder)
    ids = random_ids(torch.Generator().manual_seed(12), 60)
    pool = Pool(load(folder), 16, torch.Generator().manual_seed(13))
    assert_same_predictions(pool.step([(ids, 0, pool.table(60))]), oracle_logits(oracle, ids))


def test_no_rotation_at_all_needs_no_table(tmp_path):
    folder = make_checkpoint(tmp_path, "smollm3", no_rope_layers=[0, 0, 0])
    model, oracle = load(folder), load_oracle(folder)
    generator = torch.Generator().manual_seed(10)
    pool, ids = Pool(model, 16, generator), random_ids(generator, 30)
    assert_same_predictions(pool.step([(ids, 0, pool.table(30))]), oracle_logits(oracle, ids))


def test_a_step_without_wanted_logits_returns_none(tmp_path):
    model = load(make_checkpoint(tmp_path))
    kv = torch.zeros(2, 3, 2, 16, 2, 16)
    positions = torch.arange(4)
    batch = StepBatch(positions, positions, positions + 16, [4], [4], [[1]], [])
    assert model.forward(batch, kv).shape == (0, 300)


def test_long_rope_tables_match_short_ones(tmp_path):
    folder = make_checkpoint(tmp_path, max_position_embeddings=8192)
    model, oracle = load(folder), load_oracle(folder)
    assert ModelConfig.from_folder(folder).max_position_embeddings == 8192
    generator = torch.Generator().manual_seed(6)
    pool = Pool(model, 64, generator)
    ids = random_ids(generator, 2100)  # beyond the first table
    table = pool.table(2100)
    pool.step([(ids[:30], 0, table)])
    logits = pool.step([(ids[30:], 30, table)])
    assert_same_predictions(logits[-5:], oracle_logits(oracle, ids)[-5:])


# --------------------------------------------------------------------------------------------------
# Gated DeltaNet: how its checkpoints are written, and how its states are made.


def nested(folder, family):
    """Write a text checkpoint as a part of one that sees, its experts stacked, as published."""
    keys = json.loads((folder / "config.json").read_text())
    name = {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}[family]
    outer = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": family.removesuffix("_text"),
        "text_config": keys,
        "tie_word_embeddings": keys.pop("tie_word_embeddings"),
    }
    keys.pop("architectures")
    (folder / "config.json").write_text(json.dumps(outer))
    tensors, experts = {}, {}
    for tensor, values in load_file(folder / "model.safetensors").items():
        moved = tensor.replace("model.", "model.language_model.", 1)
        if ".experts." in moved and moved.count(".") > 7:
            block, part = moved.split(".experts.")
            number, matrix = part.split(".")[:2]
            experts.setdefault(block, {}).setdefault(matrix, {})[int(number)] = values
        else:
            tensors[moved] = values.contiguous()
    for block, matrices in experts.items():
        gate, up, down = (
            torch.stack([matrices[kind][i] for i in sorted(matrices[kind])])
            for kind in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{block}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{block}.experts.down_proj"] = down
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_gated_delta_net_within_a_model_that_sees(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    oracle = load_oracle(folder)
    nested(folder, family)
    model, generator = load(folder), torch.Generator().manual_seed(1)
    pool, ids = Pool(model, 16, generator), random_ids(generator, 70)
    assert_same_predictions(pool.step([(ids, 0, pool.table(70))]), oracle_logits(oracle, ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gated_delta_net_in_half_precision_is_as_near_to_float32_as_the_oracle(tmp_path, dtype):
    folder = make_checkpoint(tmp_path, "qwen3_5_text", dtype)
    model, oracle = load(folder, dtype), load_oracle(folder, dtype)
    generator = torch.Generator().manual_seed(4)
    pool, ids = Pool(model, 16, generator), random_ids(generator, 90)
    logits, theirs = pool.step([(ids, 0, pool.table(90))]), oracle_logits(oracle, ids)
    exact = oracle_logits(load_oracle(folder), ids)
    assert (logits - exact).square().mean() < 1.2 * (theirs - exact).square().mean()
