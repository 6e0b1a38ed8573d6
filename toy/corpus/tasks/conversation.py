"""Conversations of one or two turns: stories, letters, advice, roleplay, opinions (the kind called mt_bench)."""

from __future__ import annotations

from collections.abc import Callable

from toy.corpus.tasks.advice import Talk, advice, opinion
from toy.corpus.tasks.facts import ANIMALS, JOBS, NAMES, THINGS_LIST, place_name
from toy.corpus.tasks.grammar import Writer

MOOD = ("{cheerful|curious|quiet|stubborn|clever|lonely|careful|brave|sleepy|kind|proud|restless|shy|patient|gentle}")
FIND = (
    "{a rusty key|an old map|a glowing stone|a letter without a name|a tiny door|a broken watch|a silver whistle|"
    "a lost kitten|a box of buttons|a torn sail|a talking mirror|a bag of seeds|a golden feather}")
SPOT = (
    "{under the bridge|behind the mill|in the attic|by the river|on the beach|in a hollow tree|near the well|"
    "in the snow|at the market}")
WEATHER = "{rainy|foggy|bright|windy|cold|warm|golden|grey|stormy|silent}"
TIME = "{morning|evening|night|afternoon|day}"
FELT = (
    "{laughed|cried|smiled|was silent|felt brave|was surprised|shivered|began to sing|did not know what to say|"
    "felt at home}")

STORY_ASK = (
    "{Write|Tell me|Make up|Invent|Compose} a(n) {short |little |}{story|tale} {about|of} a(n) <mood> <who> {called|"
    "named} <name>{ who finds <find>| in <town>|}.")
STORY = (
    "{Once upon a time|Long ago|One <weather> <time>|In the town of <town>|Far away in <town>|Years ago, in <town>}, "
    "{there lived a(n) <mood> <who> {called|named} <name>|a(n) <mood> <who> {called|named} <name> {could not sleep|"
    "went for a walk|was looking for a friend}}. {<name> {loved|collected|dreamed of|was afraid of} "
    "<like>{ more than anything|}. |Everyone {liked|knew|teased} <name>. |}One <weather> <time>, "
    "<name> {found|discovered|stumbled over|came across} <find> <spot>. ",
    "{At first|For a moment|To everyone's surprise|Without thinking}, <name> <felt>. "
    '{{"What is this?"|"How strange!"|"Is anybody there?"|"This must belong to someone,"} {said|asked|whispered} '
    "<name>. |}{Then|Suddenly|A little later|Just then} a(n) <mood2> <other> {appeared|came by|called out|"
    "fell from a tree|knocked on the door} and {asked for help|offered <like2>|told a secret|promised to stay|"
    "began to explain everything}. ",
    "{Together|Side by side|Hand in hand|The two of them} they {walked|ran|sailed|climbed} "
    "to <town> and {shared <like2>|gave <find2> back|built a {small |}house|learned a new song|solved the riddle}. ",
    "{From that day on|In the end|Ever since|And so}, <name> {was never alone again|had a friend|"
    "knew what courage means|told the story to everyone|slept well|kept <find2> on the shelf}.")


def _cast(w: Writer) -> dict[str, object]:
    likes = w.some(THINGS_LIST["fruits"] + THINGS_LIST["drinks"] + THINGS_LIST["instruments"], 2)
    found = w.say(FIND)
    return {"who": w.one(sorted(ANIMALS) + sorted(JOBS)), "other": w.one(sorted(ANIMALS) + sorted(JOBS)),
            "name": w.one(NAMES),
            "mood": w.say(MOOD), "mood2": w.say(MOOD), "town": place_name(w.chance), "like": likes[0],
            "like2": likes[1],
            "find": found, "find2": "the " + found.split(" ", 1)[1], "spot": w.say(SPOT), "weather": w.say(WEATHER),
            "time": w.say(TIME), "felt": w.say(FELT)}


def _story(w: Writer) -> Talk:
    cast = _cast(w)
    parts = [STORY[0], *[part for part in STORY[1:3] if w.maybe(0.85)], STORY[3]]
    return w.say(STORY_ASK, **cast), "".join(w.say(part, **cast) for part in parts), cast


LETTER_ASK = ("{Write|Draft|Compose|Help me write} a(n) {short |polite |friendly |} {email|letter|note|message} to "
              "{my|our} <who>, <name>, "
              "{to|in which I} <aim>.").replace("|} {email", "|}{email")
AIMS = {
    "say thank you for {the help|the gift|a lovely evening|good advice}":
        "{thank you {very much |so much |}for|I am {very |truly |}grateful for|I cannot thank you enough for} "
        "{everything|your help|your kindness|what you did}",
    "cancel {a meeting|our lunch|the lesson|the visit} on <day>":
        "{unfortunately|I am sorry, but|to my regret} I {have to cancel|cannot come to|must miss} "
        "our {meeting|appointment|plan} on <day>",
    "ask for {a day off|more time|a new chair|a meeting} on <day>":
        "I {would like to|wanted to|am writing to} {ask|request} {whether we can agree on <day>|"
        "for your permission for <day>|if <day> would be possible}",
    "invite {them|everyone} to {a party|dinner|a concert|a picnic} on <day>":
        "{I would be {happy|glad|delighted} if you came|you are {warmly |}invited|please come} "
        "{to our {little |}celebration|to us} on <day>",
    "complain about {the noise|the broken lift|a late delivery|the cold food}":
        "I {am sorry to say|must tell you|have to report} that I {was not satisfied|am disappointed|expected more} "
        "{this week|this time|lately}"}
LETTER = (
    "{Subject: {A short note|For <day>|A few words|News from <me>}\n\n"
    "|}{Dear <name>|Hello <name>|Hi <name>|Good {morning|evening} <name>},\n\n"
    "{I hope {you are well|this finds you well|all is fine}. |How are you? |It has been a while. |}<core>. "
    "{{The last weeks were|Everything is|Work has been} {busy|quiet|difficult|wonderful}{, but I {manage|keep going}|"
    "}. |It means {a lot|much} to me. |I {will explain|can tell you more} when we meet. |"
    "}{Please let me know {what you think|if this suits you}|I look forward to your {answer|reply}|"
    "Thank you for your {patience|understanding|time}|If you have questions, {just |}{call|write to} me}.\n\n"
    "{Best regards|Kind regards|Yours sincerely|With warm wishes|Yours|See you soon|All the best},\n<me>")


def _letter(w: Writer) -> Talk:
    name, me = w.some(NAMES, 2)
    slots: dict[str, object] = {
        "who": w.say("{neighbour|teacher|boss|landlord|colleague|aunt|doctor|coach|friend|uncle|manager}"),
        "name": name, "me": me,
        "day": w.say("{Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday|next week|the weekend}"),
        "find": "a note"}
    aim = w.one(sorted(AIMS))
    asked = w.say(LETTER_ASK, aim=w.say(aim, **slots), **slots) + w.say("{ My name is <me>.| I am <me>.| Sign it as "
        "<me>.}", me=me)
    return asked, w.say(LETTER, core=w.sentence(AIMS[aim], **slots), **slots), slots


def _role(w: Writer) -> Talk:
    name = w.one(sorted(JOBS))
    place, tool, task, need = JOBS[name]
    slots: dict[str, object] = {"n": name, "p": place, "tool": tool, "t": task.split(" ", 1)[1], "need": need,
                                "name": w.one(NAMES), "a": w.one(sorted(ANIMALS)),
                                "town": place_name(w.chance), "years": w.number(3, 40), "find": "my work"}
    asked = w.say("{Pretend {to be|you are}|Imagine you are|You are|Act as|Play the role of} a(n) <n> {called|named} "
                  "<name> {in|from} <town>. {Describe|Tell me "
                  "about} {your day|your work|your life|yourself}.", **slots)
    answer = w.say(
        "{Hello!|Good day!|Welcome!|Ah, a visitor!|} {My name is|I am called|I am|People call me} <name>, and I {work "
        "as|am|have been} a(n) <n> "
        "{in|from|here in} <town>{ {for|since} <years> years|}. ", **slots).replace("since",
                                                                                    "for").strip() + " " + " ".join(
            w.say(part, **slots) for part in w.some(ROLE, w.number(3, 6)))
    return asked, answer, slots


ROLE = (
    "{Every|Each} {day|morning} I {go to|can be found in|open the door of} <p>{ before {sunrise|breakfast}|}.",
    "{I could not {work|live} without|My most important {tool|helper} is|I always {carry|keep} with me} <tool>.",
    "{It takes|You need|My father taught me that it takes} <need>{, and {good |}{humour|friends|luck}|}.",
    "{At lunch|In the evening|On Sundays} I {feed|talk to|look for|draw} {the|my|this} "
    "{little |old |}<a>{ that lives nearby|}.",
    "{Sometimes|Often|Now and then} {people|children|strangers} {ask me|want to know} {why I do this|for help|"
    "for a story}.",
    "{What I like most|The best part|The hardest part} is {the silence|the people|the first hour|going home tired|"
    "learning something new}.",
    "{Once|Last {year|winter|summer}} I {nearly gave up|won a prize|lost everything|met a famous <n>}{, "
    "but {that is another story|I went on}|}.")


def _second(w: Writer, answer: str, slots: dict[str, object]) -> tuple[str, str]:
    """Return a follow-up question that depends on the first answer, and its answer."""
    sentences = [s for s in answer.replace("\n", " ").replace("! ", ". ").split(". ") if len(s) > 12]
    pick = w.number(0, 3)
    if pick == 0:
        return w.say("{Thank you|Thanks}{!| a lot!|.}{ That was {helpful|lovely|great}.|}"), w.say(
            "{You are {very |most |}welcome|My pleasure|Glad {to help|you like it}|Any time|Happy to help}{!|.}{ {Is "
            "there|Do you need} anything else{ I can do|}?| {Let|"
            "Just let} me know if you {need|want} more.| Have a {nice|good|lovely} day.|}")
    if pick == 1:
        last = sentences[-1].strip().rstrip(".")
        return w.say("{Repeat|Say again|Quote} {only |}the last {sentence|part}."), w.say("{{The last {sentence|part} "
            "{was|is}|It {was|is}|I said}: |}") + last + "."
    if pick == 2:
        first = sentences[0].strip().rstrip(".")
        return w.say("{How did it begin|What was the {beginning|first sentence}|Repeat the beginning}?"), w.say(
            "{It {began|started} {like this|with this}: |The {beginning|start} was: |Here it is again: |}"
        ) + first + "."
    words = len(answer.split())
    return w.say("{Write|Give me|Add|Please add} a title{ for {it|that}|}."), w.say(
        "{{A|One} {fitting|good|possible} title {is|would be|might be}|How about|I {suggest|propose}|My idea}: \"{The "
        "{Story|Tale|Words|Day} of <n>|<n> and {the|a} {Long|"
        "Short|Happy|Strange} {Day|Road|Night|Letter}|{All|Something} about <n>|What <n> {Said|Knew|Found}}\".",
        n=slots["name"], k=words)


KINDS: tuple[Callable[[Writer], Talk], ...] = (_story, _story, _letter, advice, _role, opinion)


def conversation(w: Writer, turns: int = 0) -> tuple[list[str], list[str]]:
    """Return one conversation; if `turns` is 0, their number is random."""
    asked, answer, slots = w.one(KINDS)(w)
    if turns == 1 or (not turns and w.maybe(0.6)):
        return [asked], [answer]
    more, reply = _second(w, answer, slots)
    return [asked, more], [answer, reply]
