"""Conversations of one or two turns: stories, letters, advice, roleplay, opinions (the kind called mt_bench)."""

from __future__ import annotations

from collections.abc import Callable

from toy.corpus.tasks.advice import NamedExchange, advice, opinion
from toy.corpus.tasks.facts import ANIMALS, JOBS, NAMES, THINGS_OF, place_name
from toy.corpus.tasks.grammar import DialogueTurns, Exchange, PhraseWriter, TemplateSlots

MOOD = "{cheerful|curious|quiet|stubborn|clever|lonely|careful|brave|sleepy|kind|proud|restless|shy|patient|gentle}"
DISCOVERY = (
    "{a rusty key|an old map|a glowing stone|a letter without a name|a tiny door|a broken watch|a silver whistle|"
    "a lost kitten|a box of buttons|a torn sail|a talking mirror|a bag of seeds|a golden feather}")
SPOT = (
    "{under the bridge|behind the mill|in the attic|by the river|on the beach|in a hollow tree|near the well|"
    "in the snow|at the market}")
WEATHER = "{rainy|foggy|bright|windy|cold|warm|golden|grey|stormy|silent}"
TIME_OF_DAY = "{morning|evening|night|afternoon|day}"
REACTION = (
    "{laughed|cried|smiled|was silent|felt brave|was surprised|shivered|began to sing|did not know what to say|"
    "felt at home}")
STORY_REQUEST = (
    "{Write|Tell me|Make up|Invent|Compose} a(n) {short |little |}{story|tale} {about|of} a(n) <mood> <who> {called|"
    "named} <name>{ who finds <find>| in <town>|}.")
STORY_PARAGRAPHS = (
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
CREATURES = sorted(ANIMALS) + sorted(JOBS)
LIKED_THINGS = THINGS_OF["fruits"] + THINGS_OF["drinks"] + THINGS_OF["instruments"]


def _story_slots(writer: PhraseWriter) -> TemplateSlots:
    first_liked, second_liked = writer.sample(LIKED_THINGS, 2)
    discovery = writer.expand(DISCOVERY)

    return {
        "who": writer.choose(CREATURES),
        "other": writer.choose(CREATURES),
        "name": writer.choose(NAMES),
        "mood": writer.expand(MOOD),
        "mood2": writer.expand(MOOD),
        "town": place_name(writer.random_source),
        "like": first_liked,
        "like2": second_liked,
        "find": discovery,
        "find2": "the " + discovery.split(" ", 1)[1],
        "spot": writer.expand(SPOT),
        "weather": writer.expand(WEATHER),
        "time": writer.expand(TIME_OF_DAY),
        "felt": writer.expand(REACTION)}


def _story(writer: PhraseWriter) -> NamedExchange:
    slots = _story_slots(writer)
    first_paragraph, *middle_paragraphs, last_paragraph = STORY_PARAGRAPHS
    kept_paragraphs = [paragraph for paragraph in middle_paragraphs if writer.happens(0.85)]

    question_text = writer.expand(STORY_REQUEST, **slots)
    paragraphs = (first_paragraph, *kept_paragraphs, last_paragraph)
    answer_text = "".join(writer.expand(paragraph, **slots) for paragraph in paragraphs)
    return question_text, answer_text, str(slots["name"])


ADDRESSEE = "{neighbour|teacher|boss|landlord|colleague|aunt|doctor|coach|friend|uncle|manager}"
LETTER_DAY = "{Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday|next week|the weekend}"
LETTER_REQUEST = (
    "{Write|Draft|Compose|Help me write} a(n) {short |polite |friendly |}{email|letter|note|message} "
    "to {my|our} <who>, <name>, {to|in which I} <aim>.")
SIGNATURE_REQUEST = "{ My name is <me>.| I am <me>.| Sign it as <me>.}"
LETTER_AIMS = {
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
LETTER_TEMPLATE = (
    "{Subject: {A short note|For <day>|A few words|News from <me>}\n\n"
    "|}{Dear <name>|Hello <name>|Hi <name>|Good {morning|evening} <name>},\n\n"
    "{I hope {you are well|this finds you well|all is fine}. |How are you? |It has been a while. |}<core>. "
    "{{The last weeks were|Everything is|Work has been} {busy|quiet|difficult|wonderful}{, but I {manage|keep going}|"
    "}. |It means {a lot|much} to me. |I {will explain|can tell you more} when we meet. |"
    "}{Please let me know {what you think|if this suits you}|I look forward to your {answer|reply}|"
    "Thank you for your {patience|understanding|time}|If you have questions, {just |}{call|write to} me}.\n\n"
    "{Best regards|Kind regards|Yours sincerely|With warm wishes|Yours|See you soon|All the best},\n<me>")


def _letter(writer: PhraseWriter) -> NamedExchange:
    addressee_name, sender_name = writer.sample(NAMES, 2)
    slots: TemplateSlots = {"who": writer.expand(ADDRESSEE), "name": addressee_name, "me": sender_name,
                    "day": writer.expand(LETTER_DAY)}

    aim_template = writer.choose(sorted(LETTER_AIMS))
    aim_text = writer.expand(aim_template, **slots)
    question_text = writer.expand(LETTER_REQUEST, aim=aim_text, **slots) + writer.expand(SIGNATURE_REQUEST, **slots)

    core_sentence = writer.sentence(LETTER_AIMS[aim_template], **slots)
    return question_text, writer.expand(LETTER_TEMPLATE, core=core_sentence, **slots), addressee_name


ROLE_REQUEST = (
    "{Pretend {to be|you are}|Imagine you are|You are|Act as|Play the role of} a(n) <n> {called|named} <name> "
    "{in|from} <town>. {Describe|Tell me about} {your day|your work|your life|yourself}.")
# `{for|for}` is a choice too: without its draw, all that follows in the corpus would differ.
ROLE_OPENING = (
    "{Hello!|Good day!|Welcome!|Ah, a visitor!|} {My name is|I am called|I am|People call me} <name>, and I "
    "{work as|am|have been} a(n) <n> {in|from|here in} <town>{ {for|for} <years> years|}.")
ROLE_SENTENCES = (
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


def _role(writer: PhraseWriter) -> NamedExchange:
    job_name = writer.choose(sorted(JOBS))
    workplace, tool, task, requirement = JOBS[job_name]
    person_name = writer.choose(NAMES)
    slots: TemplateSlots = {
        "n": job_name,
        "p": workplace,
        "tool": tool,
        "t": task.split(" ", 1)[1],
        "need": requirement,
        "name": person_name,
        "a": writer.choose(sorted(ANIMALS)),
        "town": place_name(writer.random_source),
        "years": writer.number_between(3, 40)}

    question_text = writer.expand(ROLE_REQUEST, **slots)
    sentences = [writer.expand(ROLE_OPENING, **slots).strip()]
    chosen_sentences = writer.sample(ROLE_SENTENCES, writer.number_between(3, 6))
    sentences += [writer.expand(template, **slots) for template in chosen_sentences]
    return question_text, " ".join(sentences), person_name


# The second turns: the question, and how its answer begins.
THANKS = "{Thank you|Thanks}{!| a lot!|.}{ That was {helpful|lovely|great}.|}"
THANKS_ANSWER = (
    "{You are {very |most |}welcome|My pleasure|Glad {to help|you like it}|Any time|Happy to help}{!|.}"
    "{ {Is there|Do you need} anything else{ I can do|}?| {Let|Just let} me know if you {need|want} more.|"
    " Have a {nice|good|lovely} day.|}")
LAST_REQUEST = "{Repeat|Say again|Quote} {only |}the last {sentence|part}."
LAST_OPENING = "{{The last {sentence|part} {was|is}|It {was|is}|I said}: |}"
FIRST_REQUEST = "{How did it begin|What was the {beginning|first sentence}|Repeat the beginning}?"
FIRST_OPENING = "{It {began|started} {like this|with this}: |The {beginning|start} was: |Here it is again: |}"
TITLE_REQUEST = "{Write|Give me|Add|Please add} a title{ for {it|that}|}."
TITLE_ANSWER = (
    "{{A|One} {fitting|good|possible} title {is|would be|might be}|How about|I {suggest|propose}|My idea}: "
    '"{The {Story|Tale|Words|Day} of <n>|<n> and {the|a} {Long|Short|Happy|Strange} {Day|Road|Night|Letter}|'
    '{All|Something} about <n>|What <n> {Said|Knew|Found}}".')


def _second_exchange(writer: PhraseWriter, answer_text: str, name: str) -> Exchange:
    """Return a follow-up question that depends on the first answer, and its answer."""
    plain_text = answer_text.replace("\n", " ").replace("! ", ". ")
    sentences = [sentence.strip().rstrip(".") for sentence in plain_text.split(". ") if len(sentence) > 12]
    follow_up = writer.number_between(0, 3)

    if follow_up == 0:
        return writer.expand(THANKS), writer.expand(THANKS_ANSWER)
    if follow_up == 1:
        return writer.expand(LAST_REQUEST), writer.expand(LAST_OPENING) + sentences[-1] + "."
    if follow_up == 2:
        return writer.expand(FIRST_REQUEST), writer.expand(FIRST_OPENING) + sentences[0] + "."
    return writer.expand(TITLE_REQUEST), writer.expand(TITLE_ANSWER, n=name)


FIRST_EXCHANGES: tuple[Callable[[PhraseWriter], NamedExchange], ...] = (
    _story, _story, _letter, advice, _role, opinion)


def conversation(writer: PhraseWriter, has_two_turns: bool = False) -> DialogueTurns:
    """Return one conversation, of one or two turns at random unless `has_two_turns` says so."""
    question_text, answer_text, name = writer.choose(FIRST_EXCHANGES)(writer)
    if not has_two_turns and writer.happens(0.6):
        return [question_text], [answer_text]

    next_question, next_answer = _second_exchange(writer, answer_text, name)
    return [question_text, next_question], [answer_text, next_answer]
