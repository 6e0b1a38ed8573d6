"""Short instructions: lists, sorting, rewriting, sentences from words, how-tos (the kind called alpaca)."""

from __future__ import annotations

from toy.corpus.tasks.facts import ANIMALS, JOBS, NAMES, OPPOSITES, THINGS_OF
from toy.corpus.tasks.grammar import (
    DialogueTurns,
    Exchange,
    PhraseWriter,
    TemplateSlots,
    capital,
    numbered_lines,
    word_list,
)

ALL_WORDS = sorted({word for words in THINGS_OF.values() for word in words})

LIST_REQUEST = (
    "{List|Name|Give me|Write down|Tell me|Suggest|I need} <c> <k>{| that {everyone knows|come to mind}}.")
LIST_LEAD = (
    "{Here are <c> <k>|<c> <k> are|{Some|A few} <k> I {like|know}|You asked for <k>|These <k> come to mind}"
    "{:|{ for you|}:}")


def _list(writer: PhraseWriter) -> Exchange:
    category, num_items = writer.choose(sorted(THINGS_OF)), writer.number_between(3, 9)
    things = writer.sample(THINGS_OF[category], num_items)
    question_text = writer.expand(LIST_REQUEST, c=num_items, k=category)
    list_style = writer.number_between(0, 3)
    list_lead = writer.expand(LIST_LEAD, c=num_items, k=category)

    if list_style == 0:
        return question_text, f"{list_lead}\n{numbered_lines(things)}"
    if list_style == 1:
        return question_text, list_lead + "".join(f"\n- {capital(thing)}" for thing in things)
    return question_text, f"{list_lead} {word_list(things)}."


# by whether the items are numbers, and whether the order is descending
SORTED_ORDERS = {
    (True, True): "{in descending order|from {large|high} to {small|low}}",
    (True, False): "{in ascending order|from {small|low} to {large|high}}",
    (False, True): "{in reverse alphabetical order|from Z to A}",
    (False, False): "{alphabetically|from A to Z|in alphabetical order}"}
SORTED_OPENING = (
    "{The {sorted|ordered} {list|order} is: |Sorted: |Here {they are|is the list}{ in order|}: |In order, they are |}")


def _sort(writer: PhraseWriter) -> Exchange:
    has_numbers = not writer.happens(0.5)
    num_items = writer.number_between(4, 8)
    items = [str(item) for item in writer.sample(range(2, 100) if has_numbers else ALL_WORDS, num_items)]
    is_descending = writer.happens(0.3)
    sorted_items = sorted(items, key=int if has_numbers else str, reverse=is_descending)

    item_words = "{numbers|values}" if has_numbers else "{words|things}"
    order_words = SORTED_ORDERS[has_numbers, is_descending]
    question_text = writer.expand(f"{{Sort|Order|Arrange|Put}} {{the|these}} {item_words} {order_words}: ")
    answer_text = writer.expand(SORTED_OPENING) + ", ".join(sorted_items) + writer.expand("{.|}")
    return question_text + ", ".join(items), answer_text


REVERSE_REQUEST = (
    "{Reverse the order of these words|Turn this list around|Write these words in reverse order|"
    "Say the list backwards}: ")
REVERSE_OPENING = "{Reversed{, this is|}: |In reverse order: |Backwards: |The {result|list} is: |}"


def _reverse(writer: PhraseWriter) -> Exchange:
    words = writer.sample(ALL_WORDS, writer.number_between(3, 7))
    question_text = writer.expand(REVERSE_REQUEST) + " ".join(words)
    return question_text, writer.expand(REVERSE_OPENING) + " ".join(reversed(words))


# style: a beginning, and what it becomes in this style
REWRITTEN_BEGINNINGS = {
    "more polite": (
        (
            "give me",
            "{could you please {give|hand|pass} me|would you {mind giving|be so kind as to give} me|"
            "may I {please |}have|I would be grateful for}"),
        ("I want", "{I would like|I should like|would it be possible to get|I would be happy about}"),
        (
            "bring",
            "{please bring|could you bring|would you {kindly |}bring|I would appreciate it if you brought}")),
    "more formal": (
        ("I love", "{I very much appreciate|I hold in high regard|I am most fond of|I greatly enjoy}"),
        ("we got", "{we have received|we obtained|we were given|it was our privilege to receive}"),
        (
            "they broke",
            "{they have damaged|they unfortunately destroyed|they have rendered useless|regrettably, they damaged}"))}
REWRITE_REQUEST = "{Rewrite|Rephrase|Change} {this|the} sentence so that it {is|sounds} <s>: "
REWRITE_OPENING = "{\"|A <s> version {is|would be}: \"|You could {say|write}: \"|Better: \"}"
DEADLINE = "{ {today|now|at once|tomorrow|before noon|this week|for {my|the} {friend|sister|boss}}|}"
PORTABLE_THINGS = [thing for category in ("furniture", "tools", "fruits", "clothes") for thing in THINGS_OF[category]]


def _rewrite(writer: PhraseWriter) -> Exchange:
    style = writer.choose(sorted(REWRITTEN_BEGINNINGS))
    plain_beginning, better_template = writer.choose(REWRITTEN_BEGINNINGS[style])
    sentence_end = " " + writer.expand("{the|your|my|our} ") + writer.choose(PORTABLE_THINGS) + writer.expand(DEADLINE)
    request_text = writer.expand(REWRITE_REQUEST, s=style)

    better_beginning = writer.expand(better_template)
    is_question = better_beginning.startswith(("could", "would", "may"))
    better_sentence = capital(better_beginning) + sentence_end + ("?" if is_question else ".")
    question_text = f'{request_text}"{capital(plain_beginning)}{sentence_end}."'
    return question_text, f'{writer.expand(REWRITE_OPENING, s=style)}{better_sentence}"'


OPPOSITE_REQUEST = "{Give|Write|Tell me|Name} the {opposites|antonyms} of{ these words|}: "
OPPOSITE_SENTENCE = (
    "{the {opposite|antonym|contrary} of <x> is <y>|<x> {becomes|turns into|has the opposite} <y>|"
    "<y> is the {opposite|contrary|reverse} of <x>|if it is not <x>, it {is|may be} <y>}")


def _opposite(writer: PhraseWriter) -> Exchange:
    words = writer.sample(sorted(OPPOSITES), writer.number_between(2, 5))
    question_text = writer.expand(OPPOSITE_REQUEST) + ", ".join(words) + "."
    if writer.happens(0.5):
        return question_text, "\n".join(f"{capital(word)}: {OPPOSITES[word]}" for word in words)
    sentences = [writer.sentence(OPPOSITE_SENTENCE, x=word, y=OPPOSITES[word]) + "." for word in words]
    return question_text, " ".join(sentences)


COUNT_REQUEST = "{How many words are in this list|Count the words|How long is this list}: "
COUNT_ANSWER = (
    "{There are <n> words{ in {the|this} list|}.|The list has <n> {words|entries}.|<n>.|I {count|see|find} <n> words.}"
    "{ The first {one |}is <a> and the last {one |}is <b>.| It {begins|starts} with <a> and ends with <b>.|}")


def _count(writer: PhraseWriter) -> Exchange:
    words = [writer.choose(ALL_WORDS) for _ in range(writer.number_between(3, 8))]
    question_text = writer.expand(COUNT_REQUEST) + ", ".join(words) + "."
    return question_text, writer.expand(COUNT_ANSWER, n=len(words), a=words[0], b=words[-1])


SENTENCES_REQUEST = "{Write|Make|Form|Create} {some sentences|a {short |}text} {with|using|with all of} the words "
SENTENCE_WITH = {  # by the slot of its word
    "a": "{The|An old|A small} <a> {slept|waited|was hiding|made noise} {under|behind|near|beside} the "
         "{house|tree|gate|train}{ all {day|night}|}",
    "j": "{The|Our|That} <j> {smiled|came {late|early}|told a joke|opened the window|was tired} "
         "{before|after|during} {lunch|work|the storm}",
    "t": "{<n>|My uncle|Somebody|The boy} {forgot|bought|borrowed|repaired|could not find} the <t> "
         "{again|yesterday|in the yard|on Monday}",
    "f": "{We|They|The children|Two guests} {ate|shared|painted|threw away|carried} {the|some|all the} <f> "
         "{at noon|in silence|with joy|on the way}",
    "c": "{<n>|She|He|The old lady} {wore|lost|washed|sold} {the|her} {green|warm|torn|new} <c>{ last {week|winter}|}"}


def _sentences(writer: PhraseWriter) -> Exchange:
    slots: TemplateSlots = {
        "n": writer.choose(NAMES),
        "a": writer.choose(sorted(ANIMALS)),
        "j": writer.choose(sorted(JOBS)),
        "t": writer.choose(THINGS_OF["tools"]),
        "f": writer.choose(THINGS_OF["fruits"]),
        "c": writer.choose(THINGS_OF["clothes"])}
    chosen_slots = writer.sample("ajtfc", writer.number_between(2, 5))

    quoted_words = word_list([f'"{slots[slot]}"' for slot in chosen_slots])
    question_text = f"{writer.expand(SENTENCES_REQUEST)}{quoted_words}."
    return question_text, " ".join(writer.sentence(SENTENCE_WITH[slot], **slots) + "." for slot in chosen_slots)


HOWTO_STEPS = {
    "make tea": (
        "{boil|heat} {fresh |}water",
        "{put|place} the {tea|leaves|bag} {in|into} a {cup|pot}",
        "{pour|add} the {hot |}water",
        "wait {three|four|five} minutes",
        "{remove|take out} the {bag|leaves}",
        "{add|stir in} {milk|sugar|lemon|honey}"),
    "plant a tree": (
        "{choose|find} a {good|sunny|open} {place|spot}",
        "dig a {deep|wide} hole",
        "{set|put} the {young |}tree in",
        "fill in the {earth|soil}",
        "{press|tread} it {down|firm}",
        "water it {well|generously|every day}"),
    "wash a car": (
        "{rinse|spray} {off |}the {dust|dirt}",
        "mix {soap|shampoo} and water",
        "{wash|start with} the {roof|top}",
        "{clean|scrub} the wheels",
        "{rinse|wash} everything {again|off}",
        "dry it with a {soft |}{cloth|towel}"),
    "bake bread": (
        "mix flour, {yeast|salt} and water",
        "knead the dough{ for ten minutes|}",
        "let it {rest|rise}{ for an hour|}",
        "{form|shape} a loaf",
        "{bake|put} it in a {hot |}oven",
        "let it cool{ down|}"),
    "pack a suitcase": (
        "{make|write} a list",
        "{fold|roll} {the|your} clothes",
        "{put|lay} heavy things {below|first}",
        "{fill|use} the {gaps|shoes} with socks",
        "{keep|leave} {papers|money} {at hand|on top}",
        "{weigh|close} it"),
    "write a letter": (
        "{find|choose} {good |}paper",
        "{begin|start} with {the date|a greeting}",
        "{say|explain} {why you write|your news}",
        "{ask|add} a {question|wish}",
        "sign {it|your name}",
        "{put|glue} a stamp on{ the envelope|}")}
HOWTO_REQUEST = "{Explain|Describe|Tell me|Write down} how to <g>."
HOWTO_LEAD = (
    "{To <g>, {follow these steps|do this}|This is how to <g>|It is {easy|simple} to <g>|"
    "You can <g> {like this|in {some|<n>} steps}}:")
STEP_JOINT = "{, then |. {Then|Next|After that|Now}, |. |, and }"


def _howto(writer: PhraseWriter) -> Exchange:
    goal = writer.choose(sorted(HOWTO_STEPS))
    all_steps = HOWTO_STEPS[goal]
    chosen_indices = sorted(writer.sample(range(len(all_steps)), writer.number_between(4, 6)))
    steps = [writer.expand(all_steps[index]) for index in chosen_indices]
    question_text = writer.expand(HOWTO_REQUEST, g=goal)
    howto_lead = writer.expand(HOWTO_LEAD, g=goal, n=len(steps))

    if writer.happens(0.5):
        return question_text, howto_lead + "\n" + numbered_lines(f"{capital(step)}." for step in steps)
    return question_text, f"{howto_lead} {writer.continue_text(capital(steps[0]), STEP_JOINT, steps[1:])}."


GROUP_REQUEST = "{Sort|Divide|Group|Split} these into <a> and <b>: "
GROUP_ANSWER = (
    "{The <a> are|<a>:|Among the <a> {are|I count}} <x>. {The <b> are|<b>:|The others are <b>:|"
    "{To|Among} the <b> belong} <y>.")


def _group(writer: PhraseWriter) -> Exchange:
    categories = writer.sample(sorted(THINGS_OF), 2)
    things_of_both = [writer.sample(THINGS_OF[category], writer.number_between(2, 4)) for category in categories]
    mixed_things = [thing for things in things_of_both for thing in things]
    writer.shuffle(mixed_things)

    slots: TemplateSlots = dict(zip("ab", categories))
    question_text = writer.expand(GROUP_REQUEST, **slots) + ", ".join(mixed_things) + "."
    ordered_things = [[thing for thing in mixed_things if thing in things] for things in things_of_both]
    if writer.happens(0.5):
        lines = [f"{capital(category)}: {', '.join(things)}" for category, things in zip(categories, ordered_things)]
        return question_text, "\n".join(lines)
    first_list, second_list = map(word_list, ordered_things)
    return question_text, writer.expand(GROUP_ANSWER, x=first_list, y=second_list, **slots)


INSTRUCTIONS = (_list, _list, _sort, _reverse, _rewrite, _rewrite, _opposite, _count, _sentences, _sentences, _howto,
                _howto, _group)
POLITE_LEAD = "{|||||Please do this: |{Can|Could} you help me? |I need your help. |Here is a task: }"
ANSWER_OPENING = "{||||{Sure|Of course|Certainly|Gladly|Here you are|With pleasure}{:|.|!} }"
SECOND_REQUEST = "<a>{ {Then|After that|Next|Also}: |\n\nSecond: |\n{- |2. |}}<b>"
SECOND_ANSWER = "<a>{\n\n|\n\n|\n}<b>"
ANSWER_END = (
    "{|||||\n\nI hope {this|that} {helps|is useful}.|\n\n{Let me know|Tell me} if you {need|want} "
    "{more|anything else}.|\n\nIs {this|that} what you {wanted|meant}?}")


def instructions(writer: PhraseWriter) -> DialogueTurns:
    """Return one instruction and its answer."""
    question_text, answer_text = writer.choose(INSTRUCTIONS)(writer)

    if writer.happens(0.6):
        second_question, second_answer = writer.choose(INSTRUCTIONS)(writer)
        question_text = writer.expand(SECOND_REQUEST, a=question_text, b=second_question)
        answer_text = writer.expand(SECOND_ANSWER, a=answer_text, b=capital(second_answer))

    answer_end = writer.expand(ANSWER_END)
    question_lead = writer.expand(POLITE_LEAD)
    answer_opening = writer.expand(ANSWER_OPENING)
    return [question_lead + question_text], [answer_opening + capital(answer_text) + answer_end]
