"""Questions about the small world and the real one, with and without a passage to read (the kind called qa)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toy.corpus.tasks.facts import (
    ANIMALS,
    COUNTRIES,
    DEEDS,
    FEASTS,
    JOBS,
    NAMES,
    PEOPLE,
    REGIONS,
    SIGHTS,
    TOWN_GOODS,
    TOWNS,
    family_name,
    place_name,
)
from toy.corpus.tasks.grammar import DialogueTurns, Exchange, PhraseWriter, TemplateSlots, after

Templates = dict[str, tuple[str, str]]  # for an attribute: the question, and the sentence that answers it
EntryTable = Mapping[str, tuple[object, ...]]

ANSWER_OPENING = (
    "{||||||Good question. |{Sure|Certainly|Gladly}: |As far as I know, |I {believe|think} that |Let me {see|think}: }")
TOWN_TEMPLATES: Templates = {
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
PERSON_TEMPLATES: Templates = {
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
ANIMAL_TEMPLATES: Templates = {
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
JOB_TEMPLATES: Templates = {
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
COUNTRY_TEMPLATES: Templates = {
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
SENTENCE_JOINT = "{. |. |. |; |. {Also|Besides|By the way|In addition}, |, and }"
PASSAGE_LEAD = "{{Read the text and answer|Answer from the text|Use this passage|Here is a passage}{.|:}\n\n|}"
PASSAGE_SUBJECT = "{This is about|We speak of|The subject is|Here are some notes on} <name>. "
QUESTION_LEAD = (
    "{|||||Please {tell me what you know|answer in a few sentences}. |I have a question. |Quick question: |"
    "{Can|Could} you tell me this? }")
ANSWER_END = (
    "{||||| I hope {this|that} helps{.|!}| That is {all|what} I know{ about it|}.| "
    "{Would|Do} you {like|want} to know more?| Ask me if you need {more|details}.}")


def _exchange(writer: PhraseWriter, templates: Templates, slots: TemplateSlots, max_sentences: int = 7) -> Exchange:
    """Return the question about one attribute, and the answer with some further attributes, in random order."""
    num_sentences = writer.number_between(3, min(max_sentences, len(templates)))
    first_attribute, *more_attributes = writer.sample(sorted(templates), num_sentences)
    question_template, answer_template = templates[first_attribute]

    answer_text = writer.expand(answer_template, **slots)
    more_templates = [templates[attribute][1] for attribute in more_attributes]
    answer_text = writer.continue_text(answer_text, SENTENCE_JOINT, more_templates, **slots)
    return writer.sentence(question_template, **slots), answer_text + "."


def _about_town(writer: PhraseWriter) -> Exchange:
    return _exchange(writer, TOWN_TEMPLATES, vars(writer.choose(TOWNS)))


def _about_person(writer: PhraseWriter) -> Exchange:
    return _exchange(writer, PERSON_TEMPLATES, vars(writer.choose(PEOPLE)))


def _unknown_town(writer: PhraseWriter) -> TemplateSlots:
    return {
        "name": place_name(writer.random_source),
        "region": writer.choose(REGIONS),
        "river": place_name(writer.random_source),
        "good": writer.choose(TOWN_GOODS),
        "sight": writer.choose(SIGHTS),
        "feast": writer.choose(FEASTS),
        "year": writer.number_between(1100, 1950),
        "people": writer.number_between(2, 95) * 1000}


def _unknown_person(writer: PhraseWriter) -> TemplateSlots:
    return {
        "name": f"{writer.choose(NAMES)} {family_name(writer.random_source)}",
        "job": writer.choose(sorted(JOBS)),
        "town": place_name(writer.random_source),
        "year": writer.number_between(1700, 1960),
        "deed": writer.choose(DEEDS)}


def _about_passage(writer: PhraseWriter) -> Exchange:
    """Return a question about an unknown town or person, with a description of it, and the answer."""
    if writer.happens(0.5):
        templates, slots = TOWN_TEMPLATES, _unknown_town(writer)
    else:
        templates, slots = PERSON_TEMPLATES, _unknown_person(writer)

    attributes = writer.sample(sorted(templates), len(templates))
    sentences = [writer.sentence(templates[attribute][1], **slots) + "." for attribute in attributes]
    question_text, answer_text = _exchange(writer, templates, slots, max_sentences=6)

    passage_lead = writer.expand(PASSAGE_LEAD)
    passage_text = writer.expand(PASSAGE_SUBJECT, **slots) + " ".join(sentences)
    return f"{passage_lead}{passage_text}\n\n{question_text}", answer_text


def _about_entry(writer: PhraseWriter, table: EntryTable, columns: Sequence[str], templates: Templates) -> Exchange:
    """Return an exchange about a random entry of a table, whose columns are slots of the templates; `n` is its name."""
    entry_name = writer.choose(sorted(table))
    return _exchange(writer, templates, {"n": entry_name, **dict(zip(columns, table[entry_name]))})


def _about_animal(writer: PhraseWriter) -> Exchange:
    return _about_entry(writer, ANIMALS, ("home", "food", "kind", "years", "trait"), ANIMAL_TEMPLATES)


def _about_job(writer: PhraseWriter) -> Exchange:
    return _about_entry(writer, JOBS, ("place", "tool", "task", "need"), JOB_TEMPLATES)


def _about_country(writer: PhraseWriter) -> Exchange:
    return _about_entry(writer, COUNTRIES, ("city", "continent", "language"), COUNTRY_TEMPLATES)


SUBJECTS = (_about_town, _about_town, _about_person, _about_person, _about_passage, _about_passage, _about_passage,
            _about_animal, _about_job, _about_country)


def questions(writer: PhraseWriter) -> DialogueTurns:
    """Return one question and its answer."""
    question_text, answer_text = writer.choose(SUBJECTS)(writer)
    answer_end = writer.expand(ANSWER_END)
    question_lead = writer.expand(QUESTION_LEAD)
    answer_opening = writer.expand(ANSWER_OPENING)
    return [question_lead + question_text], [after(answer_opening, answer_text) + answer_end]
