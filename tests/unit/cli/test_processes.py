import subprocess
import sys
import textwrap

ORPHANAGE = textwrap.dedent("""
    import subprocess, sys
    from penstock.cli.processes import become_subreaper, descendants, end_descendants
    become_subreaper()
    # A child that starts a grandchild deaf to SIGTERM, in a session of its own, and dies: only a subreaper still finds
    # it.
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    deaf = f"{ignore}; print('deaf', flush=True); time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {deaf!r}], stdout=subprocess.PIPE, start_new_session=True)"
    child = f"import subprocess, sys; {start}.stdout.readline()"
    subprocess.run([sys.executable, "-c", child], check=True)
    before = len(descendants())
    print(before, end_descendants(0.5), len(descendants()))
""")


def test_orphans_that_ignore_sigterm_are_found_and_ended() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", ORPHANAGE], capture_output=True, text=True, check=True, timeout=30
    ).stdout

    assert shown == "1 1 0\n"
