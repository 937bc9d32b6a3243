import contextlib
import os
import socket
import sqlite3
from pathlib import Path

import pytest

from pipeline import server


def test_a_taken_port_is_replaced() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert server.free_port(port) not in (0, port)
    assert server.free_port(port) == port


def test_a_reserved_port_is_not_given_twice() -> None:
    """Nothing listens on either yet, as between the start of two runs and their first GPU stage."""
    wanted = server.free_port()
    with server.reserved_port(wanted) as first:
        assert first == wanted
        with server.reserved_port(wanted) as second:
            assert second != wanted
    with server.reserved_port(wanted) as again:
        assert again == wanted


def test_a_new_home_begins_with_the_database_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    database = tmp_path / "home/prefect.db"
    server.begin_with_tables()
    assert not database.exists()  # this environment has none: the server makes it
    made = tmp_path / "venv/share/alambique/prefect.db"
    made.parent.mkdir(parents=True)
    made.write_text("tables")
    server.begin_with_tables()
    assert database.read_text() == "tables"
    database.write_text("tables and runs")
    server.begin_with_tables()
    assert database.read_text() == "tables and runs"
    assert list(database.parent.iterdir()) == [database]
    assert made.read_text() == "tables"


def test_the_environments_database_is_made_apart_from_the_users_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    teams = tmp_path / "teams.db"
    for name in ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL"):
        monkeypatch.setenv(name, f"sqlite+aiosqlite:///{teams}")
    server.make_tables()
    assert not teams.exists()
    with contextlib.closing(sqlite3.connect(tmp_path / "venv/share/alambique/prefect.db")) as database:
        assert database.execute("SELECT count(*) FROM flow_run").fetchone() == (0,)


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_READY_SECONDS", 0.3)
    url = server.url_of(server.free_port())
    with pytest.raises(TimeoutError, match=f"no Prefect server answers at {url}"):
        server.wait_until_ready(url)


def test_defaults_yield_to_the_user_and_name_only_settings_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import get_current_settings
    from prefect.settings.models.root import Settings

    for name in [name for name in os.environ if name.startswith("PREFECT")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "7")
    server.set_defaults()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / ".prefect")
    assert os.environ["PREFECT_CLIENT_MAX_RETRIES"] == "7"
    known = set(get_current_settings().to_environment_variables(exclude_unset=False, include_aliases=True))
    assert set(server._IDLE) <= known
    ours = {name for name in server._DEFAULTS if name.startswith("PREFECT_") and "LOGGERS" not in name}
    assert ours - known == {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"}  # an entry of logging.yml, not a setting
    settings = Settings()
    assert settings.client.max_retries == 7
    assert settings.server.analytics_enabled is False
