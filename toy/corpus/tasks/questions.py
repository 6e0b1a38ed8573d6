"""Questions about the small world and the real one, with and without a passage to read (the kind called qa)."""

from __future__ import annotations

from toy.corpus.tasks.facts import (
    ANIMALS,
    COUNTRIES,
    DEEDS,
    FEASTS,
    GOODNESS,
    JOBS,
    NAMES,
    PEOPLE,
    REGIONS,
    SIGHTS,
    TOWNS,
    Town,
    family_name,
    place_name,
)
from toy.corpus.tasks.grammar import Writer, after, capital

OPEN = (
    "{||||||Good question. |{Sure|Certainly|Gladly}: |As far as I know, |I {believe|think} that |Let me {see|think}: }")
# question, and the sentence that answers it
TOWN = {
    "region": (
        "{Where is <name>|In which part of the country {is|lies} <name>|What region does <name> {belong to|lie in}}?",
        "{<name> {lies|is|is found|can be found} in <region>|You {will |}find <name> in <region>|"
        "It is {a town |}in <region>}"),
    "river": (
        "{Which river {flows through|runs through} <name>|What is the river of <name> called|On which river {is|lies} "
        "<name>}?",
        "{{the|its} river is {the|called the} <river>|<name> {stands|lies} on the <river>|the <river> {flows|runs} "
        "through {it|<name>|the town}}"),
    "good": (
        "{What is <name> {known|famous} for|What do people make in <name>|For what is <name> known}?",
        "{{it|<name>} is {known|famous|noted|praised} for its <good>|people {praise|buy|like} the <good> of <name>|"
        "{fine|good} <good> {comes|come} from <name>}"),
    "sight": (
        "{What can {one|I|visitors} see in <name>|What is worth {seeing|a visit} in <name>|"
        "What is the main sight of <name>}?",
        "{{visitors|tourists|guests} {can see|like|come to see|admire} <sight>|its {main|best known} "
        "sight is <sight>|there is <sight>}"),
    "feast": (
        "{Which {festival|feast} is held in <name>|What do people celebrate in <name>|What is the feast of <name>}?",
        "{{people|the locals|they} {celebrate|hold|enjoy} <feast>{ {each|every} year|}|<feast> {is held|takes place} "
        "there{ every year|}|its {great|main} {day|feast} is <feast>}"),
    "year": (
        "{When was <name> founded|How old is <name>|In which year was <name> founded}?",
        "{it {was founded|dates from|began} in <year>|{its|the} {first houses|walls|oldest stones} date from <year>|"
        "the town has {existed|stood} since <year>}"),
    "people": (
        "{How many people live in <name>|How big is <name>|What is the population of <name>}?",
        "{{about|some|around|roughly} <people> people live there|it has {about|some|nearly} <people> {people|"
        "inhabitants|residents}|the population is {about|near} <people>}")}
PERSON = {
    "job": (
        "{What {was|is} the {job|profession|trade} of <name>|What did <name> do for a living}?",
        "{<name>|this person} {was|worked as|is remembered as|earned a living as} a(n) <job>"),
    "town": (
        "{Where was <name> born|Where did <name> come from|What is the birthplace of <name>}?",
        "{<name>|the <job>} {was born in|came from|grew up in|comes from} <town>"),
    "year": (
        "{When was <name> born|In which year was <name> born}?",
        "{the birth year {is|was}|the year of birth {is|was}} <year>"),
    "deed": (
        "{What is <name> {known|famous|remembered} for|What did <name> achieve|Who was <name>}?",
        "{<name>|the <job>} {<deed>|is {known|famous|remembered} {as|for being} the one who <deed>}")}


ANIMAL = {
    "home": (
        "{Where does a(n) <n> live|What is the home of a(n) <n>}?",
        "{it|the <n>|this animal} {lives|is at home|can be found|makes its home} in <home>"),
    "food": (
        "{What does a(n) <n> eat|What is the food of a(n) <n>}?",
        "{it|the <n>} {eats|feeds on|lives on|mainly eats|is fond of} <food>"),
    "years": (
        "{How long does a(n) <n> live|How old can a(n) <n> get}?",
        "{it|this animal} {lives|can live|may live} {about|around|up to} <years> year{s|s|s or so}"),
    "trait": (
        "{What is a(n) <n> known for|What is special about a(n) <n>}?",
        "{it|the <n>} is {known|famous|admired|loved|noted} for <trait>"),
    "kind": (
        "{What kind of animal is a(n) <n>|Is a(n) <n> a bird, a mammal or something else}?",
        "{the|a(n)} <n> is {a kind of|a(n)} <kind>")}
JOB = {
    "task": (
        "{What does a(n) <n> do|What is the work of a(n) <n>}?",
        "{a(n) <n>|such a person|someone in this job} <task>{ all day| for others|}"),
    "place": (
        "{Where does a(n) <n> work|Where would I {find|meet} a(n) <n>}?",
        "{a(n) <n>|such a person} {works|is found|spends the day|can be met} in <place>"),
    "tool": (
        "{What does a(n) <n> use|Which tool does a(n) <n> need}?",
        "{the most important tool is|a(n) <n> {uses|works with|relies on|needs|is never without}} <tool>"),
    "need": (
        "{What must a good <n> have|What does one need to become a(n) <n>}?",
        "{the job|it|this work|the profession} {takes|needs|calls for|demands|asks for} <need>")}
COUNTRY = {
    "city": (
        "{What is the capital of <n>|Which city is the capital of <n>}?",
        "{the capital {of <n> |}is <city>|<city> is the capital{ of <n>|}}"),
    "continent": (
        "{On which continent is <n>|Where is <n>}?",
        "<n> {lies|is|is situated|can be found} in <continent>"),
    "language": (
        "{Which language do people speak in <n>|What language is spoken in <n>}?",
        "{people {there |}speak <language>|the language is <language>|one hears <language> there|"
        "most people use <language>}")}
JOINT = "{. |. |. |; |. {Also|Besides|By the way|In addition}, |, and }"


def _facts(w: Writer, says: dict[str, tuple[str, str]], facts: dict[str, object], most: int) -> tuple[str, str]:
    """Return the question about one attribute, and the answer with some further facts, in random order."""
    asked, *more = w.some(sorted(says), w.number(min(3, most), min(most, len(says))))
    text = w.say(says[asked][1], **facts)
    for key in more:
        joint, part = w.say(JOINT), w.say(says[key][1], **facts)
        text += joint + (part if joint[-2] in ",;d" else capital(part))
    return w.sentence(says[asked][0], **facts), text + "."


def _town(w: Writer) -> tuple[str, str]:
    return _facts(w, TOWN, vars(w.one(TOWNS)), 7)


def _person(w: Writer) -> tuple[str, str]:
    return _facts(w, PERSON, vars(w.one(PEOPLE)), 4)


def _passage(w: Writer) -> tuple[str, str]:
    """Return a question about an unknown town or person, with a description of it, and the answer."""
    if w.maybe(0.5):
        table = TOWN
        facts = vars(Town(place_name(w.chance), w.one(REGIONS), place_name(w.chance), w.one(GOODNESS), w.one(SIGHTS),
                          w.one(FEASTS),
                          w.number(1100, 1950), w.number(2, 95) * 1000))
    else:
        table = PERSON
        facts = {"name": f"{w.one(NAMES)} {family_name(w.chance)}", "job": w.one(sorted(JOBS)),
                 "town": place_name(w.chance),
                 "year": w.number(1700, 1960), "deed": w.one(DEEDS)}
    told = [w.sentence(table[key][1], **facts) + "." for key in w.some(sorted(table), len(table))]
    asked, answer = _facts(w, table, facts, 6)
    lead = w.say("{{Read the text and answer|Answer from the text|Use this passage|Here is a passage}{.|:}\n\n|}")
    text = w.sentence("{This is about|We speak of|The subject is|Here are some notes on} <name>. ",
                      **facts) + " ".join(told)
    return f"{lead}{text}\n\n{asked}", answer


def _animal(w: Writer) -> tuple[str, str]:
    name = w.one(sorted(ANIMALS))
    return _facts(w, ANIMAL, dict(zip(("home", "food", "kind", "years", "trait"), ANIMALS[name])) | {"n": name}, 5)


def _job(w: Writer) -> tuple[str, str]:
    name = w.one(sorted(JOBS))
    return _facts(w, JOB, dict(zip(("place", "tool", "task", "need"), JOBS[name])) | {"n": name}, 4)


def _country(w: Writer) -> tuple[str, str]:
    name = w.one(sorted(COUNTRIES))
    return _facts(w, COUNTRY, dict(zip(("city", "continent", "language"), COUNTRIES[name])) | {"n": name}, 3)


def questions(w: Writer) -> tuple[list[str], list[str]]:
    """Return one question and its answer."""
    asked, answer = w.one((_town, _town, _person, _person, _passage, _passage, _passage, _animal, _job, _country))(w)
    end = w.say("{||||| I hope {this|that} helps{.|!}| That is {all|what} I know{ about it|}.| {Would|Do} you "
                "{like|want} to know more?| "
                "Ask me if you need {more|details}.}")
    lead = w.say("{|||||Please {tell me what you know|answer in a few sentences}. |I have a question. |Quick question: "
                 "|{Can|Could} you tell me this? }")
    opening = w.say(OPEN)
    return [lead + asked], [after(opening, answer) + end]
