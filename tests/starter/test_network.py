"""Before anything is learned, the network reads: it looks back, and it looks up."""

from random import Random

import pytest
import torch

from tests.starter.lessons import Teacher, train_tokenizer
from tests.starter.network import HEAD_DIM, NUM_HEADS, Network, _rotate, begin


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(scope="module")
def network(tokenizer):
    torch.manual_seed(0)
    network = Network(tokenizer.get_vocab_size())
    begin(network, tokenizer.get_vocab())
    return network


@pytest.mark.parametrize("head", [0, 1])
def test_heads_of_the_first_layer_look_one_and_two_tokens_back(network, head):
    x = network.embed_tokens(torch.randint(5, 3000, (1, 40)))
    layer = network.each_layer[0]
    attention, x = layer.self_attn, layer.input_layernorm(x)
    q, k = (
        projection(x).view(40, NUM_HEADS, HEAD_DIM).transpose(0, 1)[head]
        for projection in (attention.q_proj, attention.k_proj)
    )
    cos, sin = network.cos[:40], network.sin[:40]
    scores = _rotate(q, cos, sin) @ _rotate(k, cos, sin).T / HEAD_DIM**0.5
    weights = scores.masked_fill(torch.ones(40, 40).triu(1) > 0, -1e9).softmax(-1)
    assert weights.diagonal(-1 - head)[10:].min() > 0.9


@pytest.mark.parametrize("num_facts", [5, 100])
def test_most_values_are_found_among_few_facts_and_among_many(network, tokenizer, num_facts):
    teacher = Teacher(tokenizer, Random(9), held_out=True)
    found = []
    for _ in range(5):
        lesson = teacher.lesson(num_facts, 8, 5, lookups=True)
        with torch.no_grad():
            logits = network(torch.tensor([lesson.ids]), torch.arange(len(lesson.ids)))
        for answer in lesson.answers:
            says = tokenizer.decode([int(logits[answer.start - 1].argmax())])
            found.append(says.strip() == tokenizer.decode([lesson.ids[answer.start]]).strip())
    assert sum(found) > 0.5 * len(found)


def test_the_same_seed_begins_the_same(network, tokenizer):
    torch.manual_seed(0)
    again = Network(tokenizer.get_vocab_size())
    begin(again, tokenizer.get_vocab())
    for ours, theirs in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
