"""Names of signals."""

from engine.system.signals import signal_name


def test_every_signal_has_a_name_and_real_time_ones_count_from_the_first() -> None:
    assert [signal_name(number) for number in (9, 34, 40, 64)] == [
        "SIGKILL",
        "SIGRTMIN",
        "SIGRTMIN+6",
        "SIGRTMAX",
    ]
