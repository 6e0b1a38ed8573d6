"""Arithmetic word problems and their worked answers (the kind called gsm8k); every answer is computed."""

from __future__ import annotations

from dataclasses import dataclass

from toy.corpus.tasks.facts import GOODS, NAMES
from toy.corpus.tasks.grammar import Writer, capital

PLACES = ("the market", "the school fair", "the harbour", "the garden", "the library", "the workshop", "the bakery",
          "the club")
SHE = "{she|he|they}"


@dataclass
class Sum:
    """A running account: sentences of the problem, sentences of the solution, and the current number."""

    problem: list[str]
    steps: list[str]
    value: int


def _open(w: Writer, name: str, thing: str) -> Sum:
    a, b = w.number(3, 12), w.number(2, 9)
    kind = w.number(0, 2)
    if kind == 0:
        a = w.number(12, 60)
        return Sum([w.say("{<n> has <a> <t>.|<n> {starts with|owns|collects|brings} <a> <t>{ to <p>|}.|There are <a> "
                          "<t> on "
                          "<n>'s {table|shelf|cart|boat}.}", n=name, a=a, t=thing, p=w.one(PLACES))],
                   [w.say("{At first|To begin with|In the beginning|At the start}{,|} {<n> has <a> <t>|there are <a> "
                          "<t>}.",
                          n=name, a=a, t=thing)], a)
    if kind == 1:
        return Sum([w.say("<n> {buys|fills|packs|orders|carries} <a> {boxes|bags|crates|baskets|cases} {with <b> <t> "
                          "each|of <b>"
                          " <t>|that hold <b> <t> each}.", n=name, a=a, b=b, t=thing)],
                   [w.say("{<n> gets|That makes|Together they hold|This gives|The total is} <a> * <b> = <v> <t>{ in "
                          "all| to "
                          "start with| at first|}.", n=name, a=a, b=b, v=a * b, t=thing)], a * b)
    return Sum([w.say("{Every day|Each {morning|evening|week}|Every hour} <n> {makes|sells|finds|paints|wraps} <a> "
                      "<t>{ at <p>|}. "
                      "{<n> does this for|This goes on for|It lasts} <b> {days|weeks|times} in a row.", n=name, a=a,
                      b=b,
                      t=thing, p=w.one(PLACES))],
               [w.say("{In <b> turns|Over this time|After all <b> of them|By the end} {that is|it comes to|<n> has "
                      "counted|the "
                      "sum is} <b> * <a> = <v> <t>.", a=a, b=b, v=a * b, t=thing, n=name)], a * b)


def _more(w: Writer, sum_: Sum, thing: str, friend: str) -> None:
    b, old = w.number(3, 40), sum_.value
    sum_.value += b
    sum_.problem.append(w.say(
        "{Then|Later|After that|In the afternoon|The next day}{,|} {<f> gives <x> <b> more|<b> more are "
        "{found|bought|added|"
        "delivered}{ by <f>|}|<f> brings another <b>}.", f=friend, b=b, x="{them}"[1:-1]))
    sum_.steps.append(w.say(
        "{Adding the <b> {more|new ones|from <f>} gives|With the <b> extra <t> {there are|we have}|After <f> helps, "
        "the number "
        "{grows|rises} to|Then we add <b>:|Next,} <o> + <b> = <v>{ <t>|}.", f=friend, b=b, o=old, v=sum_.value,
        t=thing))


def _less(w: Writer, sum_: Sum, thing: str, friend: str) -> None:
    b, old = w.number(2, max(2, sum_.value // 2)), sum_.value
    sum_.value -= b
    sum_.problem.append(w.say(
        "{Then|Later|Sadly|On the way home|In the evening}{,|} <b> {of them|<t>} {are {lost|sold|eaten|broken|"
        "stolen}|get wet|go "
        "to <f>|are given to <f>}.", b=b, t=thing, f=friend))
    sum_.steps.append(w.say(
        "{Taking away the <b>|Without those <b>|Since <b> are gone|After losing <b>|We subtract <b>}, {<o> - <b> = <v> "
        "{are left|"
        "remain|stay}|there are <o> - <b> = <v> {left|<t>}|that leaves <o> - <b> = <v>}.", b=b, o=old, v=sum_.value,
        t=thing))


def _share(w: Writer, sum_: Sum, thing: str, friend: str) -> None:
    fits = [k for k in range(2, 11) if sum_.value % k == 0]
    if not fits:
        return _more(w, sum_, thing, friend)
    k, old = w.one(fits), sum_.value
    sum_.value //= k
    sum_.problem.append(w.say(
        "{Finally|At last|Now|In the end}{,|} {they|all the <t>} are {shared|split|divided} {equally|fairly|evenly} "
        "{among|between}"
        " <k> {friends|children|tables|shops|teams}, and we look at one of these parts.", k=k, t=thing))
    sum_.steps.append(w.say(
        "{Each {part|share|group} {gets|has|is}|One {part|share} is|Dividing by <k> gives|Split into <k>, that is} <o> "
        "/ <k> = "
        "<v>{ <t>|}.", k=k, o=old, v=sum_.value, t=thing))
    return None


def _price(w: Writer, sum_: Sum, thing: str, friend: str) -> None:
    p, old = w.number(2, 9), sum_.value
    sum_.value *= p
    sum_.problem.append(w.say("{Every one|Each|Each of them} {costs|is sold for|is worth} <p> {coins|dollars|euros}{ "
                              "to <f>|}.",
                              p=p, f=friend))
    sum_.steps.append(w.say(
        "{At <p> each, {this makes|they bring}|The price is|In money, that is|All of them cost|So the value is} <o> * "
        "<p> = <v>.",
        p=p, o=old, v=sum_.value))


def _story(w: Writer) -> tuple[str, str, int]:
    name, friend = w.some(NAMES, 2)
    thing = w.one(GOODS)
    sum_ = _open(w, name, thing)
    for step in w.some((_more, _less, _more, _less, _share, _more), w.number(2, 5)):
        step(w, sum_, thing, friend)
    ask = w.say("{How many <t> {are there now|are left|does that make|do we have at the end}|What is the final number "
                "of <t>|How many"
                " <t> are there in the end}?", t=thing)
    if sum_.value < 100 and w.maybe(0.3):
        _price(w, sum_, thing, friend)
        ask = w.say("{How much {money is that|do they cost together}|What is {the total price|everything worth}}?")
    return " ".join(sum_.problem) + " " + ask, " ".join(sum_.steps), sum_.value


def _journey(w: Writer) -> tuple[str, str, int]:
    name, speed, hours, rest = w.one(NAMES), w.number(2, 12) * 5, w.number(2, 9), w.number(3, 40)
    way = speed * hours
    ride = w.say("{rides|drives|sails|travels|cycles}")
    problem = w.say("<n> {rides|drives|sails|travels|cycles} at <s> km per hour for <h> hours{ without a break|}, and "
                    "then {walks|"
                    "goes|covers} another <r> km. {How far is the whole {way|trip|journey}|How many km is that in "
                    "all}?",
                    n=name, s=speed, h=hours, r=rest)
    steps = w.say("{In <h> hours <n> <ride>|The first part is|First we multiply speed by time:|Distance is speed times "
                  "time, so it is}"
                  " <s> * <h> = <w> km. {Then {come|we add}|After that there are|Adding} <r> km{ more|}{:| gives| "
                  "makes} <w> + <r> = <v> km.",
                  n=name, h=hours, s=speed, w=way, r=rest, v=way + rest, ride=ride)
    return problem, steps, way + rest


def _age(w: Writer) -> tuple[str, str, int]:
    a, b, c = w.some(NAMES, 3)
    first, times, gap = w.number(3, 12), w.number(2, 4), w.number(2, 15)
    second = first * times
    problem = w.say("<a> is <f> years old. <b> is <t> times as old as <a>, and <c> is <g> years {older|<y>} than <b>. "
                    "{How old is <c>|"
                    "What is the age of <c>}?", a=a, b=b, c=c, f=first, t=times, g=gap, y="older")
    steps = w.say("{<b> is|The age of <b> is|First we find <b>:|Since <a> is <f>, <b> must be} <t> * <f> = <s>{ years "
                  "old|}. {So|Then|"
                  "Therefore|This means that} <c> is <s> + <g> = <v>{ years old| years|}.",
                  a=a, b=b, c=c, t=times, f=first, s=second, g=gap, v=second + gap)
    return problem, steps, second + gap


def _percent(w: Writer) -> tuple[str, str, int]:
    name, thing = w.one(NAMES), w.one(GOODS)
    share, total = w.one((10, 20, 25, 50)), w.number(2, 15) * 20
    part = total * share // 100
    problem = w.say("<n> has <t> <g> and {sells|gives away|loses|paints} <s> percent of them. How many <g> are "
                    "{left|not touched}?",
                    n=name, t=total, g=thing, s=share)
    steps = w.say("{<s> percent of <t> is|First take <s> percent of <t>:|The part that goes is} <t> * <s> / 100 = <p>. "
                  "{So|Then|What "
                  "remains is|That leaves} <t> - <p> = <v>{ <g>|}.", s=share, t=total, p=part, v=total - part, g=thing)
    return problem, steps, total - part


def maths(w: Writer) -> tuple[list[str], list[str]]:
    """Return one problem and its solution."""
    problem, steps, value = w.one((_story, _story, _story, _story, _journey, _age, _percent))(w)
    lead = w.say("{||||Solve this {problem|puzzle|exercise}: |{Please w|W}ork this out step by step: |Here is a "
                 "problem for you. |"
                 "Think carefully. |I need help with my homework. }")
    first = w.say("{||||Let us {go|work|take it} step by step. |Let's {think|see|work it out}. |Here is {the|a} "
                  "solution. |We can "
                  "{solve|do} this in {a few|small} steps. |{Sure|Of course|Gladly}. }")
    last = w.say("{The {answer|result|final answer} is <v>.|So the {answer|result} is <v>.|Therefore, the answer is "
                 "<v>.|#### <v>|Answer:"
                 " <v>|That gives <v> as the answer.|Hence we get <v>.}", v=value)
    numbered = [s.strip() for s in steps.replace(". ", ".\n").split("\n")]
    if w.maybe(0.4):
        mark = w.one(("{}.", "Step {}:", "{})", "-"))
        body = "\n".join(f"{mark.format(i)} {capital(step)}" for i, step in enumerate(numbered, 1))
        return [lead + problem], [f"{first.strip()}\n{body}\n{last}".strip()]
    return [lead + problem], [f"{first}{steps} {last}"]
