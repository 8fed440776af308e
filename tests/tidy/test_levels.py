"""The levels' own rules hold: no network below integration, and one closing line for all of it."""

import asyncio
import socket

import pytest
import pytest_socket


def test_a_tidy_test_cannot_open_a_network_socket() -> None:
    with (
        pytest.warns(UserWarning, match="tried to use socket"),
        pytest.raises(pytest_socket.SocketBlockedError),
    ):
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def test_a_tidy_test_can_open_a_unix_socket() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        left.sendall(b"x")
        assert right.recv(1) == b"x"


async def test_an_asynchronous_test_runs_without_network_sockets() -> None:
    assert asyncio.get_running_loop().is_running()
