import os
from pathlib import Path

import pytest

from penstock.adapters.peft import CONFIG_FILE, FILES, WEIGHTS_FILE
from penstock.adapters.store import AdapterStore, digest_of
from tests.unit.adapters.files import write


def put(store: AdapterStore, fill: int, now: float, tenant: str = "acme") -> str:
    return store.put(write(store.draft(), fill=fill), tenant, now)


def adapters_in(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir() if place.is_dir()} - {"brought"}


def test_equal_files_are_one_adapter_and_a_changed_byte_is_another(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")

    first, again, other = put(store, 0, 1.0), put(store, 0, 2.0), put(store, 1, 3.0)

    assert first == again != other
    assert sorted(file.name for file in store.path(first).iterdir()) == sorted(FILES)
    assert [digest_of(store.path(digest)) for digest in (first, other)] == [first, other]
    assert adapters_in(tmp_path / "adapters") == {first, other}


def test_the_configuration_is_part_of_the_digest(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b", lora_alpha=5)

    assert (first / WEIGHTS_FILE).read_bytes() == (second / WEIGHTS_FILE).read_bytes()
    assert digest_of(first) != digest_of(second)


def test_a_byte_that_moves_from_one_file_to_the_other_changes_the_digest(tmp_path: Path) -> None:
    for name, config, weights in (("a", b"12", b"3"), ("b", b"1", b"23")):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG_FILE).write_bytes(config)
        (tmp_path / name / WEIGHTS_FILE).write_bytes(weights)

    assert digest_of(tmp_path / "a") != digest_of(tmp_path / "b")


def test_a_discarded_draft_leaves_nothing(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    draft = write(store.draft())

    store.discard(draft)

    assert list(tmp_path.iterdir()) == []


def test_sweeping_removes_what_is_old_and_nobodys(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    owned, old, young, touched = (put(store, fill, now) for fill, now in ((0, 10.0), (1, 10.0), (2, 30.0), (3, 10.0)))
    store.touch(touched, 30.0)

    removed = store.sweep({owned}, before=20.0)

    assert removed == [old]
    assert all(store.path(digest).is_dir() for digest in (owned, young, touched))
    assert not store.path(old).exists()


def test_what_a_tenant_has_brought_counts_for_it_once_until_it_is_swept(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    assert store.measure_disk_use("acme").held == 0
    first, second = (put(store, fill, 10.0) for fill in (0, 1))
    put(store, 0, 10.0)
    put(store, 0, 10.0, tenant="acme.2")
    size = sum(file.stat().st_size for file in store.path(first).iterdir())

    assert [store.measure_disk_use(tenant).held for tenant in ("acme", "acme.2", "other")] == [2 * size, size, 0]
    assert store.sweep({second}, before=20.0) == [first]
    assert [store.measure_disk_use(tenant).held for tenant in ("acme", "acme.2")] == [size, 0]
    assert store.put(write(store.draft()), "other", 30.0) == first
    assert [store.measure_disk_use(tenant).held for tenant in ("acme", "acme.2", "other")] == [size, 0, size], (
        "what was swept is brought anew, by others"
    )
    assert 0 < store.measure_disk_use("acme").free < 2**60


def test_what_is_put_again_is_kept_from_then_on(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    digest = put(store, 0, 10.0)

    put(store, 0, 30.0)

    assert store.sweep(set(), before=20.0) == []
    assert store.path(digest).is_dir()


def test_what_a_crash_left_incomplete_is_whole_again_when_it_is_put_again(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    digest = put(store, 0, 10.0)
    (store.path(digest) / CONFIG_FILE).unlink()

    assert put(store, 0, 20.0) == digest
    assert digest_of(store.path(digest)) == digest
    (store.path(digest) / WEIGHTS_FILE).write_bytes(b"")

    assert put(store, 0, 30.0) == digest
    assert digest_of(store.path(digest)) == digest
    assert adapters_in(tmp_path) == {digest}


def test_a_draft_that_a_killed_gateway_left_is_swept(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    draft = write(store.draft())
    os.utime(draft, (10.0, 10.0))

    assert store.sweep(set(), before=20.0) == [draft.name]


def test_a_store_that_has_never_held_anything_has_nothing_to_sweep(tmp_path: Path) -> None:
    assert AdapterStore(tmp_path / "none").sweep(set(), before=1e12) == []
    assert not (tmp_path / "none").exists()


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    digest = put(store, 0, 1.0)

    assert [oct(place.stat().st_mode & 0o077) for place in (tmp_path / "adapters", store.path(digest))] == [
        oct(0),
        oct(0),
    ]


def test_a_digest_that_is_not_there_can_be_touched_without_harm(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)

    store.touch("0" * 32, 1.0)

    with pytest.raises(FileNotFoundError):
        digest_of(store.path("0" * 32))
