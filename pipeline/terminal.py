"""A job's stderr, shown as it comes and remembered: progress bars stay live, and the last lines explain a failure."""

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections import deque

_TAIL_BYTES = 64 * 1024  # assumption: the end of a traceback, with the log lines before it
_LINES_KEPT = 1000  # assumption: between two looks, seconds apart


class Relay:
    """Copies what is written to ``write_end`` to our stderr, in a thread.

    ``write_end`` is a terminal when ours is one, so that bars are drawn as on the real one; else it is a pipe.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        if self._terminal:
            self._read_end, self.write_end = pty.openpty()
            self._imitate_terminal()
        else:
            self._read_end, self.write_end = os.pipe()
        self._tail = bytearray()
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._partial = b""
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._copy, name="stderr of the job", daemon=True)
        self._thread.start()

    def _imitate_terminal(self) -> None:
        attributes = termios.tcgetattr(self.write_end)
        attributes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n; once is enough
        termios.tcsetattr(self.write_end, termios.TCSANOW, attributes)
        size = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(self.write_end, termios.TIOCSWINSZ, size)

    def close_write_end(self) -> None:
        """Close our copy, once the job has its own; the relay ends when nobody holds one."""
        os.close(self.write_end)

    def _copy(self) -> None:
        while True:
            try:
                data = os.read(self._read_end, 65536)
            except OSError:  # a terminal without writers says EIO where a pipe says end of file
                break
            if not data:
                break
            with contextlib.suppress(OSError):  # our own stderr is gone: the job goes on
                os.write(2, data)
            self._remember(data)
        os.close(self._read_end)

    def _remember(self, data: bytes) -> None:
        with self._mutex:
            self._tail += data
            del self._tail[:-_TAIL_BYTES]
            *whole, self._partial = (self._partial + data).split(b"\n")
            self._partial = self._partial.rpartition(b"\r")[2] or self._partial[-_TAIL_BYTES:]
            self._lines.extend(text for line in whole if (text := _last_state(line)))

    def finish(self) -> None:
        """Wait until everything written has been copied; the writers have ended."""
        self._thread.join(timeout=5.0)

    def tail(self) -> str:
        """The last 64 KiB."""
        with self._mutex:
            return self._tail.decode(errors="replace")

    def new_lines(self) -> list[str]:
        """Whole lines since the last call; of a line redrawn with carriage returns, its last state."""
        with self._mutex:
            lines = list(self._lines)
            self._lines.clear()
        return lines


def _last_state(line: bytes) -> str:
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1].decode(errors="replace").rstrip() if states else ""
