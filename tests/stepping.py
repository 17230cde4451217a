"""An engine without its thread, whose steps a test takes one by one."""

from penstock.workers.engine.engine import Engine


def take_step(engine: Engine) -> bool:
    """Take over what was submitted or aborted, and take a step if there is one. Returns False where nothing was left
    to do."""
    if not engine._is_busy and engine._operations.empty():
        engine._report_held()
        return False
    assert engine._prepare()
    if engine._is_busy:
        engine.step()
    return True
