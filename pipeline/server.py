"""A Prefect server on this machine for as long as it is needed: quiet, offline, its state in the main checkout."""

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from alambique.core.places import main_checkout
from pipeline import processes

API_URL = "PREFECT_API_URL"
PORT = 4200  # Prefect's own default, which its pages expect
_READY_SECONDS = 120.0  # assumption: a first start makes a database, 15 s on two idle cores
_STOP_SECONDS = 5.0  # assumption
_SERVERS = 3  # of one run. Assumption: what ends more often can't be helped
_DEFAULTS = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # The terminal shows the job itself. Its lines go to the run's log, which is why the level can't simply be raised.
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
    # Round trips that a server of the same installation doesn't need.
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false",
    # A server that went away must not hold a finished job for minutes.
    "PREFECT_CLIENT_MAX_RETRIES": "2",
}
# Loops that serve deployments and automations, of which this server has none: a third of what it does between events.
_IDLE = {
    f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false"
    for name in ("CANCELLATION_CLEANUP", "CLEANUP_RECONCILER", "FOREMAN", "LATE_RUNS", "PAUSE_EXPIRATIONS",
                 "REPOSSESSOR", "SCHEDULER", "TRIGGERS")
}  # fmt: skip


def set_defaults() -> None:
    """Set Prefect's environment where the user hasn't; do it before Prefect is imported."""
    for name, value in {"PREFECT_HOME": str(main_checkout().resolve() / ".prefect"), **_DEFAULTS}.items():
        os.environ.setdefault(name, value)


def free_port(preferred: int = 0) -> int:
    """``preferred`` if nothing listens there, else any free port of the loopback."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise OSError("no free port on 127.0.0.1")


@contextlib.contextmanager
def reserved_port(preferred: int) -> Iterator[int]:
    """A free port, if possible ``preferred``, that no other `make repro` of this machine takes meanwhile.

    A server listens only once a stage has asked for it: until then the port itself looks free to everybody.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        for port in (free_port(preferred), free_port()):
            with contextlib.suppress(OSError):
                claim.bind(f"\0alambique-port-{port}")  # a name of Linux's, not a file: it goes when we do
                break
        yield port


def url_of(port: int) -> str:
    """The API's address of a server on this machine."""
    return f"http://127.0.0.1:{port}/api"


def make_tables() -> None:
    """Make an empty database beside this virtual environment, from which every checkout's begins (Makefile).

    Whatever the user has set of Prefect is left out: it could name the database of a team.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "server", "database", "upgrade", "-y"]
    _made().parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, env={**env, "PREFECT_HOME": str(_made().parent)}, stdout=subprocess.DEVNULL, check=True)


def begin_with_tables() -> None:
    """Give a new PREFECT_HOME that database, if it was made: without, a first server takes ten seconds of a core."""
    database = Path(os.environ["PREFECT_HOME"], "prefect.db")
    if not _made().is_file() or database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    part = database.with_name(f"prefect.db.{os.getpid()}")
    shutil.copyfile(_made(), part)
    with contextlib.suppress(FileExistsError):  # of a server that started beside us
        os.link(part, database)
    part.unlink()


def _made() -> Path:
    return Path(sys.prefix, "share/alambique/prefect.db")


@contextlib.contextmanager
def local_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and give its process at once (see :func:`wait_until_ready`); stop it at the end."""
    url = url_of(port)
    begin_with_tables()
    env = {**_IDLE, **os.environ, API_URL: url, "PREFECT_UI_API_URL": url}
    server = processes.start(
        [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        signal.SIGTERM,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        behind=True,
    )
    try:
        yield server
    finally:
        processes.stop(server, _STOP_SECONDS)


class Service:
    """The Prefect server of one `make repro`: its port is known from the first, the server starts when it is wanted.

    None where PREFECT_API_URL names one already. Use it in a ``with`` block, at whose end the server stops.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._servers: list[subprocess.Popen[bytes]] = []  # one after the other, where one ended early
        self._announced = 0
        self._port: int | None = None

    def __enter__(self) -> "Service":
        if API_URL not in os.environ:
            self._port = self._stack.enter_context(reserved_port(PORT))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def env(self) -> dict[str, str]:
        """What stages need to find the server, before it runs too."""
        return {} if self._port is None else {API_URL: url_of(self._port)}

    def pids(self) -> list[int]:
        """Its processes, ended ones included."""
        return [server.pid for server in self._servers]

    def start(self) -> None:
        """Start a server unless one runs; what has ended three times is let be."""
        ended = all(server.poll() is not None for server in self._servers)
        if self._port is not None and ended and len(self._servers) < _SERVERS:
            set_defaults()
            self._servers.append(self._stack.enter_context(local_server(self._port)))

    def announce(self) -> None:
        """Say once for each server where its pages are."""
        if self._announced < len(self._servers):
            again = " again" if self._announced else ""
            print(f"Prefect shows the jobs at http://127.0.0.1:{self._port}{again} while this runs", flush=True)
            self._announced = len(self._servers)


def wait_until_ready(url: str) -> None:
    """Wait until the server at ``url`` answers.

    Raises:
        TimeoutError: it did not within two minutes.
    """
    end = time.monotonic() + _READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0):
                return
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            if time.monotonic() > end:
                raise TimeoutError(f"no Prefect server answers at {url}") from None
            time.sleep(0.1)


if __name__ == "__main__":
    make_tables()
