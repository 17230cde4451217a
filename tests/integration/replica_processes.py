"""The processes of replicas, found by the ids that answers name."""

import os
import signal

import psutil

from bench.support.platform_process import PlatformProcess


def has_log_of(pid: int, replica_id: str) -> bool:
    """Whether a process is the one behind a replica id: Serve names its log after it."""
    try:
        return any(replica_id in file.path for file in psutil.Process(pid).open_files())
    except psutil.NoSuchProcess:
        return False


def pid_of(platform: PlatformProcess, replica_id: str) -> int:
    return next(pid for pid in platform.replicas if has_log_of(pid, replica_id))


def kill_replica(platform: PlatformProcess, replica_id: str) -> None:
    os.kill(pid_of(platform, replica_id), signal.SIGKILL)
