import asyncio

import pytest

from penstock.wire.frames import (
    Abort,
    Announce,
    BeamOutput,
    BlockEvents,
    Delta,
    Finish,
    Hello,
    PromptLogprobs,
    SamplingParams,
    TimeAccounts,
    Timing,
    UpFrame,
    encode,
    pack_token_ids,
)
from penstock.workers.engine.engine import StepReport
from penstock.workers.engine.sequence import Sequence
from penstock.workers.serving import outbox, session, stream
from penstock.workers.serving.outbox import FRAME_S
from tests.unit.workers.stream_fakes import (
    ACCOUNTS,
    IDLE,
    NUM_PLACES,
    TIMEOUT_S,
    Bench,
    FakeRouter,
    gain,
    serving,
    soon,
    submit,
)

pytestmark = pytest.mark.uvloop


async def reason_of(router: FakeRouter) -> str | None:
    """The reason in the replica's last frame, after which it ends the stream."""
    reason = (await router.frame_with(lambda frame: frame.error)).error
    with pytest.raises(EOFError):
        await router.frame()
    return reason


async def begun(bench: Bench, router: FakeRouter, sid: int = 1) -> Sequence:
    """A sequence that the engine has."""
    router.send(submit(sid))
    return await soon(bench.engine.submitted)


async def test_the_first_frame_has_the_load_and_all_the_credit() -> None:
    async with serving() as bench, bench.router() as router:
        load = (await router.frame()).load

        assert load is not None
        assert (load.epoch, load.max_inflight, load.total_blocks, load.costs) == (
            "epoch",
            NUM_PLACES,
            100,
            IDLE.costs,
        )


async def test_a_submission_becomes_a_sequence_with_its_output_told_apart() -> None:
    async with serving() as bench, bench.router() as router:
        keys = b"k" * 16 + b"l" * 16
        router.send(
            submit(
                3,
                40,
                block_keys=keys,
                num_output_tokens=5,
                tenant="t",
                seconds_left=9.5,
                sampling=SamplingParams(max_tokens=9, seed=4),
            )
        )
        seq = await soon(bench.engine.submitted)

        assert (seq.request_id, seq.token_ids, seq.num_prompt_tokens, seq.num_output_tokens) == (
            "q3",
            list(range(40)),
            35,
            5,
        )
        assert seq.deadline == seq.arrival_s + 9.5
        assert (seq.block_keys, seq.chain_key, seq.tenant, seq.sampling.seed) == (
            [keys[:16], keys[16:]],
            b"c" * 16,
            "t",
            4,
        )


async def test_a_sequence_streams_to_its_finish_and_says_the_first_time_what_was_cached() -> None:
    async with serving() as bench, bench.router() as router:
        seq = await begun(bench, router)
        seq.num_cached_tokens = 16
        bench.engine.step(gain(seq, 5))
        first = await router.frame_with(lambda frame: frame.deltas)
        bench.engine.step(gain(seq, 6))
        bench.engine.step(gain(seq, 7, finish=Finish.LENGTH))
        rest = await router.deltas(1)

        assert first.deltas == [Delta(1, [5], num_cached_tokens=16)]
        assert [token_id for delta in rest for token_id in delta.token_ids] == [6, 7]
        assert rest[-1].finish is Finish.LENGTH
        assert all(delta.num_cached_tokens is None for delta in rest)
        assert bench.server.num_inflight == 0


async def test_every_delta_tells_the_share_of_time_so_far_and_so_does_the_end_of_one_that_was_aborted() -> None:
    async with serving() as bench, bench.router() as router:
        seq = await begun(bench, router)
        seq.step_s = 0.5
        bench.engine.step(gain(seq, 5))
        first = await router.frame_with(lambda frame: frame.deltas)
        seq.step_s = 0.75
        bench.engine.step(gain(seq, 6))
        second = await router.frame_with(lambda frame: frame.deltas)
        router.send(Abort(1))
        assert await soon(bench.engine.aborted) is seq
        seq.step_s = 1.0
        bench.engine.step(gain(seq, finish=Finish.ABORT))
        [last] = await router.deltas(1)

        assert [frame.deltas[0].step_s for frame in (first, second)] == [0.5, 0.75]
        assert (last.finish, last.step_s) == (Finish.ABORT, 1.0)


async def test_load_reports_have_the_replica_s_accounts_also_the_last_one_before_the_stream_ends() -> None:
    async with serving() as bench, bench.router() as router:
        first = await router.frame_with(lambda frame: frame.load)
        bench.engine.shown = TimeAccounts(2.0, 1.0, 4.0, 3.0)
        assert await bench.server.drain(1.0)
        bench.server.stop()
        loads = [frame.load for frame in await router.rest() if frame.load is not None]

        assert first.load is not None
        assert first.load.accounts == ACCOUNTS
        assert bench.engine.is_draining
        assert loads[-1].accounts == TimeAccounts(2.0, 1.0, 4.0, 3.0)


async def test_the_first_delta_has_the_scores_of_the_whole_prompt_and_no_later_one() -> None:
    async with serving() as bench, bench.router() as router:
        router.send(submit(sampling=SamplingParams(max_tokens=8, prompt_logprobs=0)))
        seq = await soon(bench.engine.submitted)
        parts = [
            PromptLogprobs(0, b"abcd", pack_token_ids([1])),
            PromptLogprobs(0, b"efghijkl", pack_token_ids([2, 3])),
        ]
        seq.prompt_logprobs += parts
        bench.engine.step(gain(seq, 5))
        first = await router.frame_with(lambda frame: frame.deltas)
        bench.engine.step(gain(seq, 6, finish=Finish.LENGTH))
        rest = await router.deltas(1)

        whole = PromptLogprobs(0, b"abcdefghijkl", pack_token_ids([1, 2, 3]))
        assert [delta.prompt_logprobs for delta in (*first.deltas, *rest)] == [whole, None]


async def test_a_prompt_that_ended_before_it_was_scored_has_no_scores() -> None:
    async with serving() as bench, bench.router() as router:
        router.send(submit(sampling=SamplingParams(max_tokens=8, prompt_logprobs=0)))
        seq = await soon(bench.engine.submitted)
        seq.prompt_logprobs.append(PromptLogprobs(0, b"abcd", pack_token_ids([1])))
        bench.engine.step(gain(seq, finish=Finish.DEADLINE))
        [last] = await router.deltas(1)

        assert (last.finish, last.prompt_logprobs) == (Finish.DEADLINE, None)


async def test_the_first_and_the_last_delta_of_a_traced_sequence_tell_its_times() -> None:
    async with serving() as bench, bench.router() as router:
        router.send(submit(traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"))
        seq = await soon(bench.engine.submitted)
        assert seq.times is not None
        seq.times.wait_s, seq.times.admitted_s, seq.times.first_token_s, seq.times.last_token_s = (
            0.5,
            100.0,
            101.0,
            101.0,
        )
        bench.engine.step(gain(seq, 5))
        first = await router.frame_with(lambda frame: frame.deltas)
        bench.engine.step(gain(seq, 6))
        between = await router.frame_with(lambda frame: frame.deltas)
        seq.times.last_token_s, seq.num_preemptions = 103.0, 1
        bench.engine.step(gain(seq, 7, finish=Finish.LENGTH))
        [last] = await router.deltas(1)

        assert first.deltas[0].timing == Timing(0.5, 100.0, 101.0, 101.0)
        assert between.deltas[0].timing is None
        assert last.timing == Timing(0.5, 100.0, 101.0, 103.0, 1)


async def test_a_sequence_that_is_not_traced_or_has_no_token_tells_no_times() -> None:
    async with serving() as bench, bench.router() as router:
        plain = await begun(bench, router)
        router.send(submit(2, traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"))
        traced = await soon(bench.engine.submitted)
        bench.engine.step(gain(plain, 5, finish=Finish.LENGTH), gain(traced, finish=Finish.DEADLINE))
        deltas = (await router.frame_with(lambda frame: frame.deltas)).deltas

        assert plain.times is None
        assert [delta.timing for delta in deltas] == [None, None]


async def test_two_routers_get_their_own_deltas_and_both_all_block_events() -> None:
    async with serving() as bench, bench.router("a") as one, bench.router("b") as two:
        first, second = await begun(bench, one), await begun(bench, two)
        events = BlockEvents(1, b"k" * 16)
        bench.engine.step(gain(first, 5, finish=Finish.STOP), gain(second, 6, finish=Finish.STOP), events=events)
        frames = [await router.frame_with(lambda frame: frame.deltas) for router in (one, two)]

        assert [frame.deltas[0].token_ids for frame in frames] == [[5], [6]]
        assert [frame.events for frame in frames] == [[events], [events]]
        assert bench.events == [events]


async def test_a_snapshot_goes_to_the_router_that_asked_for_it() -> None:
    async with serving() as bench, bench.router() as router:
        bench.engine.snapshot = BlockEvents(4, b"k" * 32, is_snapshot=True)
        router.send(Announce())
        frame = await router.frame_with(lambda frame: frame.events)

        assert frame.events == [bench.engine.snapshot]


async def test_an_abort_reaches_the_engine_and_an_unknown_one_is_ignored() -> None:
    async with serving() as bench, bench.router() as router:
        seq = await begun(bench, router)
        router.send(Abort(99), Abort(1))

        assert await soon(bench.engine.aborted) is seq
        bench.engine.step(gain(seq, finish=Finish.ABORT))
        assert (await router.deltas(1))[-1].finish is Finish.ABORT


@pytest.mark.parametrize("is_polite", [True, False], ids=["closed", "reset"])
async def test_the_sequences_of_a_router_that_goes_are_aborted(is_polite: bool) -> None:
    async with serving() as bench, bench.router() as router:
        seq = await begun(bench, router)
        if is_polite:
            router.channel.close()
        else:
            router.channel.abort()

        assert await soon(bench.engine.aborted) is seq
        bench.engine.step(gain(seq, 5))  # its last step was under way
        assert bench.server.num_inflight == 0


async def test_credit_is_shared_and_told_at_once_to_a_router_that_has_none() -> None:
    async with serving() as bench, bench.router("a") as greedy:
        greedy.send(*[submit(sid) for sid in range(1, NUM_PLACES + 1)])
        seqs = [await soon(bench.engine.submitted) for _ in range(NUM_PLACES)]
        async with bench.router("b") as late:
            load = (await late.frame()).load
            assert load is not None
            assert load.max_inflight == 0

            bench.engine.step(gain(seqs[0], 5, finish=Finish.STOP))
            load = (await late.frame_with(lambda frame: frame.load)).load

            assert load is not None
            assert load.max_inflight == 1


async def test_a_load_says_how_many_kernels_were_compiled() -> None:
    counts = iter((0, 2))
    async with serving(count_compiled=lambda: next(counts, 2)) as bench, bench.router() as router:
        first = (await router.frame()).load
        bench.engine.step()
        second = (await router.frame_with(lambda frame: frame.load)).load

        assert first is not None
        assert second is not None
        assert (first.num_compiled, second.num_compiled) == (0, 2)


async def test_an_engine_that_refuses_whatever_comes_grants_no_credit() -> None:
    async with serving() as bench, bench.router() as router:
        await router.frame()
        bench.engine.step(load=IDLE._replace(is_closed=True))
        load = (await router.frame_with(lambda frame: frame.load)).load

        assert load is not None
        assert load.max_inflight == 0


async def test_an_engine_that_keeps_targets_grants_credit_for_the_places_that_it_has_now() -> None:
    async with serving() as bench, bench.router() as router:
        await router.frame()
        bench.engine.step(load=IDLE._replace(num_places=3))
        load = (await router.frame_with(lambda frame: frame.load)).load

        assert load is not None
        assert load.max_inflight == 3


async def test_no_credit_while_sequences_wait_for_kv_that_is_not_there() -> None:
    async with serving() as bench, bench.router() as router:
        seq = await begun(bench, router)
        bench.engine.step(
            gain(seq, 5),
            load=IDLE._replace(num_running=1, num_waiting=1, unplaced_tokens=500, free_blocks=3),
        )
        load = (await router.frame_with(lambda frame: frame.load and frame.load.num_waiting)).load

        assert load is not None
        assert load.max_inflight == 1


async def test_a_load_says_up_to_which_submission_it_counts() -> None:
    async with serving() as bench, bench.router() as router:
        running, waiting = await begun(bench, router, 1), await begun(bench, router, 2)
        bench.engine.step(gain(running, 5))
        load = (await router.frame_with(lambda frame: frame.load and frame.load.last_sid)).load
        assert load is not None
        assert load.last_sid == 1, "the second one may have come during the step"

        bench.engine.step(gain(running, 6))
        load = (await router.frame_with(lambda frame: frame.load and frame.load.last_sid != 1)).load
        assert load is not None
        assert load.last_sid == 2
        assert waiting.finish is None


async def test_a_load_does_not_claim_the_submissions_of_the_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "REPORT_S", 0.0)  # every report is told
    monkeypatch.setattr(outbox, "FRAME_S", 0.0)

    async with serving() as bench, bench.router() as router:
        first, second = await begun(bench, router, 1), await begun(bench, router, 2)
        bench.engine.step(gain(first, 5), load=IDLE._replace(num_running=1))
        bench.engine.step(
            gain(first, 6), gain(second, 5), load=IDLE._replace(num_running=2)
        )  # made before the first is delivered
        loads = [(await router.frame_with(lambda frame: frame.load and frame.load.num_running)).load for _ in range(2)]

        assert [(load.num_running, load.last_sid) for load in loads if load is not None] == [(1, 1), (2, 2)]


async def test_a_frame_that_cannot_be_encoded_ends_its_router_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as bench, bench.router("a") as one, bench.router("b") as two:
        broken, good = await begun(bench, one), await begun(bench, two)
        bench.engine.step(gain(broken, 2**70), gain(good, 6, finish=Finish.STOP))

        assert [delta.token_ids for delta in await two.deltas(1)] == [[6]]
        assert await soon(bench.engine.aborted) is broken
        with pytest.raises(EOFError):
            await one.frame_with(lambda _frame: False)

    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["frame can't be encoded"]


async def test_a_draining_replica_says_so_refuses_and_ends_when_the_last_sequence_has() -> None:
    async with serving() as bench, bench.router() as router:
        seq = await begun(bench, router)
        draining = asyncio.create_task(bench.server.drain(TIMEOUT_S))
        load = (await router.frame_with(lambda frame: frame.load and frame.load.is_draining)).load
        assert load is not None
        assert load.max_inflight == 1

        router.send(submit(2))
        (refusal,) = await router.deltas(2)
        assert refusal.finish is Finish.REFUSED
        assert not draining.done()

        bench.engine.step(gain(seq, 5, finish=Finish.STOP))
        assert await draining


async def test_a_drain_that_takes_too_long_says_so() -> None:
    async with serving() as bench, bench.router() as router:
        await begun(bench, router)

        assert not await bench.server.drain(0.01)


async def test_a_router_that_does_not_read_is_cut_off_and_its_sequences_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "MAX_HELD_TOKENS", 100_000)

    async with serving() as bench, bench.router("reads") as reader, bench.router("idle") as idler:
        read, unread = await begun(bench, reader), await begun(bench, idler)
        reading = asyncio.create_task(reader.deltas(1))
        idler.channel._transport.pause_reading()
        async with asyncio.timeout(TIMEOUT_S):
            while bench.engine.aborted.empty():
                bench.engine.step(gain(read, *[70_000] * 10_000), gain(unread, *[70_000] * 10_000))
                await asyncio.sleep(FRAME_S)  # a step's time
        bench.engine.step(gain(read, finish=Finish.LENGTH))

        assert await soon(bench.engine.aborted) is unread
        assert sum(len(delta.token_ids) for delta in await reading) > 2 * session.MAX_HELD_TOKENS


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xc1"], "decoded"),
        ([encode(UpFrame([Hello("r")]))], "Hello"),
        ([encode(UpFrame([submit(2), submit(2)]))], "rise"),
        ([encode(UpFrame([submit(num_output_tokens=5)]))], "malformed"),
        ([encode(UpFrame([submit(packed_token_ids=b"abc")]))], "malformed"),
        ([encode(UpFrame([submit(block_keys=b"short")]))], "malformed"),
        ([encode(UpFrame([])), b"\xc1"], "decoded"),
    ],
    ids=["garbage", "a hello", "same sid twice", "more output", "odd tokens", "odd keys", "garbage later"],
)
async def test_what_no_router_of_ours_would_send_breaks_the_stream(frames: list[bytes], reason: str) -> None:
    async with serving() as bench, bench.router() as router:
        for frame in frames:
            router.channel.send(frame)

        assert reason in (await reason_of(router) or "")
        assert bench.server.num_inflight == 0


async def test_an_idle_replica_is_heard_of_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.05)

    async with serving() as bench, bench.router() as router:
        assert [(await router.frame()).load is not None for _ in range(3)] == [True] * 3


async def test_a_broken_stream_takes_its_sequences_along() -> None:
    async with serving() as bench, bench.router() as router:
        seq = await begun(bench, router)
        router.channel.send(b"\xc1")

        assert await soon(bench.engine.aborted) is seq


async def test_steps_that_come_quickly_share_a_frame() -> None:
    async with serving() as bench, bench.router() as router:
        seq = await begun(bench, router)
        for token_id in range(20):
            bench.engine.step(gain(seq, token_id))
        bench.engine.step(gain(seq, 20, finish=Finish.LENGTH))
        deltas = await router.deltas(1)

        assert [token_id for delta in deltas for token_id in delta.token_ids] == list(range(21))
        assert len(deltas) < 5


async def test_token_ids_travel_as_they_are() -> None:
    async with serving() as bench, bench.router() as router:
        router.send(submit(1, packed_token_ids=pack_token_ids([0, 2**32 - 1])))

        assert (await soon(bench.engine.submitted)).token_ids == [0, 2**32 - 1]


async def test_an_engine_that_computes_nothing_ends_the_streams_as_a_loss_would():
    async with serving() as bench, bench.router() as router:
        router.send(submit(1), submit(2))
        lost, other = await soon(bench.engine.submitted), await soon(bench.engine.submitted)
        bench.engine.on_step(StepReport([gain(lost, finish=Finish.REFUSED)], None, IDLE, is_broken=True))
        with pytest.raises(EOFError):
            await router.frame_with(lambda frame: frame.deltas)

        assert await soon(bench.engine.aborted) is other
        async with bench.router("r2") as again:  # it may come back
            assert (await again.frame_with(lambda frame: frame.load)).load.max_inflight > 0


async def test_the_answers_of_a_search_come_in_the_last_delta_and_before_it_what_was_computed() -> None:
    async with serving() as bench, bench.router() as router:
        router.send(submit(sampling=SamplingParams(max_tokens=8, num_beams=2, num_returned=2)))
        seq = await soon(bench.engine.submitted)
        beams = [BeamOutput([5, 6], Finish.STOP), BeamOutput([5, 7, 8], Finish.LENGTH)]
        end = gain(seq, finish=Finish.STOP)._replace(beams=beams, num_beam_tokens=6)
        for computed in (2, 4):
            bench.engine.step(gain(seq)._replace(num_beam_tokens=computed))
            [delta] = (await router.frame_with(lambda frame: frame.deltas)).deltas
            assert (delta.token_ids, delta.beams, delta.finish, delta.num_beam_tokens) == ([], None, None, computed)
        bench.engine.step(end)
        [delta] = await router.deltas(1)

        assert (delta.token_ids, delta.beams, delta.num_beam_tokens) == ([], beams, 6)


async def test_a_prediction_becomes_part_of_the_sequence() -> None:
    async with serving() as bench, bench.router() as router:
        router.send(submit(prediction=pack_token_ids([7, 8])))
        seq = await soon(bench.engine.submitted)

        assert seq.prediction == [7, 8]
        router.send(submit(2, prediction=b"odd"))
        assert "malformed" in (await reason_of(router) or "")
