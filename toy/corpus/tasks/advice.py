"""Advice and opinions: how to reach a goal, and which of two things is better."""

from __future__ import annotations

from toy.corpus.tasks.facts import NAMES, THINGS_LIST
from toy.corpus.tasks.grammar import Writer, capital

# Question, answer, and the subject of a possible second question.
Talk = tuple[str, str, dict[str, object]]

ADVICE = {
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
WHY = (
    "{this|that|it} {really |}{helps|works|matters|pays off} {because|since} {the body|your mind|the habit} "
    "{needs|wants|likes} {time|order|rest|routine}",
    "{many|most} people {forget|overlook|underestimate} {this|that}",
    "{even|just} a {little|few minutes} {helps|makes a difference}",
    "you will {soon |quickly |}{see|feel|notice} {the difference|results}",
    "{it is easier|that is simpler} than {you think|it sounds}")


def advice(w: Writer) -> Talk:
    goal = w.one(sorted(ADVICE))
    tips = [w.say(tip) for tip in w.some(ADVICE[goal], w.number(4, 5))]
    opening = w.say("{{Here are|These are|Let me give you} {some|a few|<k>} {tips|ideas|suggestions}{ to "
                    "<g>|}{:|.}|There are {many|several} ways to <g>.|"
                    "{That is|What} a good {goal|plan}{!|.}|{To <g>|If you want to <g>}, {try this|these steps "
                    "help|start small}:}", g=goal, k=len(tips))
    if w.maybe(0.5):
        points = [f"{capital(tip)}." + w.say("{|| <y>.}", y=w.sentence(w.one(WHY))) for tip in tips]
        text = opening + "\n" + "\n".join(f"{i}. {point}" for i, point in enumerate(points, 1))
    else:
        joined = w.say("{First|To begin with|Above all}, ") + tips[0]
        for tip in tips[1:]:
            joined += w.say("{. {Then|Next|Also|Besides|After that}, |, and |. }")
            joined += capital(tip) if joined.endswith(". ") else tip
        text = f"{opening} {joined}."
    if w.maybe(0.6):
        text += w.say("{ |\n\n}") + w.sentence(w.one(WHY)) + "."
    asked = w.say("{How can I|How do I|What should I do to|I want to|Give me {some |}{tips|advice} on how to|What is "
                  "the best way to|Help me to} <g>?",
                  g=goal)
    if asked.startswith(("I want", "Give", "Help")):
        asked = asked.replace("?", ".")
    return asked, text, {"name": w.one(NAMES), "find": goal}


def opinion(w: Writer) -> Talk:
    kind = w.one(("sports", "instruments", "drinks", "vehicles", "colours", "trees", "birds", "fruits"))
    one, two = w.some(THINGS_LIST[kind], 2)
    good = (
        "{cheaper|easier|more useful|more beautiful|more common|calmer|quicker|older|healthier|more fun|simpler|warmer}"
    )
    slots: dict[str, object] = {"a": one, "b": two, "kind": kind, "name": w.one(NAMES), "find": one}
    asked = w.say("{Which is better|What do you prefer|Compare|What would you choose|Tell me the difference between} "
                  "<a> {or|and} <b>{ {as|among} <kind>|}", **slots)
    if asked.startswith(("Compare", "Tell")):
        asked = asked.replace(" or ", " and ") + "."
    else:
        asked = asked.replace(f"{one} and ", f"{one} or ") + "?"
    parts = [f"{{many|some|most}} people {{find|call|consider}} <a> {good}",
             f"<b> is {{often|usually|sometimes|clearly}} {good}",
             f"{{on the other hand|however|still|then again}}, <b> {{can be|may be}} {good}",
             f"<a> is {{often|usually|said to be}} {good} {{than <b>|in summer|for beginners|for children}}",
             "{both|the two} {have their place|are good|belong to the <kind>|are worth a try}",
             "{it depends on|that is a question of} {taste|money|time|the day|your mood}"]
    chosen = [w.sentence(part, **slots) + "." for part in w.some(parts, w.number(3, 5))]
    end = w.say("{If I had to choose, I would {take|say|pick} <c>.|My {choice|favourite|pick} is <c>.|I {slightly "
                "|}prefer <c>{ myself|}.|In the end, <c> wins{ for "
                "me|}.}", c=w.one((one, two)))
    lead = w.say("{That is a {good|hard|fair} question. |Hmm. |Let me think. ||||Well, {it is not easy|here is my "
                 "view}. }")
    return asked, lead + " ".join(chosen) + " " + end, slots
