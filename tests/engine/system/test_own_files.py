"""Whose folders and files are used, and whose are not."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.system import own_files
from engine.system.own_files import (
    check_own_folder,
    check_own_path,
    check_own_socket,
    check_own_way,
    check_private_folder,
    open_file,
    open_own,
    open_own_target,
)

pytestmark = pytest.mark.usefixtures("in_time")

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "above" / "state"
    made.mkdir(parents=True, mode=0o755)
    return made


def test_a_folder_of_ours_is_used_through_links_of_ours(folder, tmp_path):
    check_own_folder(folder)
    link = tmp_path / "link"
    link.symlink_to("above/../above")
    check_own_folder(link / "state")


@pytest.mark.parametrize("mode", [0o777, 0o773, 0o757])
@pytest.mark.parametrize("is_above", [False, True])
def test_a_folder_that_others_can_write_to_is_refused(folder, mode, is_above):
    wrong = folder.parent if is_above else folder
    wrong.chmod(mode)
    with pytest.raises(PermissionError) as refused:
        check_own_folder(folder)
    assert refused.value.filename == str(wrong)


def test_a_sticky_folder_may_hold_it_but_may_not_be_it(folder):
    folder.parent.chmod(0o1777)
    check_own_folder(folder)
    folder.chmod(0o1777)
    with pytest.raises(PermissionError):
        check_own_folder(folder)


@AS_ROOT
def test_of_groups_only_the_users_own_may_write(folder):
    own = grp.getgrnam(pwd.getpwuid(os.geteuid()).pw_name).gr_gid
    folder.chmod(0o775)
    os.chown(folder, -1, own)
    check_own_folder(folder)
    named = next(each.gr_gid for each in grp.getgrall() if each.gr_gid != own)
    for other in (60001, named):
        os.chown(folder, -1, other)
        folder.chmod(0o775)
        with pytest.raises(PermissionError):
            check_own_folder(folder)


def test_a_group_with_the_users_name_that_has_other_members_may_not_write(folder, monkeypatch):
    user = pwd.getpwuid(os.geteuid())
    folder.chmod(0o775)
    for members, is_refused in (([], False), ([user.pw_name], False), (["somebody"], True)):
        group = grp.struct_group((user.pw_name, "x", folder.stat().st_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda _gid, group=group: group)
        with pytest.raises(PermissionError) if is_refused else contextlib.nullcontext():
            check_own_folder(folder)


def test_what_became_a_link_after_its_way_was_checked_is_refused(folder, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.setattr(own_files, "_end_of_own_way", lambda path, _uid: path)
    check_own_path(folder, os.geteuid())
    with pytest.raises(PermissionError):
        check_own_path(link, os.geteuid())


@AS_ROOT
@pytest.mark.parametrize("what", ["folder", "above", "link"])
def test_what_another_user_owns_is_refused(folder, tmp_path, what):
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.lchown({"folder": folder, "above": folder.parent, "link": link}[what], NOBODY, NOBODY)
    with pytest.raises(PermissionError):
        check_own_folder(link)


@AS_ROOT
def test_a_link_that_root_made_leads_every_user_to_his_own_folder(folder, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.chown(folder, 1234, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    check_own_folder(link, is_roots_fine=False)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(PermissionError):
        check_own_folder(link, is_roots_fine=False)


@AS_ROOT
def test_a_program_of_this_user_is_not_roots(folder):
    program = folder / "penstock"
    program.touch(0o755)
    check_own_path(program, uid=0)
    os.chown(program, 1234, -1)
    check_own_path(program, uid=1234)
    with pytest.raises(PermissionError):
        check_own_path(program, uid=0)


def test_a_folder_that_is_none_is_no_permission_problem(folder):
    with pytest.raises(NotADirectoryError):
        check_own_folder(folder / "missing")


@AS_ROOT
def test_roots_folder_is_not_another_users_own(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    check_own_folder(folder)
    with pytest.raises(PermissionError):
        check_own_folder(folder, is_roots_fine=False)
    os.chown(folder, 1234, -1)
    check_own_folder(folder, is_roots_fine=False)


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o750, 0o704])
def test_a_private_folder_is_entered_by_nobody_else_and_is_no_link(folder, tmp_path, mode):
    folder.chmod(0o700)
    check_private_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    for wrong in (tmp_path / "link", tmp_path / "missing"):
        with pytest.raises(NotADirectoryError):
            check_private_folder(wrong)
    folder.chmod(mode)
    with pytest.raises(PermissionError):
        check_private_folder(folder)


def test_only_in_a_sticky_folder_may_others_write_beside_a_socket(folder):
    for mode in (0o700, 0o1777, 0o750):
        folder.chmod(mode)
        check_own_way(folder / "socket")
    folder.chmod(0o702)
    for path in (folder / "socket", folder / "run" / "socket"):
        (folder / "run").mkdir(exist_ok=True)
        with pytest.raises(PermissionError):
            check_own_way(path)


@pytest.mark.parametrize(("mode", "denied"), [(0o602, 0), (0o666, 0), (0o640, 0o077)])
def test_a_file_that_too_many_can_use_is_neither_read_nor_emptied(folder, mode, denied):
    path = folder / "file"
    path.write_text("text")
    path.chmod(mode)
    for flags in (os.O_RDONLY, NEW):
        with pytest.raises(PermissionError):
            open_own(path, flags, denied=denied)
    assert path.read_text() == "text"


def test_a_named_file_is_opened_through_links_that_no_other_user_can_change(folder, tmp_path):
    (folder / "..data").mkdir()
    (folder / "..data" / "keys").write_text("text")
    (folder / "keys").symlink_to("..data/keys")
    with open(open_own_target(folder / "keys", os.O_RDONLY)) as file:
        assert file.read() == "text"
    for wrong in (folder, folder / "..data"):
        before = wrong.stat().st_mode
        wrong.chmod(0o777)
        with pytest.raises(PermissionError) as refused:
            open_own_target(folder / "keys", os.O_RDONLY)
        assert refused.value.filename == str(wrong)
        wrong.chmod(before)


@AS_ROOT
def test_a_told_socket_is_ours_or_roots(folder):
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))
        path.chmod(0o666)
        check_own_socket(path)
        os.chown(path, NOBODY, -1)
        with pytest.raises(PermissionError):
            check_own_socket(path)
    with pytest.raises(PermissionError):
        check_own_socket(folder)


@pytest.mark.parametrize("flags", [os.O_RDONLY, NEW])
@pytest.mark.parametrize("open_it", [open_own, open_file])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "dangling link"])
def test_what_is_no_file_is_not_opened_and_its_target_stays(folder, kind, open_it, flags):
    path, victim = folder / "requests.open.new", folder / "victim"
    victim.write_text("precious")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(victim if kind == "link" else folder / "missing")
    with pytest.raises(OSError, match=r".+"):
        os.close(open_it(path, flags))
    assert victim.read_text() == "precious"
    assert not (folder / "missing").exists()


@AS_ROOT
def test_another_users_file_is_neither_read_nor_emptied(folder):
    path = folder / "file"
    path.write_text("theirs")
    os.chown(path, NOBODY, NOBODY)
    for flags in (os.O_RDONLY, NEW):
        with pytest.raises(PermissionError):
            open_own(path, flags)
    assert path.read_text() == "theirs"


def test_a_file_of_ours_is_opened_and_inherited_by_nobody(folder):
    for _ in range(2):
        fd = open_own(folder / "file", NEW)
        assert os.write(fd, b"new") == 3
        assert not os.get_inheritable(fd)
        os.close(fd)
    assert (folder / "file").read_text() == "new"
    assert (folder / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_in_a_user_namespace_the_machines_root_is_trusted_above(folder):
    """There, root's folders have the uid that stands for everybody outside."""
    code = (
        "import pathlib; from engine.system.own_files import check_own_folder;"
        f" check_own_folder(pathlib.Path({str(folder)!r}))"
    )
    command = ["unshare", "--user", "--map-user=1000", sys.executable, "-P", "-c", code]
    if subprocess.run([*command[:3], "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    for each in (folder, *folder.parents):
        if each.stat().st_uid not in (0, os.geteuid()):
            pytest.skip("not all of it is root's")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("use", [check_own_folder, check_own_path, open_own_target])
def test_links_without_an_end_are_refused(folder, use):
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    more = {check_own_path: os.geteuid(), open_own_target: os.O_RDONLY}
    for path in (folder / "a", folder / "a" / "inner"):
        with pytest.raises(OSError, match=r".+"):
            use(path, *([more[use]] if use in more else []))


def test_of_several_wrong_folders_the_outermost_is_named(folder):
    for each in (folder, folder.parent):
        each.chmod(0o777)
    with pytest.raises(PermissionError) as refused:
        check_own_folder(folder)
    assert refused.value.filename == str(folder.parent)


def exchange(place, ours):
    """As another user, put a folder and a link to one of ours in turn at a place, until killed."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    own, link = f"{place}.folder", f"{place}.link"
    os.mkdir(own, 0o755)
    os.symlink(ours, link)
    while True:
        os.rename(own, place)
        os.rename(place, own)
        os.rename(link, place)
        os.rename(place, link)


@AS_ROOT
def test_another_user_who_exchanges_a_folder_while_it_is_checked_wins_nothing():
    """In /tmp, where each may rename what is theirs; a link of theirs leads to a folder of ours."""
    with tempfile.TemporaryDirectory() as made:
        shared, ours = Path(made) / "shared", Path(made) / "ours"
        Path(made).chmod(0o755)
        ours.mkdir(0o755)
        shared.mkdir()
        shared.chmod(0o1777)
        place = shared / "state"
        pid = os.fork()
        if pid == 0:
            try:
                exchange(str(place), str(ours))
            finally:
                os._exit(1)
        try:
            taken, seen = 0, set()
            while len(seen) < 2 or taken < 2_000:
                taken += 1
                with contextlib.suppress(FileNotFoundError):
                    seen.add(place.is_symlink())
                for check in (check_own_folder, check_own_path):
                    with pytest.raises(OSError, match=r".+"):
                        check(place, *([0] if check is check_own_path else []))
                with pytest.raises(OSError, match=r".+"):
                    os.close(open_own_target(place / "keys", NEW))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert not list(ours.iterdir())
