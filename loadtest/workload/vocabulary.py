"""Words that made-up text consists of: common English ones, nearly all a single token of any byte-pair vocabulary;
exactly so where the tokenizer is given."""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from penstock_loadtest.errors import ScenarioInvalid

_WORDS: Final = """
a about above action after again against age air all also always among an and animal another answer any area arm
around art as ask at back ball bank base be because bed been before best better between big bird black blood blue
board boat body book both box boy brother build building business but buy by call came can capital car care case cause
cell center century certain change child children church city class clear close cold color come common company
complete control cost could country course court cover cross current cut dark data daughter day dead deal death
decision deep design development did different direction do doctor dog done door down draw drive each early earth east
easy eat economic education effect eight either end energy enough even event ever every evidence example experience
eye face fact fall family far farm fast father feel feet few field fight figure final find fire first fish five floor
follow food foot for force foreign form four free friend from front full future game gas general get girl give glass
go gold good government great green ground group grow had hair half hand happy hard has have he head health heart heat
heavy held help her here high him his history hold home horse hospital hot hour house how human idea if image
important in industry inside interest into is it its job just keep kind king know land language large last late law
lead learn leave left less let letter level life light like line list little live local long look lost love low
machine made main make man many mark market matter may me mean meat member method middle might mile milk mind minute
modern moment money month more most mother mouth move much music must my name nature near need never new news next
night nine no north not note nothing now number of off office often oil old on once one only open or order other our
out outside over own page paper part party pass past peace people perhaps period person picture piece place plan plant
play point poor position power present president press price private problem process product program public question
quick quite race radio rain raise ran range rate reach read ready real reason red report research rest result right
rise river road rock room round rule run said same sand say school science sea season seat second see seen self send
sense set seven several she ship short should show side sign simple since six size skin small so social some son song
soon sort sound south space special speed spring staff stage stand star start state station stay step still stock
stone stop story street strong student study such summer sun supply support system table take talk tax teacher team
ten term test than that the their them then there these they thing think this those thought three through time to
today together too top town trade train training tree trial true try turn two type under union unit until up upon us
use value very view voice wait walk wall want war warm was watch water way we week well went were west what wheel when
where which while white who whole why wife wild will wind window winter with within without woman wood word work world
would write year yellow yes yet you young
"""
WORDS: Final = tuple(_WORDS.split())
MIN_WORDS: Final = 64
"""Fewest different words: with fewer, made-up prompts would begin alike too often."""


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file. Raises ScenarioInvalid when the file is not there, or is not a tokenizer.json."""
    try:
        data = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioInvalid(f"{path} can't be read: {error}.") from None
    try:
        return Tokenizer.from_str(data)
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        raise ScenarioInvalid(f"{path} is not a tokenizer.json: {error}.") from None


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def find_single_token_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Words such that any of them, joined by a space, are as many tokens: ours, and where those are too few the
    vocabulary's own.

    Raises ScenarioInvalid when the vocabulary has too few words of one token.
    """
    ours = tuple(word for word in WORDS if _is_single(tokenizer, word))
    if len(ours) >= MIN_WORDS:
        return ours
    decoded = {tokenizer.decode([index]).strip() for index in tokenizer.get_vocab().values()}
    words = tuple(sorted(word for word in decoded if word.isascii() and word.isalpha() and _is_single(tokenizer, word)))
    if len(words) < MIN_WORDS:
        raise ScenarioInvalid(
            f"The tokenizer has {len(words)} words of one token, too few to make up text of exact length from; leave "
            "`tokenizer` out."
        )
    return words


def _is_single(tokenizer: Tokenizer, word: str) -> bool:
    """Whether a word is one token at the start of a text, and one after a space."""
    return count_tokens(tokenizer, word) == 1 and count_tokens(tokenizer, f"{word} {word}") == 2
