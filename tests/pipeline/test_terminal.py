import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from pipeline import terminal
from pipeline.terminal import Relay

WRITER = r"""
import sys
sys.stderr.write("\r10%\r20%")
sys.stderr.write(f"\r30%\nplain {sys.stderr.isatty()}\nhalf")
"""


def relay_of(code: str) -> Relay:
    relay = Relay()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=relay.write_end)
    relay.close_write_end()
    process.wait()
    relay.finish()
    return relay


def test_lines_are_shown_and_kept(capfd: pytest.CaptureFixture[str]) -> None:
    relay = relay_of(WRITER)
    assert relay.new_lines() == ["30%", "plain False"]
    assert relay.new_lines() == []
    assert relay.tail() == "\r10%\r20%\r30%\nplain False\nhalf"
    assert capfd.readouterr().err == relay.tail()


def test_only_the_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    relay = relay_of("import sys; sys.stderr.write('x' * 200_000 + 'the end')")
    assert len(relay.tail()) == terminal._TAIL_BYTES
    assert relay.tail().endswith("the end")


def test_a_terminal_stays_one(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    master, slave = pty.openpty()

    class Terminal:
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return slave

    def with_terminal() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(terminal.sys, "stderr", Terminal())  # type: ignore[attr-defined]
            return relay_of(WRITER)

    relay = with_terminal()
    os.close(master)
    os.close(slave)
    assert relay.new_lines() == ["30%", "plain True"]
