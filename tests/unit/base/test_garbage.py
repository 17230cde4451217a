import gc

from penstock.base.garbage import freeze_startup


def test_what_is_there_is_not_walked_again_and_what_comes_later_is() -> None:
    circle: list[object] = []
    circle.append(circle)
    try:
        freeze_startup()
        later: list[object] = []
        later.append(later)
        walked = gc.get_objects()

        assert all(each is not circle for each in walked)
        assert any(each is later for each in walked)
    finally:
        gc.unfreeze()
