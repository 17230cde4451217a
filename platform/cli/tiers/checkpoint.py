"""Questions asked of a checkpoint that is read here, greedily, with the log probability of each token that it chose.

Not what is made of the answers (`curve`). Answers come as they end, in no order; a question that the model can't read
is passed over and counted.
"""

from collections.abc import Sequence
from itertools import islice

from penstock.base.errors import ConfigError
from penstock.cli.tiers.questions import BATCH, Answer, OnAnswer, Question
from penstock.text.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.offline import OfflineEngine
from penstock.workers.engine.sequence import SeqOutput


def ask_checkpoint(
    model: str, place: str, questions: Sequence[Question], max_tokens: int, threads: int | None, on_answer: OnAnswer
) -> int:
    """Have a checkpoint answer. Returns how many questions were passed over. Raises ConfigError, EngineFault."""
    source = resolve(model)
    tokenizer = load_tokenizer(source)
    encoded = [(question, ids) for question in questions if (ids := _encode(tokenizer, question)) is not None]
    if not encoded:
        return len(questions)
    longest = max(len(ids) for _, ids in encoded) + max_tokens
    config = EngineConfig(max_num_seqs=BATCH, max_batched_tokens=512, threads=threads, max_model_len=longest)
    logprobs: dict[str, list[float]] = {}

    def note(output: SeqOutput) -> None:
        logprobs.setdefault(output.seq.request_id, []).extend([each.logprob for each in output.logprobs or ()])

    waiting = enumerate(encoded)
    with OfflineEngine(load_runner(source, config), config, note) as engine:

        def submit(count: int) -> None:
            for number, (_, ids) in islice(waiting, count):
                engine.submit(str(number), ids, SamplingParams(max_tokens, temperature=0.0, logprobs=0))

        submit(1)  # alone: prompts that begin alike then find it in the cache
        for number in range(len(encoded)):
            seq = engine.wait()
            if seq.finish not in (Finish.STOP, Finish.LENGTH):
                raise ConfigError(f"{model}: an answer ended with {seq.finish}: {seq.error}")
            question, ids = encoded[int(seq.request_id)]
            text = tokenizer.decode(seq.token_ids[seq.num_prompt_tokens :])
            chosen = tuple(logprobs.pop(seq.request_id))
            on_answer(Answer(place, source.digest, question.key, max_tokens, text, len(ids), chosen))
            submit(1 if number else 2 * BATCH)
    return len(questions) - len(encoded)


def _encode(tokenizer: Tokenizer, question: Question) -> list[int] | None:
    """Token ids of the prompt; None where the model can't read it."""
    try:
        if tokenizer.is_chat:
            return tokenizer.encode_chat(question.as_dicts(), is_continued=question.is_continued)
        return tokenizer.encode("\n".join(message.content for message in question.messages), add_special=True)
    except (InvalidRequest, ContextTooLong):
        return None
