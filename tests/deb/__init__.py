"""The Debian package: made in a chroot of its suite, and tried on a booted machine."""
