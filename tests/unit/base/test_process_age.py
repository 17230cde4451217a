import subprocess
import sys
import time

from penstock.base.process_age import process_age_s


def test_a_process_knows_how_long_ago_it_was_made() -> None:
    before_s = time.monotonic()
    program = (
        "import time; time.sleep(0.2); from penstock.base.process_age import process_age_s; print(process_age_s())"
    )
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    took_s = time.monotonic() - before_s

    assert 0.2 <= float(answer.stdout) <= took_s + 0.02
    assert process_age_s() >= 0.2
