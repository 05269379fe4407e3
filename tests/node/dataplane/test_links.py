from __future__ import annotations

import threading

import pytest

from node.dataplane.links import LinkClosed, LocalLink


def test_messages_come_in_order_and_none_is_lost_at_the_end() -> None:
    link = LocalLink()
    for i in range(3):
        link.send(i)
    link.close()
    assert [link.recv() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(LinkClosed):
            link.recv()


def test_nothing_in_time_is_none() -> None:
    assert LocalLink().recv(timeout=0.01) is None


def test_a_closed_link_takes_nothing() -> None:
    link = LocalLink()
    link.close()
    with pytest.raises(LinkClosed):
        link.send(1)


def test_closing_wakes_everyone_who_waits() -> None:
    link, ended = LocalLink(), []

    def wait() -> None:
        with pytest.raises(LinkClosed):
            link.recv()
        ended.append(True)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    link.close()
    for thread in threads:
        thread.join(timeout=10)
    assert ended == [True] * 3
