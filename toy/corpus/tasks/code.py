"""Small Python functions to complete (the kind called humaneval). The examples in docstrings are really run."""

from __future__ import annotations

from collections.abc import Callable

from toy.corpus.tasks.grammar import Writer

# condition in words, in code, name
FILTERS = (
    ("even", "{x} % 2 == 0", "even"),
    ("odd", "{x} % 2 == 1", "odd"),
    ("greater than {k}", "{x} > {k}", "large"),
    ("smaller than {k}", "{x} < {k}", "small"),
    ("divisible by {k}", "{x} % {k} == 0", "divisible"),
    ("not equal to {k}", "{x} != {k}", "other"),
    ("positive", "{x} > 0", "positive"),
    ("negative", "{x} < 0", "negative"),
    ("at least {k}", "{x} >= {k}", "high"),
    ("between 0 and {k}", "0 <= {x} <= {k}", "middle"))
# values to take, in words, in code, name
MAPS = (
    ("squares", "{x} ** 2", "squares"),
    ("doubles", "2 * {x}", "doubles"),
    ("absolute values", "abs({x})", "sizes"),
    ("values", "{x}", "values"),
    ("values plus {m}", "{x} + {m}", "shifted"),
    ("values times {m}", "{x} * {m}", "scaled"),
    ("cubes", "{x} ** 3", "cubes"),
    ("values", "{x}", "numbers"),
    ("remainders modulo {m}", "{x} % {m}", "remainders"))
# result in words, as a call, start, update, type, name
REDUCES = (
    ("sum", "sum({g})", "0", "{t} += {e}", "int", "sum"),
    ("list", "[{g}]", "[]", "{t}.append({e})", "list[int]", "list"),
    ("largest", "max([{g}], default=0)", "0", "{t} = max({t}, {e})", "int", "max"),
    ("number", "len([{g}])", "0", "{t} += 1", "int", "count"),
    ("product", "math.prod({g})", "1", "{t} *= {e}", "int", "product"),
    ("set", "set({g})", "set()", "{t}.add({e})", "set[int]", "set"))
TEXTS = (
    ("the number of vowels in {a}", "count_vowels", "int", "sum(1 for c in {a} if c in 'aeiou')"),
    ("{a} with its words in reverse order", "reverse_words", "str", "' '.join(reversed({a}.split()))"),
    ("the longest word in {a}", "longest_word", "str", "max({a}.split(), key=len)"),
    ("the shortest word in {a}", "shortest_word", "str", "min({a}.split(), key=len)"),
    ("{a} without the letter '{c}'", "drop_letter", "str", "{a}.replace('{c}', '')"),
    ("how often '{c}' occurs in {a}", "count_letter", "int", "{a}.count('{c}')"),
    ("True if {a} reads the same backwards", "is_palindrome", "bool", "{a} == {a}[::-1]"),
    ("the words of {a} in sorted order", "sorted_words", "list[str]", "sorted({a}.split())"),
    ("the first {k} characters of {a}", "head", "str", "{a}[:{k}]"),
    ("the last {k} characters of {a}", "tail", "str", "{a}[-{k}:]"),
    ("{a} repeated {k} times", "repeat", "str", "{a} * {k}"),
    (
        "the words of {a} that have more than {k} letters",
        "long_words",
        "list[str]",
        "[w for w in {a}.split() if len(w) > {k}]"),
    ("the first letters of the words of {a}", "initials", "str", "''.join(w[0] for w in {a}.split())"),
    (
        "a dict from each letter of {a} to its count",
        "letter_counts",
        "dict[str, int]",
        "dict(Counter({a}))"),
    (
        "{a} with every word capitalised",
        "title_words",
        "str",
        "' '.join(w.capitalize() for w in {a}.split())"),
    ("the length of each word of {a}", "word_lengths", "list[int]", "[len(w) for w in {a}.split()]"))
SUBJECTS = ("Account", "Counter", "Stack", "Playlist", "Basket", "Garden", "Library", "Robot", "Player", "Queue",
            "Timer", "Shelf")
FIELDS = ("balance", "count", "total", "points", "level", "amount", "score", "size", "speed", "energy", "price",
          "weight")
VERBS = ("add", "remove", "raise_by", "lower_by", "grow", "shrink", "reset", "double", "halve", "move", "pay", "earn")
WORDS = "sun tree river stone apple green cloud lamp paper house music light bread horse snow glass".split()
LIST_NAMES = ("numbers", "values", "items", "data", "nums", "xs", "scores", "readings", "prices", "entries")
TEXT_NAMES = ("text", "s", "line", "sentence", "string", "phrase", "message", "title")
ASK = (
    "{Complete {this|the following} {function|Python function}:|Write the body of this function.|"
    "Please {finish|implement|complete} the function below.|Fill in {the|this} function|Implement this{ in Python|}:|"
    "Can you {complete|write} this function?|Finish the code{ below|}.|Here is the start of a function. "
    "{Complete|Finish} it.}")
OPEN = (
    "{|||Here is {the|a} {function|complete function|solution|possible version}:\n\n"
    "|{Sure|Of course|Certainly|Gladly}{!|.}{ Here it is:|}\n\n|This {works|does it|should work}:\n\n"
    "|You can write it {like this|this way|as follows}:\n\n}")


def _call(source: str, name: str, argument: object) -> str:
    space: dict[str, Callable[[object], object]] = {}
    exec(source, space)  # noqa: S102 - our own text of a few lines, built from the tables above
    return repr(space[name](argument))


def _signature(w: Writer, name: str, arg: str, kind: str, result: str, words: str) -> str:
    words = w.say("{Return|Compute|Give back|Find|Get} <d>.", d=words)
    return f'def {name}({arg}: {kind}) -> {result}:\n    """{words}'


def _numbers(w: Writer) -> tuple[str, str, str]:
    """Return a filter, a map and a fold over a list, as a loop or as one expression."""
    has, takes, folds = w.one(FILTERS), w.one(MAPS), w.one(REDUCES)
    arg, x, t = w.one(LIST_NAMES), w.one(("x", "n", "v", "item", "value", "num")), w.one(("total", "result", "out",
                                                                                          "found", "answer"))
    spots = {"x": x, "k": w.number(2, 40), "m": w.number(2, 12), "t": t}
    cond, expr = has[1].format(**spots), takes[1].format(**spots)
    plain = [folds[5], "of", has[2]]
    name = "_".join(w.some(plain, 3)) if w.maybe(0.1) else f"{w.one((folds[5], 'find', 'get', 'take'))}_{has[2]}"
    words = f"the {folds[0]} of the {takes[0]} of the numbers in {arg} that are {has[0]}".format(**spots)
    head = _signature(w, name, arg, "list[int]", folds[4], words)
    if w.maybe(0.5):
        inner = f"{expr} for {x} in {arg} if {cond}"
        body = "    return " + folds[1].format(g=inner)
        why = w.say("{The comprehension|The expression|It} {keeps|takes|selects} only the {numbers|<x>} that are <h>{ "
                    "and {takes|folds "
                    "them into} the <f>|}.", h=has[0].format(**spots), f=folds[0], x=arg)
    else:
        update = folds[3].format(t=t, e=expr)
        body = f"    {t} = {folds[2]}\n    for {x} in {arg}:\n        if {cond}:\n            {update}\n    return {t}"
        why = w.say("{The loop|It|This} {goes through|visits|walks over} {every|each} {number|<x>} and "
                    "{updates|changes} <t> {when|if} it is "
                    "<h>.", x=x, t=t, h=has[0].format(**spots))
    if "math." in body:
        body = "    import math\n\n" + body
    sample = [w.number(-9, 60) for _ in range(w.number(3, 6))]
    shown = _call(f'{head}"""\n{body}\n', name, sample)
    return f'{head}\n\n    >>> {name}({sample})\n    {shown}\n    """' if w.maybe(0.6) else f'{head}"""', body, why


def _texts(w: Writer) -> tuple[str, str, str]:
    words, name, result, expr = w.one(TEXTS)
    arg = w.one(TEXT_NAMES)
    spots = {"a": arg, "c": w.one("abcdeilmnorstu"), "k": w.number(2, 7)}
    words, expr = words.format(**spots), expr.format(**spots)
    head = _signature(w, name, arg, "str", result, words)
    local = w.one(("result", "answer", "out", "found"))
    body = w.one((f"    return {expr}", f"    {local} = {expr}\n    return {local}"))
    if "Counter" in body:
        body = "    from collections import Counter\n\n" + body
    sample = " ".join(w.some(WORDS, w.number(2, 5)))
    shown = _call(f'{head}"""\n{body}\n', name, sample)
    why = w.say("{This|It|The function|The last line} {returns|gives|computes} <d>.", d=words)
    return f'{head}\n\n    >>> {name}({sample!r})\n    {shown}\n    """' if w.maybe(0.7) else f'{head}"""', body, why


def _classes(w: Writer) -> tuple[str, str, str]:
    """Return a class with one number and two methods that change it."""
    name, field = w.one(SUBJECTS), w.one(FIELDS)
    start, (one, two) = w.number(0, 50), w.some(VERBS, 2)
    step, by = w.number(2, 20), w.one(("amount", "by", "n", "value", "step"))
    ops = (f"self.{field} += {by}", f"self.{field} -= {by}", f"self.{field} *= {by}", f"self.{field} = max(0, "
        f"self.{field} - {by})",
           f"self.{field} = {by}", f"self.{field} += {step} * {by}", f"self.{field} = min({step}, self.{field} + {by})")
    first, second = w.some(ops, 2)
    told = w.say("A(n) {class|<n>} with a <f> that starts at <s>; <a> does `<x>` and <b> does `<y>`.", n=name.lower(),
                 f=field, s=start,
                 a=one, b=two, x=first, y=second)
    head = f'class {name}:\n    """{told}"""'
    rest = [f"    def {verb}(self, {by}: int) -> None:\n        {op}" for verb, op in ((one, first), (two, second))]
    body = f"\n    def __init__(self) -> None:\n        self.{field} = {start}\n\n" + "\n\n".join(rest)
    if w.maybe(0.4):
        body += f'\n\n    def __repr__(self) -> str:\n        return f"{name}({{self.{field}}})"'
    why = w.say("{The class|<n>|It} {keeps|holds|stores} one {number|value}, <f>, {which|and} {<a> and <b> change|is "
                "changed by <a> and "
                "<b>}.", n=name, f=field, a=one, b=two)
    return head, body, why


def code(w: Writer) -> tuple[list[str], list[str]]:
    """Return one function to complete, and its completion."""
    head, body, why = w.one((_numbers, _numbers, _texts, _texts, _classes))(w)
    fence = w.maybe(0.6)
    asked = w.say(ASK) + (f"\n\n```python\n{head}\n```" if fence else f"\n\n{head}")
    answer = f"{w.say(OPEN)}```python\n{head}\n{body}\n```"
    return [asked], [answer + (f"\n\n{why}" if w.maybe(0.6) else "")]
