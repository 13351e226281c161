"""An answer arrives as it was sent, in one piece."""

import socket

from engine.text.answers import Answer, receive_answer, send_answer


def test_an_answer_is_sent_in_one_piece():
    """A process that is killed between two would leave a head without its text."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs:
        send_answer(theirs, Answer.BEGUN, "12345")
        assert ours.recv(100).endswith(b"12345")


def test_an_answer_is_received_as_it_was_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_answer(theirs, Answer.UNREADABLE, "line 1: é")
        assert receive_answer(ours) == (Answer.UNREADABLE, "line 1: é".encode())
