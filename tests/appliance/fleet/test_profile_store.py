"""The profile's file: written by several, read back, damaged, of other machines."""

import fcntl
import sqlite3
import threading
from contextlib import closing

import pytest

from appliance.fleet import profile_store
from appliance.fleet.placement import WorkerPlan
from appliance.fleet.profile_store import FILE_NAME, Known, ProfileStore, ProfileUnusable
from appliance.fleet.scopes import devices_name, machine_name, model_scope
from engine.checkpoint.checkpoint import Checkpoint
from engine.profile.facts import FactKey, Scope

SCOPE = Scope("a machine", "avx2 1", "tiny", "float32", "cpu 0")
KEY = FactKey("prompt_ms", 256, 0, "decode on 2")


def test_what_is_saved_is_read_back_in_its_scope_alone(tmp_path):
    store = ProfileStore(tmp_path)
    store.save(SCOPE, {KEY: [3.0, 1.0, 2.0]})
    fact = store.load(SCOPE).facts[KEY]
    assert (list(fact.samples), fact.value) == ([3.0, 1.0, 2.0], 2.0)
    for field in Scope._fields:
        assert not store.load(SCOPE._replace(**{field: "another"})).facts
    store.save(SCOPE, {KEY: [7.0]})
    assert store.load(SCOPE).value(*KEY) == 7.0
    assert len(store.rows()) == 1


def test_what_a_first_start_timed_of_products_is_forgotten(tmp_path):
    store = ProfileStore(tmp_path)
    store.save(SCOPE, {KEY: [1.0]})
    with closing(sqlite3.connect(store.path)) as db, db:
        rows = [(what, "dots", "[0.0]") for what in ("product_us", "is_wrong")]
        db.executemany(
            "INSERT INTO facts VALUES ('m', 'b', '', '', '', ?, 0, 0, ?, ?, 0, 0, 0, '')", rows
        )
        db.execute("DELETE FROM _sqlite_migrations WHERE name = 'm002_no_products'")
    assert [row.key for row in store.rows()] == [KEY]
    assert store.is_readable


def test_only_what_has_changed_is_written(tmp_path):
    known = Known.of(tmp_path, SCOPE)
    known.save()
    assert not (tmp_path / FILE_NAME).exists()
    known.profile.observe(KEY, 5.0)
    known.save()
    assert Known.of(tmp_path, SCOPE).profile.value(*KEY) == 5.0


def test_two_daemons_write_one_file(tmp_path):
    def write(number):
        for size in range(20):
            ProfileStore(tmp_path).save(SCOPE, {FactKey("a_ms", size, number): [1.0]})

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(ProfileStore(tmp_path).rows()) == 60


def test_a_damaged_file_is_as_good_as_none_and_is_cleared(tmp_path, caplog):
    store = ProfileStore(tmp_path)
    store.path.write_bytes(b"no database" * 1000)
    assert not store.load(SCOPE).facts
    assert str(store.path) in caplog.text
    with pytest.raises(ProfileUnusable):
        store.save(SCOPE, {KEY: [1.0]})
    store.clear()
    store.save(SCOPE, {KEY: [1.0]})
    assert store.load(SCOPE).facts


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE facts SET samples = 'oops'",
        "UPDATE facts SET samples = '[]'",
        "UPDATE facts SET samples = '5'",
        "UPDATE facts SET samples = '[0]'",
        "UPDATE facts SET samples = '[1, NaN]'",
        "UPDATE facts SET samples = '[1e9, 1e308]'",
        "UPDATE facts SET samples = '[\"a\"]'",
        f"UPDATE facts SET samples = '{'[' * 100_000}'",
        "ALTER TABLE _sqlite_migrations RENAME COLUMN name TO nam",
    ],
    ids=[
        "no JSON",
        "none",
        "a number",
        "zero",
        "NaN",
        "absurd",
        "text",
        "deep",
        "a renamed column",
    ],
)
def test_a_damaged_fact_is_as_good_as_no_file(tmp_path, damage, caplog):
    store = ProfileStore(tmp_path)
    store.save(SCOPE, {KEY: [1.0]})
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute(damage)
    assert not store.load(SCOPE).facts
    assert not store.is_readable
    assert str(store.path) in caplog.text
    assert store.clear() == 0
    assert store.load(SCOPE).facts == {}


def test_a_file_that_another_program_keeps_locked_is_left_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_store, "BUSY_TIMEOUT_S", 0.1)
    store = ProfileStore(tmp_path)
    store.save(SCOPE, {KEY: [1.0]})
    with store.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not store.load(SCOPE).facts
        assert not store.is_readable
    assert store.load(SCOPE).facts


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProfileUnusable):
        ProfileStore(tmp_path).save(SCOPE, {KEY: [1.0]})
    assert (tmp_path / "elsewhere").read_text() == "precious"


def test_a_file_that_others_can_write_to_is_not_used(tmp_path):
    store = ProfileStore(tmp_path)
    store.save(SCOPE, {KEY: [1.0]})
    store.path.chmod(0o666)
    assert not store.load(SCOPE).facts


CPUINFO = """processor\t: 0
model name\t: A CPU @ 3 GHz
model\t\t: 2
flags\t\t: {flags}
cpu MHz\t\t: {mhz}

processor\t: 1
"""


def test_a_machine_is_named_by_its_processor_and_what_of_it_may_be_used(tmp_path):
    def name(flags="avx2 fma", mhz=3000, cpus=(0, 1), quota=None):
        path = tmp_path / "cpuinfo"
        path.write_text(CPUINFO.format(flags=flags, mhz=mhz))
        return machine_name(list(cpus), quota, path)

    first = name()
    assert first.startswith("A CPU @ 3 GHz [")
    assert name(mhz=800) == name(flags="fma avx2") == first, "its clock is no part of it"
    others = {name(flags="avx2"), name(cpus=(0,)), name(quota=1.5)}
    assert len({first, *others}) == 4
    assert machine_name([0], None, tmp_path / "none"), "without the file there is a name, too"


def test_a_model_is_named_by_its_shapes(tiny_llama):
    checkpoint = Checkpoint.open(tiny_llama)
    scope = model_scope(Scope("m", "b"), checkpoint, "float32", "cpu 0")
    assert scope.model.startswith(f"{tiny_llama.name} [")
    assert scope == model_scope(Scope("m", "b"), checkpoint, "float32", "cpu 0")


def test_devices_are_named_by_cores():
    workers = [WorkerPlan("prefill", (0,), "kv"), WorkerPlan("decode", (1, 2), "kv")]
    assert devices_name(workers).split("; ") == ["prefill cpu 0", "decode cpu 1-2"]
