"""One frozen `Settings`, read once from the command line and SHARDYARD_* variables; nobody else reads the environment.

A variable is the field's name in capitals: `data_dir` is SHARDYARD_DATA_DIR. The command line wins over it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

PREFIX = "SHARDYARD_"
FIRST_PORT = 8470
CPU_SLOTS = max(4, os.cpu_count() or 1)


class SettingError(ValueError):
    """A setting that cannot be used; the text names it and says what to change."""


@dataclass(frozen=True)
class Settings:
    """Everything about this installation that is not in a job spec."""

    data_dir: Path = Path("~/.shardyard")  # absolute once read; SQLite, checkpoints, logs, token, chosen port
    database_url: str = ""  # empty: SQLite in the data folder
    ray_address: str = ""  # empty: a local Ray head of our own
    store_url: str = ""  # absolute folder or s3://...; empty: `checkpoints` in the data folder
    host: str = "127.0.0.1"
    port: int | None = None  # None: the first free one from 8470 on
    public_url: str = ""  # where ranks of other machines reach the API; empty: http://host:port
    cpu_slots_per_node: int = CPU_SLOTS  # ranks a node without GPUs may hold
    max_ranks: int = 1024  # more is refused at submit
    quota_slots: int = 0  # slots all jobs together may use; 0: no limit
    data_roots: tuple[Path, ...] = ()  # a spec may read below these; empty: home and the folder where serve started
    fake_cluster: bool = False  # simulated ranks instead of Ray
    idle_workers: int = 4  # Ray workers kept warm after each launch
    leader_lease_seconds: float = 10.0
    tick_seconds: float = 1.0  # the controller looks at least this often
    heartbeat_seconds: float = 2.0  # between signs of life of an actor
    unreachable_seconds: float = 30.0  # without a sign of life a running job is shown as unreachable
    lost_seconds: float = 5.0  # an attempt that the answering cluster does not list for so long is lost
    start_deadline_seconds: float = 120.0  # from launch to every rank joined, preparing data not counted
    save_deadline_seconds: float = 300.0  # a save that makes no progress for so long is given up
    no_progress_seconds: float = 1800.0  # without a completed step, after training began
    orphan_seconds: float = 86400.0  # an actor whose server stays away for so long lets its rank checkpoint and ends
    sweep_seconds: float = 30.0  # an attempt unknown to the database is killed after this delay
    first_backoff_seconds: float = 1.0  # doubled by each failure without progress, up to the last
    last_backoff_seconds: float = 60.0
    shutdown_seconds: float = 60.0  # how long Ctrl-C waits for jobs to pause beyond their own grace
    scrub_bytes_per_second: int = 32 * 2**20  # pace at which checkpoints are read back in the background; 0: never
    scrub_days: float = 7.0  # after so long a checkpoint is read back again
    log_bytes_per_attempt: int = 256 * 2**20  # head and tail are kept
    max_body_bytes: int = 2**20

    @property
    def database(self) -> str:
        """The SQLAlchemy URL (async driver) in use."""
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir / 'shardyard.db'}"

    @property
    def store(self) -> str:
        """The absolute folder or URL below which each job's checkpoints live."""
        return self.store_url or str(self.data_dir / "checkpoints")

    def job_store(self, job_id: str) -> str:
        """Where the checkpoints of one job live."""
        return f"{self.store.rstrip('/')}/{job_id}"

    @property
    def token_file(self) -> Path:
        """The admin token, mode 0600."""
        return self.data_dir / "token"

    @property
    def port_file(self) -> Path:
        """The chosen port, as text, while a server is up."""
        return self.data_dir / "port"

    @property
    def lock_file(self) -> Path:
        """Held by the one server of this data folder."""
        return self.data_dir / "lock"

    @property
    def cache_dir(self) -> Path:
        """Tokenizers and token files, by content hash, shared by all jobs of a node."""
        return self.data_dir / "cache"

    @property
    def ranks_dir(self) -> Path:
        """One folder per attempt and rank: order, spool, output, result."""
        return self.data_dir / "ranks"

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders a spec may read from."""
        return self.data_roots or (Path.home(), Path.cwd())


def read_settings(given: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Defaults, then SHARDYARD_* variables, then `given` (command line; None means not given). Raises SettingError."""
    env = os.environ if environment is None else environment
    chosen: dict[str, Any] = {
        f.name: _parse(f.name, env[PREFIX + f.name.upper()]) for f in fields(Settings) if PREFIX + f.name.upper() in env
    }
    chosen.update({name: value for name, value in (given or {}).items() if value is not None})
    return _checked(replace(Settings(), **chosen))


def _parse(name: str, text: str) -> Any:
    try:
        return _PARSERS[name](text)
    except ValueError as error:
        raise SettingError(f"{PREFIX}{name.upper()}={text!r} cannot be used: {error}") from error


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("use true or false")


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part).expanduser().absolute() for part in text.split(os.pathsep) if part)


def _port(text: str) -> int | None:
    return int(text) if text else None


_BY_ANNOTATION: dict[str, Callable[[str], Any]] = {
    "Path": lambda text: Path(text).expanduser().absolute(),
    "str": str,
    "int": int,
    "float": float,
    "bool": _boolean,
    "int | None": _port,
    "tuple[Path, ...]": _paths,
}
_PARSERS: dict[str, Callable[[str], Any]] = {f.name: _BY_ANNOTATION[str(f.type)] for f in fields(Settings)}


def _checked(settings: Settings) -> Settings:
    settings = replace(settings, data_dir=Path(settings.data_dir).expanduser().absolute())
    if settings.port is not None and not 1 <= settings.port <= 65535:
        raise SettingError(f"port {settings.port} is not a port; use 1 to 65535, or none for the first free one")
    for name in ("cpu_slots_per_node", "max_ranks"):
        if getattr(settings, name) < 1:
            raise SettingError(f"{name} must be at least 1, not {getattr(settings, name)}")
    if "://" not in settings.store and not Path(settings.store).is_absolute():
        raise SettingError(f"store_url {settings.store!r} must be an absolute folder or a URL")
    return settings
