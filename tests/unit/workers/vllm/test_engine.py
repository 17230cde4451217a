"""The engine, its child process and the bridge, with a fake vLLM behind the bridge
(tests/unit/workers/vllm/fake_vllm.py)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import psutil
import pytest
from msgspec.structs import astuple

from bench.support.cpu import command_line, is_alive
from penstock.adapters.store import digest_of
from penstock.prefix.hashing import ChainHasher
from penstock.prefix.index import ApplyResult
from penstock.prefix.plain_index import PlainIndex
from penstock.wire.errors import EngineFault, InvalidRequest
from penstock.wire.frames import BlockEvents, Finish, SamplingParams, TokenLogprobs, split_keys
from penstock.workers.config import EngineConfig, VllmConfig
from penstock.workers.engine.engine import EngineLoad, StepReport
from penstock.workers.engine.sequence import SeqOutput, Sequence, Times
from penstock.workers.vllm.engine import LOST, Launch, VllmEngine
from penstock.workers.vllm.request import VllmAdapter
from tests.unit.adapters.files import write
from tests.unit.workers.vllm.fake_vllm import (
    ADAPTER_SLOTS,
    BABBLE,
    BLOCK_SIZE,
    CACHED_BLOCKS,
    CLEAR,
    DIE,
    HANG,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    RAISE,
)

FAKE = Path(__file__).with_name("fake_vllm.py")
TIMEOUT_S = 20.0
EOS = 50000
HASHER = ChainHasher(b"secret of sixteen", 16)
ROOT = HASHER.root("digest")


class Bench:
    """An engine that serves, and what it has reported."""

    def __init__(
        self, config: EngineConfig, args: dict[str, object], command: Seq[str] = (sys.executable, str(FAKE))
    ) -> None:
        self.reports: SimpleQueue[StepReport] = SimpleQueue()
        self._read: list[StepReport] = []
        """Reports that `until_running` has read."""
        self.late_s = 0.0
        """Time by which the engine's clock is ahead."""
        launch = Launch(list(command), os.environ, args, frozenset({EOS}))
        self.engine = VllmEngine(launch, config, HASHER, self._on_step, self._clock, unix_clock=lambda: 1000.0)
        self.events: list[BlockEvents] = []
        self.load: EngineLoad | None = None
        self.is_broken = False
        self.before_report: Callable[[], None] = lambda: None
        """Called on the engine's thread."""

    def _on_step(self, report: StepReport) -> None:
        self.before_report()
        self.reports.put(report)

    def _clock(self) -> float:
        return time.monotonic() + self.late_s

    def outputs(self, seqs: Seq[Sequence]) -> dict[Sequence, list[SeqOutput]]:
        """All that is reported until each of them has a finish."""
        found: dict[Sequence, list[SeqOutput]] = {seq: [] for seq in seqs}
        deadline = time.monotonic() + TIMEOUT_S
        while not all(found[seq] and found[seq][-1].finish for seq in seqs):
            report = (
                self._read.pop(0) if self._read else self.reports.get(timeout=max(0.0, deadline - time.monotonic()))
            )
            self.load = report.load
            self.is_broken |= report.is_broken
            if report.events is not None:
                self.events.append(report.events)
                assert report.load.event_seq == report.events.event_seq
            for output in report.outputs:
                found.setdefault(output.seq, []).append(output)
        return found

    def finish(self, seq: Sequence) -> Finish | None:
        return self.outputs([seq])[seq][-1].finish

    def until_running(self, seq: Sequence) -> None:
        """Wait for the sequence's first token. All that is reported meanwhile is kept for `outputs`."""
        while not any(output.seq is seq and output.token_ids for report in self._read for output in report.outputs):
            self._read.append(self.reports.get(timeout=TIMEOUT_S))

    def snapshot(self) -> BlockEvents:
        found: SimpleQueue[BlockEvents] = SimpleQueue()
        self.engine.request_snapshot(found.put)
        return found.get(timeout=TIMEOUT_S)

    @property
    def child(self) -> psutil.Process:
        (found,) = [process for process in psutil.Process().children() if str(FAKE) in command_line(process)]
        return found


@contextmanager
def serving(args: dict[str, object] | None = None, **changes: Any) -> Iterator[Bench]:
    bench = Bench(config(**changes), args or {})
    bench.engine.start()
    try:
        yield bench
    finally:
        assert bench.engine.stop(timeout_s=TIMEOUT_S)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(runner="vllm", max_num_seqs=4, max_batched_tokens=64, **changes)


def sequence(*token_ids: int, deadline: float | None = None, adapter: str | None = None, **sampling: Any) -> Sequence:
    prompt = list(token_ids) or [10, 11, 12]
    params = SamplingParams(**({"max_tokens": 4, "temperature": 0.0} | sampling))
    keys = HASHER.extend(ROOT, prompt)
    parent = keys[-1] if keys else ROOT
    return Sequence("q", prompt, params, len(prompt), keys, parent, time.monotonic(), deadline, adapter, "tenant")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_tokens_come_step_by_step_to_the_last_with_its_finish() -> None:
    with serving() as bench:
        seq = sequence(10, 11, 12)
        bench.engine.submit(seq)
        outputs = bench.outputs([seq])[seq]

        assert [output.token_ids for output in outputs] == [[13], [14], [15], [16]]
        assert [output.finish for output in outputs] == [None, None, None, Finish.LENGTH]
        assert (seq.token_ids[3:], seq.num_cached_tokens, seq.finish) == ([13, 14, 15, 16], 7, Finish.LENGTH)


def test_sequences_of_many_run_together_and_each_ends_once() -> None:
    with serving() as bench:
        seqs = [sequence(100 * place, max_tokens=3 + place) for place in range(1, 9)]
        for seq in seqs:
            bench.engine.submit(seq)
        found = bench.outputs(seqs)

        for place, seq in enumerate(seqs, 1):
            assert seq.token_ids == list(range(100 * place, 100 * place + 4 + place))
            assert [output.finish for output in found[seq]].count(Finish.LENGTH) == 1
        assert bench.load is not None
        assert (bench.load.num_running, bench.load.num_waiting, bench.load.free_blocks) == (
            0,
            0,
            bench.load.total_blocks,
        )


def test_every_second_is_in_an_account_and_steps_are_the_sequences() -> None:
    before_s = time.monotonic()
    with serving() as bench:
        seqs = [sequence(*range(10, 10 + count), max_tokens=6) for count in (3, 30, 60)]
        for seq in seqs:
            bench.engine.submit(seq)
        left = sequence(1, 2, 3, max_tokens=500)
        bench.engine.submit(left)
        bench.until_running(left)
        bench.engine.abort(left)
        bench.outputs([*seqs, left])
        bench.snapshot()

        accounts = bench.engine.accounts()

        shares = [seq.step_s for seq in (*seqs, left)]
        assert min(shares) > 0
        assert sum(shares) == pytest.approx(accounts.steps_s)
        assert accounts.start_s > 0
        assert sum(astuple(accounts)) == pytest.approx(time.monotonic() - before_s, abs=1.0)

        bench.engine.begin_drain()
        bench.snapshot()
        bench.late_s += 7.0

        assert bench.engine.accounts().drain_s >= 7.0


def test_an_end_of_sequence_token_stops_unless_it_is_to_be_ignored() -> None:
    with serving() as bench:
        stopped, ignoring = sequence(EOS - 2, max_tokens=9), sequence(EOS - 2, max_tokens=9, ignore_eos=True)
        bench.engine.submit(stopped)
        bench.engine.submit(ignoring)
        bench.outputs([stopped, ignoring])

        assert (stopped.token_ids[1:], stopped.finish) == ([EOS - 1, EOS], Finish.STOP)
        assert (ignoring.num_output_tokens, ignoring.finish) == (9, Finish.LENGTH)


def test_logprobs_are_those_of_the_chosen_token_and_as_many_of_the_likeliest_as_wanted() -> None:
    with serving() as bench:
        seqs = [sequence(max_tokens=1, logprobs=wanted) for wanted in (None, 0, 1)]
        for seq in seqs:
            bench.engine.submit(seq)
        found = bench.outputs(seqs)

        assert [found[seq][-1].logprobs for seq in seqs] == [
            None,
            [TokenLogprobs(-0.5)],
            [TokenLogprobs(-0.5, ((13, -0.5),))],
        ]


def test_an_aborted_sequence_is_reported_once_and_its_kv_is_free_while_the_others_go_on() -> None:
    with serving() as bench:
        victim, other = sequence(max_tokens=100_000), sequence(20, max_tokens=50)
        bench.engine.submit(victim)
        bench.until_running(victim)
        bench.engine.submit(other)
        bench.until_running(other)
        bench.engine.abort(victim)
        found = bench.outputs([victim, other])
        bench.engine.abort(victim)
        last = sequence(30)
        bench.engine.submit(last)
        later = bench.outputs([last])

        assert [output.finish for output in found[victim] if output.finish] == [Finish.ABORT]
        assert victim not in later
        assert other.finish is Finish.LENGTH
        assert bench.load is not None
        assert bench.load.free_blocks == bench.load.total_blocks


def test_the_load_counts_blocks_in_the_routers_size_and_tokens_by_their_state() -> None:
    with serving() as bench:
        running = sequence(max_tokens=100_000)
        bench.engine.submit(running)
        bench.until_running(running)
        load = bench.reports.get(timeout=TIMEOUT_S).load

        assert load.total_blocks == NUM_BLOCKS * 32 // 16
        assert (load.num_running, load.num_waiting, load.free_blocks) == (1, 0, load.total_blocks - 2)
        assert load.kv_tokens > 3
        assert load.costs.base_s > 0


@pytest.mark.parametrize("how", ["killed", "ended", "babbled"])
def test_a_lost_child_leaves_every_sequence_to_other_replicas_and_the_engine_unhealthy(how: str) -> None:
    with serving() as bench:
        child = bench.child
        seqs = [sequence(max_tokens=100_000), sequence(20, max_tokens=100_000)]
        for seq in seqs:
            bench.engine.submit(seq)
        for seq in seqs:
            bench.until_running(seq)
        assert bench.engine.is_healthy(time.monotonic())
        if how == "killed":
            child.kill()
        else:
            seqs.append(sequence(DIE if how == "ended" else BABBLE))
            bench.engine.submit(seqs[-1])
        found = bench.outputs(seqs)
        late = sequence()
        bench.engine.submit(late)

        assert [found[seq][-1].finish for seq in seqs] == [Finish.REFUSED] * len(seqs)
        assert bench.finish(late) is Finish.REFUSED
        assert late.error == LOST
        assert bench.load is not None
        assert bench.load.is_closed
        assert not bench.engine.is_healthy(time.monotonic())
        wait_until(lambda: not child.is_running())


def test_a_step_that_raises_leaves_its_sequences_to_other_replicas_since_nobody_knows_whose_fault_it_is() -> None:
    with serving() as bench:
        seqs = [sequence(max_tokens=100_000), sequence(RAISE)]
        bench.engine.submit(seqs[0])
        bench.until_running(seqs[0])
        bench.engine.submit(seqs[1])
        found = bench.outputs(seqs)

        assert [found[seq][-1].finish for seq in seqs] == [Finish.REFUSED] * 2
        assert bench.is_broken
        assert not bench.engine.is_healthy(time.monotonic())


def test_a_loss_that_vllm_announces_before_it_ends_is_reported_as_one() -> None:
    with serving() as bench:
        seqs = [sequence(max_tokens=100_000), sequence(RAISE)]

        def let_both_come() -> None:
            """Keep the engine from looking until vLLM has announced its failure, and has ended."""
            child = bench.engine._child
            if seqs[1] in bench.engine._rids and child is not None:
                wait_until(lambda: not child._reader.is_alive())

        bench.before_report = let_both_come
        bench.engine.submit(seqs[0])
        bench.until_running(seqs[0])
        bench.engine.submit(seqs[1])
        found = bench.outputs(seqs)

        assert [found[seq][-1].finish for seq in seqs] == [Finish.REFUSED] * 2
        assert bench.is_broken


def test_what_vllm_does_not_take_is_invalid_and_harms_nobody() -> None:
    with serving() as bench:
        running, refused = sequence(max_tokens=50), sequence(logit_bias=((3, 1.0),))
        bench.engine.submit(running)
        bench.engine.submit(refused)
        found = bench.outputs([running, refused])

        assert found[refused][-1].finish is Finish.INVALID
        assert refused.error == "vLLM does not take this request: no biases today"
        assert running.finish is Finish.LENGTH
        assert bench.engine.is_healthy(time.monotonic())


def test_adapters_that_were_not_loaded_are_invalid_and_sequences_beyond_the_context_are_refused() -> None:
    with serving() as bench:
        adapted, long = sequence(adapter="d1"), sequence(*range(1, MAX_MODEL_LEN + 1))
        bench.engine.submit(adapted)
        bench.engine.submit(long)
        found = bench.outputs([adapted, long])

        assert (found[adapted][-1].finish, found[long][-1].finish) == (Finish.INVALID, Finish.REFUSED)
        assert "d1" in (adapted.error or "")


def test_a_step_that_does_not_end_makes_the_engine_unhealthy_in_time() -> None:
    with serving(stall_s=30.0) as bench:
        bench.engine.submit(sequence(HANG))
        bench.engine.submit(seq := sequence(EOS, deadline=0.0))  # its end shows that the other one has been sent
        bench.finish(seq)
        now = time.monotonic()

        assert bench.engine.is_healthy(now)
        assert not bench.engine.is_healthy(now + 31.0)


def test_an_idle_engine_does_not_stall_however_long_its_start_took() -> None:
    with serving(stall_s=1.0) as bench:
        assert bench.engine.is_healthy(time.monotonic() + 3600)
        bench.engine.submit(seq := sequence())
        bench.finish(seq)

        assert bench.engine.is_healthy(time.monotonic() + 3600)


def test_a_sequence_ends_at_its_deadline() -> None:
    with serving() as bench:
        now = time.monotonic()
        seq = sequence(max_tokens=100_000, deadline=now + 1000.0)
        other = sequence(20, max_tokens=100_000, deadline=now + 9000.0)
        bench.engine.submit(seq)
        bench.engine.submit(other)
        bench.until_running(seq)
        bench.late_s = 1000.0

        assert bench.finish(seq) is Finish.DEADLINE
        assert other.finish is None


def test_draining_lets_sequences_finish_refuses_new_ones_and_ends_the_child() -> None:
    with serving() as bench:
        child = bench.child
        seq, late = sequence(max_tokens=100), sequence(20)
        bench.engine.submit(seq)
        bench.until_running(seq)
        assert not bench.engine.stop(drain=True, timeout_s=0.0)
        bench.engine.submit(late)
        found = bench.outputs([seq, late])

        assert (found[seq][-1].finish, found[late][-1].finish) == (Finish.LENGTH, Finish.REFUSED)
        assert bench.engine.stop(drain=True, timeout_s=TIMEOUT_S)
        assert not child.is_running()


def test_stopping_aborts_what_runs() -> None:
    with serving() as bench:
        seq = sequence(max_tokens=100_000)
        bench.engine.submit(seq)
        bench.until_running(seq)

        assert bench.engine.stop(timeout_s=TIMEOUT_S)
        assert bench.finish(seq) is Finish.ABORT


def test_a_frozen_child_can_be_stopped_also_when_it_does_not_read() -> None:
    with serving() as bench:
        child = bench.child
        child.suspend()
        for _ in range(1000):  # more than the socket holds
            bench.engine.submit(sequence(*[1] * 250))

        assert bench.engine.stop(timeout_s=0.5)
        assert not child.is_running()


def test_a_child_ends_with_the_process_that_started_it() -> None:
    script = (
        "import os, signal, sys, threading\n"
        "from penstock.workers.vllm.bridge import Start\n"
        "from penstock.workers.vllm.child import Child\n"
        "ready = threading.Event()\n"
        f"child = Child([sys.executable, {str(FAKE)!r}], os.environ, Start({{}}), lambda message: ready.set(), print)\n"
        "assert ready.wait(20)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert result.returncode == -signal.SIGKILL, result.stderr
    wait_until(lambda: not is_alive(int(result.stdout)))


@pytest.mark.parametrize(
    ("args", "command", "expected"),
    [
        ({"fails": "no such model"}, [sys.executable, str(FAKE)], "RuntimeError: no such model"),
        ({}, ["/no/such/python", str(FAKE)], "/no/such/python can't be run"),
        ({}, [sys.executable, "-c", "raise SystemExit(7)"], "status 7"),
        (
            {},
            [sys.executable, "-c", "import no_such_module"],
            "status 1\nIts last lines:\n(.*\n)*ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            {},
            [sys.executable, "-uc", "print('10 %\\r20 %'); raise SystemExit('no room')"],
            "Its last lines:\n20 %\nno room$",
        ),
        ({"sleeps": 60.0}, [sys.executable, str(FAKE)], "longer than engine.vllm.start_timeout_s"),
    ],
    ids=["load fails", "no interpreter", "ends", "lacks a module", "says why", "slow"],
)
def test_a_start_that_fails_says_why(args: dict[str, object], command: list[str], expected: str) -> None:
    bench = Bench(config(vllm=VllmConfig(start_timeout_s=1.5 if "sleeps" in args else TIMEOUT_S)), args, command)

    with pytest.raises(EngineFault, match=expected):
        bench.engine.start()
    assert bench.engine.stop(timeout_s=TIMEOUT_S)


def test_blocks_that_vllm_caches_are_reported_by_the_keys_of_their_sequences() -> None:
    """Both prompt and output have keys; a block of vLLM's is two of ours."""
    with serving() as bench:
        seq = sequence(*range(40), max_tokens=30)
        bench.engine.submit(seq)
        bench.outputs([seq])

        keys = HASHER.extend(ROOT, seq.token_ids[: 2 * BLOCK_SIZE])
        assert [event.event_seq for event in bench.events] == [1, 2]
        assert [split_keys(event.stored) for event in bench.events] == [keys[:2], keys[2:]]
        assert bench.snapshot() == BlockEvents(2, b"".join(keys), is_snapshot=True)


def test_a_routers_index_follows_what_vllm_stores_gives_up_and_clears() -> None:
    with serving() as bench:
        index = PlainIndex()
        index.apply("replica", "epoch", bench.snapshot())
        seqs = [sequence(*range(1000 * number, 1000 * number + BLOCK_SIZE), max_tokens=1) for number in range(1, 10)]
        for seq in seqs:
            bench.engine.submit(seq)
            bench.outputs([seq])
        found = [index.apply("replica", "epoch", event) for event in bench.events]
        held = [index.lookup(seq.block_keys[:2], 0.0) for seq in seqs]
        bench.events.clear()
        clearing = sequence(CLEAR)
        bench.engine.submit(clearing)
        bench.outputs([clearing])
        found += [index.apply("replica", "epoch", event) for event in bench.events]

        assert set(found) == {ApplyResult.OK}
        assert held == [{}] * (len(seqs) - CACHED_BLOCKS) + [{"replica": 2}] * CACHED_BLOCKS
        assert index.held("replica") == frozenset(split_keys(bench.snapshot().stored)) == frozenset()


def test_an_idle_replicas_snapshot_holds_no_block_also_after_the_probe() -> None:
    with serving() as bench:
        assert bench.snapshot() == BlockEvents(0, is_snapshot=True)


def adapter_folder(folder: Path, number: int = 0) -> tuple[str, Path]:
    """An adapter in a folder of its digest, as the store has it."""
    written = write(folder / "new", fill=number)
    return digest_of(written), written.rename(folder / digest_of(written))


def test_a_loaded_adapter_serves_sequences_and_one_that_is_given_up_makes_room(tmp_path: Path) -> None:
    with serving() as bench:
        for number in range(ADAPTER_SLOTS + 1):
            digest, folder = adapter_folder(tmp_path, number)
            adapter = bench.engine.load_adapter(digest, folder, max_rank=8)
            seq = sequence(adapter=digest)
            seq.lora = adapter
            bench.engine.submit(seq)

            assert adapter == VllmAdapter(digest, number + 1)
            assert bench.finish(seq) is Finish.LENGTH
            bench.engine.unload_adapter(adapter)


def test_cached_kv_of_an_adapter_is_not_that_of_the_base_model(tmp_path: Path) -> None:
    with serving() as bench:
        digest, folder = adapter_folder(tmp_path)
        plain, adapted = sequence(*range(BLOCK_SIZE)), sequence(*range(BLOCK_SIZE), adapter=digest)
        adapted.lora = bench.engine.load_adapter(digest, folder, max_rank=8)
        adapted.block_keys, adapted.chain_key = [], HASHER.root("digest", digest)
        for seq in (plain, adapted):
            bench.engine.submit(seq)
        bench.outputs([plain, adapted])

        assert len(split_keys(bench.snapshot().stored)) == 4
        assert plain.block_keys[0] != adapted.block_keys[0]


OF_ITS_OWN: list[dict[str, Any]] = [
    {"use_dora": True},
    {"rank_pattern": {"q_proj": 4}},
    {"alpha_pattern": {"q_proj": 4}},
]


@pytest.mark.parametrize("changes", OF_ITS_OWN)
def test_what_vllm_would_compute_otherwise_than_peft_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "a", **changes)

    with serving() as bench, pytest.raises(InvalidRequest, match="vLLM serves neither DoRA"):
        bench.engine.load_adapter(digest_of(folder), folder, max_rank=8)


@pytest.mark.parametrize("why", ["refused", "rank", "digest", "names"])
def test_an_adapter_that_can_not_be_loaded_has_a_reason_and_harms_nobody(tmp_path: Path, why: str) -> None:
    with serving() as bench:
        digest, folder = adapter_folder(tmp_path)
        if why == "refused":
            (folder / "refused").touch()
        if why == "names":
            write(folder, tensors={"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 8)})
            digest = digest_of(folder)
        running = sequence(max_tokens=50)
        bench.engine.submit(running)

        reason = {
            "refused": "ValueError: not an adapter",
            "rank": "rank is 2",
            "digest": "digest",
            "names": "is not found",
        }
        with pytest.raises(InvalidRequest, match=reason[why]):
            bench.engine.load_adapter(
                "0" * 32 if why == "digest" else digest, folder, max_rank=1 if why == "rank" else 8
            )
        assert bench.finish(running) is Finish.LENGTH


def test_loading_ends_with_vllm(tmp_path: Path) -> None:
    with serving() as bench:
        digest, folder = adapter_folder(tmp_path)
        child = bench.child
        child.suspend()  # so it answers nothing
        with ThreadPoolExecutor(1) as threads:
            loading = threads.submit(bench.engine.load_adapter, digest, folder, max_rank=8)
            child.kill()
            with pytest.raises(EngineFault, match="has ended"):
                loading.result(TIMEOUT_S)

        with pytest.raises(EngineFault, match="has ended"):
            bench.engine.load_adapter(digest, folder, max_rank=8)


def test_a_traced_sequence_is_timed() -> None:
    with serving() as bench:
        seq = sequence(max_tokens=2)
        seq.times = Times()
        bench.engine.submit(seq)
        bench.finish(seq)

        assert seq.times.admitted_s is not None
        assert seq.times.admitted_s < 1000.0
        assert (seq.times.first_token_s, seq.times.last_token_s) == (1000.0, 1000.0)


def test_whatever_is_submitted_and_aborted_ends_exactly_once() -> None:
    random = Random(5)
    with serving() as bench:
        seqs = [sequence(random.randrange(1, 1000), max_tokens=random.randrange(1, 30)) for _ in range(60)]
        for seq in seqs:
            bench.engine.submit(seq)
            if random.random() < 0.5:
                bench.engine.abort(random.choice(seqs))
        found = bench.outputs(seqs)
        last = sequence()
        bench.engine.submit(last)
        found |= bench.outputs([last])

        for seq in seqs:
            assert [output.finish for output in found[seq] if output.finish is not None] == [seq.finish]
            assert found[seq][-1].finish is seq.finish
            assert seq.token_ids == list(range(seq.token_ids[0], seq.token_ids[0] + len(seq.token_ids)))
