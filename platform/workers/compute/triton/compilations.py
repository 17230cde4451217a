"""What Triton compiles in this process: kept on the disk for the next one, and counted once the replica serves, when
there should be nothing left. No kernel."""

import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from penstock.workers.compute.kernels.build import cache_folder

CACHE_VARIABLE = "TRITON_CACHE_DIR"
"""Environment variable of the folder in which Triton keeps what it has compiled."""

_log = logging.getLogger("penstock.runner")


class Compilations:
    """Counts, from `begin` to `end`, what Triton compiles, or loads for the first time in this process; one at a time.
    In Triton's interpreter that is nothing."""

    def __init__(self, *, is_warning: bool = False) -> None:
        """is_warning: each is told in the log, by the kernel's name."""
        self.names: list[str] = []
        """Kernels, once for each specialization, in order."""
        self._is_warning = is_warning
        self._before: Any = None

    @property
    def num_compiled(self) -> int:
        return len(self.names)

    def begin(self) -> None:
        from triton import knobs  # noqa: PLC0415 (Triton may be absent)

        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self.note

    def end(self) -> None:
        from triton import knobs  # noqa: PLC0415 (Triton may be absent)

        knobs.runtime.jit_post_compile_hook = self._before

    def note(self, *arguments: Any, **named: Any) -> None:
        """Count one, as Triton tells of it (`triton.knobs.JITHook`)."""
        if self._before is not None:
            self._before(*arguments, **named)
        name = str(getattr(named.get("fn"), "name", "a kernel"))
        self.names.append(name)
        if self._is_warning:
            _log.warning(
                "A kernel was compiled while sequences waited: %s. The warm-up before readiness lacks it.",
                name,
                extra={"kernel": name, "specialization": str(named.get("repr", ""))},
            )


def keep_on_disk(environment: MutableMapping[str, str] = os.environ, folder: Path | None = None) -> None:
    """Have Triton keep what it compiles in a folder that the next process of this user finds, unless the environment
    names one. folder: by default beside the CPU's kernels."""
    if environment.get(CACHE_VARIABLE):
        return
    folder = folder or cache_folder().parent / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_kept = os.access(folder, os.W_OK)
    except OSError:
        is_kept = False
    if not is_kept:
        _log.warning(
            "Each replica compiles its kernels anew, because %s can't be written to; set %s to a folder that can.",
            folder,
            CACHE_VARIABLE,
        )
        folder = Path(tempfile.mkdtemp(prefix="penstock-triton-"))
    environment[CACHE_VARIABLE] = str(folder)
