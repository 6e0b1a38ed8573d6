"""Advice and opinions: how to reach a goal, and which of two things is better."""

from __future__ import annotations

from toy.corpus.tasks.facts import NAMES, THINGS_OF
from toy.corpus.tasks.grammar import PhraseWriter, TemplateSlots, capital, numbered_lines

NamedExchange = tuple[str, str, str]  # a question, its answer, and the name that a title of the answer contains

TIPS = {
    "sleep better": (
        "go to bed at the same {time|hour} {each|every} night",
        "keep {the|your} {bedroom|room} {dark|cool|quiet}",
        "put away {the phone|all screens} {early|before bed}",
        "{drink no|avoid} coffee {in the evening|after lunch}",
        "{read|listen to} something calm"),
    "save money": (
        "write down {what|everything} you spend",
        "cook at home{ more often|}",
        "compare prices{ before you buy|}",
        "{set|put} a little aside {every|each} month",
        "sell {things|what} you do not {need|use}",
        "wait a {day|week} before {big|large} purchases"),
    "learn a language": (
        "{practise|speak} a little {every|each} day",
        "learn {ten|five|a few} new words {daily|each morning}",
        "{find|look for} a {partner|friend} to talk to",
        "watch films {in that language|with subtitles}",
        "do not be afraid of {mistakes|errors}"),
    "stay healthy": (
        "{eat|choose} more {vegetables|fruit|fibre}",
        "{walk|move} {for |}{half an hour|twenty minutes} {a|every} day",
        "drink enough water",
        "{sleep|rest} {well|for eight hours}",
        "see your {doctor|dentist} {once a year|regularly}",
        "{laugh|meet friends} {often|a lot}"),
    "prepare for an exam": (
        "{make|draw up} a {plan|timetable} {early|first}",
        "{explain|teach} the {matter|material} to {someone else|a friend}",
        "take {short|regular} breaks",
        "{solve|try} old {papers|exams}",
        "{sleep|rest} well {the night before|before the day}"),
    "make new friends": (
        "join a {club|choir|team|course}",
        "{ask|listen} with {real |}interest",
        "{invite|greet} your neighbours",
        "{remember|learn} people's names",
        "be {patient|yourself|open}",
        "{help|offer help} where {you can|it is needed}"),
    "grow tomatoes": (
        "{choose|find} a {sunny|warm} {place|corner}",
        "water them {early|in the morning|at the roots}",
        "{tie|fix} the plants to a {stick|pole}",
        "{remove|pinch out} the side shoots",
        "feed them {every two weeks|with compost}"),
    "speak in public": (
        "{practise|rehearse} {aloud|in front of a mirror}",
        "{breathe|stand} calmly",
        "look at {the people|friendly faces}",
        "{use|keep} {short|simple} sentences",
        "{begin|start} with a {story|question}",
        "{make|allow} pauses"),
    "keep a tidy home": (
        "{give|find} everything {a|its own} place",
        "{clean|clear} one {room|shelf} {a day|at a time}",
        "{throw|give} away what is {broken|useless}",
        "{wash|do} the dishes {at once|after meals}",
        "{fold|sort} {clothes|laundry} {on Sundays|right away}")}
REASONS = (
    "{this|that|it} {really |}{helps|works|matters|pays off} {because|since} {the body|your mind|the habit} "
    "{needs|wants|likes} {time|order|rest|routine}",
    "{many|most} people {forget|overlook|underestimate} {this|that}",
    "{even|just} a {little|few minutes} {helps|makes a difference}",
    "you will {soon |quickly |}{see|feel|notice} {the difference|results}",
    "{it is easier|that is simpler} than {you think|it sounds}")
ADVICE_OPENING = (
    "{{Here are|These are|Let me give you} {some|a few|<k>} {tips|ideas|suggestions}{ to <g>|}{:|.}|"
    "There are {many|several} ways to <g>.|{That is|What} a good {goal|plan}{!|.}|"
    "{To <g>|If you want to <g>}, {try this|these steps help|start small}:}")
FIRST_TIP = "{First|To begin with|Above all}, "
TIP_JOINT = "{. {Then|Next|Also|Besides|After that}, |, and |. }"
ADVICE_REQUEST = (
    "{How can I|How do I|What should I do to|I want to|Give me {some |}{tips|advice} on how to|"
    "What is the best way to|Help me to} <g>?")

COMPARED_CATEGORIES = ("sports", "instruments", "drinks", "vehicles", "colours", "trees", "birds", "fruits")
OPINION_REQUEST = (
    "{Which is better|What do you prefer|Compare|What would you choose|Tell me the difference between} <a> {or|and} "
    "<b>{ {as|among} <kind>|}")
PRAISE = (
    "{cheaper|easier|more useful|more beautiful|more common|calmer|quicker|older|healthier|more fun|simpler|warmer}")
OPINIONS = (
    "{many|some|most} people {find|call|consider} <a> " + PRAISE,
    "<b> is {often|usually|sometimes|clearly} " + PRAISE,
    "{on the other hand|however|still|then again}, <b> {can be|may be} " + PRAISE,
    "<a> is {often|usually|said to be} " + PRAISE + " {than <b>|in summer|for beginners|for children}",
    "{both|the two} {have their place|are good|belong to the <kind>|are worth a try}",
    "{it depends on|that is a question of} {taste|money|time|the day|your mood}")
OPINION_LEAD = (
    "{That is a {good|hard|fair} question. |Hmm. |Let me think. ||||Well, {it is not easy|here is my view}. }")
OPINION_END = (
    "{If I had to choose, I would {take|say|pick} <c>.|My {choice|favourite|pick} is <c>.|"
    "I {slightly |}prefer <c>{ myself|}.|In the end, <c> wins{ for me|}.}")


def _random_reason(writer: PhraseWriter) -> str:
    return writer.sentence(writer.choose(REASONS))


def advice(writer: PhraseWriter) -> NamedExchange:
    goal = writer.choose(sorted(TIPS))
    tips = [writer.expand(tip) for tip in writer.sample(TIPS[goal], writer.number_between(4, 5))]
    answer_text = writer.expand(ADVICE_OPENING, g=goal, k=len(tips))

    if writer.happens(0.5):
        points = [f"{capital(tip)}." + writer.expand("{|| <y>.}", y=_random_reason(writer)) for tip in tips]
        answer_text += "\n" + numbered_lines(points)
    else:
        first_clause = writer.expand(FIRST_TIP) + tips[0]
        answer_text += f" {writer.continue_text(first_clause, TIP_JOINT, tips[1:])}."
    if writer.happens(0.6):
        answer_text += writer.expand("{ |\n\n}") + _random_reason(writer) + "."

    question_text = writer.expand(ADVICE_REQUEST, g=goal)
    if question_text.startswith(("I want", "Give", "Help")):
        question_text = question_text.replace("?", ".")
    return question_text, answer_text, writer.choose(NAMES)


def opinion(writer: PhraseWriter) -> NamedExchange:
    category = writer.choose(COMPARED_CATEGORIES)
    first_thing, second_thing = writer.sample(THINGS_OF[category], 2)
    person_name = writer.choose(NAMES)
    slots: TemplateSlots = {"a": first_thing, "b": second_thing, "kind": category}

    question_text = writer.expand(OPINION_REQUEST, **slots)
    if question_text.startswith(("Compare", "Tell")):
        question_text = question_text.replace(" or ", " and ") + "."
    else:
        question_text = question_text.replace(f"{first_thing} and ", f"{first_thing} or ") + "?"

    chosen_opinions = writer.sample(OPINIONS, writer.number_between(3, 5))
    sentences = [writer.sentence(template, **slots) + "." for template in chosen_opinions]
    sentences.append(writer.expand(OPINION_END, c=writer.choose((first_thing, second_thing))))
    return question_text, writer.expand(OPINION_LEAD) + " ".join(sentences), person_name
