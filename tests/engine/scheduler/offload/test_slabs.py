import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scheduler.offload import disk as module
from engine.scheduler.offload import slab_files
from engine.scheduler.offload.disk import probe
from engine.scheduler.offload.files import (
    BusyError,
    check_records,
    delete_slabs,
    head_of,
    slab_bytes,
    survey,
)
from engine.scheduler.offload.index import RecordPlace, SlabIndex
from engine.scheduler.offload.records import (
    DIGEST_BYTES,
    HEADER_BYTES,
    PAGE,
    RecordHead,
    seal_record,
    seal_slab,
)
from engine.scheduler.offload.slab_files import DamagedError, RecordBuffer, Slabs

BLOCK_BYTES = 5000
CAP_BYTES = 48 * PAGE
MODELS = [bytes([n]) * DIGEST_BYTES for n in (1, 2)]


def name(n):
    return bytes([n]) * 16


def content(block_hash, model=MODELS[0]):
    return hashlib.shake_128(block_hash + model).digest(BLOCK_BYTES)


def open_slabs(folder, *, model=MODELS[0], cap_bytes=CAP_BYTES, block_bytes=BLOCK_BYTES, **more):
    slabs = Slabs(folder, block_bytes, model, cap_bytes, 0, f"model {model[0]}", **more)
    return slabs, slabs.open()


def put(slabs, place, block_hash, number=1, model=MODELS[0], stored_at_s=0):
    buffer = RecordBuffer(BLOCK_BYTES)
    buffer.block[:] = content(block_hash, model)
    slabs.write(place, block_hash, number, stored_at_s, buffer)


def fill(folder, *, model, stored_at_s, num_slabs=1, cap_bytes=CAP_BYTES):
    """Serve a model once; each of its new slabs has one block."""
    slabs, _ = open_slabs(folder, model=model, cap_bytes=cap_bytes)
    for _ in range(num_slabs):
        number = slabs.grow(stored_at_s).number
        block_hash = bytes([model[0], number]) * 8
        put(slabs, RecordPlace(number, 0), block_hash, number, model, stored_at_s)
    slabs.close()


def served_again(folder, model):
    """The slabs of a model that is served again."""
    slabs, found = open_slabs(folder, model=model)
    slabs.close()
    return [contents.head.number for contents in found]


def get(slabs, place, block_hash):
    buffer = RecordBuffer(BLOCK_BYTES)
    slabs.read(place, block_hash, buffer)
    return bytes(buffer.block)


def physical_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.name != "lock")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def slabs(folder):
    slabs, _ = open_slabs(folder)
    slabs.grow()
    yield slabs
    slabs.close()


def test_a_block_comes_back_after_a_restart(slabs, folder):
    put(slabs, RecordPlace(0, 1), name(7), number=5)
    slabs.close()
    again, found = open_slabs(folder)
    ((index, head),) = found[0].records
    assert (index, head.number, head.block_hash) == (1, 5, name(7))
    assert get(again, RecordPlace(0, 1), name(7)) == content(name(7))
    assert again.reclaimed == slab_files.Reclaimed()
    again.close()


def test_slabs_are_made_one_by_one_up_to_the_cap_and_no_further(slabs, folder):
    heads = []
    while (head := slabs.grow()) is not None:
        heads.append(head)
        assert physical_bytes(folder) <= CAP_BYTES
    assert (1 + len(heads)) * heads[0].num_records == slabs.max_places > 0
    assert physical_bytes(folder) > CAP_BYTES / 2


def test_the_disk_keeps_its_reserve(folder):
    free_bytes = shutil.disk_usage(folder.parent).free
    slabs = Slabs(folder, BLOCK_BYTES, MODELS[0], CAP_BYTES, reserve_bytes=2 * free_bytes)
    slabs.open()
    assert slabs.grow() is None
    assert re.fullmatch(r".+: .+ free, .+ reserved", slabs.limit())
    slabs.close()


def test_no_slab_of_another_model_goes_where_the_reserve_would_leave_no_room_even_then(folder):
    fill(folder, model=MODELS[1], stored_at_s=1)
    slabs, _ = open_slabs(folder)
    slabs._reserve_bytes = 2 * shutil.disk_usage(folder).total
    assert slabs.grow() is None
    slabs.close()
    assert served_again(folder, MODELS[1]) == [0]


def test_a_probe_of_a_disk_without_any_room_reads_what_lies_there(slabs, folder, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(module.os, "pwritev", write)
    assert probe(slabs) > 0
    (folder / "slab-000000.kv").unlink()
    slabs.forget_lost()
    with pytest.raises(OSError, match="no space left"):
        probe(slabs)


def test_a_cap_that_is_reached_is_no_shortage(slabs):
    while slabs.grow() is not None:
        assert slabs.limit() is None
    slabs._reserve_bytes = 1 << 60
    assert slabs.limit() is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_file_of_the_highest_number_costs_no_number_that_a_restart_would_not_find(
    slabs, folder, is_whole
):
    number, path = 10**15 - 1, folder / "slab-000000.kv"
    head = head_of(os.open(path, os.O_RDONLY), 0)
    slabs.close()
    path.write_bytes(seal_slab(head._replace(number=number)) if is_whole else b"x")
    path.rename(folder / f"slab-{number}.kv")
    again, found = open_slabs(folder)
    assert [each.head.number for each in found] == [number] * is_whole
    made = again.grow()
    put(again, RecordPlace(made.number, 0), name(7))
    again.close()
    last, found = open_slabs(folder)
    assert {each.head.number for each in found} == {made.number, *[number] * is_whole}
    assert get(last, RecordPlace(made.number, 0), name(7)) == content(name(7))
    last.close()


def test_a_cap_too_small_for_one_record_has_no_places(folder):
    slabs, _ = open_slabs(folder, cap_bytes=2 * PAGE)
    assert slabs.max_places == 0
    assert slabs.grow() is None
    slabs.close()


def test_folder_and_files_are_their_owners_alone_whatever_the_umask(folder):
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        slabs, _ = open_slabs(folder)
        slabs.grow()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    slabs.close()


def test_a_folder_with_files_of_others_is_refused_and_left_as_it_was(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    for foreign in ("notes.txt", "slab-000123.kv", "probe"):
        (folder / foreign).write_text("mine")
    with pytest.raises(OSError, match="holds other files"):
        open_slabs(folder)
    assert delete_slabs(folder) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert sorted(path.name for path in folder.iterdir()) == [
        "notes.txt",
        "probe",
        "slab-000123.kv",
    ]


def test_what_only_has_a_slabs_name_is_none(slabs, folder):
    slabs.close()
    (folder / "slab-99999999999999999999.kv").write_bytes(b"x")
    (folder / "slab-000007.kv").mkdir()
    (folder / "slab-000008.kv").symlink_to("/etc/passwd")
    os.mkfifo(folder / "slab-000009.kv")
    assert [path.name for path, _ in survey(folder)] == ["slab-000000.kv"]
    slabs, found = open_slabs(folder)
    assert len(found) == 1
    assert slabs.grow() is not None
    slabs.close()


def test_a_folder_has_one_process(slabs, folder):
    with pytest.raises(BusyError):
        open_slabs(folder)


def test_another_models_blocks_are_there_when_it_is_served_again(slabs, folder):
    put(slabs, RecordPlace(0, 0), name(1))
    slabs.close()
    for model, block_bytes in ((MODELS[1], BLOCK_BYTES), (MODELS[0], 3 * BLOCK_BYTES)):
        other, found = open_slabs(folder, model=model, block_bytes=block_bytes)
        assert found == []
        assert [share.num_blocks for share in other.others.shares] == [1]
        other.grow()
        other.close()  # and what it has made is empty, and not kept
    again, found = open_slabs(folder)
    assert [index for index, _ in found[0].records] == [0]
    assert get(again, RecordPlace(0, 0), name(1)) == content(name(1))
    assert again.others.shares == []
    again.close()


def test_the_cap_is_of_all_models_and_the_oldest_makes_room(folder):
    fill(folder, model=MODELS[0], stored_at_s=100, num_slabs=2)
    fill(folder, model=MODELS[1], stored_at_s=200, num_slabs=2)
    slabs, _ = open_slabs(folder, model=bytes([3]) * DIGEST_BYTES)
    assert {each.model: each.num_blocks for each in slabs.others.shares} == {
        "model 1": 2,
        "model 2": 2,
    }
    gone, made = [], 0
    while slabs.grow() is not None:
        made += 1
        assert physical_bytes(folder) <= CAP_BYTES
        gone.append({each.model: each.num_blocks for each in slabs.others.shares})
    assert made * slabs._num_records == slabs.max_places, "at last it has all of the cap"
    both = [each for each in gone if "model 1" in each]
    assert all(each["model 2"] == 2 for each in both), "the older one's go first"
    assert gone[-1] == {}
    slabs.close()


def test_blocks_of_the_served_model_that_are_older_go_before_anothers(folder):
    fill(folder, model=MODELS[1], stored_at_s=200, num_slabs=2)
    slabs, _ = open_slabs(folder)
    while slabs.grow(unused_since_s=100) is not None:
        pass
    assert [share.num_blocks for share in slabs.others.shares] == [2]
    assert slabs.grow(unused_since_s=300) is not None
    assert [share.num_blocks for share in slabs.others.shares] == [1]
    slabs.close()


def test_a_smaller_cap_keeps_the_newest_of_all_models(folder):
    fill(folder, model=MODELS[0], stored_at_s=100, num_slabs=2)
    fill(folder, model=MODELS[1], stored_at_s=200, num_slabs=2)
    fill(folder, model=MODELS[0], stored_at_s=300)
    slabs, found = open_slabs(folder, cap_bytes=CAP_BYTES // 2)
    stored = [head.stored_at_s for contents in found for _, head in contents.records]
    num_others = sum(share.num_blocks for share in slabs.others.shares)
    assert physical_bytes(folder) <= CAP_BYTES // 2
    assert slabs.reclaimed.num_surplus_slabs == 5 - len(found) - num_others > 0
    assert stored[-1:] == [300]
    assert 100 not in stored or num_others == 2
    slabs.close()


def test_what_is_too_old_of_another_model_is_erased(folder):
    fill(folder, model=MODELS[0], stored_at_s=100)
    slabs, _ = open_slabs(folder)
    put(slabs, RecordPlace(0, 1), name(2), 2, stored_at_s=200)
    slabs.close()
    fill(folder, model=MODELS[1], stored_at_s=100)
    other, _ = open_slabs(folder, model=bytes([3]) * DIGEST_BYTES)
    other.expire_others(150)
    assert [(share.model, share.num_blocks) for share in other.others.shares] == [("model 1", 1)]
    other.close()
    data = b"".join(path.read_bytes() for path in folder.glob("slab-*"))
    assert content(name(2)) in data
    for model in MODELS:
        assert content(bytes([model[0], 0]) * 8, model) not in data
        assert content(bytes([model[0], 1]) * 8, model) not in data
    again, found = open_slabs(folder)
    assert [index for index, _ in found[0].records] == [1]
    again.close()


def test_another_models_files_may_be_deleted_by_somebody(folder):
    fill(folder, model=MODELS[0], stored_at_s=100, num_slabs=2)
    slabs, _ = open_slabs(folder, model=MODELS[1])
    for path in folder.glob("slab-*"):
        path.unlink()
    while slabs.grow() is not None:
        pass
    slabs.expire_others(0)
    assert slabs.others.shares == []
    slabs.close()


def test_a_daemon_that_was_killed_while_it_made_room_leaves_what_it_had_not_deleted(folder):
    fill(folder, model=MODELS[0], stored_at_s=100, num_slabs=2)
    slabs, _ = open_slabs(folder, model=MODELS[1])
    assert slabs.others.drop_oldest(None)
    os.close(slabs._lock_fd)  # as the kernel does
    assert len(served_again(folder, MODELS[0])) == 1


def test_a_smaller_cap_is_kept_from_the_start(slabs, folder):
    while slabs.grow():
        pass
    slabs.close()
    smaller, found = open_slabs(folder, cap_bytes=CAP_BYTES // 2)
    assert found
    assert smaller.reclaimed.num_surplus_slabs > 0
    assert physical_bytes(folder) <= CAP_BYTES // 2
    smaller.close()


def test_a_slab_that_was_cut_off_keeps_what_is_whole(slabs, folder):
    put(slabs, RecordPlace(0, 0), name(1))
    put(slabs, RecordPlace(0, 1), name(2))
    slabs.close()
    path = folder / "slab-000000.kv"
    os.truncate(path, PAGE + 2 * 2 * PAGE - 1)
    again, found = open_slabs(folder)
    assert [index for index, _ in found[0].records] == [0, 1]
    assert get(again, RecordPlace(0, 0), name(1)) == content(name(1))
    again.close()
    os.truncate(path, PAGE + 2 * PAGE + 100)
    again, found = open_slabs(folder)
    assert [index for index, _ in found[0].records] == [0]
    put(again, RecordPlace(0, 1), name(3))
    assert get(again, RecordPlace(0, 1), name(3)) == content(name(3))
    again.close()


def test_a_slab_without_its_first_page_is_reclaimed(slabs, folder):
    slabs.close()
    with (folder / "slab-000000.kv").open("r+b") as file:
        file.write(b"x")
    again, found = open_slabs(folder)
    assert (found, again.reclaimed.num_damaged_slabs) == ([], 1)
    again.close()


def test_a_slab_under_another_slabs_name_is_reclaimed(slabs, folder):
    put(slabs, RecordPlace(0, 0), name(1))
    slabs.close()
    shutil.copy(folder / "slab-000000.kv", folder / "slab-000001.kv")
    again, found = open_slabs(folder)
    assert ([c.head.number for c in found], again.reclaimed.num_damaged_slabs) == ([0], 1)
    again.close()


def test_a_record_in_anothers_place_is_not_served(slabs, folder):
    put(slabs, RecordPlace(0, 0), name(1))
    with (folder / "slab-000000.kv").open("r+b") as file:
        file.seek(PAGE)
        record = file.read(2 * PAGE)
        file.write(record)
    with pytest.raises(DamagedError):
        get(slabs, RecordPlace(0, 1), name(1))


def test_another_block_in_the_place_is_not_served(slabs):
    put(slabs, RecordPlace(0, 0), name(1))
    with pytest.raises(DamagedError, match="another block"):
        get(slabs, RecordPlace(0, 0), name(2))


def test_nothing_is_left_of_what_is_erased(slabs, folder):
    put(slabs, RecordPlace(0, 0), name(1))
    slabs.erase(RecordPlace(0, 0))
    with pytest.raises(DamagedError):
        get(slabs, RecordPlace(0, 0), name(1))
    assert content(name(1))[100:200] not in (folder / "slab-000000.kv").read_bytes()


def test_slabs_that_somebody_deletes_are_noticed_and_their_space_given_back(slabs, folder):
    assert slabs.forget_lost() == []
    (folder / "slab-000000.kv").unlink()
    assert slabs.forget_lost() == [0]
    assert slabs.num_bytes == 0
    with pytest.raises(FileNotFoundError):
        put(slabs, RecordPlace(0, 0), name(1))
    assert slabs.grow().number == 1


def test_a_folder_that_is_made_again_costs_no_descriptor(slabs, folder):
    num_fds = len(os.listdir("/proc/self/fd"))
    shutil.rmtree(folder)
    slabs.remake_folder()
    assert len(os.listdir("/proc/self/fd")) == num_fds


@pytest.mark.parametrize("way", ["a probe", "a slab"])
def test_a_folder_that_somebody_deletes_is_made_again_and_is_ones_own(slabs, folder, way):
    shutil.rmtree(folder)
    if way == "a probe":
        assert probe(slabs) > 0
        assert slabs.forget_lost() == [0]
    head = slabs.grow()
    assert head.number == 1  # no number twice
    put(slabs, RecordPlace(1, 0), name(7))
    assert get(slabs, RecordPlace(1, 0), name(7)) == content(name(7))
    with pytest.raises(BusyError):
        open_slabs(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_deleted_folder_that_another_process_has_made_again_is_left_to_it(slabs, folder):
    shutil.rmtree(folder)
    other, _ = open_slabs(folder)
    with pytest.raises(BusyError):
        slabs.grow()
    other.close()
    assert slabs.grow().number == 1


def test_a_full_disk_leaves_no_part_of_a_slab(slabs, folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        slabs.grow()
    assert [path.name for path in sorted(folder.iterdir())] == ["lock", "slab-000000.kv"]


def test_a_file_system_without_direct_io_is_used_through_its_cache(folder, monkeypatch):
    real_open = os.open

    def refuse_direct(path, flags, *more, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return real_open(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse_direct)
    slabs, _ = open_slabs(folder)
    slabs.grow()
    put(slabs, RecordPlace(0, 0), name(1))
    assert get(slabs, RecordPlace(0, 0), name(1)) == content(name(1))
    assert not slabs.is_direct
    slabs.close()


def test_a_survey_says_what_is_there_and_which_of_it_is_damaged(slabs, folder):
    slabs.grow()
    for n, place in enumerate([RecordPlace(0, 0), RecordPlace(0, 1), RecordPlace(1, 0)]):
        put(slabs, place, name(n))
    path = folder / "slab-000000.kv"
    with path.open("r+b") as file:
        file.seek(PAGE + 2 * PAGE + HEADER_BYTES + 77)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 8]))
    found = dict(survey(folder))
    assert [list(check_records(path, found[path])) for path in sorted(found)] == [
        [True, False],
        [True],
    ]
    assert list(survey(folder / "nothing")) == []


def test_a_record_of_another_model_in_a_slab_is_damage(slabs, folder):
    put(slabs, RecordPlace(0, 0), name(1))
    head = RecordHead(1, 0, BLOCK_BYTES, name(2), MODELS[1], 0)
    with (folder / "slab-000000.kv").open("r+b") as file:
        file.seek(slabs.grow().offset(1))
        file.write(seal_record(head, 0, 1))
    contents = dict(survey(folder))[folder / "slab-000000.kv"]
    assert [index for index, _ in contents.records] == [0]
    assert contents.damaged == [1]


def test_what_a_start_finds_damaged_is_erased(slabs, folder):
    for n in range(2):
        put(slabs, RecordPlace(0, n), name(n))
    path = folder / "slab-000000.kv"
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(b"not a header")
    slabs.close()
    (contents,) = slabs.open()
    assert [index for index, _ in contents.records] == [1]
    assert slabs.reclaimed.num_damaged_records == 1
    assert next(iter(survey(folder)))[1].damaged == []


def test_what_a_process_has_is_not_deleted(slabs, folder):
    put(slabs, RecordPlace(0, 0), name(1))
    with pytest.raises(BusyError):
        delete_slabs(folder)
    slabs.close()
    size = slab_bytes(folder)
    assert delete_slabs(folder) == size > 0
    assert slab_bytes(folder) == delete_slabs(folder) == 0
    assert delete_slabs(folder / "nothing") == 0


class Faults(RuleBasedStateMachine):
    """Whatever happens to the files: no wrong byte is served, and the cap holds."""

    @initialize()
    def begin(self):
        self.root = Path(tempfile.mkdtemp())
        self.folder = self.root / "kv"
        self.model = MODELS[0]
        self.slabs = None
        self.number = 0
        self.restart()

    def restart(self):
        """As after kill -9: nothing is said or written before."""
        if self.slabs is not None:
            self.slabs.close()
        self.slabs, found = open_slabs(self.folder, model=self.model)
        self.index = SlabIndex()
        for contents in found:
            self.index.add_slab(contents.head.number, contents.head.num_records, contents.records)
        self.index.order_by_age()

    @rule(n=st.integers(0, 30))
    def store(self, n):
        self.index.evict(self.slabs.max_places)
        if not self.index.num_free and (head := self.slabs.grow()) is not None:
            self.index.add_slab(head.number, head.num_records)
        entry = self.index.begin_store(name(n), 0)
        if entry is not None:
            is_written = False
            with contextlib.suppress(OSError):
                put(self.slabs, entry.place, name(n), entry.number, self.model)
                is_written = True
            self.index.end_store(entry, is_written=is_written)

    @rule(n=st.integers(0, 30))
    def load(self, n):
        entry = self.index.begin_load(name(n))
        if entry is None:
            return
        is_sound = False
        with contextlib.suppress(DamagedError, OSError):
            assert get(self.slabs, entry.place, name(n)) == content(name(n), self.model)
            is_sound = True
        self.index.end_load(entry, is_sound=is_sound)

    @rule(model=st.sampled_from(MODELS))
    def crash(self, model):
        self.model = model
        self.restart()

    def paths(self):
        return sorted(self.folder.glob("slab-*"))

    @rule(data=st.data())
    @precondition(lambda self: self.paths())
    def flip(self, data):
        path = data.draw(st.sampled_from(self.paths()))
        with path.open("r+b") as file:
            at = data.draw(st.integers(0, max(path.stat().st_size - 1, 0)))
            file.seek(at)
            byte = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte[0] ^ data.draw(st.integers(1, 255))]))

    @rule(data=st.data(), share=st.floats(0, 1))
    @precondition(lambda self: self.paths())
    def truncate(self, data, share):
        path = data.draw(st.sampled_from(self.paths()))
        os.truncate(path, int(path.stat().st_size * share))

    @rule(data=st.data(), n=st.integers(0, 30), share=st.floats(0, 1))
    @precondition(lambda self: self.index.num_free)
    def crash_while_storing(self, data, n, share):
        entry = self.index.begin_store(name(n), 0)
        if entry is None:
            return
        real, size = os.pwritev, 2 * PAGE
        os.pwritev = lambda fd, data, at: real(
            fd, [data[0][: int(share * size) // PAGE * PAGE]], at
        )
        try:
            put(self.slabs, entry.place, name(n), entry.number, self.model)
        except OSError:
            pass
        finally:
            os.pwritev = real
        self.restart()

    @rule(data=st.data())
    @precondition(lambda self: self.paths())
    def delete(self, data):
        data.draw(st.sampled_from(self.paths())).unlink()
        for number in self.slabs.forget_lost():
            self.index.remove_slab(number)

    @invariant()
    def holds(self):
        if hasattr(self, "folder"):
            assert physical_bytes(self.folder) <= CAP_BYTES
            self.index.check_invariants()

    def teardown(self):
        if hasattr(self, "slabs"):
            self.slabs.close()
            shutil.rmtree(self.root)


Faults.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFaults = Faults.TestCase
