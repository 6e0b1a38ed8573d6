"""Short instructions: lists, sorting, rewriting, sentences from words, how-tos (the kind called alpaca)."""

from __future__ import annotations

from toy.corpus.tasks.facts import ANIMALS, JOBS, NAMES, OPPOSITES, THINGS_LIST
from toy.corpus.tasks.grammar import Writer, capital, listing

POLITE = "{|||||Please do this: |{Can|Could} you help me? |I need your help. |Here is a task: }"
OPEN = "{||||{Sure|Of course|Certainly|Gladly|Here you are|With pleasure}{:|.|!} }"
ALL = sorted({word for words in THINGS_LIST.values() for word in words})


def _list(w: Writer) -> tuple[str, str]:
    kind, count = w.one(sorted(THINGS_LIST)), w.number(3, 9)
    chosen = w.some(THINGS_LIST[kind], count)
    asked = w.say("{List|Name|Give me|Write down|Tell me|Suggest|I need} <c> <k>{| that {everyone knows|come to "
                  "mind}}.", c=count, k=kind)
    style = w.number(0, 3)
    lead = w.say("{Here are <c> <k>|<c> <k> are|{Some|A few} <k> I {like|know}|You asked for <k>|These <k> come to "
                 "mind}{:|{ for you|}:}", c=count, k=kind)
    if style == 0:
        return asked, lead + "\n" + "\n".join(f"{i}. {word}" for i, word in enumerate(chosen, 1))
    if style == 1:
        return asked, lead + "\n" + "\n".join(f"- {capital(word)}" for word in chosen)
    return asked, f"{lead} {listing(chosen)}."


def _sort(w: Writer) -> tuple[str, str]:
    words = w.some(ALL, w.number(4, 8)) if w.maybe(0.5) else [str(n) for n in w.some(range(2, 100), w.number(4, 8))]
    numbers = words[0].isdigit()
    order = sorted(words, key=int) if numbers else sorted(words)
    down = w.maybe(0.3)
    if down:
        order.reverse()
    what = "{numbers|values}" if numbers else "{words|things}"
    how = ("{in descending order|from {large|high} to {small|low}}" if down else "{in ascending order|from {small|low} "
        "to {large|high}}") if numbers else (
        "{in reverse alphabetical order|from Z to A}" if down else "{alphabetically|from A to Z|in alphabetical order}")
    asked = w.say(f"{{Sort|Order|Arrange|Put}} {{the|these}} {what} {how}: ") + ", ".join(words)
    return asked, w.say("{The {sorted|ordered} {list|order} is: |Sorted: |Here {they are|is the list}{ in order|}: |In "
                        "order, they are |}") + ", ".join(order) + w.say("{.|}")


def _reverse(w: Writer) -> tuple[str, str]:
    words = w.some(ALL, w.number(3, 7))
    asked = w.say(
        "{Reverse the order of these words|Turn this list around|Write these words in reverse order|Say the list "
        "backwards}: ")
    return asked + " ".join(words), w.say("{Reversed{, this is|}: |In reverse order: |Backwards: |The {result|list} "
                                          "is: |}") + " ".join(reversed(words))


REWRITE = {
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


def _rewrite(w: Writer) -> tuple[str, str]:
    style = w.one(sorted(REWRITE))
    plain, better = w.one(REWRITE[style])
    thing = w.say("{the|your|my|our} ") + w.one([word for kind in ("furniture", "tools", "fruits",
                                                                   "clothes") for word in THINGS_LIST[kind]])
    when = w.say("{ {today|now|at once|tomorrow|before noon|this week|for {my|the} {friend|sister|boss}}|}")
    asked = w.say("{Rewrite|Rephrase|Change} {this|the} sentence so that it {is|sounds} <s>: ", s=style)
    text = w.say(better)
    mark = "?" if text.startswith(("could", "would", "may")) else "."
    return asked + f'"{capital(plain)} {thing}{when}."', w.say("{\"|A <s> version {is|would be}: \"|You could "
        "{say|write}: \"|Better: \"}", s=style) + capital(
        f'{text} {thing}{when}{mark}"')


def _opposite(w: Writer) -> tuple[str, str]:
    words = w.some(sorted(OPPOSITES), w.number(2, 5))
    asked = w.say("{Give|Write|Tell me|Name} the {opposites|antonyms} of{ these words|}: ") + ", ".join(words) + "."
    if w.maybe(0.5):
        return asked, "\n".join(f"{capital(x)}: {OPPOSITES[x]}" for x in words)
    return asked, ". ".join(w.sentence("{the {opposite|antonym|contrary} of <x> is <y>|<x> {becomes|turns into|has the "
                                       "opposite} <y>|<y> is the {opposite|contrary|reverse} of "
                                       "<x>|if it is not <x>, it {is|may be} <y>}", x=x,
                                       y=OPPOSITES[x]) for x in words) + "."


def _count(w: Writer) -> tuple[str, str]:
    thing = [w.one(ALL) for _ in range(w.number(3, 8))]
    asked = w.say("{How many words are in this list|Count the words|How long is this list}: ") + ", ".join(thing) + "."
    return asked, w.say("{There are <n> words{ in {the|this} list|}.|The list has <n> {words|entries}.|<n>.|I "
                        "{count|see|find} <n> words.}{ The first {one |}is <a> and the last "
                        "{one |}is <b>.| It {begins|starts} with <a> and ends with <b>.|}", n=len(thing), a=thing[0],
                        b=thing[-1])


def _sentences(w: Writer) -> tuple[str, str]:
    name, animal, job = w.one(NAMES), w.one(sorted(ANIMALS)), w.one(sorted(JOBS))
    tool, fruit, coat = (w.one(THINGS_LIST[kind]) for kind in ("tools", "fruits", "clothes"))
    words = {"a": animal, "j": job, "t": tool, "f": fruit, "c": coat, "n": name}
    keys = w.some("ajtfc", w.number(2, 5))
    asked = w.say("{Write|Make|Form|Create} {some sentences|a {short |}text} {with|using|with all of} the "
                  "words ") + listing(
        [f'"{words[key]}"' for key in keys]) + "."
    texts = {
        "a": "{The|An old|A small} <a> {slept|waited|was hiding|made noise} {under|behind|near|beside} the "
             "{house|tree|gate|train}{ all {day|night}|}",
        "j": "{The|Our|That} <j> {smiled|came {late|early}|told a joke|opened the window|was tired} "
             "{before|after|during} {lunch|work|the storm}",
        "t": "{<n>|My uncle|Somebody|The boy} {forgot|bought|borrowed|repaired|could not find} the <t> "
             "{again|yesterday|in the yard|on Monday}",
        "f": "{We|They|The children|Two guests} {ate|shared|painted|threw away|carried} {the|some|all the} <f> {at "
             "noon|in silence|with joy|on the way}",
        "c": "{<n>|She|He|The old lady} {wore|lost|washed|sold} {the|her} {green|warm|torn|new} <c>{ last "
             "{week|winter}|}",
    }
    parts = [w.sentence(texts[key], **words) for key in keys]
    return asked, ". ".join(parts) + "."


HOWTO = {
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


def _howto(w: Writer) -> tuple[str, str]:
    goal = w.one(sorted(HOWTO))
    keep = sorted(w.some(range(len(HOWTO[goal])), w.number(4, 6)))
    steps = [w.say(HOWTO[goal][i]) for i in keep]
    asked = w.say("{Explain|Describe|Tell me|Write down} how to <g>.", g=goal)
    lead = w.say("{To <g>, {follow these steps|do this}|This is how to <g>|It is {easy|simple} to <g>|You can <g> "
                 "{like this|in {some|<n>} steps}}:", g=goal, n=len(steps))
    if w.maybe(0.5):
        return asked, lead + "\n" + "\n".join(f"{i}. {capital(step)}." for i, step in enumerate(steps, 1))
    text = steps[0]
    for step in steps[1:]:
        text += w.say("{, then |. {Then|Next|After that|Now}, |. |, and }")
        text += capital(step) if text.endswith(". ") else step
    return asked, f"{lead} {capital(text)}."


def _sortkinds(w: Writer) -> tuple[str, str]:
    one, two = w.some(sorted(THINGS_LIST), 2)
    first, second = w.some(THINGS_LIST[one], w.number(2, 4)), w.some(THINGS_LIST[two], w.number(2, 4))
    mixed = first + second
    w.chance.shuffle(mixed)
    asked = w.say("{Sort|Divide|Group|Split} these into <a> and <b>: ", a=one, b=two) + ", ".join(mixed) + "."
    first, second = ([x for x in mixed if x in part] for part in (first, second))
    if w.maybe(0.5):
        return asked, f"{capital(one)}: {', '.join(first)}\n{capital(two)}: {', '.join(second)}"
    return asked, w.say("{The <a> are|<a>:|Among the <a> {are|I count}} <x>. {The <b> are|<b>:|The others are "
                        "<b>:|{To|Among} the <b> belong} <y>.", a=one, b=two,
                        x=listing(first), y=listing(second))


KINDS = (
    _list,
    _list,
    _sort,
    _reverse,
    _rewrite,
    _rewrite,
    _opposite,
    _count,
    _sentences,
    _sentences,
    _howto,
    _howto,
    _sortkinds)


def instructions(w: Writer) -> tuple[list[str], list[str]]:
    """Return one instruction and its answer."""
    asked, answer = w.one(KINDS)(w)
    if w.maybe(0.6):
        more, second = w.one(KINDS)(w)
        asked = w.say("<a>{ {Then|After that|Next|Also}: |\n\nSecond: |\n{- |2. |}}<b>", a=asked, b=more)
        answer = w.say("<a>{\n\n|\n\n|\n}<b>", a=answer, b=capital(second))
    end = w.say("{|||||\n\nI hope {this|that} {helps|is useful}.|\n\n{Let me know|Tell me} if you {need|want} "
                "{more|anything else}.|\n\nIs {this|that} what you {wanted|meant}?}")
    return [w.say(POLITE) + asked], [w.say(OPEN) + capital(answer) + end]
