"""What a self-test has found is kept for later starts, and a damaged file is as good as none."""

from appliance.fleet.kept_proofs import FILE_NAME, keep_proofs, load_proofs
from engine.wire.messages import Proof


def test_proofs_are_kept_each_once(tmp_path):
    assert load_proofs(tmp_path) == []
    first, second = (Proof(key, {"norm": "row 3"}, [], 9.0) for key in "ab")
    keep_proofs(tmp_path, [first])
    keep_proofs(tmp_path, [second, first])
    assert load_proofs(tmp_path) == [second, first]


def test_a_damaged_file_is_replaced(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"[{")
    assert load_proofs(tmp_path) == []
    keep_proofs(tmp_path, [Proof("a", {}, [], 1.0)])
    assert [proof.key for proof in load_proofs(tmp_path)] == ["a"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path, caplog):
    keep_proofs(tmp_path / "missing", [Proof("a", {}, [], 1.0)])
    assert "Self-test" in caplog.text
