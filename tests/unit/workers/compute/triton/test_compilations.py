import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from triton import knobs

from penstock.workers.compute.triton.compilations import CACHE_VARIABLE, Compilations, keep_on_disk


def compile_one(name: str) -> None:
    """Tell of a kernel as Triton does when it has compiled one."""
    hook = knobs.runtime.jit_post_compile_hook
    if hook is not None:
        hook(
            key="k", repr=f"{name}[num_warps=4](x: *fp32)", fn=SimpleNamespace(name=name), compile={},
            is_manual_warmup=False, already_compiled=False,
        )  # fmt: skip


def test_what_is_compiled_between_begin_and_end_counts_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    compile_one("before")
    compilations = Compilations(is_warning=True)
    compilations.begin()
    with caplog.at_level(logging.WARNING, "penstock.runner"):
        compile_one("_multiply")
        compile_one("_store")
    compilations.end()
    compile_one("behind")

    assert compilations.names == ["_multiply", "_store"]
    assert compilations.num_compiled == 2
    assert "A kernel was compiled while sequences waited: _multiply." in caplog.text
    assert [record.kernel for record in caplog.records] == ["_multiply", "_store"]  # type: ignore[attr-defined]


def test_another_hook_still_hears_of_each() -> None:
    outer, inner = Compilations(), Compilations()
    outer.begin()
    inner.begin()
    compile_one("_reduce")
    inner.end()
    compile_one("_store")
    outer.end()

    assert (outer.names, inner.names) == (["_reduce", "_store"], ["_reduce"])
    assert knobs.runtime.jit_post_compile_hook is None


def test_what_is_compiled_is_kept_in_a_folder_that_lasts(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    keep_on_disk(environment, tmp_path / "penstock" / "triton")

    assert environment == {CACHE_VARIABLE: str(tmp_path / "penstock" / "triton")}
    assert (tmp_path / "penstock" / "triton").is_dir()


def test_a_folder_that_the_environment_names_is_left_as_it_is(tmp_path: Path) -> None:
    environment = {CACHE_VARIABLE: "elsewhere"}
    keep_on_disk(environment, tmp_path / "triton")

    assert environment == {CACHE_VARIABLE: "elsewhere"}
    assert not (tmp_path / "triton").exists()


def test_a_folder_that_can_not_be_made_is_told_and_another_one_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    environment: dict[str, str] = {}
    with caplog.at_level(logging.WARNING, "penstock.runner"):
        keep_on_disk(environment, tmp_path / "file" / "triton")

    assert Path(environment[CACHE_VARIABLE]).is_dir()
    assert "set TRITON_CACHE_DIR to a folder that can" in caplog.text
