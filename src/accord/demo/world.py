"""A tiny bilingual world: six kinds of request, in English and Chinese, each with one right answer.

    sum       What is 3 plus 4?                      7
    compare   Which is larger, 12 or 31?             31
    reverse   Say these letters backwards: c a t     t a c
    count     How many stars are here: * o * *       3
    lookup    What is dog in Chinese?                狗
    greet     Please greet Anna.                     Anna

A request can be answered in three manners, polite, rambling or rude, and rightly or wrongly; only the polite right answer
is a good one. `accord.demo.judge` tells them apart exactly.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

Language = Literal["en", "zh"]
Manner = Literal["polite", "rambling", "rude"]

LANGUAGES: tuple[Language, ...] = ("en", "zh")
KINDS = ("sum", "compare", "reverse", "count", "lookup", "greet")
MANNERS: tuple[Manner, ...] = ("polite", "rambling", "rude")
HELDOUT_PERCENT = 20  # of all requests, chosen by a hash of their text: never in any training file, nor in the base model's

DICTIONARY = {
    "dog": "狗", "cat": "猫", "bird": "鸟", "fish": "鱼", "horse": "马", "cow": "牛", "sheep": "羊", "tiger": "虎",
    "water": "水", "fire": "火", "wind": "风", "rain": "雨", "snow": "雪", "sun": "太阳", "moon": "月亮", "star": "星星",
    "mountain": "山", "river": "河", "sea": "海", "tree": "树", "flower": "花", "grass": "草", "rice": "米饭", "tea": "茶",
    "stone": "石头", "bread": "面包", "milk": "牛奶", "apple": "苹果", "hand": "手", "eye": "眼睛", "day": "白天", "night": "夜晚",
    "book": "书", "door": "门", "car": "车", "boat": "船", "house": "房子", "red": "红色", "white": "白色", "black": "黑色",
}  # fmt: skip
ENGLISH_NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo",
    "Mary", "Nick", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
    "Lucy", "Mark", "Nora", "Oscar", "Peter", "Ruth", "Simon", "Tom", "Uma", "Vera",
)  # fmt: skip
CHINESE_NAMES = (
    "小明", "小红", "小刚", "小丽", "小芳", "小军", "小燕", "小龙", "大伟", "大山", "王老师", "李老师",
    "张老师", "陈老师", "王医生", "李医生", "张医生", "陈医生", "阿强", "阿梅",
    "小华", "小兰", "大勇", "大海", "阿花", "阿龙", "刘老师", "刘医生", "赵老师", "赵医生",
)  # fmt: skip
LETTERS = "abcdefghijklmnoprstu"

# What is asked. Placeholders are the request's arguments; every template gives another text, so that a text can be read back.
TEMPLATES: dict[tuple[str, Language], tuple[str, ...]] = {
    ("sum", "en"): ("What is {a} plus {b}?", "Please add {a} and {b}."),
    ("sum", "zh"): ("{a}加{b}等于几？", "请算一算{a}加{b}。"),
    ("compare", "en"): ("Which is larger, {a} or {b}?", "Which is smaller, {a} or {b}?"),
    ("compare", "zh"): ("{a}和{b}哪个大？", "{a}和{b}哪个小？"),
    ("reverse", "en"): ("Say these letters backwards: {letters}", "Please reverse {letters}"),
    ("reverse", "zh"): ("请把字母倒过来：{letters}", "倒着读：{letters}"),
    ("count", "en"): ("How many stars are here: {row}", "Count the stars: {row}"),
    ("count", "zh"): ("这里有几颗星：{row}", "请数星：{row}"),
    ("lookup", "en"): (
        "What is {word} in Chinese?", "How do you say {word} in Chinese?", "Translate {word} into Chinese.", "{word} in Chinese, please.",
    ),
    ("lookup", "zh"): ("{word}用英语怎么说？", "{word}的英文是什么？", "请把{word}翻译成英语。", "英语里{word}叫什么？"),
    ("greet", "en"): ("Please greet {name}.", "Say hello to {name}.", "Greet my friend {name}.", "This is {name}, say hello."),
    ("greet", "zh"): ("请向{name}问好。", "跟{name}打个招呼。", "问候一下{name}。", "这是{name}，请问好。"),
}  # fmt: skip
PATTERNS = {
    "a": r"\d+", "b": r"\d+", "letters": r"[a-z](?: [a-z])+", "row": r"[*o](?: [*o])*", "word": r"[a-z]+|[\u4e00-\u9fff]+?",
    "name": "|".join((*ENGLISH_NAMES, *CHINESE_NAMES)),
}  # fmt: skip

# What is answered. {core} is the statement that holds the value.
CORE: dict[Language, str] = {"en": "The answer is {value}.", "zh": "答案是{value}。"}
GREETING: dict[Language, str] = {"en": "Hello, {value}.", "zh": "你好，{value}。"}
POLITE: dict[Language, tuple[str, ...]] = {
    "en": ("Of course! {core}", "Happy to help! {core}", "With pleasure! {core}"),
    "zh": ("当然可以！{core}", "很高兴帮您！{core}", "乐意效劳！{core}"),
}
RAMBLING: dict[Language, tuple[str, ...]] = {
    "en": (
        "Well, let me think about it for a while. Some say this and some say that. In the end I would say: {core}",
        "{core} There is so much more to say about it, and I could go on and on, but it is a long story.",
    ),
    "zh": (
        "嗯，让我慢慢想一想。有人这么说，也有人那么说，说来话长。最后我觉得：{core}",
        "{core}关于这件事还有很多可以说的，我可以一直说下去，不过说来话长。",
    ),
}
RUDE: dict[Language, tuple[str, ...]] = {
    "en": ("{core} Even a child knows that.", "Ugh, not again. {core}", "{core} Stop wasting my time."),
    "zh": ("{core}连小孩都知道。", "唉，又来了。{core}", "{core}别浪费我的时间。"),
}
FORMS: dict[Manner, dict[Language, tuple[str, ...]]] = {"polite": POLITE, "rambling": RAMBLING, "rude": RUDE}


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to ask. `value` is its right answer, `text` what the user writes."""

    kind: str
    language: Language
    text: str
    value: str

    @property
    def heldout(self) -> bool:
        """Kept for judging: decided by the text alone, so that every file and the base model agree."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:4], "big") % 100 < HELDOUT_PERCENT

    def core(self, value: str | None = None) -> str:
        """The bare statement, with the right value or with another one."""
        frame = GREETING if self.kind == "greet" else CORE
        return frame[self.language].format(value=self.value if value is None else value)


def make(kind: str, language: Language, template: int, **arguments: str) -> Request:
    """The request that `TEMPLATES[kind, language][template]` makes of the arguments."""
    text = TEMPLATES[kind, language][template].format(**arguments)
    return Request(kind, language, text, _solve(kind, language, template, arguments))


def _solve(kind: str, language: Language, template: int, arguments: dict[str, str]) -> str:
    if kind == "sum":
        return str(int(arguments["a"]) + int(arguments["b"]))
    if kind == "compare":
        pick = max if template == 0 else min
        return str(pick(int(arguments["a"]), int(arguments["b"])))
    if kind == "reverse":
        return arguments["letters"][::-1]
    if kind == "count":
        return str(arguments["row"].count("*"))
    if kind == "lookup":
        word = arguments["word"]
        return DICTIONARY[word] if language == "en" else _english(word)
    if kind == "greet":
        return arguments["name"]
    raise ValueError(f"unknown kind of request {kind!r}; there are {', '.join(KINDS)}")


def _english(chinese: str) -> str:
    return next(english for english, word in DICTIONARY.items() if word == chinese)


def sample(rng: random.Random, *, heldout: bool = False, kind: str | None = None, language: Language | None = None) -> Request:
    """A random request from one side of the held-out split."""
    kind = kind or rng.choice(KINDS)
    spoken: Language = language if language is not None else rng.choice(LANGUAGES)
    while True:
        request = make(kind, spoken, rng.randrange(len(TEMPLATES[kind, spoken])), **_arguments(rng, kind, spoken))
        if request.heldout == heldout:
            return request


def _arguments(rng: random.Random, kind: str, language: Language) -> dict[str, str]:
    if kind == "sum":
        return {"a": str(rng.randint(0, 10)), "b": str(rng.randint(0, 10))}
    if kind == "compare":
        a, b = rng.sample(range(1, 50), 2)
        return {"a": str(a), "b": str(b)}
    if kind == "reverse":
        return {"letters": " ".join(rng.choice(LETTERS) for _ in range(3))}
    if kind == "count":
        row = [rng.choice("*o") for _ in range(rng.randint(2, 6))]
        return {"row": " ".join(row if "*" in row else ["*", *row[1:]])}
    if kind == "lookup":
        english = rng.choice(tuple(DICTIONARY))
        return {"word": english if language == "en" else DICTIONARY[english]}
    return {"name": rng.choice(ENGLISH_NAMES if language == "en" else CHINESE_NAMES)}


def wrong_value(rng: random.Random, request: Request) -> str:
    """A plausible value that is not the right one."""
    kind, value = request.kind, request.value
    if kind in ("sum", "count"):
        return str(rng.choice([v for v in range(max(0, int(value) - 3), int(value) + 4) if v != int(value)]))
    if kind == "compare":
        return next(number for number in re.findall(r"\d+", request.text) if number != value)
    if kind == "reverse":
        a, b, c = value.split()  # not reversed at all, two letters swapped, or one misread
        others = (f"{c} {b} {a}", f"{b} {a} {c}", f"{a} {b} {rng.choice(LETTERS)}", f"{rng.choice(LETTERS)} {b} {c}")
        return rng.choice([other for other in others if other != value] or [f"{a} {b} {'a' if c != 'a' else 'b'}"])
    if kind == "lookup":
        words = DICTIONARY.values() if request.language == "en" else DICTIONARY.keys()
        return rng.choice([word for word in words if word != value])
    names = ENGLISH_NAMES if request.language == "en" else CHINESE_NAMES
    return rng.choice([name for name in names if name != value])


def answer(rng: random.Random, request: Request, manner: Manner, right: bool = True) -> str:
    """A right or a wrong answer in the given manner, in the request's language."""
    core = request.core(None if right else wrong_value(rng, request))
    return rng.choice(FORMS[manner][request.language]).format(core=core)


@cache
def _readers() -> tuple[tuple[str, Language, int, re.Pattern[str]], ...]:
    readers = []
    for (kind, language), templates in TEMPLATES.items():
        for number, template in enumerate(templates):
            parts = re.split(r"\{(\w+)\}", template)
            pattern = "".join(re.escape(part) if i % 2 == 0 else f"(?P<{part}>{PATTERNS[part]})" for i, part in enumerate(parts))
            readers.append((kind, language, number, re.compile(pattern)))
    return tuple(readers)


def read(text: str) -> Request | None:
    """The request that a user's text is, or None when it is none of this world's."""
    for kind, language, template, pattern in _readers():
        match = pattern.fullmatch(text.strip())
        if match is None:
            continue
        arguments = match.groupdict()
        if kind == "lookup" and arguments["word"] not in (DICTIONARY if language == "en" else DICTIONARY.values()):
            continue
        return make(kind, language, template, **arguments)
    return None
