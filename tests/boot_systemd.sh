#!/bin/bash
# Boots systemd on a root of its own, made of this machine's /usr and a tmpfs. Run by
# tests/booted_machine.py, in fresh namespaces (mount, pid, uts, ipc, net, cgroup).
#
# usage: boot_systemd.sh ROOT [READ_ONLY_FOLDER...]
#
# ROOT is an empty folder; the other folders appear in the machine at their own paths. With TREE in
# the environment the root is that tree, which keeps what is written.
set -e
root=$1
shift
if [ -n "$TREE" ]; then
    mount --bind "$TREE" "$root"
    cd "$root"
    mkdir old
else
    mount -t tmpfs -o mode=0755,size=512m,nr_inodes=64k tmpfs "$root"
    cd "$root"
    mkdir -p usr etc/systemd/system etc/penstock var/lib var/log/journal var/cache run proc sys dev \
        opt root home old
    mkdir -m 1777 tmp var/tmp
    for name in bin sbin lib lib32 lib64 libx32; do
        if [ -L "/$name" ]; then ln -s "usr/$name" "$name"; fi
    done
    mount --bind -o ro /usr usr
    mount -o remount,bind,ro usr
    for name in passwd group shadow gshadow nsswitch.conf ld.so.cache ld.so.conf os-release \
        localtime pam.d dbus-1 ssl login.defs protocols services; do
        if [ -e "/etc/$name" ]; then cp -aL "/etc/$name" etc/; fi
    done
fi
echo machine > etc/hostname
tr -d - < /proc/sys/kernel/random/uuid > etc/machine-id
for unit in getty.target console-getty.service systemd-logind.service systemd-udevd.service \
    systemd-networkd.service systemd-timesyncd.service dev-hugepages.mount dev-mqueue.mount \
    sys-kernel-debug.mount sys-kernel-tracing.mount; do
    ln -sfn /dev/null "etc/systemd/system/$unit"
done
for folder in "$@"; do
    mkdir -p ".$folder"
    mount --rbind "$folder" ".$folder"
    mount -o remount,bind,ro ".$folder"
done
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=0755,nosuid tmpfs dev
mkdir dev/pts dev/shm
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/zero c 1 5
mknod -m 666 dev/full c 1 7
mknod -m 666 dev/random c 1 8
mknod -m 666 dev/urandom c 1 9
mknod -m 666 dev/tty c 5 0
pivot_root . old
cd /
umount -l old
rmdir old
# without this LoadCredential= yields an empty folder
mount --make-rshared /
exec env -i container=tests PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin \
    /usr/lib/systemd/systemd --system --unit=multi-user.target --log-target=journal \
    --show-status=no
