"""Small Python functions to complete (the kind called humaneval). The examples in docstrings are really run."""

from __future__ import annotations

from collections.abc import Callable

from toy.corpus.tasks.grammar import DialogueTurns, PhraseWriter, TemplateSlots

CodeCompletion = tuple[str, str, str]  # code to complete, the rest of it, and a sentence that explains it

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
# values to take, in words, in code
MAPS = (
    ("squares", "{x} ** 2"),
    ("doubles", "2 * {x}"),
    ("absolute values", "abs({x})"),
    ("values", "{x}"),
    ("values plus {m}", "{x} + {m}"),
    ("values times {m}", "{x} * {m}"),
    ("cubes", "{x} ** 3"),
    ("values", "{x}"),
    ("remainders modulo {m}", "{x} % {m}"))
# result in words, as a call, start, update, type, name
REDUCES = (
    ("sum", "sum({g})", "0", "{t} += {e}", "int", "sum"),
    ("list", "[{g}]", "[]", "{t}.append({e})", "list[int]", "list"),
    ("largest", "max([{g}], default=0)", "0", "{t} = max({t}, {e})", "int", "max"),
    ("number", "len([{g}])", "0", "{t} += 1", "int", "count"),
    ("product", "math.prod({g})", "1", "{t} *= {e}", "int", "product"),
    ("set", "set({g})", "set()", "{t}.add({e})", "set[int]", "set"))
# result in words, name, type, in code
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
    ("a dict from each letter of {a} to its count", "letter_counts", "dict[str, int]", "dict(Counter({a}))"),
    ("{a} with every word capitalised", "title_words", "str", "' '.join(w.capitalize() for w in {a}.split())"),
    ("the length of each word of {a}", "word_lengths", "list[int]", "[len(w) for w in {a}.split()]"))
CLASS_NAMES = ("Account", "Counter", "Stack", "Playlist", "Basket", "Garden", "Library", "Robot", "Player", "Queue",
               "Timer", "Shelf")
FIELD_NAMES = ("balance", "count", "total", "points", "level", "amount", "score", "size", "speed", "energy", "price",
               "weight")
METHOD_NAMES = ("add", "remove", "raise_by", "lower_by", "grow", "shrink", "reset", "double", "halve", "move", "pay",
                "earn")
WORDS = "sun tree river stone apple green cloud lamp paper house music light bread horse snow glass".split()
LIST_NAMES = ("numbers", "values", "items", "data", "nums", "xs", "scores", "readings", "prices", "entries")
TEXT_NAMES = ("text", "s", "line", "sentence", "string", "phrase", "message", "title")
COMPLETION_REQUEST = (
    "{Complete {this|the following} {function|Python function}:|Write the body of this function.|"
    "Please {finish|implement|complete} the function below.|Fill in {the|this} function|Implement this{ in Python|}:|"
    "Can you {complete|write} this function?|Finish the code{ below|}.|Here is the start of a function. "
    "{Complete|Finish} it.}")
COMPLETION_OPENING = (
    "{|||Here is {the|a} {function|complete function|solution|possible version}:\n\n"
    "|{Sure|Of course|Certainly|Gladly}{!|.}{ Here it is:|}\n\n|This {works|does it|should work}:\n\n"
    "|You can write it {like this|this way|as follows}:\n\n}")
LOOP_NAMES = ("x", "n", "v", "item", "value", "num")
TOTAL_NAMES = ("total", "result", "out", "found", "answer")
RESULT_NAMES = ("result", "answer", "out", "found")
ARGUMENT_NAMES = ("amount", "by", "n", "value", "step")
COMPREHENSION_EXPLANATION = (
    "{The comprehension|The expression|It} {keeps|takes|selects} only the {numbers|<x>} that are <h>"
    "{ and {takes|folds them into} the <f>|}.")
LOOP_EXPLANATION = (
    "{The loop|It|This} {goes through|visits|walks over} {every|each} {number|<x>} and {updates|changes} <t> "
    "{when|if} it is <h>.")
TEXT_EXPLANATION = "{This|It|The function|The last line} {returns|gives|computes} <d>."
CLASS_DESCRIPTION = "A(n) {class|<n>} with a <f> that starts at <s>; <a> does `<x>` and <b> does `<y>`."
CLASS_EXPLANATION = (
    "{The class|<n>|It} {keeps|holds|stores} one {number|value}, <f>, {which|and} {<a> and <b> change|"
    "is changed by <a> and <b>}.")


def _function_head(writer: PhraseWriter, signature: str, result_words: str) -> str:
    """Return the first lines of a function, whose docstring is not closed yet."""
    description = writer.expand("{Return|Compute|Give back|Find|Get} <d>.", d=result_words)
    return f'def {signature}:\n    """{description}'


def _with_example(head_code: str, completion_code: str, function_name: str, argument: object) -> str:
    """Return the head with an example in its docstring, as the completed function answers it."""
    namespace: dict[str, Callable[[object], object]] = {}
    # our own text of a few lines, built from the tables above
    exec(f'{head_code}"""\n{completion_code}\n', namespace)  # noqa: S102
    result = namespace[function_name](argument)
    return f"{head_code}\n\n    >>> {function_name}({argument!r})\n    {result!r}\n    "


def _number_function(writer: PhraseWriter) -> CodeCompletion:
    """Return a filter, a map and a fold over a list, as a loop or as one expression."""
    filter_words, condition_template, filter_name = writer.choose(FILTERS)
    value_words, value_template = writer.choose(MAPS)
    fold_words, fold_call, start_value, update_template, result_type, fold_name = writer.choose(REDUCES)
    list_name, loop_name, total_name = (writer.choose(names) for names in (LIST_NAMES, LOOP_NAMES, TOTAL_NAMES))
    code_slots = {"x": loop_name, "k": writer.number_between(2, 40), "m": writer.number_between(2, 12)}
    condition, value_code = (template.format(**code_slots) for template in (condition_template, value_template))
    filter_words, value_words = (template.format(**code_slots) for template in (filter_words, value_words))

    if writer.happens(0.1):
        function_name = "_".join(writer.sample((fold_name, "of", filter_name), 3))
    else:
        function_name = f"{writer.choose((fold_name, 'find', 'get', 'take'))}_{filter_name}"
    result_words = f"the {fold_words} of the {value_words} of the numbers in {list_name} that are {filter_words}"
    head_code = _function_head(writer, f"{function_name}({list_name}: list[int]) -> {result_type}", result_words)

    if writer.happens(0.5):
        generator_code = f"{value_code} for {loop_name} in {list_name} if {condition}"
        completion_code = "    return " + fold_call.format(g=generator_code)
        explanation = writer.expand(COMPREHENSION_EXPLANATION, h=filter_words, f=fold_words, x=list_name)
    else:
        update_code = update_template.format(t=total_name, e=value_code)
        completion_code = (
            f"    {total_name} = {start_value}\n    for {loop_name} in {list_name}:\n"
            f"        if {condition}:\n            {update_code}\n    return {total_name}")
        explanation = writer.expand(LOOP_EXPLANATION, x=loop_name, t=total_name, h=filter_words)
    if "math." in completion_code:
        completion_code = "    import math\n\n" + completion_code

    numbers = [writer.number_between(-9, 60) for _ in range(writer.number_between(3, 6))]
    if writer.happens(0.6):
        head_code = _with_example(head_code, completion_code, function_name, numbers)
    return head_code + '"""', completion_code, explanation


def _text_function(writer: PhraseWriter) -> CodeCompletion:
    words_template, function_name, result_type, result_template = writer.choose(TEXTS)
    text_name = writer.choose(TEXT_NAMES)
    code_slots = {"a": text_name, "c": writer.choose("abcdeilmnorstu"), "k": writer.number_between(2, 7)}
    result_words, result_code = (template.format(**code_slots) for template in (words_template, result_template))
    head_code = _function_head(writer, f"{function_name}({text_name}: str) -> {result_type}", result_words)

    result_name = writer.choose(RESULT_NAMES)
    completion_code = writer.choose((
        f"    return {result_code}",
        f"    {result_name} = {result_code}\n    return {result_name}"))
    if "Counter" in completion_code:
        completion_code = "    from collections import Counter\n\n" + completion_code

    example_text = " ".join(writer.sample(WORDS, writer.number_between(2, 5)))
    explanation = writer.expand(TEXT_EXPLANATION, d=result_words)
    if writer.happens(0.7):
        head_code = _with_example(head_code, completion_code, function_name, example_text)
    return head_code + '"""', completion_code, explanation


def _class(writer: PhraseWriter) -> CodeCompletion:
    """Return a class with one number and two methods that change it."""
    class_name, field_name = writer.choose(CLASS_NAMES), writer.choose(FIELD_NAMES)
    start_value = writer.number_between(0, 50)
    first_method, second_method = writer.sample(METHOD_NAMES, 2)
    constant, argument_name = writer.number_between(2, 20), writer.choose(ARGUMENT_NAMES)
    field = f"self.{field_name}"
    operations = (
        f"{field} += {argument_name}",
        f"{field} -= {argument_name}",
        f"{field} *= {argument_name}",
        f"{field} = max(0, {field} - {argument_name})",
        f"{field} = {argument_name}",
        f"{field} += {constant} * {argument_name}",
        f"{field} = min({constant}, {field} + {argument_name})")
    first_operation, second_operation = writer.sample(operations, 2)

    slots: TemplateSlots = {"f": field_name, "a": first_method, "b": second_method}
    description = writer.expand(CLASS_DESCRIPTION, n=class_name.lower(), s=start_value, x=first_operation,
                                y=second_operation, **slots)
    head_code = f'class {class_name}:\n    """{description}"""'

    completion_code = f"\n    def __init__(self) -> None:\n        {field} = {start_value}"
    for method_name, operation in ((first_method, first_operation), (second_method, second_operation)):
        completion_code += f"\n\n    def {method_name}(self, {argument_name}: int) -> None:\n        {operation}"
    if writer.happens(0.4):
        completion_code += f'\n\n    def __repr__(self) -> str:\n        return f"{class_name}({{{field}}})"'

    return head_code, completion_code, writer.expand(CLASS_EXPLANATION, n=class_name, **slots)


COMPLETIONS = (_number_function, _number_function, _text_function, _text_function, _class)


def code(writer: PhraseWriter) -> DialogueTurns:
    """Return one function to complete, and its completion."""
    head_code, completion_code, explanation = writer.choose(COMPLETIONS)(writer)
    is_fenced = writer.happens(0.6)
    question_text = writer.expand(COMPLETION_REQUEST)
    question_text += f"\n\n```python\n{head_code}\n```" if is_fenced else f"\n\n{head_code}"

    answer_text = f"{writer.expand(COMPLETION_OPENING)}```python\n{head_code}\n{completion_code}\n```"
    if writer.happens(0.6):
        answer_text += f"\n\n{explanation}"
    return [question_text], [answer_text]
