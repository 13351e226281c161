"""The recipe: the network is a Llama, learning lowers the loss, and a stopped run goes on."""

from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint.checkpoint import Checkpoint
from tests.starter import lessons as taught
from tests.starter import train
from tests.starter.lessons import MAX_FACTS, MIN_LESSONS, Curriculum, Teacher, train_tokenizer
from tests.starter.network import MAX_POSITIONS, export
from tests.starter.train import Training


def assert_close(ours, theirs):
    """Equal but for the order of sums: by the size of all values, as float32 rounds the largest.

    Another instruction set adds up in another order, and what cancels keeps the error of its parts.
    """
    scale = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    assert difference <= 5e-5 * scale, f"{difference:.2g} apart at values up to {scale:.2g}"


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.fixture
def training(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "STEP_TOKENS", 600)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # each with a share of a step
    return Training(tmp_path / "run", 0, "cpu")


def test_what_is_exported_is_a_llama_with_the_same_logits(training, tmp_path):
    with torch.no_grad():
        for parameter in training.network.parameters():
            parameter.copy_(parameter.bfloat16())
    export(training.network, training.tokenizer, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.stored_dtype == "bfloat16"
    assert checkpoint.num_parameters == sum(p.numel() for p in training.network.parameters())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.tensor([Teacher(training.tokenizer, Random(1)).chat(3).ids])
    with torch.no_grad():
        ours = training.network(ids, torch.arange(ids.shape[1]))
        theirs = reference(ids).logits[0]
    assert_close(ours, theirs)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("What?").input_ids == training.tokenizer.encode("What?").ids


def test_learning_lowers_the_loss(training):
    first = training.step(rate=1.0)
    for _ in range(12):  # within the warm-up; so at many times the usual rate
        last = training.step(rate=10.0)
    assert last < 0.98 * first


def test_a_stopped_run_goes_on_where_it_was(training, tmp_path):
    for _ in range(3):
        training.step(rate=1.0)
    training.curriculum.num_facts = 9.0
    training.elapsed_s = 12.0
    training.save()
    again = Training(tmp_path / "run", 0, "cpu")
    again.resume()
    assert (again.num_steps, again.num_tokens) == (training.num_steps, training.num_tokens)
    assert (again.curriculum.num_facts, again.elapsed_s) == (9.0, 12.0)
    for ours, theirs in zip(again.network.parameters(), training.network.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert again.step(rate=0.5) > 0
    assert again.num_steps == 4


def test_shares_of_a_step_give_the_gradients_of_the_whole(training):
    teacher = Teacher(training.tokenizer, Random(3))
    lessons = [teacher.lesson(3, 2, 1, lookups=True) for _ in range(4)]
    whole = training._learned(lessons)
    weights = [sum(answer.end - answer.start for answer in x.answers) for x in lessons]
    parts = [training._learned([lesson]) for lesson in lessons]
    shared = [
        sum(w * p.gradients[index] for w, p in zip(weights, parts, strict=True)) / sum(weights)
        for index in range(len(whole.gradients))
    ]
    assert_close(flat(whole.gradients), flat(shared))


# --------------------------------------------------------------------------------------------------
# Lessons grow when answers come right, and only then.


@pytest.fixture(scope="module")
def teacher():
    return Teacher(train_tokenizer(), Random(0))


def test_wrong_answers_never_make_documents_grow():
    curriculum = Curriculum()
    size = curriculum.num_facts
    curriculum.note([False] * 10_000)
    assert curriculum.num_facts == size


def test_right_answers_make_them_grow_up_to_a_limit():
    curriculum = Curriculum()
    sizes = [curriculum.num_facts]
    for _ in range(40):
        curriculum.note([True] * 300)
        sizes.append(curriculum.num_facts)
    assert sizes == sorted(sizes)
    assert sizes[1] > sizes[0]
    assert sizes[-1] == MAX_FACTS


def test_answers_before_a_growth_do_not_count_after_it():
    curriculum = Curriculum()
    curriculum.note([True] * 300)
    size = curriculum.num_facts
    curriculum.note([True] * 299)
    assert curriculum.num_facts == size


def test_a_step_about_documents_has_about_the_tokens_asked_for(teacher, monkeypatch):
    monkeypatch.setattr(taught, "_CHAT_SHARE", 0.0)
    lessons, _ = Curriculum().lessons(teacher, Random(1), 4096)
    assert 4096 <= sum(len(lesson.ids) for lesson in lessons) < 4096 + 500


def test_the_largest_lessons_fit_the_model(teacher):
    curriculum = Curriculum()
    curriculum.num_facts = MAX_FACTS
    random = Random(2)
    for _ in range(12):
        lessons, _ = curriculum.lessons(teacher, random, 4096)
        assert len(lessons) >= MIN_LESSONS
        assert max(len(lesson.ids) for lesson in lessons) <= MAX_POSITIONS
